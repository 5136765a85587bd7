"""What is read of processors, memory, control groups and GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skyward.events import GpuMetrics, Metrics
from skyward.node.cgroups import find_memory_cgroup
from skyward.node.gpu.nvml import open_nvml
from skyward.node.supervisor.load_metrics import MetricsSampler, open_sampler, read_gpus
from skyward.wire.control import NodeMetrics
from support.gpus import FakeGpu, FakeGpus, Machine, cut

GIB = 2**30


@dataclass
class FakeMemory:
    total: int
    available: int


@dataclass
class FakeHost:
    percents: list[float] = field(default_factory=lambda: [0.0, 12.5])
    memory: FakeMemory = field(default_factory=lambda: FakeMemory(total=16 * GIB, available=12 * GIB))

    def cpu_percent(self) -> float:
        return self.percents.pop(0)

    def virtual_memory(self) -> FakeMemory:
        return self.memory


def reading(**changes: Any) -> GpuMetrics:
    values: dict[str, Any] = {
        "index": 0,
        "uuid": "GPU-1",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_used_mb": 20480.0,
        "memory_total_mb": 81920.0,
        "utilization": 90.0,
        "temperature": 61.0,
    }
    return GpuMetrics(**values | changes)


def refuse(nvml: Any, function: str, gpu: object = None) -> None:
    """Have a function of the driver refuse its answer: for one GPU, or always."""
    usual = getattr(nvml, function)

    def answer(*args: object) -> Any:
        if gpu is None or args[0] == gpu:
            raise nvml.NVMLError
        return usual(*args)

    setattr(nvml, function, answer)


class TestGpus:
    @pytest.fixture
    def machine(self, tmp_path: Path) -> Callable[..., FakeGpus]:
        return lambda *gpus, **how: FakeGpus(tmp_path / "gpus", Machine(gpus=list(gpus), **how))

    def test_each_tells_its_name_load_memory_and_temperature(self, machine: Callable[..., FakeGpus]) -> None:
        h100, t4 = FakeGpu(), FakeGpu(card="T4")

        readings = read_gpus(machine(h100, t4).nvml())

        assert [(gpu.index, gpu.uuid, gpu.name) for gpu in readings] == [
            (0, h100.uuid, "NVIDIA H100 80GB HBM3"),
            (1, t4.uuid, "Tesla T4"),
        ]
        assert [gpu.memory_total_mb for gpu in readings] == [81559, 15360]
        assert {(gpu.utilization, gpu.temperature, gpu.memory_used_mb) for gpu in readings} == {(40.0, 50.0, 11.0)}

    def test_a_lost_one_is_left_out_and_the_others_keep_their_numbers(self, machine: Callable[..., FakeGpus]) -> None:
        assert [gpu.index for gpu in read_gpus(machine(FakeGpu(lost=True), FakeGpu()).nvml())] == [1]

    @pytest.mark.parametrize(
        ("refused", "temperature", "utilization"),
        [("nvmlDeviceGetTemperature", None, 40.0), ("nvmlDeviceGetUtilizationRates", 50.0, None)],
    )
    def test_what_one_refuses_to_tell_is_none(
        self, machine: Callable[..., FakeGpus], refused: str, temperature: float | None, utilization: float | None
    ) -> None:
        nvml = machine(FakeGpu()).nvml()
        refuse(nvml, refused)

        (gpu,) = read_gpus(nvml)

        assert (gpu.temperature, gpu.utilization, gpu.memory_used_mb) == (temperature, utilization, 11.0)

    def test_one_that_refuses_to_tell_its_memory_is_left_out(self, machine: Callable[..., FakeGpus]) -> None:
        nvml = machine(FakeGpu(), FakeGpu()).nvml()
        refuse(nvml, "nvmlDeviceGetMemoryInfo", nvml.nvmlDeviceGetHandleByIndex(0))

        assert [gpu.index for gpu in read_gpus(nvml)] == [1]

    @pytest.mark.parametrize("root", [True, False])
    def test_in_mig_mode_tell_their_memory_and_not_how_busy_they_are(
        self, machine: Callable[..., FakeGpus], *, root: bool
    ) -> None:
        parted = FakeGpu()
        cut(parted, ["3g.40gb", "3g.40gb"])

        whole, in_parts = read_gpus(machine(FakeGpu(), parted, root=root).nvml())

        assert (whole.index, whole.utilization) == (0, 40.0)
        assert (in_parts.index, in_parts.utilization) == (1, None)
        assert in_parts.memory_total_mb == pytest.approx(81920, rel=0.05)

    @pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount"])
    def test_are_none_where_the_driver_fails(
        self, failing: str, machine: Callable[..., FakeGpus], caplog: pytest.LogCaptureFixture
    ) -> None:
        nvml = machine(FakeGpu()).nvml()

        refuse(nvml, failing)
        with caplog.at_level(logging.INFO):
            opened = open_nvml(lambda: nvml)
            assert opened is None or read_gpus(opened) == ()
        assert caplog.records == []

    def test_are_none_without_pynvml(self) -> None:
        def fails() -> Any:
            raise ImportError("pynvml")

        assert open_nvml(fails) is None

    def test_the_driver_is_let_go_once(self, machine: Callable[..., FakeGpus]) -> None:
        nvml = open_nvml(machine(FakeGpu()).nvml)
        sampler = MetricsSampler(host=FakeHost(), nvml=nvml)

        sampler.close()
        sampler.close()

        assert nvml.users == 0


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(limit: str, parent_limit: str = "max") -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/user.slice/job\n",
        "sys/fs/cgroup/user.slice/memory.max": f"{parent_limit}\n",
        "sys/fs/cgroup/user.slice/memory.current": f"{7 * GIB}\n",
        "sys/fs/cgroup/user.slice/memory.stat": "anon 1\n",
        "sys/fs/cgroup/user.slice/job/memory.max": f"{limit}\n",
        "sys/fs/cgroup/user.slice/job/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user.slice/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
    }


def version_1(limit: int, folder: str) -> dict[str, str]:
    return {
        "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n",
        f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"sys/fs/cgroup/memory/{folder}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    }


class TestControlGroups:
    @pytest.mark.parametrize(
        "files, limit, used",
        [
            (version_2(str(4 * GIB)), 4 * GIB, 2 * GIB),
            (version_2(str(8 * GIB), parent_limit=str(6 * GIB)), 6 * GIB, 7 * GIB),
            (version_2("max", parent_limit=str(6 * GIB)), 6 * GIB, 7 * GIB),
            (version_1(4 * GIB, "docker/abc"), 4 * GIB, 2 * GIB),
            (version_1(4 * GIB, "."), 4 * GIB, 2 * GIB),  # in a container the path is the host's
        ],
    )
    def test_the_smallest_limit_counts_with_what_can_be_dropped_left_out(
        self, tmp_path: Path, files: dict[str, str], limit: int, used: int
    ) -> None:
        group = find_memory_cgroup(write_files(tmp_path, files))

        assert group is not None
        assert (group.limit_bytes, group.used_bytes()) == (limit, used)

    @pytest.mark.parametrize("files", [{}, version_2("max"), {"proc/self/cgroup": "3:cpu:/a\n0::/a\n"}])
    def test_none_without_a_limit(self, tmp_path: Path, files: dict[str, str]) -> None:
        assert find_memory_cgroup(write_files(tmp_path, files)) is None

    def test_a_limit_under_physical_memory_is_the_nodes_memory(self, tmp_path: Path) -> None:
        group = find_memory_cgroup(write_files(tmp_path, version_2(str(4 * GIB))))

        sample = MetricsSampler(host=FakeHost(), cgroup=group).sample()

        assert (sample.memory_used_mb, sample.memory_total_mb, sample.memory_percent) == (2048, 4096, 50)

    def test_a_limit_over_physical_memory_means_nothing(self, tmp_path: Path) -> None:
        group = find_memory_cgroup(write_files(tmp_path, version_1(9223372036854771712, "docker/abc")))

        sample = MetricsSampler(host=FakeHost(), cgroup=group).sample()

        assert (sample.memory_used_mb, sample.memory_total_mb) == (4096, 16384)


class TestSamples:
    def test_tell_processors_and_memory(self) -> None:
        assert MetricsSampler(host=FakeHost()).sample() == NodeMetrics(
            cpu_percent=12.5, memory_used_mb=4096, memory_total_mb=16384
        )

    def test_of_this_machine_are_sane_and_cost_next_to_nothing(self) -> None:
        sampler = open_sampler()
        try:
            started = time.thread_time()
            samples = [sampler.sample() for _ in range(50)]
            seconds_each = (time.thread_time() - started) / 50
        finally:
            sampler.close()

        assert 0 <= samples[-1].cpu_percent <= 100
        assert 0 < samples[-1].memory_used_mb <= samples[-1].memory_total_mb
        assert samples[-1].gpus or seconds_each < 0.001


class TestEvent:
    def test_without_gpus_has_no_gpu_values(self) -> None:
        sample = NodeMetrics(cpu_percent=1.0, memory_used_mb=2.0, memory_total_mb=8.0)

        assert sample.to_event(instance_id="i-1", node=3) == Metrics("i-1", 3, 1.0, 25.0, 2.0, 8.0)

    def test_sums_up_the_gpus(self) -> None:
        gpus = (reading(), reading(index=1, utilization=50.0, temperature=70.0))
        event = NodeMetrics(cpu_percent=1.0, memory_used_mb=2.0, memory_total_mb=8.0, gpus=gpus).to_event(
            instance_id="i-1", node=3
        )

        assert (event.gpu_utilization, event.gpu_temperature) == (70.0, 70.0)
        assert (event.gpu_memory_used_mb, event.gpu_memory_total_mb) == (40960.0, 163840.0)
        assert event.gpus[0] == GpuMetrics(0, "NVIDIA H100 80GB HBM3", 90.0, 20480.0, 81920.0, 61.0, "GPU-1")

    def test_leaves_out_what_no_gpu_tells(self) -> None:
        gpus = (reading(utilization=None, temperature=None),)
        event = NodeMetrics(cpu_percent=1.0, memory_used_mb=2.0, memory_total_mb=8.0, gpus=gpus).to_event(
            instance_id="i-1", node=3
        )

        assert (event.gpu_utilization, event.gpu_temperature, event.gpu_memory_used_mb) == (None, None, 20480.0)
