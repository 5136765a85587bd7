"""Many small calls: what one costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from benchmarks.measured import Measured, opened, timed, timed_twice
from benchmarks.peers import WORKERS, Peer
from benchmarks.work import nothing

__all__ = ["gather", "joblib_calls", "round_trip"]

_BLOCK = 100
_GATHERED = 10_000


@opened
def round_trip(peer: Peer) -> Measured:
    """One call after the other; a repeat is the mean of a block of them."""
    calls = max(1, _BLOCK // peer.fewer)

    def block() -> None:
        for _ in range(calls):
            peer.call(nothing)

    block()
    if peer.fewer > 1:
        return timed(block, repeats=3, calls=calls)
    measured = timed_twice(block, repeats=3, calls=calls, tasks=calls)
    return Measured(seconds=measured.seconds, figures={"least_us": min(measured.seconds) * 1e6, **measured.figures})


@opened
def gather(peer: Peer) -> Measured:
    """10,000 calls at once, or fewer, as if they were so many."""
    arguments = [(i,) for i in range(_GATHERED // peer.fewer)]
    peer.gather(nothing, arguments[: len(arguments) // 20])
    if peer.fewer > 1:
        return timed(lambda: peer.gather(nothing, arguments), repeats=1, calls=1 / peer.fewer)
    return timed_twice(lambda: peer.gather(nothing, arguments), repeats=1, tasks=_GATHERED)


def joblib_calls(count: int, *, repeats: int, return_as: str = "list") -> Callable[[str], Measured]:
    """``count`` tasks of joblib's that do nothing."""

    @opened
    def measure(peer: Peer) -> Measured:
        from joblib import Parallel, delayed, parallel_config

        def run(tasks: int) -> None:
            with parallel_config(peer.joblib()):
                results = Parallel(n_jobs=WORKERS, return_as=return_as)(delayed(nothing)(i) for i in range(tasks))
                deque(results, maxlen=0)

        run(100)
        return timed_twice(lambda: run(count), repeats=repeats, tasks=count)

    return measure
