"""Progress of Dask's tasks, as the scheduler on the head node reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from skyward.events import Progress, SkywardEvent
from skyward.wire.control import SchedulerExit, SchedulerRunning, TasksReport

__all__ = ["DaskWorks"]


class DaskWorks:
    """Unfinished work of Dask clients. A scheduler that ends takes its work along.

    Args:
        publish: receiver of the progress; must not block.
    """

    def __init__(self, publish: Callable[[SkywardEvent], None]) -> None:
        self._publish = publish
        self._unfinished: dict[str, Progress] = {}
        self._instance_id = ""

    def handle(self, instance_id: str, message: object) -> None:
        """Publish the progress that a node reports; ignore other messages."""
        match message:
            case TasksReport():
                self._instance_id = instance_id
                event = message.to_event()
                self._unfinished.pop(event.label, None)
                if not event.over:
                    self._unfinished[event.label] = event
                self._publish(event)
            # A running one states so after every loss of the connection, too.
            case SchedulerExit() if instance_id == self._instance_id:
                self._end()
            case SchedulerRunning() if instance_id != self._instance_id:
                self._end()
            case _:
                pass

    def _end(self) -> None:
        unfinished, self._unfinished = self._unfinished, {}
        for event in unfinished.values():
            left = (event.total or 0) - event.ended
            self._publish(replace(event, running=0, cancelled=event.cancelled + left))
