"""What a node reports of its load: readings of the node and of its GPUs, as they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from skyward.events import GpuMetrics, Metrics

__all__ = ["GpuReading", "NodeMetrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one moment.

    Attributes:
        index: the driver's number of it.
        uuid: the driver's name of it, e.g. ``GPU-…``; the same after a restart.
        name: its model.
        memory_used_mb: in MiB.
        memory_total_mb: in MiB.
        utilization: percent of the time it was busy; None where it does not tell (under MIG).
        temperature: degrees Celsius; None where it does not tell.
    """

    index: int
    uuid: str
    name: str
    memory_used_mb: float
    memory_total_mb: float
    utilization: float | None = None
    temperature: float | None = None

    def to_event(self) -> GpuMetrics:
        """Its part of the event."""
        return GpuMetrics(
            index=self.index,
            name=self.name,
            utilization=self.utilization,
            memory_used_mb=self.memory_used_mb,
            memory_total_mb=self.memory_total_mb,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMetrics:
    """A node at one moment.

    Attributes:
        cpu_percent: of all cores together since the sample before, 0 to 100.
        memory_used_mb: in MiB, without what the system could drop at once.
        memory_total_mb: in MiB: physical memory, or the control group's limit where that is smaller.
        gpus: those that answered, by index.
    """

    cpu_percent: float
    memory_used_mb: float
    memory_total_mb: float
    gpus: tuple[GpuReading, ...] = ()

    @property
    def memory_percent(self) -> float:
        """Used memory, 0 to 100."""
        return 100 * self.memory_used_mb / self.memory_total_mb

    def to_dict(self) -> dict[str, Any]:
        """For the wire: strings, numbers, sequences and None only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NodeMetrics:
        """From the wire."""
        gpus = tuple(GpuReading(**gpu) for gpu in values["gpus"])
        return replace(cls(**values), gpus=gpus)

    def to_event(self, *, instance_id: str, node: int) -> Metrics:
        """The event that tells the user."""
        utilizations = [gpu.utilization for gpu in self.gpus if gpu.utilization is not None]
        return Metrics(
            instance_id=instance_id,
            node=node,
            cpu_percent=self.cpu_percent,
            memory_percent=self.memory_percent,
            memory_used_mb=self.memory_used_mb,
            memory_total_mb=self.memory_total_mb,
            gpu_utilization=fmean(utilizations) if utilizations else None,
            gpu_memory_used_mb=sum(gpu.memory_used_mb for gpu in self.gpus) if self.gpus else None,
            gpu_memory_total_mb=sum(gpu.memory_total_mb for gpu in self.gpus) if self.gpus else None,
            gpu_temperature=max((gpu.temperature for gpu in self.gpus if gpu.temperature is not None), default=None),
            gpus=tuple(gpu.to_event() for gpu in self.gpus),
        )
