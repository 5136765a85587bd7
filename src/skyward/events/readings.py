"""Events that carry readings of a running pool: load and cost. Public as part of :mod:`skyward.events`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CostFinal", "CostUpdate", "GpuMetrics", "Metrics"]


@dataclass(frozen=True)
class GpuMetrics:
    """One GPU's part of :class:`Metrics`.

    Attributes:
        index: the GPU's number on its node.
        name: its model, as the driver says it.
        utilization: percent of the time it was busy; None where the driver does not tell, as under MIG.
    """

    index: int
    name: str
    utilization: float | None
    memory_used_mb: float
    memory_total_mb: float
    temperature: float | None = None


@dataclass(frozen=True)
class Metrics:
    """Load of a node.

    Attributes:
        cpu_percent: of all cores together, 0 to 100.
        gpu_utilization: mean over the node's GPUs, 0 to 100.
        gpu_memory_used_mb: sum over the GPUs.
        gpu_memory_total_mb: sum over the GPUs.
        gpu_temperature: of the hottest GPU.
        gpus: each GPU by itself.
    """

    instance_id: str
    node: int
    cpu_percent: float
    memory_percent: float
    memory_used_mb: float
    memory_total_mb: float
    gpu_utilization: float | None = None
    gpu_memory_used_mb: float | None = None
    gpu_memory_total_mb: float | None = None
    gpu_temperature: float | None = None
    gpus: tuple[GpuMetrics, ...] = ()

    @property
    def cpu(self) -> float:
        """Short for ``cpu_percent``."""
        return self.cpu_percent

    @property
    def memory(self) -> float:
        """Short for ``memory_percent``."""
        return self.memory_percent

    @property
    def gpu(self) -> float | None:
        """Short for ``gpu_utilization``."""
        return self.gpu_utilization


@dataclass(frozen=True)
class CostUpdate:
    """Cost of the pool since its first instance was asked for, and the price of those that run now."""

    elapsed_seconds: float
    accumulated_cost: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int


@dataclass(frozen=True)
class CostFinal:
    """Cost of the pool in all, from the request for its first instance to the end of the last.

    Attributes:
        hourly_rate: while all instances ran.
        savings_vs_ondemand: how much more the same machines cost on demand.
    """

    total_cost: float
    total_seconds: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int
    savings_vs_ondemand: float
