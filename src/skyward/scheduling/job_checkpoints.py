"""Copies of the checkpoints of jobs, beside their calls: taken by attached clients, put onto a call's next node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Final

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import SkywardError
from skyward.fleet.checkpoints import CheckpointCopy
from skyward.fleet.node_jobs import NodeJobs
from skyward.ledger.job_folders import JobFolder
from skyward.shipping.job_file import read_head

EVERY_S: Final = 10.0
"""Seconds between two copies of a checkpoint."""
_logger = logging.getLogger("skyward")


class JobCheckpoints:
    """Copies of the checkpoints of a fleet's jobs. Any later client of the user finds them in the jobs' folders.

    Args:
        clock: the time between two copies of one checkpoint.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._copied_at: dict[tuple[str, int], float] = {}
        self._copies: dict[tuple[str, int], CheckpointCopy] = {}
        self._have: set[tuple[str, int]] = set()
        self._fetching: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def refresh(
        self, folder: JobFolder, running: Mapping[int, NodeJobs], *, leaving: Collection[str] = ()
    ) -> bool:
        """Fetch what has changed in the checkpoints of calls that run, every ten seconds at most.

        Return True if one of these calls has any.

        A copy that is not made is no error: the last one stays.

        Args:
            folder: the job.
            running: the node of each call that runs.
            leaving: instances of nodes that are about to be lost, whose checkpoints are fetched each time.
        """
        now, job = self._clock.monotonic(), folder.record.job
        for index, node in running.items():
            early = now - self._copied_at.get((job, index), now - EVERY_S) < EVERY_S
            if not (early and node.instance_id not in leaving) and (job, index) not in self._fetching:
                self._fetching[job, index] = asyncio.ensure_future(self._fetch(folder, index, node))
        tasks = [task for index in running if (task := self._fetching.get((job, index))) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        return any((job, index) in self._have for index in running)

    async def put(self, folder: JobFolder, index: int, node: NodeJobs) -> str:
        """Put a call's checkpoint onto the node of its next run; return what the user should know of it.

        If that fails, the call begins without it.
        """
        if (fetching := self._fetching.get((folder.record.job, index))) is not None:  # from the node that is lost
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        try:
            count = await (await self._copy(folder, index)).put(node.checkpoints())
        except (SkywardError, OSError) as error:
            return f"without its checkpoint, which could not be put onto node {node.node}: {error}"
        return "from its checkpoint" if count else "from its beginning"

    async def _fetch(self, folder: JobFolder, index: int, node: NodeJobs) -> None:
        try:
            if await (await self._copy(folder, index)).fetch(node.checkpoints()):
                self._have.add((folder.record.job, index))
        except (SkywardError, OSError) as error:
            _logger.debug("the checkpoint of job %s[%d] was not copied: %s", folder.record.job, index, error)
        finally:
            del self._fetching[folder.record.job, index]
        self._copied_at[folder.record.job, index] = self._clock.monotonic()

    async def _copy(self, folder: JobFolder, index: int) -> CheckpointCopy:
        known = folder.record.job, index
        if known not in self._copies:
            head = await asyncio.to_thread(read_head, folder.call(index))
            self._copies[known] = CheckpointCopy(head["token"], folder.checkpoint(index))
        return self._copies[known]
