"""Sampling of a node's load: processors, memory, and GPUs where there are any."""

from __future__ import annotations

from typing import Any

import psutil

from skyward.events import GpuMetrics
from skyward.node.cgroups import MemoryCgroup, find_memory_cgroup
from skyward.node.gpu.nvml import ask, import_nvml, open_nvml
from skyward.wire.control import NodeMetrics

_MIB = 2**20


def read_gpus(nvml: Any) -> tuple[GpuMetrics, ...]:
    """Return the readings of NVIDIA GPUs, about a millisecond each, without those that do not answer. Raises nothing.

    Args:
        nvml: the :mod:`pynvml` module, initialised.
    """
    count = ask(nvml, nvml.nvmlDeviceGetCount) or 0
    readings = (ask(nvml, _read_gpu, nvml, index) for index in range(count))
    return tuple(reading for reading in readings if reading is not None)


def _read_gpu(nvml: Any, index: int) -> GpuMetrics:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory_of(nvml, handle)
    load = ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    temperature = ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    return GpuMetrics(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_used_mb=sum(info.used for info in memory) / _MIB,
        memory_total_mb=sum(info.total for info in memory) / _MIB,
        utilization=None if load is None else float(load.gpu),
        temperature=None if temperature is None else float(temperature),
    )


def _memory_of(nvml: Any, handle: Any) -> list[Any]:
    """Return that of the GPU; where only root may read it, as in MIG mode, that of each of its partitions."""
    try:
        return [nvml.nvmlDeviceGetMemoryInfo(handle)]
    except nvml.NVMLError:
        numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        parts = [ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number) for number in numbers]
        memory = [nvml.nvmlDeviceGetMemoryInfo(part) for part in parts if part is not None]
        if not memory:
            raise
        return memory


class MetricsSampler:
    """Sampler of this node; without GPUs each costs a fraction of a millisecond. Not thread-safe.

    Args:
        host: processors and physical memory: :mod:`psutil`.
        nvml: the :mod:`pynvml` module, initialised; shut down with the sampler. None without GPUs.
        cgroup: what limits memory further, if anything does.
    """

    def __init__(self, *, host: Any = psutil, nvml: Any = None, cgroup: MemoryCgroup | None = None) -> None:
        self._host = host
        self._nvml = nvml
        self._cgroup = cgroup
        host.cpu_percent()  # the first answer means nothing

    def sample(self) -> NodeMetrics:
        """Return the node's load at the moment."""
        memory = self._host.virtual_memory()
        used, total = memory.total - memory.available, memory.total
        if self._cgroup and self._cgroup.limit_bytes < total:
            used, total = self._cgroup.used_bytes(), self._cgroup.limit_bytes
        return NodeMetrics(
            cpu_percent=self._host.cpu_percent(),
            memory_used_mb=used / _MIB,
            memory_total_mb=total / _MIB,
            gpus=read_gpus(self._nvml) if self._nvml else (),
        )

    def close(self) -> None:
        """Release the driver. Idempotent."""
        nvml, self._nvml = self._nvml, None
        if nvml:
            ask(nvml, nvml.nvmlShutdown)


def open_sampler() -> MetricsSampler:
    """Return a sampler of this machine."""
    return MetricsSampler(nvml=open_nvml(import_nvml), cgroup=find_memory_cgroup())
