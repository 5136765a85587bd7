"""Dask's tasks as their scheduler sees them: their progress, and those that no worker of the pool can ever run."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import dask.utils
from distributed import Scheduler, SchedulerPlugin

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import ConfigurationError
from skyward.events import Progress

log = logging.getLogger("skyward.dask")


class _TaskWatch(SchedulerPlugin):
    """Plugin that looks at a scheduler's tasks periodically, while there are any of its kind."""

    every_s: ClassVar[float] = 1.0

    def __init__(self, scheduler: Any, clock: Clock = SYSTEM_CLOCK) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._looking: asyncio.Task[None] | None = None

    def has_work(self) -> bool:
        """Return True while there are tasks to look at."""
        raise NotImplementedError

    def look(self) -> None:
        """Look at them once."""
        raise NotImplementedError

    def wake(self) -> None:
        """Look periodically from now on."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_while_there_is_work())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    async def _look_while_there_is_work(self) -> None:
        try:
            while self.has_work():
                await self._clock.sleep(self.every_s)
                self.look()
        except Exception:
            log.exception("%s no longer looks at Dask's tasks", type(self).__name__)
        finally:
            self._looking = None


# --- progress ---------------------------------------------------------------------------------------------------------

_MOST_LABELS = 16  # whoever chooses keys himself may give every task a label of its own
_OTHERS = "tasks"

_LEFT, _DONE, _FAILED, _CANCELLED = range(4)
# A task that is released before it is over was cancelled, unless it waits again in the same breath. A result or an
# error that is released has been used up.
_AFTER: Final[Mapping[str, int]] = {"memory": _DONE, "erred": _FAILED, "released": _CANCELLED}


class _Work:
    """Tasks of a label, until none of them is left."""

    __slots__ = ("counts", "label", "looks", "reported")

    def __init__(self, label: str) -> None:
        self.label = label
        self.counts = [0, 0, 0, 0]
        self.looks = 0
        self.reported: Progress | None = None

    def report(self, running: int) -> Progress:
        left, done, failed, cancelled = self.counts
        return Progress(
            label=self.label,
            done=done,
            total=sum(self.counts),
            failed=failed,
            running=min(running, left),
            cancelled=cancelled,
        )


class TaskCounts:
    """Unfinished work of a scheduler. Every task counts once, for the state that it is in."""

    def __init__(self) -> None:
        self._works: dict[str, _Work] = {}
        self._tasks: dict[Any, tuple[_Work, int]] = {}  # those that the scheduler has, by key

    def __bool__(self) -> bool:
        """True while there is unfinished work, or some whose end is not reported."""
        return bool(self._works)

    def move(self, key: Any, state: str) -> None:
        """Count a task in its new state. Data that a client scatters is no task: it never waits."""
        work, before = self._tasks.get(key, (None, _LEFT))
        if state == "forgotten":
            self._tasks.pop(key, None)
            return
        after = _AFTER.get(state, _LEFT)
        if work is None or (after == _LEFT and self._works.get(work.label) is not work):
            if after == _LEFT:  # a new task, or a lost result of work that is over
                work = self._work(str(cast("Any", dask.utils).key_split(key)))
                work.counts[_LEFT] += 1
                self._tasks[key] = work, _LEFT
        elif after != before and not (after == _CANCELLED and before != _LEFT):
            work.counts[before] -= 1
            work.counts[after] += 1
            self._tasks[key] = work, after

    def look(self, running: Callable[[], Iterable[Any]]) -> Iterator[Progress]:
        """Yield the progress of work that has taken a while, has begun and has changed; drop work that is over.

        Args:
            running: returns the keys of the tasks that workers execute.
        """
        counts = Counter(self._tasks[key][0] for key in running() if key in self._tasks)
        for work in list(self._works.values()):
            work.looks += 1
            report = work.report(counts[work])
            over = not work.counts[_LEFT]
            if over:
                del self._works[work.label]
            if work.reported is None:  # at the second look, so that work of an instant is not shown
                due = work.looks > 1 and not over and (report.running or work.counts[_LEFT] < sum(work.counts))
            else:  # what runs is shown once a second, so that displays show its age
                due = report != work.reported or (report.running and work.looks % 2)
            if due:
                work.reported = report
                yield report

    def _work(self, label: str) -> _Work:
        if label not in self._works and len(self._works) >= _MOST_LABELS:
            label = _OTHERS
        return self._works.setdefault(label, _Work(label))


def report_tasks(scheduler: Scheduler, report: Callable[[Progress], None]) -> None:
    """Pass on the progress of the scheduler's tasks from now on."""
    scheduler.add_plugin(_Watching(scheduler, report), name="skyward-tasks")


class _Watching(_TaskWatch):
    every_s = 0.5

    def __init__(self, scheduler: Scheduler, report: Callable[[Progress], None]) -> None:
        super().__init__(scheduler)
        self._report = report
        self._counts = TaskCounts()

    def has_work(self) -> bool:
        return bool(self._counts)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        del start, args, kwargs
        self._counts.move(key, finish)
        if self._counts:
            self.wake()

    def look(self) -> None:
        for report in self._counts.look(self._running):
            self._report(report)

    def _running(self) -> Iterator[Any]:
        """Yield the keys of tasks that workers execute, by their latest heartbeats."""
        for worker in self._scheduler.workers.values():
            for task in worker.executing:
                if task.processing_on is worker:
                    yield task.key


# --- tasks that cannot run --------------------------------------------------------------------------------------------

