"""Pools on GPUs that do not exist: real supervisors and workers, with a driver that is a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward import Accelerator
from support.eventually import eventually
from support.gpus import FakeGpu, FakeGpus, Machine

Fake = Callable[..., FakeGpus]
DEADLINE_S = 120.0
WHOLE: tuple[bool, list[str]] = (False, [])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Has this process, and those that it starts, find these GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*gpus: FakeGpu, **machine: object) -> FakeGpus:
        there = FakeGpus(tmp_path / "gpus.json", Machine(gpus=list(gpus), **machine))  # type: ignore[arg-type]
        for name, value in there.install(tmp_path / "bin").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "pynvml", there.nvml())
        return there

    return make


def layout(gpus: FakeGpus) -> list[tuple[bool, list[str]]]:
    return [(gpu.mig, sorted(each.profile for each in gpu.instances)) for gpu in gpus.machine.gpus]


@sky.compute
def what_is_seen() -> tuple[str, list[str], str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all"), sky.instance_info().accelerators, sky.current_accelerator()


def test_each_partition_has_a_worker_and_is_gone_with_the_pool(fake: Fake) -> None:
    gpus = fake(FakeGpu())

    with sky.ComputePool(
        provider=sky.Local(), accelerator=Accelerator.NVIDIA.H100(mig="3g.40gb"), display="quiet"
    ) as pool:
        seen = what_is_seen() @ pool
        made = gpus.machine.gpus[0].instances

    assert sorted(shown for shown, *_ in seen) == sorted(each.uuid for each in made)
    assert [names for _, *names in seen] == [[["H100"], "H100"]] * 2
    assert [each.profile for each in made] == ["3g.40gb"] * 2
    assert layout(gpus) == [WHOLE]


def test_gpus_are_dealt_to_the_workers_of_a_node(fake: Fake) -> None:
    fake(*(FakeGpu() for _ in range(4)))

    with sky.ComputePool(provider=sky.Local(), accelerator="H100:4", concurrency=2, display="quiet") as pool:
        seen = what_is_seen() @ pool

    assert seen == (("0,2", ["H100"] * 2, "H100"), ("1,3", ["H100"] * 2, "H100"))


@pytest.mark.full
def test_gpus_that_nobody_asked_for_are_named_and_left_as_they_are(fake: Fake) -> None:
    fake(FakeGpu(card="T4"), FakeGpu())

    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        assert what_is_seen() >> pool == ("all", ["T4", "H100"], "T4")


@pytest.mark.full
def test_a_gpu_that_cannot_be_cut_keeps_the_pool_from_opening_and_says_why(fake: Fake) -> None:
    gpus = fake(FakeGpu(card="A100-80", used_by=1))

    with pytest.raises(sky.errors.BootstrapError, match="In use by another client") as raised:
        sky.ComputePool(
            provider=sky.Local(), accelerator=Accelerator.NVIDIA.A100(mig="3g.40gb"), display="quiet"
        ).__enter__()

    assert "Traceback" not in str(raised.value)
    assert layout(gpus) == [WHOLE]


CLIENT = """
import sys
import skyward as sky
with sky.ComputePool(
    provider=sky.Local(), accelerator=sky.Accelerator.NVIDIA.H100(mig="7g.80gb"), lease=8, display="quiet"
) as pool:
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.full
def test_what_a_killed_client_had_cut_is_whole_again_after_its_lease(fake: Fake, tmp_path: Path) -> None:
    gpus = fake(FakeGpu())
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}  # with a ledger that goes with it
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "open\n"
        assert layout(gpus) == [(True, ["7g.80gb"])]

        client.send_signal(signal.SIGKILL)

    for attempt in eventually(DEADLINE_S):
        with attempt:
            assert layout(gpus) == [WHOLE]


def wait_for(path: str) -> int:
    """Says that it runs, and ends as soon as somebody lets it."""
    with open(path + ".runs", "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    while not os.path.exists(path):
        time.sleep(0.02)
    return os.getpid()


@pytest.mark.full
def test_calls_of_a_node_whose_gpu_failed_run_on_the_next(fake: Fake, tmp_path: Path) -> None:
    gpus = fake(FakeGpu())
    let_go, runs = tmp_path / "go", tmp_path / "go.runs"
    errors: list[str] = []
    with sky.ComputePool(provider=sky.Local(), accelerator="H100", display="quiet") as pool:
        pool.on(sky.events.Error, lambda error: errors.append(str(error)))
        future = pool.submit(wait_for, str(let_go))
        _until(runs.exists)
        with gpus.change() as machine:
            machine.gpus[0].xids = [31, 79]
        _until(lambda: len(runs.read_text().split()) == 2)
        let_go.touch()
        ran_on = future.result(timeout=DEADLINE_S)

    first, second = map(int, runs.read_text().split())
    assert ran_on == second != first
    assert any("it has fallen off the bus (Xid 79)" in error for error in errors)


def test_what_a_failing_gpu_makes_a_call_raise_is_not_the_calls_error(fake: Fake, tmp_path: Path) -> None:
    gpus = fake(FakeGpu())
    runs = tmp_path / "runs"

    def touch_the_gpu() -> str:
        with runs.open("a") as file:
            file.write("once\n")
        if len(runs.read_text().split()) == 1:
            with gpus.change() as machine:
                machine.gpus[0].xids = [79]
            raise RuntimeError("CUDA error: unspecified launch failure")
        return "done"

    with sky.ComputePool(provider=sky.Local(), accelerator="H100", display="quiet") as pool:
        assert pool.submit(touch_the_gpu).result(timeout=DEADLINE_S) == "done"


def test_running_out_of_a_gpus_memory_is_the_calls_own_error(fake: Fake, tmp_path: Path) -> None:
    fake(FakeGpu())
    tried = tmp_path / "tried"

    @sky.compute
    def allocate() -> None:
        with tried.open("a") as file:
            file.write("once\n")
        raise RuntimeError("CUDA error: out of memory")

    with (
        sky.ComputePool(provider=sky.Local(), accelerator="H100", display="quiet") as pool,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        allocate() >> pool

    assert tried.read_text() == "once\n"


def _until(reached: Callable[[], bool]) -> None:
    for attempt in eventually(DEADLINE_S):
        with attempt:
            assert reached()
