"""The picture on the page: ratios and goals on one logarithmic line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Result, verdicts
from benchmarks.rows import Goal, Row

__all__ = ["draw"]

_MET, _MISSED, _GOAL = "#1b7f5c", "#b3402e", "#555555"


def draw(results: Sequence[Result], rows: Mapping[str, Row], path: Path) -> None:
    """Write the picture: one bar for each goal that is a ratio, a tick where the goal lies."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "benchmarks"
    bars = list(_bars(results, rows))[::-1]
    figure = Figure(figsize=(9, 1 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for height, bar in enumerate(bars):
        axes.barh(height, bar.reached - 1, left=1, color=_MET if bar.met else _MISSED)
        axes.plot([bar.wanted, bar.wanted], [height - 0.4, height + 0.4], color=_GOAL, linewidth=2)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color=_GOAL, linewidth=0.8)
    axes.set_xlabel("times as fast as the peer (bar), and the goal (tick)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    label: str
    reached: float
    wanted: float
    met: bool


def _bars(results: Sequence[Result], rows: Mapping[str, Row]) -> Iterator[_Bar]:
    for key, row in rows.items():
        for verdict in verdicts(results, key, row):
            if isinstance(goal := verdict.goal, Goal) and verdict.value is not None:
                by = "" if goal.by == "the clock" else f", {goal.by}"
                label = f"{row.title.replace('`', '')} · {goal.peer}{by}"
                yield _Bar(label=label, reached=verdict.value, wanted=goal.at_least, met=verdict.met)
