"""Wording of a display: figures, names of work, steps, summaries. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from skyward import events as ev

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
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
_LONGEST_CALL: Final = 20
_SHORT_S: Final = 10.0
_MINUTES_FROM_S: Final = 120
_HOURS_FROM_MIN: Final = 120
_CENT: Final = 0.01


def duration(seconds: float) -> str:
    """Return a duration in at most two units: ``4.2 s``, ``41 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < _SHORT_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTES_FROM_S:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < _HOURS_FROM_MIN else f"{minutes // 60} h {minutes % 60} min"


def clock_time(seconds: float) -> str:
    """Return a duration as on a clock: ``0:42``, ``3:05``, ``2:10:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def money(dollars: float) -> str:
    """Return a sum in USD, to the cent; smaller sums with two significant digits."""
    return f"${dollars:,.2f}" if dollars >= _CENT or not dollars else f"${dollars:.2g}"


def bill(dollars: float, by_provider: Mapping[str, float]) -> str:
    """Return a sum in USD, with its shares if several providers have any: ``$3.20 (local $1.20, ssh $2.00)``."""
    shares = [f"{provider} {money(share)}" for provider, share in by_provider.items()]
    return f"{money(dollars)} ({', '.join(shares)})" if len(shares) > 1 else money(dollars)


def price(dollars_per_hour: float) -> str:
    """Return a price per hour, to the cent; below a dollar to the tenth of a cent."""
    if dollars_per_hour >= 1:
        return f"${dollars_per_hour:,.2f}/h"
    return f"${dollars_per_hour:.3f}/h" if dollars_per_hour >= _CENT else f"${dollars_per_hour:.2g}/h"


def rate(count: float, seconds: float) -> str:
    """Return a rate with about two digits, per minute if it is below one per second."""
    per_second = count / max(seconds, 1e-3)
    value, unit, whole_from = (per_second, "s", 100) if per_second >= 1 else (60 * per_second, "min", 10)
    return f"{value:,.{0 if value >= whole_from else 1}f}/{unit}"


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
    """Progress of a piece of work over time.

    Attributes:
        name: the display name; see :func:`work_name`.
        progress: the latest event.
        first_s: time of the first event, in seconds.
        first_ended: number of calls that had ended in the first event.
    """

    name: str
    progress: ev.Progress
    first_s: float
    first_ended: int

    @property
    def _subject(self) -> str:
        return "1 call" if self.name == "calls" and self.progress.total == 1 else self.name

    @property
    def _measured(self) -> int:
        """Number of calls that ended while their time was taken, without those that were given up."""
        return self.progress.done + self.progress.failed - self.first_ended

    def _rate(self, now_s: float) -> list[str]:
        return [rate(self._measured, now_s - self.first_s)] if self._measured > 0 else []

    def ongoing(self, now_s: float) -> str:
        """Return the progress: ``fits 4/12 · 1 failed · 2 running · 3.1/s · 0:42 left``."""
        event = self.progress
        took = now_s - self.first_s
        if event.total == 1 and not event.ended:
            return f"{self._subject}: {'running for ' if event.running else ''}{duration(took)}"
        parts = [*_counts(self.name, event), *self._rate(now_s)]
        if event.total is not None and self._measured > 0 and (rest := event.total - event.ended) > 0:
            parts.append(f"{clock_time(rest * took / self._measured)} left")
        return " · ".join(parts)

    def ended(self, now_s: float) -> str:
        """Return the outcome: ``fits 40/40 in 13 s · 3.1/s``, ``fits 3/5 in 13 s · 1 failed · 1 dropped``."""
        event, took = self.progress, duration(now_s - self.first_s)
        if event.total == 1:
            state = "done in" if event.done else "failed after" if event.failed else "cancelled after"
            return f"{self._subject}: {state} {took}"
        rest = _losses(event) or self._rate(now_s)
        return " · ".join([f"{self.name} {event.done:,}/{event.total or event.done:,} in {took}", *rest])


def progress_words(event: ev.Progress) -> str:
    """Return the progress without rates: ``fits 4/12 · 1 failed · 2 running``."""
    return " · ".join(_counts(work_name(event.label), event))


def _counts(name: str, event: ev.Progress) -> list[str]:
    count = f"{event.done:,} done" if event.total is None else f"{event.done:,}/{event.total:,}"
    running = [f"{event.running:,} running"] if event.running else []
    return [f"{name} {count}", *_losses(event), *running]


def _losses(event: ev.Progress) -> list[str]:
    failed = [f"{event.failed:,} failed"] if event.failed else []
    given_up = "dropped" if event.failed else "cancelled"
    return [*failed, f"{event.cancelled:,} {given_up}"] if event.cancelled else failed


def short_place(event: ev.LogLine) -> str:
    """Return the place of a line, with a long name of its call cut: ``0/1 a_function_of_many_..#3``."""
    label, mark, number = event.call.rpartition("#")
    label = f"{label[: _LONGEST_CALL - 2]}.." if len(label) > _LONGEST_CALL else label
    return replace(event, call=f"{label}{mark}{number}").place


