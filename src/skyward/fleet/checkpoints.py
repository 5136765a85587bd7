"""Checkpoint of a call: copied here from the node that the call runs on, and put onto the node of its next run.

The call's worker reports each time that the folder is at rest. What has changed since the last copy is fetched then, so
that a machine that vanishes takes at most the last second along (docs/decisions/047).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from skyward.errors import SkywardError
from skyward.fleet.download_folder import TargetFolder
from skyward.fleet.node import Node
from skyward.fleet.node_files import NodeListing
from skyward.wire.node_config import CHECKPOINTS

log = logging.getLogger("skyward.fleet.checkpoints")

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_COMMAND_S: Final = 60.0
_LOOK_S: Final = 0.5
_FAILURES: Final = 3
"""Copies that fail in a row before the user is told."""
_AT_ONCE: Final = 200
"""Folders that one command makes: a command line is bounded."""


class Checkpoint:
    """Copy of the folder of one call's checkpoints on this machine, and the node that has the folder itself.

    Args:
        name: name of the folder, as the call's worker has chosen it.
        node: the node on which the call runs.
        folder: folder for the copies of checkpoints, here.
        report: called if the folder cannot be copied several times in a row, with the reason.

    Raises:
        ValueError: the name is none that a worker chooses.
    """

    def __init__(self, name: str, node: Node, folder: Path, *, report: Callable[[str], None]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint")
        self.name = name
        self._node = node
        self._folder = folder / f"{name}-{secrets.token_hex(4)}"
        self._report = report
        self._failures = 0
        self._copy: Path | None = None
        self._copies = 0
        self._facts: dict[str, tuple[int, ...]] = {}
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

    async def _move(self, node: Node) -> int:
        await self._settle()
        try:
            await self._put(node)
            listing = await node.files_in(CHECKPOINTS).matching([self.name])
        except (SkywardError, OSError):
            with suppress(SkywardError, OSError):
                await _run(node, "rm", "-rf", self._place_on(node))
            raise
        # The same content under the facts of that node's files: it is not fetched again.
        self._node, self._facts = node, {file.name: file.facts for file in listing.files}
        return len(listing.files)

    def drop(self) -> None:
        """Remove the copy, in the background: the call is over."""
        self._removal = asyncio.ensure_future(self._remove())

    async def _remove(self) -> None:
        for task in (self._moving, self._fetching):
            if task is not None:
                await _end(task)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # --- from the node ------------------------------------------------------------------------------------------------

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
                await self._fetch()
                self._failures = 0
            except (SkywardError, OSError) as error:
                log.info("checkpoint %s of node %d was not copied: %s", self.name, self._node.rank, error)
                self._failures += self._node.linked
                if self._failures == _FAILURES:  # one copy may meet a file that is just being written
                    self._report(str(error))

    async def _fetch(self) -> None:
        """Make a new copy, in which unchanged files are those of the last one."""
        listing = await self._node.files_in(CHECKPOINTS).matching([self.name])
        if listing.unmatched:
            return
        self._copies += 1
        copy = self._folder / str(self._copies)
        try:
            await self._fill(copy, listing)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True))
            raise
        last, self._copy = self._copy, copy
        self._facts = {file.name: file.facts for file in listing.files}
        if last is not None:
            await asyncio.to_thread(shutil.rmtree, last, ignore_errors=True)

    async def _fill(self, copy: Path, listing: NodeListing) -> None:
        target, reader = TargetFolder(copy), self._node.files_in(CHECKPOINTS)
        for error in await asyncio.to_thread(target.make_folders, listing.folders):
            raise error
        for file in listing.files:
            path = target.claim(file.name)
            if not (self._facts.get(file.name) == file.facts and await asyncio.to_thread(self._link, file.name, path)):
                await reader.fetch(file, path)
            target.keep(file.name)
        for name, leads_to in listing.links.items():
            await asyncio.to_thread(target.put_link, name, leads_to)

    def _link(self, name: str, path: Path) -> bool:
        """Make the file of the last copy that of this one, too; return False where that is not possible."""
        if self._copy is None:
            return False
        try:
            os.link(self._copy / name, path)
        except OSError:  # a disk without links
            return False
        return True

    # --- to the next node ---------------------------------------------------------------------------------------------

    def _place_on(self, node: Node) -> str:
        return f"{node.access.workdir}/{CHECKPOINTS}/{self.name}"

    async def _put(self, node: Node) -> None:
        place = self._place_on(node)
        await _run(node, "rm", "-rf", place)
        if self._copy is None:  # lost before its first copy: the call begins with an empty folder
            return
        top = self._copy / self.name
        entries = await asyncio.to_thread(lambda: sorted(top.rglob("*")))
        folders = [path for path in entries if path.is_dir() and not path.is_symlink()]
        files = [path for path in entries if path.is_file() and not path.is_symlink()]
        places = [place, *(f"{place}/{_below(top, path)}" for path in folders)]
        for first in range(0, len(places), _AT_ONCE):
            await _run(node, "mkdir", "-p", *places[first : first + _AT_ONCE])
        for path in files:
            mode = path.stat().st_mode & 0o777
            await node.transport.put(await asyncio.to_thread(_mapped, path), f"{place}/{_below(top, path)}", mode=mode)
        for path in entries:
            if path.is_symlink():
                await _run(node, "ln", "-s", path.readlink().as_posix(), f"{place}/{_below(top, path)}")


def _below(top: Path, path: Path) -> str:
    return path.relative_to(top).as_posix()


def _mapped(path: Path) -> memoryview | bytes:
    if not path.stat().st_size:
        return b""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _run(node: Node, *argv: str) -> None:
    done = await node.transport.run(argv, timeout_s=_COMMAND_S)
    if done.exit_code:
        raise SkywardError(f"{argv[0]} on node {node.rank} failed: {done.stderr.strip()[-300:]}")
