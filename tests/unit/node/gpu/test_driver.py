"""What GPUs a machine has, which of them are a node's, and which each worker sees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.node.gpu import nvml
from skyward.node.gpu.devices import choose_devices
from skyward.node.gpu.driver import (
    Device,
    Gpu,
    GpuInstance,
    NvidiaDriver,
    run_command,
)
from skyward.node.gpu.nvml import mig_devices, mig_mode
from skyward.node.plan import NodePlan
from skyward.wire.control import Start
from skyward.wire.node_config import NodeConfig
from support.gpu_parts._gpu_cards import PROFILES, place_for
from support.gpus import FakeGpu, FakeGpus, Machine, cut
from support.nodes import node_ready

Fake = Callable[..., FakeGpus]
ORDER = Start(head_addr="127.0.0.9", total_nodes=1)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return lambda *gpus, **machine: FakeGpus(tmp_path / "gpus.json", Machine(gpus=list(gpus), **machine))


def driver_of(fake: FakeGpus) -> NvidiaDriver:
    return NvidiaDriver(fake.run, fake.nvml)


def gpu(index: int, name: str = "NVIDIA H100 80GB HBM3", *, mig: bool | None = False) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}0", name=name, memory_gib=80, mig=mig)


def chosen(asked: Sequence[str], gpus: Sequence[Gpu] | None, shown: str | None = None) -> list[tuple[str, str]]:
    return [(device.name, device.shown_as) for device in choose_devices(asked, gpus, (), shown)]


class TestDriver:
    def test_says_what_gpus_there_are(self, fake: Fake) -> None:
        a100, t4 = FakeGpu(card="A100-40", mig=True, pending=True), FakeGpu(card="T4")

        found = driver_of(fake(a100, t4)).gpus()

        assert found == [
            Gpu(index=0, uuid=a100.uuid, name="NVIDIA A100-SXM4-40GB", memory_gib=40, mig=True, mig_pending=True),
            Gpu(index=1, uuid=t4.uuid, name="Tesla T4", memory_gib=15, mig=None),
        ]

    def test_a_gpu_that_does_not_answer_is_left_out(self, fake: Fake) -> None:
        found = driver_of(fake(FakeGpu(lost=True), FakeGpu())).gpus()

        assert found is not None
        assert [each.index for each in found] == [1]

    def test_nobody_is_left_using_the_gpus(self, fake: Fake) -> None:
        nvml = fake(FakeGpu()).nvml()

        NvidiaDriver(load=lambda: nvml).gpus()

        assert nvml.users == 0

    def test_lists_partitions_and_instances(self, fake: Fake) -> None:
        whole, parted = FakeGpu(), FakeGpu()
        cut(parted, ["3g.40gb", "1g.10gb"])
        driver = driver_of(fake(whole, parted))

        there = sorted(parted.instances, key=lambda each: each.id)
        gpus = driver.gpus() or ()
        assert driver.partitions(gpus[1]) == [
            Device(name="H100", shown_as=each.uuid, gpu=parted.uuid, profile=each.profile) for each in there
        ]
        assert driver.instances(1) == [GpuInstance(id=each.id, profile=each.profile) for each in there]
        assert driver.instances(0) == driver.partitions(gpus[0]) == []

    @pytest.mark.parametrize("card", [card for card, profiles in PROFILES.items() if profiles])
    def test_calls_profiles_as_nvidia_does(self, fake: Fake, card: str) -> None:
        for profile in PROFILES[card]:
            parted = FakeGpu(card=card)
            cut(parted, [profile.name])

            (found,) = driver_of(fake(parted)).instances(0)

            assert found.profile == profile.name

    def test_lists_instances_as_root_where_only_root_may(self, fake: Fake) -> None:
        parted = FakeGpu()
        cut(parted, ["3g.40gb"])
        parted.instances[0].uuid = ""  # without a compute instance it is no MIG device, which every user may list
        gpus = fake(parted, root=False)

        assert driver_of(gpus).instances(0) == [GpuInstance(id=parted.instances[0].id, profile="3g.40gb")]
        seen = driver_of(gpus).gpus() or ()
        assert driver_of(gpus).partitions(seen[0]) == []
        (command,) = gpus.machine.commands
        assert command.split()[:2] == ["sudo", "-n"]
        assert command.endswith(f"nvml.py {parted.uuid}")

    def test_what_root_runs_is_one_file_that_needs_nothing_of_skywards(self, fake: Fake, tmp_path: Path) -> None:
        parted = FakeGpu()
        cut(parted, ["3g.40gb"])
        environment = fake(parted).install(tmp_path / "bin")
        script = f"import runpy, sys; runpy.run_path({nvml.__file__!r}, run_name='__main__'); print(*sys.modules)"

        done = subprocess.run(
            [sys.executable, "-c", script, parted.uuid], env=environment, capture_output=True, text=True, check=True
        )

        instances, modules = done.stdout.splitlines()
        assert json.loads(instances) == [{"id": parted.instances[0].id, "profile": "3g.40gb"}]
        assert not any(name.startswith("skyward") for name in modules.split())

    def test_says_that_only_root_may_list_instances(self, fake: Fake) -> None:
        parted = FakeGpu()
        cut(parted, ["3g.40gb"])

        with pytest.raises(ConfigurationError, match=r"only root may list the instances of GPU 0, .*a password is req"):
            driver_of(fake(parted, root=False, sudo=False)).instances(0)

    def test_a_gpu_that_cannot_be_read_is_an_error(self, fake: Fake) -> None:
        driver = driver_of(fake(FakeGpu(lost=True)))

        with pytest.raises(ConfigurationError, match=r"mig: GPU 0 cannot be read: .*GpuIsLost"):
            driver.instances(0)

    def test_where_there_is_none_nobody_can_tell(self) -> None:
        def fails() -> None:
            raise ImportError("pynvml")

        assert NvidiaDriver(load=fails).gpus() is None

    def test_becomes_root_where_that_is_needed_and_allowed(self, fake: Fake) -> None:
        gpus = fake(FakeGpu(), root=False)

        driver_of(gpus).set_mig(0, on=True)

        assert gpus.changes == ["nvidia-smi -i 0 -mig 1", "sudo -n nvidia-smi -i 0 -mig 1"]
        assert gpus.machine.gpus[0].mig

    def test_a_command_that_is_not_there_has_failed(self) -> None:
        assert run_command(["no-such-program"]) == (127, "no-such-program is not installed")


class TestFake:
    """The user guide shows where the driver puts instances and how it numbers them; NVML's reference has the errors."""

    def test_answers_as_nvml_does(self, fake: Fake) -> None:
        parted, whole = FakeGpu(card="A100-40"), FakeGpu(card="A100-40")
        cut(parted, ["3g.20gb", "1g.5gb"])
        gpus = fake(parted, whole, FakeGpu(card="T4"))
        nvml = gpus.nvml()
        device, other, t4 = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(3))
        part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
        instance = nvml.nvmlDeviceGetGpuInstanceById(device, nvml.nvmlDeviceGetGpuInstanceId(part))

        assert nvml.nvmlDeviceGetName(part) == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
        assert nvml.nvmlGpuInstanceGetInfo(instance).profileId == 9
        assert (mig_mode(nvml, other), mig_mode(nvml, t4)) == ((False, False), (None, False))
        assert [len(list(mig_devices(nvml, each))) for each in (device, other, t4)] == [2, 0, 0]
        for function, arguments, error in [
            (nvml.nvmlDeviceGetMigDeviceHandleByIndex, (device, 2), nvml.NVMLError_NotFound),
            (nvml.nvmlDeviceGetMigDeviceHandleByIndex, (other, 0), nvml.NVMLError_NotSupported),
            (nvml.nvmlDeviceGetGpuInstanceById, (device, 13), nvml.NVMLError_NotFound),
            (nvml.nvmlDeviceGetGpuInstanceById, (other, 1), nvml.NVMLError_NotSupported),
            (nvml.nvmlDeviceGetGpuInstanceProfileInfo, (t4, 0), nvml.NVMLError_NotSupported),
            (nvml.nvmlDeviceGetGpuInstanceProfileInfo, (device, 18), nvml.NVMLError_InvalidArgument),
            (gpus.nvml(root=False).nvmlDeviceGetGpuInstanceById, (device, 1), nvml.NVMLError_NoPermission),
        ]:
            with pytest.raises(error):
                function(*arguments)
        gpus.run(["nvidia-smi", "mig", "-i", "0", "-dci"])
        gpus.run(["nvidia-smi", "mig", "-i", "0", "-dgi"])
        for function, handle in [(nvml.nvmlGpuInstanceGetInfo, instance), (nvml.nvmlDeviceGetName, part)]:
            with pytest.raises(nvml.NVMLError_InvalidArgument):
                function(handle)

    @pytest.mark.parametrize(
        ("asked", "placed"),
        [
            ("19,14,5", [(13, "6:1"), (5, "4:2"), (1, "0:4")]),
            ("9,19,14,19", [(2, "4:4"), (7, "0:1"), (4, "2:2"), (8, "1:1")]),
            ("14,19,19,19,19,19", [(5, "4:2"), (13, "6:1"), (7, "0:1"), (8, "1:1"), (9, "2:1"), (10, "3:1")]),
            ("9,9", [(2, "4:4"), (1, "0:4")]),
        ],
    )
    def test_places_instances_as_the_driver_does(self, fake: Fake, asked: str, placed: list[tuple[int, str]]) -> None:
        gpus = fake(FakeGpu(card="A100-40", mig=True))

        gpus.run(["nvidia-smi", "mig", "-i", "0", "-cgi", asked, "-C"])

        sizes = {profile.name: profile.size for profile in PROFILES["A100-40"]}
        made = gpus.machine.gpus[0].instances
        assert [(each.id, f"{each.start}:{sizes[each.profile]}") for each in made] == placed

    def test_has_no_place_for_a_large_one_after_small_ones(self, fake: Fake) -> None:
        exit_code, said = fake(FakeGpu(card="A100-40", mig=True)).run(
            ["nvidia-smi", "mig", "-i", "0", "-cgi", "19,19,14,9", "-C"]
        )

        assert exit_code != 0
        assert said.splitlines()[-2:] == [
            "Unable to create a GPU instance on GPU  0 using profile 9: Insufficient Resources",
            "Failed to create GPU instances: Insufficient Resources",
        ]
        with pytest.raises(LookupError):
            place_for(PROFILES["A100-40"][-1], [(0, 1)])


