"""What is read of processors, memory, control groups and GPUs."""

from __future__ import annotations

import json
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
from skyward.node.supervisor.sampling import MetricsSampler, open_sampler, read_gpus
from skyward.wire.control import NodeMetrics
from support import gpus

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


class FakeNVMLError(Exception):
    pass


@dataclass
class FakeGpu:
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-1"
    busy: int = 90
    used: int = 20 * GIB
    total: int = 80 * GIB
    celsius: int = 61
    refuses: tuple[str, ...] = ()
    """Functions that raise for this GPU, or "all"."""


@dataclass
class FakeNvml:
    """The functions of ``pynvml`` that are used, over GPUs that can refuse them."""

    gpus: list[FakeGpu]
    refuses: tuple[str, ...] = ()
    shut_down: int = 0
    NVMLError = FakeNVMLError
    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer("nvmlInit")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._answer("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self._answer("nvmlDeviceGetHandleByIndex", self.gpus[index])

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._answer("nvmlDeviceGetName", gpu).name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._answer("nvmlDeviceGetUUID", gpu).uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> FakeGpu:  # noqa: N802
        return self._answer("nvmlDeviceGetMemoryInfo", gpu)

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self._answer("nvmlDeviceGetMaxMigDeviceCount", gpu) and 0

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        @dataclass
        class Rates:
            gpu: int

        return Rates(self._answer("nvmlDeviceGetUtilizationRates", gpu).busy)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer("nvmlDeviceGetTemperature", gpu).celsius

    def _answer(self, function: str, gpu: FakeGpu | None = None) -> Any:
        refused = self.refuses + (gpu.refuses if gpu else ())
        if function in refused or (gpu and "all" in refused):
            raise FakeNVMLError(function)
        return gpu


def read(nvml: FakeNvml) -> tuple[GpuMetrics, ...]:
    return read_gpus(nvml)


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


class TestGpus:
    def test_each_tells_its_name_load_memory_and_temperature(self) -> None:
        found = read(FakeNvml([FakeGpu(), FakeGpu(uuid="GPU-2", busy=0)]))

        assert found == (reading(), reading(index=1, uuid="GPU-2", utilization=0.0))

    @pytest.mark.parametrize(
        "function, missing",
        [("nvmlDeviceGetUtilizationRates", "utilization"), ("nvmlDeviceGetTemperature", "temperature")],
    )
    def test_what_one_does_not_tell_is_none(self, function: str, missing: str) -> None:
        assert read(FakeNvml([FakeGpu(refuses=(function,))])) == (reading(**{missing: None}),)

    @pytest.mark.parametrize("function", ["all", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
    def test_a_lost_one_is_left_out_and_the_others_keep_their_numbers(self, function: str) -> None:
        found = read(FakeNvml([FakeGpu(refuses=(function,)), FakeGpu(uuid="GPU-2")]))

        assert found == (reading(index=1, uuid="GPU-2"),)

    def test_a_driver_that_fails_later_leaves_none(self) -> None:
        assert read(FakeNvml([FakeGpu()], refuses=("nvmlDeviceGetCount",))) == ()

    @pytest.mark.parametrize("root", [True, False])
    def test_in_mig_mode_tell_their_memory_and_not_how_busy_they_are(self, tmp_path: Path, *, root: bool) -> None:
        parted = gpus.FakeGpu()
        gpus.cut(parted, ["3g.40gb", "3g.40gb"])
        there = gpus.FakeGpus(tmp_path / "gpus", gpus.Machine(gpus=[gpus.FakeGpu(), parted], root=root))

        whole, in_parts = read_gpus(open_nvml(there.nvml))

        assert (whole.index, whole.utilization) == (0, 40.0)
        assert (in_parts.index, in_parts.utilization) == (1, None)
        assert in_parts.memory_total_mb == pytest.approx(81920, rel=0.05)

    def test_are_none_without_a_driver_and_without_noise(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert open_nvml(lambda: FakeNvml([], refuses=("nvmlInit",))) is None
        assert caplog.records == []

    def test_are_none_without_pynvml(self) -> None:
        def fails() -> Any:
            raise ImportError("pynvml")

        assert open_nvml(fails) is None

    def test_the_driver_is_let_go_once(self) -> None:
        nvml = FakeNvml([FakeGpu()])
        sampler = MetricsSampler(host=FakeHost(), nvml=nvml)

        sampler.close()
        sampler.close()

        assert nvml.shut_down == 1


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

    @pytest.mark.parametrize("gpus", [(), (reading(), reading(index=1, utilization=None, temperature=None))])
    @pytest.mark.parametrize("travel", [dict, lambda values: json.loads(json.dumps(values))], ids=["dict", "json"])
    def test_travel_unchanged(self, gpus: tuple[GpuMetrics, ...], travel: Callable[[Any], Any]) -> None:
        sample = NodeMetrics(cpu_percent=1.5, memory_used_mb=2.0, memory_total_mb=4.0, gpus=gpus)

        assert NodeMetrics.from_dict(travel(sample.to_dict())) == sample


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
