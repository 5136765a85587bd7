"""Counts of the tasks of Dask graphs by label, as their scheduler sees them; reported while there are any."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from distributed import Scheduler, SchedulerPlugin

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.wire.control import TasksReport
from skyward.wire.dask_parts import key_split

__all__ = ["TaskCounts", "report_tasks"]

log = logging.getLogger("skyward.node.task_counts")

_EVERY_S = 0.5
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
        self.reported: TasksReport | None = None

    def report(self, running: int) -> TasksReport:
        left, done, failed, cancelled = self.counts
        return TasksReport(
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
                work = self._work(key_split(key))
                work.counts[_LEFT] += 1
                self._tasks[key] = work, _LEFT
        elif after != before and not (after == _CANCELLED and before != _LEFT):
            work.counts[before] -= 1
            work.counts[after] += 1
            self._tasks[key] = work, after

    def look(self, running: Callable[[], Iterable[Any]]) -> Iterator[TasksReport]:
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
                due = work.looks > 1 and not over and (report.running or work.counts[_LEFT] < report.total)
            else:  # what runs is shown once a second, so that displays show its age
                due = report != work.reported or (report.running and work.looks % 2)
            if due:
                work.reported = report
                yield report

    def _work(self, label: str) -> _Work:
        if label not in self._works and len(self._works) >= _MOST_LABELS:
            label = _OTHERS
        return self._works.setdefault(label, _Work(label))


def report_tasks(scheduler: Scheduler, report: Callable[[TasksReport], None]) -> None:
    """Pass on the progress of the scheduler's tasks from now on."""
    scheduler.add_plugin(_Watching(scheduler, report), name="skyward-tasks")


class _Watching(SchedulerPlugin):
    def __init__(self, scheduler: Scheduler, report: Callable[[TasksReport], None]) -> None:
        self._scheduler = scheduler
        self._report = report
        self._counts = TaskCounts()
        self._looking: asyncio.Task[None] | None = None

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        del start, args, kwargs
        self._counts.move(key, finish)
        if self._looking is None and self._counts:
            self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    async def _look(self) -> None:
        try:
            while self._counts:
                await SYSTEM_CLOCK.sleep(_EVERY_S)
                for report in self._counts.look(self._running):
                    self._report(report)
        except Exception:
            log.exception("the progress of Dask's tasks cannot be reported")
        finally:
            self._looking = None

    def _running(self) -> Iterator[Any]:
        """Yield the keys of tasks that workers execute, by their latest heartbeats."""
        for worker in self._scheduler.workers.values():
            for task in worker.executing:
                if task.processing_on is worker:
                    yield task.key