_GRACE_S = 5.0
"""Workers of a pool that opens or grows register one after the other."""
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOffer:
    """A worker as tasks may ask for it.

    Attributes:
        name: its name, such as ``node0-worker1``. A worker that takes its place has the same.
        address: its address.
        host: the host in that.
        resources: quantity of each resource.
    """

    name: str
    address: str
    host: str = ""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])

    def has(self, demanded: Mapping[str, float]) -> bool:
        """Return True if it has as much of each resource."""
        return all(self.resources.get(name, 0) >= quantity for name, quantity in demanded.items())


def unmet_demand(resources: Mapping[str, float], places: Collection[str], offers: Iterable[WorkerOffer]) -> str:
    """Return why none of the workers can run a task, and the next step; empty if one can. Pure.

    Args:
        resources: quantity of each resource that the task requires.
        places: names, addresses or hosts of workers that may run it; empty for all.
        offers: the workers.
    """
    offers = sorted(offers, key=lambda offer: offer.name)
    named = [each for each in offers if not places or not {each.name, each.address, each.host}.isdisjoint(places)]
    if not named:
        return (
            f"workers={sorted(places)} names no worker of this pool. It has {_listed(each.name for each in offers)}; "
            "names stay when a worker is replaced, addresses do not"
        )
    if any(each.has(resources) for each in named):
        return ""
    among = " of those in workers=" if places else ""
    return f"resources={dict(resources)}: no worker{among} has that. {_offered(named)}. {_advice(resources, named)}"


def _offered(offers: Collection[WorkerOffer]) -> str:
    by_resources: dict[str, list[str]] = {}
    for offer in offers:
        words = ", ".join(f"{name}={quantity:g}" for name, quantity in sorted(offer.resources.items())) or "none"
        by_resources.setdefault(words, []).append(offer.name)
    return "Offered: " + "; ".join(f"{words} by {_listed(names)}" for words, names in by_resources.items())


def _advice(resources: Mapping[str, float], offers: Collection[WorkerOffer]) -> str:
    known = {name.casefold(): name for offer in offers for name in offer.resources}
    for name in resources:
        meant = known.get(name.casefold(), name)
        if meant != name:
            return f"Write {meant!r} instead of {name!r}"
    if any(name not in known.values() and name != "GPU" for name in resources):
        return "Workers of a pool have no other resources than 'GPU': leave the others out, or choose workers by name"
    if "GPU" not in known.values():
        return "Workers have 'GPU' on nodes with accelerators: open the pool with accelerator=, or leave resources= out"
    return (
        "A worker has as many as its node's GPUs for each worker, a fraction where they share one: require no more, or "
        "change accelerator= or concurrency= of the pool"
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fail_unrunnable(scheduler: Scheduler, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Make tasks fail a few seconds after they required a worker that the pool does not have and will not get back."""
    plugin = _Unrunnable(scheduler, clock)
    scheduler.handlers["skyward_forget"] = plugin.forget
    scheduler.add_plugin(plugin, name="skyward-unrunnable")


class _Unrunnable(_TaskWatch):
    """Watches tasks that wait for a worker, while there are any.

    A worker that is away counts with what it had, until it is to be forgotten: it restarts, or another takes its place.
    """

    def __init__(self, scheduler: Any, clock: Clock) -> None:
        super().__init__(scheduler, clock)
        self._offers: dict[str, WorkerOffer] = {}
        self._forgotten: set[str] = set()
        self._since: dict[Any, float] = {}

    def has_work(self) -> bool:
        if not self._scheduler.unrunnable:
            self._since.clear()
        return bool(self._scheduler.unrunnable)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        del scheduler
        self._forgotten.discard(self._scheduler.workers[worker].name)
        self._note(self._scheduler.workers[worker])

    async def forget(self, workers: Collection[str]) -> None:
        """Let tasks wait for these workers no longer, unless others take their names."""
        self._forgotten.update(workers)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        del key, start, args, kwargs
        if finish == "no-worker":
            self.wake()

    def look(self) -> None:
        for worker in self._scheduler.workers.values():
            self._note(worker)
        self._fail_all()

    def _expected(self) -> list[WorkerOffer]:
        here = {worker.name for worker in self._scheduler.workers.values()}
        return [offer for name, offer in self._offers.items() if name in here or name not in self._forgotten]

    def _note(self, worker: Any) -> None:
        self._offers[worker.name] = WorkerOffer(
            name=worker.name, address=worker.address, host=worker.host, resources=dict(worker.resources)
        )

    def _fail_all(self) -> None:
        now = self._clock.monotonic()
        waiting = {task.key: task for task in self._scheduler.unrunnable}
        self._since = {key: self._since.get(key, now) for key in waiting}
        if not self._scheduler.workers:
            return
        for key, since in list(self._since.items()):
            if now - since >= _GRACE_S and key in waiting:
                self._fail(waiting[key])

    def _fail(self, task: Any) -> None:
        places = {*(task.worker_restrictions or ()), *(task.host_restrictions or ())}
        reason = unmet_demand(task.resource_restrictions or {}, places, self._expected())
        if not reason or task not in self._scheduler.unrunnable:
            return
        log.info("task %s fails: %s", task.key, reason)
        error = ConfigurationError(f"Dask's task {task.key!r} cannot run: {reason}")
        stimulus = f"skyward-unrunnable-{task.key}"
        recommended = self._scheduler.transition(
            task.key, "erred", exception=pickle.dumps(error), cause=task.key, stimulus_id=stimulus
        )
        self._scheduler.transitions(recommended, stimulus_id=stimulus)
