"""What every measurement gives back, and how the common ones are taken."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.peers import PEERS, Peer

__all__ = ["Measured", "opened", "seconds_of", "timed"]


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


def timed(work: Callable[[], object], *, repeats: int, calls: int = 1) -> Measured:
    """Do ``work`` ``repeats`` times; it makes ``calls`` calls each time."""
    return Measured(seconds=tuple(seconds_of(work) / calls for _ in range(repeats)))


def seconds_of(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