def line_text(event: ev.LogLine) -> str:
    """Return the text of a line; that of a record follows its level and its logger: ``INFO app: text``."""
    return f"{event.level} {event.logger}: {event.line}" if event.level else event.line


def launch_words(event: ev.InstanceLaunching) -> str:
    """Return a launch in words: type, accelerators, region, market, price, most it can cost, room for the workers."""
    nodes = plural(event.count, "node")
    parts = [f"launching {nodes} on {event.provider}: {event.instance_type}".removesuffix(": ")]
    if event.accelerators and event.price_per_hour != 0:
        has = f"{event.accelerators} {_TIMES} {event.accelerator}"
        more = 0 < event.accelerators_asked < event.accelerators
        parts[0] += f" with {has}" + (f" ({event.accelerators_asked} asked for)" if more else "")
    if event.region:
        parts[0] += f" in {event.region}"
    if event.price_per_hour != 0:
        if event.spot is not None:
            parts.append("spot" if event.spot else "on demand")
        if event.price_per_hour:
            unit_price, in_all = price(event.price_per_hour), price(event.price_per_hour * event.count)
            parts.append(unit_price if event.count == 1 else f"{unit_price} each, {in_all} in all")
            parts += [f"at most {money(event.at_most)} until timeout"] if event.at_most else []
        elif event.spot is not None:
            parts.append("price unknown")
    room = _room_words(event)
    return ", ".join(parts) + (f"; on {'it' if event.count == 1 else 'each'} {room}" if room else "")


def _room_words(event: ev.InstanceLaunching) -> str:
    """Return the sum of ``cpu`` and ``memory``, which count for each worker, over a node's workers."""
    if event.workers_per_node == 1:
        return ""
    count, parts = event.workers_per_node, list[str]()
    times = f"{_TIMES} {count} workers"
    if event.cpu_per_worker:
        parts.append(f"{event.cpu_per_worker} {times} = {event.cpu_per_worker * count} cores")
    if event.memory_gib_per_worker:
        parts.append(f"{event.memory_gib_per_worker:g} GiB {times} = {event.memory_gib_per_worker * count:g} GiB")
    return ", ".join(parts)


def deadline_words(event: ev.InstancePreempted | ev.TimeoutApproaching) -> str:
    """Return the coming end of a node in words."""
    ends_in = duration(event.seconds_left)
    if isinstance(event, ev.InstancePreempted):
        return f"preempted: the provider takes it back in {ends_in}; a replacement is on its way"
    return f"ends in {ends_in}, when its timeout expires"


def open_words(started: ev.PoolStarted, pool_id: str) -> str:
    """Return the size of an open pool, and the command that shows its output again."""
    size = f"open: {plural(started.nodes, 'node')}, {plural(started.workers, 'worker')}"
    return f"{size} (skyward logs {pool_id})" if pool_id else size


def summary_words(
    started: ev.PoolStarted | None, lived_s: float, stopped: ev.PoolStopped | None, cost: ev.CostFinal | None
) -> str:
    """Return a pool's lifetime in one line; the cost only if it is above zero."""
    parts = [plural(started.nodes, "node"), plural(started.workers, "worker")] if started else ["never opened"]
    if stopped and stopped.calls:  # Dask's tasks are no calls: "0 calls" would say that a busy pool did nothing
        parts.append(plural(stopped.calls, "call"))
    if cost and cost.hourly_rate:
        parts.append(f"cost {bill(cost.total_cost, cost.cost_by_provider)}")
        if cost.savings_vs_ondemand > 0:
            parts.append(f"{money(cost.savings_vs_ondemand)} saved by spot")
    return f"closed after {duration(lived_s)}: {', '.join(parts)}"
