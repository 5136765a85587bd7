"""From measurements to verdicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measured import Measured
from benchmarks.rows import Goal, Limit, Row

__all__ = ["OURS", "Result", "Verdict", "errors", "figures", "samples", "times_as_fast", "verdicts"]

OURS = "skyward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell: what a peer did with a row in one round, or why it did not."""

    row: str
    peer: str
    round: int
    measured: Measured | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a goal was met.

    Attributes:
        goal: what was wanted.
        value: what was reached; None if it could not be measured.
        outcome: "met", by how much it was missed, or why there is no value.
        met: whether the goal was reached.
    """

    goal: Goal | Limit
    value: float | None
    outcome: str
    met: bool


def samples(results: Iterable[Result], row: str, peer: str) -> list[float]:
    """All repeats of all rounds, in seconds."""
    return [value for result in _of(results, row, peer) if result.measured for value in result.measured.seconds]


def figures(results: Iterable[Result], row: str, peer: str) -> dict[str, float]:
    """Return the median over the rounds of every figure."""
    found: dict[str, list[float]] = {}
    for result in _of(results, row, peer):
        for name, value in result.measured.figures.items() if result.measured else ():
            found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}


def errors(results: Iterable[Result], row: str, peer: str) -> str:
    """Why a peer has no value, or fewer; empty if nothing went wrong."""
    return "; ".join(dict.fromkeys(result.error for result in _of(results, row, peer) if result.error))


def times_as_fast(results: Iterable[Result], row: str, peer: str, *, by: str = "the clock") -> float | None:
    """Return the median, over the rounds, of the peer's median time divided by ours in the same round."""
    times: dict[int, dict[str, float]] = {}
    for result in results:
        if result.row == row and result.measured and (cost := _cost(result.measured, by)):
            times.setdefault(result.round, {})[result.peer] = cost
    ratios = [both[peer] / both[OURS] for both in times.values() if peer in both and OURS in both]
    return median(ratios) if ratios else None


def _cost(measured: Measured, by: str) -> float:
    """The median time, or the processor time of all processes; 0 if it was not measured."""
    if by == "processor time":
        return sum(value for name, value in measured.figures.items() if "_cpu_" in name)
    return median(measured.seconds or [0])


def verdicts(results: Sequence[Result], key: str, row: Row) -> list[Verdict]:
    """One for every goal of a row."""
    return [_verdict(results, key, goal) for goal in row.goals]


def _verdict(results: Sequence[Result], key: str, goal: Goal | Limit) -> Verdict:
    match goal:
        case Goal(peer=peer, at_least=bound, by=by):
            value = times_as_fast(results, key, peer, by=by)
            missing = bound / value if value else 0
            failed = errors(results, key, OURS) or errors(results, key, peer)
        case Limit(figure=figure, at_most=bound):
            value = figures(results, key, OURS).get(figure)
            missing = value / bound if value else 0
            failed = errors(results, key, OURS)
    if value is None:
        return Verdict(goal=goal, value=None, outcome=failed or "not measured", met=False)
    return Verdict(goal=goal, value=value, outcome=_outcome(missing), met=missing <= 1)


def _outcome(missing: float) -> str:
    """``missing`` is how many times more was wanted than was reached."""
    if missing <= 1:
        return "met"
    return f"missed by {missing - 1:.0%}" if missing < 2 else f"missed {missing:.1f}-fold"


def _of(results: Iterable[Result], row: str, peer: str) -> list[Result]:
    return [result for result in results if result.row == row and result.peer == peer]
