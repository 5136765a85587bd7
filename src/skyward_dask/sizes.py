"""Numbers of workers asked for in workers, threads or memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyward.errors import ConfigurationError
from skyward_dask.scaling import memory_size, nodes_for, worker_count

__all__ = ["Asked", "Bounds", "WorkerSize", "fewest_workers", "most_workers", "whole_bounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """What one worker has.

    Attributes:
        threads: Dask's threads.
        memory_bytes: its memory limit; 0 is unknown.
    """

    threads: int
    memory_bytes: int

    @classmethod
    def of(cls, workers: Mapping[str, Mapping[str, Any]]) -> WorkerSize:
        """The size of the smallest of the workers that the scheduler knows."""
        return cls(
            threads=min((worker["nthreads"] for worker in workers.values()), default=1),
            memory_bytes=min((worker["memory_limit"] or 0 for worker in workers.values()), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One bound, as its user has put it: in any of three units, or not at all.

    Attributes:
        prefix: what the names of the parameters begin with, for errors: ``"minimum_"``.
    """

    prefix: str
    workers: object = None
    cores: object = None
    memory: object = None

    @property
    def is_open(self) -> bool:
        """Whether nothing was asked for."""
        return self.workers is None and self.cores is None and self.memory is None

    @property
    def workers_name(self) -> str:
        """The name of the parameter that counts workers."""
        return self.prefix.rstrip("_") or "n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Between how many workers adaptive scaling may choose; both make whole nodes."""

    minimum: int
    maximum: float


def fewest_workers(asked: Asked, size: WorkerSize) -> int:
    """The fewest workers that have all that was asked for; 0 if nothing was.

    Raises:
        ConfigurationError: a number is wrong; names the parameter.
    """
    found = [0 if asked.workers is None else worker_count(asked.workers_name, asked.workers)]
    if asked.cores is not None:
        found.append(math.ceil(worker_count(f"{asked.prefix}cores", asked.cores) / size.threads))
    if asked.memory is not None:
        found.append(math.ceil(_memory_in_workers(f"{asked.prefix}memory", asked.memory, size)))
    return max(found)


def most_workers(asked: Asked, size: WorkerSize) -> float:
    """The most workers that have no more than what was asked for; infinitely many if nothing was.

    Raises:
        ConfigurationError: a number is wrong; names the parameter.
    """
    unbounded = asked.workers is None or asked.workers == math.inf
    found = [math.inf if unbounded else worker_count(asked.workers_name, asked.workers)]
    if asked.cores is not None:
        found.append(worker_count(f"{asked.prefix}cores", asked.cores) // size.threads)
    if asked.memory is not None:
        found.append(math.floor(_memory_in_workers(f"{asked.prefix}memory", asked.memory, size)))
    return min(found)


def whole_bounds(minimum: int, maximum: float, per_node: int) -> Bounds:
    """Both in whole nodes: the minimum is met, the maximum not exceeded, but one node stays.

    Raises:
        ConfigurationError: the minimum is above the maximum.
    """
    if minimum > maximum:
        raise ConfigurationError(f"minimum must not be above maximum ({maximum:g} workers), got {minimum}")
    fewest = nodes_for(minimum, per_node)
    most = math.inf if maximum == math.inf else max(int(maximum) // per_node, fewest)
    return Bounds(minimum=fewest * per_node, maximum=most * per_node)


def _memory_in_workers(parameter: str, value: object, size: WorkerSize) -> float:
    asked = memory_size(parameter, value)
    if not size.memory_bytes:
        raise ConfigurationError(f"{parameter} cannot be turned into workers before one is there; give their number")
    return asked / size.memory_bytes