class TestChoice:
    def test_is_what_was_asked_for_of_what_there_is(self) -> None:
        there = [gpu(0, "Tesla T4"), gpu(1), gpu(2), gpu(3)]

        assert chosen(["H100"] * 2, there) == [("H100", "1"), ("H100", "2")]

    def test_is_everything_where_nothing_was_asked_for(self) -> None:
        assert chosen([], [gpu(0, "Tesla T4"), gpu(1)]) == [("T4", "0"), ("H100", "1")]

    @pytest.mark.parametrize(
        ("asked", "there", "message"),
        [
            (["H100"] * 2, [gpu(0)], r"2x H100 asked for, .* has 1; its devices: GPU 0|H100"),
            (["A100"], [gpu(0), gpu(1)], "1x A100 asked for, .* has 0; its devices: H100, H100"),
            (["A100"], [], "1x A100 asked for, .* has 0; its devices: none"),
        ],
    )
    def test_too_few_are_refused_and_both_are_named(self, asked: list[str], there: list[Gpu], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            choose_devices(asked, there, (), None)

    def test_what_was_asked_for_counts_where_nobody_can_tell(self) -> None:
        assert chosen(["A100"] * 2, None) == [("A100", "0"), ("A100", "1")]
        assert chosen(["Trainium2"], [gpu(0)]) == [("Trainium2", "0")]
        assert chosen([], None) == []

    def test_a_name_of_the_users_own_is_looked_for_in_the_drivers(self) -> None:
        assert chosen(["Z1"], [gpu(0), gpu(1, "NVIDIA Z1 48GB")]) == [("NVIDIA Z1 48GB", "1")]

    @pytest.mark.parametrize(
        ("shown", "names"),
        [("2,0", ["2", "0"]), ("GPU-1,GPU-0", ["GPU-1", "GPU-0"]), ("0,9,1", ["0"]), ("", []), ("-1", [])],
    )
    def test_is_of_what_the_node_is_shown(self, shown: str, names: list[str]) -> None:
        assert chosen([], [gpu(0), gpu(1), gpu(2)], shown) == [("H100", name) for name in names]

    def test_a_gpu_in_mig_mode_is_its_partitions_and_no_whole_one(self) -> None:
        there = [gpu(0), gpu(1, mig=True)]
        parts = [Device(name="H100", shown_as=f"MIG-{name}", gpu=there[1].uuid, profile="3g.40gb") for name in "ab"]

        found = choose_devices([], there, parts, None)

        assert [device.shown_as for device in found] == ["0", "MIG-a", "MIG-b"]
        assert [device.shown_as for device in choose_devices([], there, parts, "MIG-b")] == ["MIG-b"]
        with pytest.raises(ConfigurationError, match=r"H100, H100 \(3g.40gb\), H100 \(3g.40gb\)"):
            choose_devices(["H100"] * 2, there, parts, None)


@pytest.fixture
def plan(tmp_path: Path) -> NodePlan:
    config = NodeConfig(
        pool_id="pool",
        instance_id="unit",
        node=0,
        total_nodes=1,
        workers=3,
        head=True,
        address="127.0.0.9",
        workdir=str(tmp_path),
        env={},
        tls_ca="",
        tls_cert="",
        tls_key="",
        accelerators=("A100",),
    )
    return NodePlan(config=config, ready=node_ready(8))


def planned(plan: NodePlan, devices: int, *, workers: int, asked: bool = True) -> NodePlan:
    config = replace(plan.config, workers=workers, accelerators=("A100",) if asked else ())
    dealt = tuple(Device(name=f"A{index}", shown_as=str(index)) for index in range(devices))
    return replace(plan, config=config, devices=dealt)


class TestDealing:
    @pytest.mark.parametrize(
        ("devices", "workers", "names", "gpus"),
        [
            (0, 2, ["", ""], [0.0, 0.0]),
            (2, 1, ["A0 A1"], [2.0]),
            (4, 2, ["A0 A2", "A1 A3"], [2.0, 2.0]),
            (3, 2, ["A0 A2", "A1"], [2.0, 1.0]),
            (1, 2, ["A0", "A0"], [0.5, 0.5]),
            (2, 3, ["A0", "A1", "A0"], [0.5, 1.0, 0.5]),
            (2, 4, ["A0", "A1", "A0", "A1"], [0.5, 0.5, 0.5, 0.5]),
        ],
    )
    def test_goes_round_the_workers(
        self, plan: NodePlan, devices: int, workers: int, names: list[str], gpus: list[float]
    ) -> None:
        own = planned(plan, devices, workers=workers)

        assert [" ".join(own.place(worker, ORDER).accelerators) for worker in range(workers)] == names
        assert [own.accelerators_of(worker) for worker in range(workers)] == gpus

    def test_shows_each_worker_its_own_in_the_drivers_order(
        self, plan: NodePlan, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        own = planned(plan, 6, workers=3)

        envs = [own.worker_env(worker, ORDER) for worker in range(3)]

        assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["0,3", "1,4", "2,5"]
        assert {env["CUDA_DEVICE_ORDER"] for env in envs} == {"PCI_BUS_ID"}

    def test_keeps_to_the_order_of_what_the_node_is_shown(
        self, plan: NodePlan, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")

        assert "CUDA_DEVICE_ORDER" not in planned(plan, 2, workers=2).worker_env(0, ORDER)

    def test_leaves_one_worker_alone_that_asked_for_nothing(self, plan: NodePlan) -> None:
        alone = planned(plan, 2, workers=1, asked=False)

        assert "CUDA_VISIBLE_DEVICES" not in alone.worker_env(0, ORDER)
        assert alone.place(0, ORDER).accelerators == ("A0", "A1")
        assert planned(plan, 2, workers=2, asked=False).worker_env(1, ORDER)["CUDA_VISIBLE_DEVICES"] == "1"

    def test_gives_way_to_what_the_user_says(self, plan: NodePlan) -> None:
        own = planned(plan, 2, workers=2)
        own = replace(own, config=replace(own.config, env={"CUDA_VISIBLE_DEVICES": "1"}))

        assert "CUDA_VISIBLE_DEVICES" not in own.worker_env(0, ORDER)
        assert own.process_env()["CUDA_VISIBLE_DEVICES"] == "1"
