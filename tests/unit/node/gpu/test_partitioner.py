"""MIG: the commands that cut a GPU and join it again, what each worker sees of it, and every way in which it fails."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward.base.waiting import wait_until
from skyward.errors import ConfigurationError
from skyward.node.gpu.devices import NodeDevices
from skyward.node.gpu.driver import Device, NvidiaDriver
from skyward.node.gpu.partitioner import largest_first
from skyward.node.plan import NodePlan
from skyward.request.accelerators import Accelerator
from skyward.wire.control import Start
from skyward.wire.node_config import NodeConfig
from support.gpu_parts._gpu_cards import PROFILES
from support.gpus import FakeGpu, FakeGpus, Machine, cut, make_instance
from support.nodes import node_ready

Fake = Callable[..., FakeGpus]
ORDER = Start(head_addr="127.0.0.9", total_nodes=1)

ROWS = [
    *[(card, *row) for card in ("H100-80", "A100-80") for row in [
        ("1g.10gb", 7), ("1g.20gb", 4), ("2g.20gb", 3), ("3g.40gb", 2), ("4g.40gb", 1), ("7g.80gb", 1)
    ]],
    *[("A100-40", *row) for row in [("1g.5gb", 7), ("2g.10gb", 3), ("3g.20gb", 2), ("4g.20gb", 1)]],
]  # fmt: skip
"""The tables of the specification: card, profile, workers."""
ASKED = {"H100-80": ("H100", "80GB"), "A100-80": ("A100", "80GB"), "A100-40": ("A100", "40GB")}


_nodes: list[NodeDevices] = []


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    while _nodes:
        release(_nodes.pop())


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return lambda *gpus, **machine: FakeGpus(tmp_path / "gpus.json", Machine(gpus=list(gpus), **machine))


def config_for(accelerator: Accelerator, concurrency: int = 1, **changes: Any) -> NodeConfig:
    config = NodeConfig(
        pool_id="pool",
        instance_id="unit",
        node=0,
        total_nodes=1,
        workers=concurrency * accelerator.partitions,
        head=True,
        address="127.0.0.9",
        workdir="/nowhere",
        env={},
        tls_ca="",
        tls_cert="",
        tls_key="",
        accelerators=(accelerator.name,) * accelerator.count,
        mig=accelerator.mig,
    )
    return replace(config, **changes)


def h100(mig: str | list[str], count: int = 1) -> Accelerator:
    return Accelerator.NVIDIA.H100(count=count, mig=mig)


def node(fake: FakeGpus, config: NodeConfig, environ: Mapping[str, str] | None = None) -> NodeDevices:
    driver = NvidiaDriver(fake.run, fake.nvml)
    _nodes.append(NodeDevices(config, driver=driver, environ=environ or {}))
    return _nodes[-1]


def prepare(devices: NodeDevices) -> tuple[Device, ...]:
    return asyncio.run(devices.prepare())


def release(devices: NodeDevices) -> None:
    asyncio.run(devices.release())


def kill_after(devices: NodeDevices) -> None:
    """Prepare them in a process that is killed then, if it was not before, and has left what it made."""
    if (pid := os.fork()) == 0:
        try:
            prepare(devices)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def the_next_undoes_it(gpus: FakeGpus) -> None:
    assert layout(gpus) == [(True, ["3g.40gb", "3g.40gb"])]
    later = node(gpus, config_for(h100("1g.10gb")))

    assert len(prepare(later)) == 7
    release(later)

    assert layout(gpus) == [WHOLE]


def environments(config: NodeConfig, devices: tuple[Device, ...]) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of every worker."""
    plan = NodePlan(config=config, ready=node_ready(config.workers), devices=devices)
    return [plan.worker_env(worker, ORDER)["CUDA_VISIBLE_DEVICES"] for worker in range(config.workers)]


def layout(fake: FakeGpus) -> list[tuple[bool, list[str]]]:
    """MIG mode and instances of every GPU."""
    return [(gpu.mig, sorted(each.profile for each in gpu.instances)) for gpu in fake.machine.gpus]


WHOLE: tuple[bool, list[str]] = (False, [])


