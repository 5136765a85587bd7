"""Size of an elastic pool: how many nodes its work is worth, and when idle ones leave. Pure; decision 048."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from skyward.request.request import NodeRange

LEAST_BOOT_S = 1.0
"""Seconds that a boot counts at least: below that, the measurement of the work is too coarse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Work of a pool at one moment.

    Attributes:
        calls: number of calls that wait or run: more workers than that have nothing to do.
        work_s: seconds that the waiting calls are expected to take, and running ones from now on, by the calls of
            their functions that have ended; one of a function of which none has ended, as long as it has run.
        idle_s: seconds for which each node in use has had no work, by rank; 0 for a node with work.
    """

    calls: int = 0
    work_s: float = 0.0
    idle_s: Mapping[int, float] = field(default_factory=dict[int, float])

    def idle_nodes(self, size: NodeRange) -> list[int]:
        """Return the ranks of the nodes that have been idle for long enough to leave, the longest first."""
        ranks = [rank for rank, idle_s in self.idle_s.items() if idle_s >= size.idle_s]
        return sorted(ranks, key=lambda rank: self.idle_s[rank], reverse=True)


def workers_worth(work_s: float, calls: int, boot_s: float) -> int:
    """Return the number of workers that so much work is worth.

    Each has a call, and as many seconds of work as its boot costs; the first one needs no more than a call.

    Args:
        work_s: seconds of work.
        calls: number of calls that wait or run.
        boot_s: seconds from the order of a node until it takes calls.
    """
    return min(calls, max(1, math.ceil(work_s / max(boot_s, LEAST_BOOT_S))))


def wanted(
    load: Workload, size: NodeRange, *, nodes: int, per_node: int, boot_s: float, is_refilled: bool = False
) -> int:
    """Return the number of nodes that a pool should have now.

    Args:
        load: the work of the pool.
        size: the limits of its size.
        nodes: its present nodes, with those that are coming.
        per_node: workers on each node.
        boot_s: seconds from the order of a node until it takes calls.
        is_refilled: True if the queue has not become shorter for that long (:class:`Backlog`). What waits is then only
            the part of the work that has been submitted so far: the pool doubles, as long as there are calls for it.
    """
    needed = math.ceil(workers_worth(load.work_s, load.calls, boot_s) / per_node)
    if is_refilled:
        needed = max(needed, min(math.ceil(load.calls / per_node), 2 * nodes))
    # Nodes that are gone, such as those that reached their timeout, are bought again for a call, not for the minimum.
    least = size.minimum if load.calls else min(size.minimum, nodes)
    return min(max(needed, nodes - len(load.idle_nodes(size)), least), size.maximum)


@dataclass(slots=True)
class Backlog:
    """Memory of the queue: whether it has become shorter.

    Loops that submit a call for each one that ends, as joblib does, never show all of their work.
    """

    _fewest: float = math.inf
    _workers: int = 0
    _since: float = 0.0

    def is_refilled(self, calls: int, workers: int, now: float, *, boot_s: float) -> bool:
        """Return True if calls have waited for as long as a boot takes, and not fewer of them than before.

        Args:
            calls: number of calls that wait or run.
            workers: number of workers that the pool has, or is about to have. After a change, time counts anew.
            now: the time in seconds.
            boot_s: seconds of a boot.
        """
        if calls < self._fewest or calls <= workers or workers != self._workers:
            self._fewest = calls if calls > workers else math.inf
            self._workers, self._since = workers, now
        return calls > workers and now - self._since >= boot_s
