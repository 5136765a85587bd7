"""Replacement of a kept node's worker processes when another client takes it over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from skyward.wire.control import JobRunning, Message, UnfinishedJobs, WorkerRunning

_TIMEOUT_S = 30.0
_AGAIN_S = 0.5


class FreshWorkers:
    """Processes of a kept node's workers: those of the last client, and those that have replaced them.

    A new program gets new processes: what the last one's calls did to modules stays with it, and a call that still
    runs has nobody who waits for it. A worker that runs a job goes on.

    Args:
        workers: number of workers on the node.

    Attributes:
        unfinished_jobs: number of the node's unfinished jobs.
        told: set once the node has told all of it.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running: dict[int, str] = {}
        self._jobs: dict[int, str] = {}
        self.unfinished_jobs = 0
        self.told = asyncio.Event()
        self._changed = asyncio.Event()

    def take(self, message: Message) -> None:
        """Take a report of the node; on a new connection the running workers come first."""
        match message:
            case WorkerRunning():
                self._running[message.worker] = message.incarnation
            case JobRunning():
                self._jobs[message.worker] = message.job
            case UnfinishedJobs():
                self.unfinished_jobs = message.count
                self.told.set()
            case _:
                return
        self._changed.set()

    async def replace(self, kill: Callable[[int, str], Awaitable[None]]) -> None:
        """Kill the processes without a job, and return once each worker has another one, or after half a minute."""
        await self.told.wait()
        old = dict(self._running)
        with suppress(TimeoutError):  # the workers' links say what is wrong
            async with asyncio.timeout(_TIMEOUT_S):
                while waiting := [
                    worker
                    for worker in range(self._workers)
                    if not self._jobs.get(worker) and self._running.get(worker) == old.get(worker)
                ]:
                    self._changed.clear()
                    for worker in waiting:
                        if worker in old:  # again and again: one that was between two jobs was spared
                            await kill(worker, old[worker])
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_AGAIN_S):
                            await self._changed.wait()