class TestEachRow:
    def test_is_made_seen_by_its_workers_and_undone(self, subtests: pytest.Subtests, fake: Fake) -> None:
        for card, profile, workers in ROWS:
            with subtests.test(card=card, profile=profile, workers=workers):
                gpus = fake(FakeGpu(card=card))
                name, memory = ASKED[card]
                config = config_for(Accelerator(name=name, memory=memory, mig=profile))
                devices = node(gpus, config)

                shown = environments(config, prepare(devices))

                made = gpus.machine.gpus[0].instances
                assert gpus.changes == [
                    "nvidia-smi -i 0 -mig 1",
                    f"nvidia-smi mig -i 0 -cgi {','.join([profile] * workers)} -C",
                ]
                assert config.workers == workers
                assert Counter(shown) == Counter(each.uuid for each in made)
                assert all(each.startswith("MIG-") for each in shown)
                assert {each.profile for each in made} == {profile}

                release(devices)

                assert layout(gpus) == [WHOLE]
                assert gpus.changes[2:] == [
                    "nvidia-smi mig -i 0 -dci",
                    "nvidia-smi mig -i 0 -dgi",
                    "nvidia-smi -i 0 -mig 0",
                ]

    def test_fails_without_a_trace_when_the_driver_fails_halfway(self, subtests: pytest.Subtests, fake: Fake) -> None:
        for card, profile, workers in ROWS:
            with subtests.test(card=card, profile=profile, workers=workers):
                name, memory = ASKED[card]
                gpus = fake(FakeGpu(card=card), breaks_after=workers - 1)
                devices = node(gpus, config_for(Accelerator(name=name, memory=memory, mig=profile)))

                with pytest.raises(ConfigurationError, match=f"using profile {profile}: Unknown Error"):
                    prepare(devices)

                assert layout(gpus) == [WHOLE]

    def test_is_refused_by_a_card_that_lacks_it(self, subtests: pytest.Subtests, fake: Fake) -> None:
        for card, profile, workers in ROWS:
            with subtests.test(card=card, profile=profile, workers=workers):
                other = "A100-40" if card != "A100-40" else "A100-80"
                gpus = fake(FakeGpu(card=other))
                accelerator = Accelerator(name="A100", memory=ASKED[card][1], mig=profile)

                lacks = f"GPU 0 has no profile {profile}; its driver lists 1g"
                too_many = f"profile MIG {profile} .*profile {profile}: Insufficient Resources"
                with pytest.raises(ConfigurationError, match=f"(?s){lacks}|{too_many}" if workers == 7 else lacks):
                    prepare(node(gpus, config_for(accelerator)))

                assert layout(gpus) == [WHOLE]


class TestLists:
    @pytest.mark.parametrize("card", ["A100-40", "H100-80"])
    def test_every_one_that_is_accepted_finds_its_place(self, fake: Fake, card: str) -> None:
        names = [profile.name for profile in PROFILES[card]]
        name, memory = ASKED[card]
        accepted = 0
        for size in range(1, 8):
            for profiles in itertools.combinations_with_replacement(names, size):
                try:
                    asked = Accelerator(name=name, memory=memory, mig=list(profiles))
                except ConfigurationError:
                    continue
                gpu = FakeGpu(card=card, mig=True)
                for each in largest_first(asked.mig, asked.memory_gib):
                    make_instance(gpu, next(profile for profile in PROFILES[card] if profile.name == each))
                accepted += 1
        assert accepted > 50

    def test_the_largest_is_made_first_and_workers_are_in_the_order_asked_for(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())
        asked = ["1g.10gb", "2g.20gb", "1g.10gb", "3g.40gb"]

        devices = prepare(node(gpus, config_for(h100(asked))))

        assert "nvidia-smi mig -i 0 -cgi 3g.40gb,2g.20gb,1g.10gb,1g.10gb -C" in gpus.changes
        assert [device.profile for device in devices] == asked
        assert len({device.shown_as for device in devices}) == 4

    def test_every_gpu_of_a_node_is_cut_alike_and_two_workers_share_a_part(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(), FakeGpu(card="T4"), FakeGpu())
        config = config_for(h100("3g.40gb", count=2), concurrency=2)

        shown = environments(config, prepare(node(gpus, config)))

        uuids = [
            each.uuid for index in (0, 2) for each in sorted(gpus.machine.gpus[index].instances, key=lambda i: i.id)
        ]
        assert shown == uuids * 2
        assert gpus.machine.gpus[1].instances == []


