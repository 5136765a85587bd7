"""Wording of a display: figures, names of work, steps, summaries. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from skyward import events as ev

__all__ = [
    "Work",
    "duration",
    "launch_words",
    "money",
    "plural",
    "price",
    "rate",
    "step_name",
    "summary_words",
    "work_name",
]

_PLAIN_CALLS: Final = re.compile(r"|calls?|\d+ calls?|<lambda>|partial", re.ASCII)
_KNOWN_WORK: Final = {
    "_fit_and_predict": "fits",
    "_fit_and_score": "fits",
    "_fit_binary": "fits",
    "_fit_single_estimator": "fits",
    "_parallel_build_estimators": "estimators",
    "_parallel_build_trees": "trees",
}
"""scikit-learn's function names, in words."""
_KNOWN_STEPS: Final = {
    "apt": "system packages",
    "deps": "Python packages",
    "server": "starting the supervisor",
    "skyward": "Skyward",
}
"""Steps of a node's bootstrap whose names need a translation, in words."""
_SHORT_S: Final = 10.0
_MINUTES_FROM_S: Final = 120
_HOURS_FROM_MIN: Final = 120
_CENT: Final = 0.01
_WHOLE_RATE, _WHOLE_RATE_PER_MIN = 100, 10


def duration(seconds: float) -> str:
    """Return a duration in at most two units: ``4.2 s``, ``41 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < _SHORT_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTES_FROM_S:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < _HOURS_FROM_MIN else f"{minutes // 60} h {minutes % 60} min"


def money(dollars: float) -> str:
    """Return a sum in USD, to the cent; smaller sums with two significant digits."""
    return f"${dollars:,.2f}" if dollars >= _CENT or not dollars else f"${dollars:.2g}"


def price(dollars_per_hour: float) -> str:
    """Return a price per hour, to the cent; below a dollar to the tenth of a cent."""
    if dollars_per_hour >= 1:
        return f"${dollars_per_hour:,.2f}/h"
    return f"${dollars_per_hour:.3f}/h" if dollars_per_hour >= _CENT else f"${dollars_per_hour:.2g}/h"


def rate(count: float, seconds: float) -> str:
    """Return a rate with about two digits, per minute if it is below one per second."""
    per_second = count / max(seconds, 1e-3)
    if per_second >= _WHOLE_RATE:
        return f"{per_second:,.0f}/s"
    per_minute = per_second * 60
    return (
        f"{per_second:.1f}/s"
        if per_second >= 1
        else f"{per_minute:.{0 if per_minute >= _WHOLE_RATE_PER_MIN else 1}f}/min"
    )


def plural(count: int, thing: str) -> str:
    """Return the number with its noun: ``1 node``, ``2 nodes``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def step_name(step: str) -> str:
    """Return the display name of a step of a node's bootstrap."""
    return _KNOWN_STEPS.get(step, step)


def work_name(label: str) -> str:
    """Return the display name of a piece of work.

    Names of private functions become words; unnamed functions are calls.
    """
    name = label.rpartition(".")[2]
    if _PLAIN_CALLS.fullmatch(name):
        return "calls"
    if name in _KNOWN_WORK:
        return _KNOWN_WORK[name]
    if not name.startswith("_"):
        return label
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.partition("(")[0]).replace("_", " ").split()
    return " ".join(words).lower() or "calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Progress of a piece of work.

    Attributes:
        name: the display name; see :func:`work_name`.
        done: number of calls that have ended.
        total: number of all calls; None while that is unknown.
        first_s: time of the first event, in seconds.
        first_done: value of ``done`` in the first event.
    """

    name: str
    done: int
    total: int | None
    first_s: float
    first_done: int

    @property
    def _subject(self) -> str:
        return "1 call" if self.name == "calls" and self.total == 1 else self.name

    def _rate(self, now_s: float) -> str:
        done = self.done - self.first_done
        return f", {rate(done, now_s - self.first_s)}" if done else ""

    def ongoing(self, now_s: float) -> str:
        """Return the progress: ``fits: 12 of 40, 3.1/s``."""
        if self.total == 1:
            return f"{self._subject}: running for {duration(now_s - self.first_s)}"
        if self.total is None:
            return f"{self._subject}: {self.done:,} done{self._rate(now_s)}"
        return f"{self._subject}: {self.done:,} of {self.total:,}{self._rate(now_s)}"

    def ended(self, now_s: float, *, wanted: int | None) -> str:
        """Return the outcome, compared with the number of calls: ``fits: all 40 in 13 s, 3.1/s``."""
        took = duration(now_s - self.first_s)
        if wanted is not None and wanted != self.done:
            return f"{self._subject}: {self.done:,} of {wanted:,} in {took}, the rest given up"
        if self.total == 1:
            return f"{self._subject}: done in {took}"
        return f"{self._subject}: all {self.done:,} in {took}{self._rate(now_s)}"


def launch_words(event: ev.InstanceLaunching) -> str:
    """Return a launch in words: machine type, region, market, price, and room for the workers."""
    nodes = plural(event.count, "node")
    told = [f"launching {nodes} on {event.provider}: {event.instance_type}".removesuffix(": ")]
    if event.region:
        told[0] += f" in {event.region}"
    if event.price_per_hour != 0:
        if event.spot is not None:
            told.append("spot" if event.spot else "on demand")
        if event.price_per_hour:
            each, in_all = price(event.price_per_hour), price(event.price_per_hour * event.count)
            told.append(each if event.count == 1 else f"{each} each, {in_all} in all")
        elif event.spot is not None:
            told.append("price unknown")
    room = _room_words(event)
    return ", ".join(told) + (f"; on {'it' if event.count == 1 else 'each'} {room}" if room else "")


def _room_words(event: ev.InstanceLaunching) -> str:
    """Return the sum of ``cpu`` and ``memory``, which count for each worker, over a node's workers."""
    if event.workers_per_node == 1:
        return ""
    count, told = event.workers_per_node, list[str]()
    times = f"\N{MULTIPLICATION SIGN} {count} workers"
    if event.cpu_per_worker:
        told.append(f"{event.cpu_per_worker} {times} = {event.cpu_per_worker * count} cores")
    if event.memory_gib_per_worker:
        told.append(f"{event.memory_gib_per_worker:g} GiB {times} = {event.memory_gib_per_worker * count:g} GiB")
    return ", ".join(told)


def summary_words(
    started: ev.PoolStarted, lived_s: float, stopped: ev.PoolStopped | None, cost: ev.CostFinal | None
) -> str:
    """Return a pool's lifetime in one line; the cost only if it is above zero."""
    parts = [plural(started.nodes, "node"), plural(started.workers, "worker")]
    if stopped:
        parts.append(plural(stopped.calls, "call"))
    if cost and cost.hourly_rate:
        parts.append(f"cost {money(cost.total_cost)}")
        if cost.savings_vs_ondemand > 0:
            parts.append(f"{money(cost.savings_vs_ondemand)} saved by spot")
    return f"closed after {duration(lived_s)}: {', '.join(parts)}"
