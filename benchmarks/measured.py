"""What every measurement gives back, and how the common ones are taken."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.observe import processor_time
from benchmarks.peers import PEERS, Peer

__all__ = ["Measured", "opened", "seconds_of", "timed", "timed_twice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The outcome of one measurement.

    Attributes:
        seconds: one value per repeat; for short work, the time of one call among many.
        figures: whatever else was measured, by name.
    """

    seconds: tuple[float, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict[str, float])


def opened(measure: Callable[[Peer], Measured]) -> Callable[[str], Measured]:
    """Let ``measure`` find its peer open."""

    @functools.wraps(measure)
    def with_open_peer(name: str) -> Measured:
        with PEERS[name]() as peer:
            return measure(peer)

    return with_open_peer


def timed(work: Callable[[], object], *, repeats: int, calls: float = 1) -> Measured:
    """Do ``work`` ``repeats`` times; it makes ``calls`` calls each time."""
    return Measured(seconds=tuple(seconds_of(work) / calls for _ in range(repeats)))


def timed_twice(work: Callable[[], object], *, repeats: int, calls: float = 1, tasks: int = 1) -> Measured:
    """Do the same, and measure processor time: a task's in microseconds where ``work`` has many, else in seconds."""
    with processor_time() as used:
        measured = timed(work, repeats=repeats, calls=calls)
    unit, factor = ("us", 1e6) if tasks > 1 else ("s", 1)
    figures = {f"{who}_cpu_{unit}": seconds / repeats / tasks * factor for who, seconds in used.items()}
    return Measured(seconds=measured.seconds, figures=figures)


def seconds_of(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
