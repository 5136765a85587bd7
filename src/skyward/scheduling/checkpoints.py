"""Checkpoint of a call, on its way from the node of one run to that of the next.

The call's worker reports each time that the folder is at rest. What has changed since the last copy is fetched then, so
that a machine that vanishes takes at most the last second along (docs/decisions/047).
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from skyward.errors import SkywardError
from skyward.fleet.checkpoints import CheckpointCopy
from skyward.fleet.node import Node

log = logging.getLogger("skyward.scheduling.checkpoints")

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_LOOK_S: Final = 0.5
_FAILURES: Final = 3
"""Copies that fail in a row before the user is told."""


class Checkpoint:
    """Folder of a call's checkpoints: the node that has it, and a copy of its content here.

    Args:
        name: name of the folder, as the call's worker has chosen it.
        node: the node on which the call runs.
        folder: folder for the copies of checkpoints, here.
        report: called if the folder cannot be copied several times in a row, with the reason.

    Attributes:
        name: name of the folder.

    Raises:
        ValueError: the name is none that a worker chooses.
    """

    def __init__(self, name: str, node: Node, folder: Path, *, report: Callable[[str], None]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint")
        self.name = name
        self._node = node
        self._copy = CheckpointCopy(name, folder / f"{name}-{secrets.token_hex(4)}")
        self._report = report
        self._failures = 0
        self._due = False
        self._fetching: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[int] | None = None
        self._removal: asyncio.Task[None] | None = None

    def is_on(self, node: Node) -> bool:
        """Return True if the node has the newest content."""
        return node is self._node

    def refresh(self) -> None:
        """Fetch what has changed, in the background: the content is at rest."""
        self._due = True
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.ensure_future(self._fetch_while_due())

    async def move(self, node: Node) -> int:
        """Put the content onto another node, on which the call runs next; return the number of files.

        What the last node has, if it can still be reached, is fetched before. If that fails the last copy counts.

        Raises:
            SkywardError, OSError: the content could not be put there; nothing of it is there now, if the node answers.
        """
        if self._moving is not None:  # to a node that was lost before the call could begin there
            await _end(self._moving)
        self._moving = asyncio.ensure_future(self._move(node))
        return await self._moving

    def drop(self, *, stays_on_node: bool) -> None:
        """Remove the copy in the background, and the folder if it ``stays_on_node``: the call is over."""
        self._removal = asyncio.ensure_future(self._remove(stays_on_node=stays_on_node))

    async def _move(self, node: Node) -> int:
        await self._settle()
        count = await self._copy.put(node.checkpoints())
        former, self._node = self._node, node
        if former.linked:
            with suppress(SkywardError, OSError):
                await self._copy.remove_from(former.checkpoints())
        return count

    async def _remove(self, *, stays_on_node: bool) -> None:
        for task in (self._moving, self._fetching):
            if task is not None:
                await _end(task)
        await self._copy.remove()
        if stays_on_node and self._node.linked:
            with suppress(SkywardError, OSError):
                await self._copy.remove_from(self._node.checkpoints())

    async def _settle(self) -> None:
        """Have the newest content here; give up when the node is lost."""
        if self._node.linked:
            self.refresh()
        fetching = self._fetching
        while fetching is not None and not fetching.done():
            await asyncio.wait((fetching,), timeout=_LOOK_S)
            if not self._node.linked:
                fetching.cancel()

    async def _fetch_while_due(self) -> None:
        while self._due:
            self._due = False
            try:
                await self._copy.fetch(self._node.checkpoints())
                self._failures = 0
            except (SkywardError, OSError) as error:
                log.info("checkpoint %s of node %d was not copied: %s", self.name, self._node.rank, error)
                self._failures += self._node.linked
                if self._failures == _FAILURES:  # one copy may meet a file that is just being written
                    self._report(str(error))


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
