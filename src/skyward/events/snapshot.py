"""State of an open pool at one moment, as values: nodes, workers, their calls, the queue and the costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from skyward.events import Metrics, Progress

__all__ = ["NodeSnapshot", "PoolSnapshot", "WorkerSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker.

    Attributes:
        worker: its index on its node.
        state: ``"running"`` a call, ``"idle"``, or ``"starting"`` while it accepts no calls.
        call: name of the running call, such as ``"train#3"``; empty for none.
        seconds: time that this call has taken so far; None for none.
        waiting: calls already sent to the worker that wait behind the running one.
    """

    worker: int
    state: str = "starting"
    call: str = ""
    seconds: float | None = None
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node.

    Attributes:
        node: its rank.
        state: ``"launching"``, ``"starting"``, ``"ready"`` or ``"ending"``.
        instance_id: the provider's id of its machine; empty before there is one.
        instance_type: the provider's name of the machine type.
        spot: True if the machine was bought on the spot market.
        price_per_hour: price in USD; 0.0 is free, None is unknown.
        workers: its workers, by index.
        metrics: its latest reported load; None before the first report, and without ``collect_metrics``.
    """

    node: int
    state: str
    instance_id: str = ""
    instance_type: str = ""
    spot: bool = False
    price_per_hour: float | None = None
    workers: tuple[WorkerSnapshot, ...] = ()
    metrics: Metrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """A pool at one moment.

    Attributes:
        pool_id: the pool's id, as in ``skyward ls``.
        provider: name of the provider.
        taken_at: time of the snapshot, in seconds since the epoch.
        open_s: seconds since the pool began to open.
        nodes: its nodes, by rank: present, coming and leaving ones.
        queued: calls that wait for a worker, those that were sent to a busy one included.
        running: calls that run.
        done: calls that have returned a result, since the pool was opened.
        failed: calls that have failed.
        cancelled: calls that were cancelled, or dropped because their batch failed.
        last_failure: latest failure, in one line; empty for none.
        works: progress of the unfinished pieces of work.
        hourly_rate: price of the present machines together, in USD per hour.
        cost: costs so far, in USD.
        cost_by_provider: their shares, in USD by provider.
    """

    pool_id: str
    provider: str
    taken_at: float
    open_s: float
    nodes: tuple[NodeSnapshot, ...] = ()
    queued: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    last_failure: str = ""
    works: tuple[Progress, ...] = ()
    hourly_rate: float = 0.0
    cost: float = 0.0
    cost_by_provider: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PoolSnapshot:
        """Return the snapshot that :meth:`to_dict` wrote; names of another version of Skyward are left out.

        Args:
            values: the snapshot's values, by name.

        Raises:
            TypeError: a value is missing or of another type.
        """
        import msgspec

        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise TypeError(str(error)) from error