class TestModeThatCannotBeChanged:
    def test_says_who_uses_the_gpu_and_what_to_do(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(card="A100-80", used_by=1))

        with pytest.raises(
            ConfigurationError, match=r"GPU 0 \(NVIDIA A100-SXM4-80GB\).*In use by another client"
        ) as raised:
            prepare(node(gpus, config_for(Accelerator.NVIDIA.A100(mig="3g.40gb"))))

        assert "nvidia-smi --gpu-reset -i 0" in str(raised.value)
        assert not gpus.machine.gpus[0].pending, "a reset would put the GPU into MIG mode later"

    def test_says_that_this_machine_cannot_reset_it(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(card="A100-80", resettable=False))

        with pytest.raises(ConfigurationError, match=r"pending enable state .*Not Supported"):
            prepare(node(gpus, config_for(Accelerator.NVIDIA.A100(mig="3g.40gb"))))

    def test_says_that_it_takes_root(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(), root=False, sudo=False)

        with pytest.raises(ConfigurationError, match=r"(?s)Insufficient Permissions.*sudo: a password is required"):
            prepare(node(gpus, config_for(h100("3g.40gb"))))

        assert layout(gpus) == [WHOLE]

    def test_sudo_is_enough_from_the_first_command_to_the_last(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(), root=False)
        devices = node(gpus, config_for(h100("3g.40gb")))

        assert len(prepare(devices)) == 2
        release(devices)

        assert layout(gpus) == [WHOLE]

    def test_a_card_without_one_is_named(self, fake: Fake) -> None:
        config = config_for(h100("3g.40gb"), accelerators=("T4",))

        with pytest.raises(ConfigurationError, match=r"mig must be None: GPU 0 \(Tesla T4\) cannot be partitioned"):
            prepare(node(fake(FakeGpu(card="T4")), config))

    def test_a_machine_without_a_driver_has_nothing_to_cut(self) -> None:
        def fails() -> None:
            raise ImportError("pynvml")

        devices = NodeDevices(config_for(h100("3g.40gb")), driver=NvidiaDriver(load=fails), environ={})

        with pytest.raises(ConfigurationError, match="no NVIDIA driver"):
            prepare(devices)

    def test_fewer_gpus_than_asked_for_are_refused_before_any_is_cut(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(), FakeGpu(card="A100-80"))

        with pytest.raises(ConfigurationError, match=r"2x H100 asked for, .* has 1"):
            prepare(node(gpus, config_for(h100("3g.40gb", count=2))))

        assert gpus.changes == []


class TestPartitionsThatAreThere:
    def parted(self, fake: Fake, *profiles: str, **machine: Any) -> FakeGpus:
        gpu = FakeGpu()
        cut(gpu, profiles)
        return fake(gpu, **machine)

    def test_are_used_and_left_if_they_are_right(self, fake: Fake) -> None:
        gpus = self.parted(fake, "3g.40gb", "3g.40gb")
        devices = node(gpus, config_for(h100("3g.40gb")))

        found = prepare(devices)
        release(devices)

        assert {device.shown_as for device in found} == {each.uuid for each in gpus.machine.gpus[0].instances}
        assert gpus.changes == []

    def test_of_ones_own_are_not_destroyed_if_they_are_others(self, fake: Fake) -> None:
        gpus = self.parted(fake, "4g.40gb")

        with pytest.raises(ConfigurationError, match=r"partitioned already, into 4g.40gb; asked for: 3g.40gb, 3g.40gb"):
            prepare(node(gpus, config_for(h100("3g.40gb"))))

        assert gpus.changes == []

    def test_of_a_rented_machine_are_replaced_and_stay(self, fake: Fake) -> None:
        gpus = self.parted(fake, "4g.40gb")
        devices = node(gpus, config_for(h100("3g.40gb"), own_machine=False))

        prepare(devices)
        release(devices)

        assert layout(gpus) == [(True, ["3g.40gb", "3g.40gb"])]

    def test_an_instance_that_nobody_could_use_is_no_partition(self, fake: Fake) -> None:
        gpus = self.parted(fake, "3g.40gb", "3g.40gb")
        with gpus.change() as machine:
            machine.gpus[0].instances[1].uuid = ""

        with pytest.raises(ConfigurationError, match="partitioned already"):
            prepare(node(gpus, config_for(h100("3g.40gb"))))

    def test_mig_mode_that_was_on_stays_on(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(mig=True, pending=True))
        devices = node(gpus, config_for(h100("7g.80gb")))

        prepare(devices)
        release(devices)

        assert layout(gpus) == [(True, [])]


