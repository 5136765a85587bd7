"""Conversion of workers, threads and memory, which Dask users state, to whole nodes of a fleet. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from dask.utils import parse_bytes

from skyward.errors import ConfigurationError
from skyward.submission import FleetStatus, NodeStatus

HEAD = 0
"""Rank of the scheduler's node, which is never removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """Resources of one worker.

    Attributes:
        threads: number of Dask's threads.
        memory_bytes: memory limit; 0 is unknown.
    """

    threads: int
    memory_bytes: int

    @classmethod
    def of(cls, workers: Mapping[str, Mapping[str, Any]]) -> WorkerSize:
        """Return the smallest size among the workers registered with the scheduler."""
        return cls(
            threads=min((worker["nthreads"] for worker in workers.values()), default=1),
            memory_bytes=min((worker["memory_limit"] or 0 for worker in workers.values()), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeParams:
    """Requested size, or bound of it, in workers, cores or memory; each may be None.

    Attributes:
        prefix: prefix of the parameters' names, for errors, such as ``"minimum_"``.
        workers: number of workers.
        cores: number of threads of all workers together.
        memory: memory of all workers together, as bytes or text.
    """

    prefix: str
    workers: object = None
    cores: object = None
    memory: object = None

    @property
    def is_open(self) -> bool:
        """True if no unit is set."""
        return self.workers is None and self.cores is None and self.memory is None

    @property
    def workers_name(self) -> str:
        """The name of the parameter for the number of workers."""
        return self.prefix.rstrip("_") or "n"


def worker_count(parameter: str, value: object) -> int:
    """Return ``value`` as a number of workers.

    Raises:
        ConfigurationError: the value is not a whole number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ConfigurationError(f"{parameter} must be a whole number ≥ 0, got {value!r}")
    return int(value)


def memory_size(parameter: str, value: object) -> int:
    """Return ``value``, such as ``"64 GiB"``, in bytes.

    Raises:
        ConfigurationError: the value is not a size of at least 0.
    """
    try:
        size = -1
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            size = parse_bytes(value)
    except ValueError:
        size = -1
    if size < 0:
        raise ConfigurationError(f'{parameter} must be a size such as "64 GiB", got {value!r}')
    return size


def nodes_for(workers: float, per_node: int) -> int:
    """Return the minimum number of nodes with ``workers`` workers; at least one, the scheduler's."""
    return max(1, math.ceil(workers / per_node))


def node_of(worker: str) -> str:
    """Return the node's part of a worker's name: ``node0`` of ``node0-worker1``."""
    return worker.rpartition("-")[0]


def staying(status: FleetStatus) -> list[NodeStatus]:
    """Return the nodes that are not ending, by rank."""
    return sorted((node for node in status.nodes if node.state != "ending"), key=lambda node: node.rank)


def requested_workers(status: FleetStatus) -> set[str]:
    """Return names of the workers of nodes that exist, or are requested from the provider."""
    return {worker for node in staying(status) for worker in node.workers}


def planned_workers(status: FleetStatus) -> set[str]:
    """Return names of the workers of the target number of nodes.

    Nodes that are not yet requested get the lowest free ranks. Of surplus nodes the highest ranks do not count.
    """
    kept = staying(status)[: status.wanted]
    taken = {node.rank for node in kept}
    free = (rank for rank in range(status.wanted) if rank not in taken)
    coming = [next(free) for _ in range(status.wanted - len(kept))]
    names = {worker for node in kept for worker in node.workers}
    return names | {f"node{rank}-worker{index}" for rank in coming for index in range(status.workers_per_node)}


def ranks_named(status: FleetStatus, workers: Collection[str]) -> list[int]:
    """Return ranks of the nodes all of whose workers are named; never the scheduler's."""
    return [
        node.rank
        for node in staying(status)
        if node.rank != HEAD and node.workers and set(node.workers).issubset(workers)
    ]


def superfluous(
    status: FleetStatus, *, target: int, observed: Collection[str], cheapest_first: Sequence[str]
) -> list[str]:
    """Return names of the workers to close until ``target`` remain, by whole nodes.

    Nodes that have not arrived go first, highest rank first, then those that are cheapest to close.

    Args:
        status: the fleet.
        target: number of workers that should remain.
        observed: names of the workers registered with the scheduler.
        cheapest_first: names of the workers that may be closed, cheapest first.
    """
    nodes = [node for node in staying(status) if node.rank != HEAD]
    too_many = len(staying(status)) - nodes_for(target, status.workers_per_node)
    coming = [node for node in reversed(nodes) if not set(node.workers) & set(observed)]
    closable = _whole(nodes, cheapest_first)
    chosen = [*coming, *(node for node in closable if node not in coming)][: max(too_many, 0)]
    return [worker for node in chosen for worker in node.workers]


def _whole(nodes: Iterable[NodeStatus], workers: Sequence[str]) -> list[NodeStatus]:
    """Return the nodes all of whose workers are named, in the order of their first mention."""
    by_name = {node_of(node.workers[0]): node for node in nodes if node.workers}
    named = Counter(map(node_of, workers))
    return [by_name[name] for name in named if name in by_name and named[name] >= len(by_name[name].workers)]


def fewest_workers(asked: SizeParams, size: WorkerSize) -> int:
    """Return the minimum number of workers that satisfies all units; 0 if none is set.

    Raises:
        ConfigurationError: a value is wrong; the message names the parameter.
    """
    return math.ceil(max(_in_workers(asked, size), default=0))


def most_workers(asked: SizeParams, size: WorkerSize) -> float:
    """Return the maximum number of workers that exceeds no unit; infinity if none is set.

    Raises:
        ConfigurationError: a value is wrong; the message names the parameter.
    """
    bounded = replace(asked, workers=None) if asked.workers == math.inf else asked
    most = min(_in_workers(bounded, size), default=math.inf)
    return most if most == math.inf else math.floor(most)


def _in_workers(asked: SizeParams, size: WorkerSize) -> Iterator[float]:
    """Yield the number of workers that each unit asks for, not rounded."""
    if asked.workers is not None:
        yield worker_count(asked.workers_name, asked.workers)
    if asked.cores is not None:
        yield worker_count(f"{asked.prefix}cores", asked.cores) / size.threads
    if asked.memory is not None:
        yield _memory_in_workers(f"{asked.prefix}memory", asked.memory, size)


def whole_bounds(minimum: int, maximum: float, per_node: int) -> tuple[int, float]:
    """Return both limits for whole nodes: the minimum rounded up, the maximum rounded down, at least one node.

    Raises:
        ConfigurationError: the minimum is above the maximum.
    """
    if minimum > maximum:
        raise ConfigurationError(f"minimum must not be above maximum ({maximum:g} workers), got {minimum}")
    fewest = nodes_for(minimum, per_node)
    most = math.inf if maximum == math.inf else max(int(maximum) // per_node, fewest)
    return fewest * per_node, most * per_node


def _memory_in_workers(parameter: str, value: object, size: WorkerSize) -> float:
    asked = memory_size(parameter, value)
    if not size.memory_bytes:
        raise ConfigurationError(
            f"{parameter} cannot be converted to workers before the first one arrives; pass their number instead"
        )
    return asked / size.memory_bytes
