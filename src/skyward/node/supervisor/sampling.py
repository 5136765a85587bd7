"""Sampling of a node's load: processors, memory, and GPUs where there are any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import psutil

from skyward.events import GpuMetrics
from skyward.node.cgroups import MemoryCgroup, find_memory_cgroup
from skyward.node.gpu.nvml import import_nvml, open_nvml
from skyward.wire.control import NodeMetrics

log = logging.getLogger("skyward.node.supervisor.sampling")

T = TypeVar("T")

_MIB = 2**20


class MemoryInfo(Protocol):
    """Physical memory, in bytes."""

    @property
    def total(self) -> int:
        """All there is."""
        ...

    @property
    def available(self) -> int:
        """Memory that programs could get without swapping, in bytes."""
        ...


class HostProbe(Protocol):
    """Readings of the machine: :mod:`psutil`'s functions of these names. None of them blocks."""

    def cpu_percent(self) -> float:
        """Of all cores together since the last call, 0 to 100; the first call's value means nothing."""
        ...

    def virtual_memory(self) -> MemoryInfo:
        """Physical memory."""
        ...


class NvmlProbe:
    """Reader of NVIDIA GPUs, about a millisecond each. Never raises: a GPU that does not answer is left out.

    Args:
        nvml: the :mod:`pynvml` module, initialised; closing the probe shuts it down.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._open = True

    def read(self) -> tuple[GpuMetrics, ...]:
        """Return the readings of the GPUs that answer."""
        count = self._ask(self._nvml.nvmlDeviceGetCount) or 0
        readings = (self._ask(self._read_one, index) for index in range(count))
        return tuple(reading for reading in readings if reading is not None)

    def close(self) -> None:
        """Shut NVML down."""
        if self._open:
            self._open = False
            self._ask(self._nvml.nvmlShutdown)

    def _read_one(self, index: int) -> GpuMetrics:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._memory(handle)
        load = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        return GpuMetrics(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            memory_used_mb=sum(each.used for each in memory) / _MIB,
            memory_total_mb=sum(each.total for each in memory) / _MIB,
            utilization=None if load is None else float(load.gpu),
            temperature=None if temperature is None else float(temperature),
        )

    def _memory(self, handle: Any) -> list[Any]:
        """Of the GPU; where only root is told, which is so in MIG mode, of each of its partitions."""
        nvml = self._nvml
        try:
            return [nvml.nvmlDeviceGetMemoryInfo(handle)]
        except nvml.NVMLError:
            numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
            parts = [self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number) for number in numbers]
            memory = [nvml.nvmlDeviceGetMemoryInfo(part) for part in parts if part is not None]
            if not memory:
                raise
            return memory

    def _ask(self, question: Callable[..., T], *args: Any) -> T | None:
        try:
            return question(*args)
        except self._nvml.NVMLError as error:
            log.debug("NVML: %s%r: %s", getattr(question, "__name__", question), args, error)
            return None


def open_gpu_probe(load: Callable[[], Any] = import_nvml) -> NvmlProbe | None:
    """Return a probe of this machine's NVIDIA GPUs; None without their driver.

    Args:
        load: returns the :mod:`pynvml` module, not yet initialised.
    """
    nvml = open_nvml(load)
    return None if nvml is None else NvmlProbe(nvml)


class MetricsSampler:
    """Sampler of this node; without GPUs each costs a fraction of a millisecond. Not thread-safe.

    Args:
        host: processors and physical memory.
        gpus: closed with the sampler; None where there are none.
        cgroup: what limits memory further, if anything does.
    """

    def __init__(self, *, host: HostProbe, gpus: NvmlProbe | None = None, cgroup: MemoryCgroup | None = None) -> None:
        self._host = host
        self._gpus = gpus
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
            gpus=self._gpus.read() if self._gpus else (),
        )

    def close(self) -> None:
        """Release the driver. Idempotent."""
        if self._gpus:
            self._gpus.close()


def open_sampler() -> MetricsSampler:
    """Return a sampler of this machine."""
    return MetricsSampler(host=psutil, gpus=open_gpu_probe(), cgroup=find_memory_cgroup())
