"""Many small calls: what one costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from benchmarks.measured import Measured, opened, timed
from benchmarks.peers import WORKERS, Peer
from benchmarks.work import nothing

__all__ = ["gather", "joblib_calls", "round_trip"]

_BLOCK = 100
_GATHERED = 10_000


@opened
def round_trip(peer: Peer) -> Measured:
    """One call after the other; a repeat is the mean of a block of them."""

    def block() -> None:
        for _ in range(_BLOCK):
            peer.call(nothing)

    block()
    return timed(block, repeats=3, calls=_BLOCK)


@opened
def gather(peer: Peer) -> Measured:
    """10,000 calls at once."""
    arguments = [(i,) for i in range(_GATHERED)]
    peer.gather(nothing, arguments[:500])
    return timed(lambda: peer.gather(nothing, arguments), repeats=1)


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
        return timed(lambda: run(count), repeats=repeats)

    return measure