class TestUndoing:
    def test_waits_for_programs_that_were_just_killed(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())
        devices = node(gpus, config_for(h100("3g.40gb")))
        prepare(devices)
        with gpus.change() as machine:
            machine.gpus[0].instances[0].used_by = 1

        async def tried() -> bool | None:
            return any("-dci" in command for command in gpus.changes) or None

        async def scenario() -> None:
            undoing = asyncio.create_task(devices.release())
            await wait_until(tried, deadline_s=10, interval_s=0.01, what="the first attempt")
            with gpus.change() as machine:
                machine.gpus[0].instances[0].used_by = 0
            await undoing

        asyncio.run(scenario())

        assert layout(gpus) == [WHOLE]

    def test_leaves_partitions_that_somebody_else_made_meanwhile(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())
        devices = node(gpus, config_for(h100(["3g.40gb"])))
        prepare(devices)
        with gpus.change() as machine:
            make_instance(machine.gpus[0], PROFILES["H100-80"][0])

        release(devices)

        assert layout(gpus) == [(True, ["1g.10gb"])]

    def test_what_a_killed_node_left_is_undone_by_the_next(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())
        kill_after(node(gpus, config_for(h100("3g.40gb"))))

        the_next_undoes_it(gpus)

    def test_a_command_that_cannot_be_run_does_not_keep_the_node_from_ending(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())
        broken: list[OSError] = []

        def run(argv: Sequence[str]) -> tuple[int, str]:
            if broken:
                raise broken[0]
            return gpus.run(argv)

        devices = NodeDevices(config_for(h100("3g.40gb")), driver=NvidiaDriver(run, gpus.nvml), environ={})
        prepare(devices)
        broken.append(OSError("out of memory"))
        release(devices)
        later = node(gpus, config_for(h100("1g.10gb")))

        assert len(prepare(later)) == 7

    def test_what_a_node_left_that_was_killed_while_it_cut_is_undone_too(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())

        def run(argv: Sequence[str]) -> tuple[int, str]:
            answer = gpus.run(argv)
            if "-cgi" in argv:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        kill_after(NodeDevices(config_for(h100("3g.40gb")), driver=NvidiaDriver(run, gpus.nvml), environ={}))

        the_next_undoes_it(gpus)

    def test_what_was_left_before_the_system_started_again_is_nobodys(self, fake: Fake, tmp_path: Path) -> None:
        gpus = fake(FakeGpu(mig=True, pending=True))
        with gpus.change() as machine:
            cut(machine.gpus[0], ["4g.40gb"])
            uuid = machine.gpus[0].uuid
        folder = tmp_path / "state" / "skyward" / "mig"
        folder.mkdir(parents=True)
        (folder / f"{uuid}.json").write_text(json.dumps({"mig": False, "made": [1], "boot": "another"}))

        with pytest.raises(ConfigurationError, match=r"partitioned already, into 4g\.40gb"):
            prepare(node(gpus, config_for(h100("3g.40gb"))))

        assert layout(gpus) == [(True, ["4g.40gb"])]

    def test_a_gpu_serves_one_node_at_a_time(self, fake: Fake) -> None:
        gpus = fake(FakeGpu())
        first = node(gpus, config_for(h100("3g.40gb")))
        prepare(first)

        with pytest.raises(ConfigurationError, match=r"partitioned for another node"):
            prepare(node(gpus, config_for(h100("3g.40gb"))))
        release(first)

        assert layout(gpus) == [WHOLE]
        assert len(prepare(node(gpus, config_for(h100("3g.40gb"))))) == 2

    def test_a_second_gpu_that_fails_takes_the_first_back(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(), FakeGpu(used_by=1))

        with pytest.raises(ConfigurationError, match="GPU 1"):
            prepare(node(gpus, config_for(h100("3g.40gb", count=2))))

        assert layout(gpus) == [WHOLE, WHOLE]


def test_partitions_are_made_of_what_the_node_is_shown(fake: Fake) -> None:
    gpus = fake(FakeGpu(), FakeGpu())

    prepare(node(gpus, config_for(h100("7g.80gb")), {"CUDA_VISIBLE_DEVICES": "1"}))

    assert layout(gpus) == [WHOLE, (True, ["7g.80gb"])]


def test_it_is_written_down_first_for_root_and_others(fake: Fake, tmp_path: Path) -> None:
    gpus = fake(FakeGpu())
    devices = node(gpus, config_for(h100("3g.40gb")))
    prepare(devices)
    (record,) = (tmp_path / "state" / "skyward" / "mig").iterdir()

    written = json.loads(record.read_text())
    release(devices)

    assert (written["mig"], written["made"]) == (False, [1, 2])
    assert record.read_text() == ""
    assert os.stat(record).st_mode & 0o077 == 0
