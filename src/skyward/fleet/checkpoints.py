"""Copies of checkpoints: fetched from the node that a call runs on, and put onto the node of its next run."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from skyward.errors import SkywardError
from skyward.fleet.download_folder import TargetFolder
from skyward.fleet.node_files import NodeFiles, NodeListing
from skyward.machine.access import Transport

_COMMAND_S: Final = 60.0
_AT_ONCE: Final = 200
"""Folders that one command makes: a command line is bounded."""


# A file that is replaced while it is read would make the copy fail, however often a new one is begun. What vanishes in
# between was replaced; any other error, as on a disk without links, leaves the folder itself to be read.
_SNAPSHOT: Final = """
import os, shutil, sys

def link(source, target):
    try:
        os.link(source, target)
    except FileNotFoundError:
        pass

source, target = sys.argv[1:]
shutil.rmtree(os.path.dirname(target), ignore_errors=True)
if os.path.isdir(source):
    shutil.copytree(source, target, symlinks=True, copy_function=link)
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeCheckpoints:
    """Folder of all checkpoints on one node.

    Attributes:
        transport: the transport to the node.
        python: an interpreter there.
        folder: the folder there.
        instance_id: the provider's id of its machine.
        node: the node's rank, for messages.
    """

    transport: Transport
    python: str
    folder: str
    instance_id: str
    node: int

    def files(self) -> NodeFiles:
        """Return the reader of the files there."""
        return NodeFiles(self.transport, python=self.python, folder=self.folder, node=self.node)

    @asynccontextmanager
    async def at_rest(self, name: str) -> AsyncGenerator[NodeFiles]:
        """Yield the reader of one checkpoint's present files, which stay as they are while the call replaces them."""
        place = f"{self.folder}/.{name}"
        try:
            try:
                await self.run(self.python, "-I", "-S", "-c", _SNAPSHOT, f"{self.folder}/{name}", f"{place}/{name}")
            except SkywardError:
                yield self.files()
                return
            yield replace(self, folder=place).files()
        finally:
            with suppress(SkywardError, OSError):
                await self.run("rm", "-rf", place)

    async def run(self, *argv: str) -> None:
        """Run a command. Raises :class:`~skyward.errors.SkywardError` if it fails."""
        done = await self.transport.run(argv, timeout_s=_COMMAND_S)
        if done.exit_code:
            raise SkywardError(f"{argv[0]} on node {self.node} failed: {done.stderr.strip()[-300:]}")


class CheckpointCopy:
    """Copy of one call's folder of checkpoints on this machine. One that an earlier process has made is taken over.

    Args:
        name: name of the folder on nodes.
        folder: folder for the copy, here; made when there is something to copy.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
        self._known_on = ""
        self._facts: dict[str, tuple[int, ...]] = {}

    async def fetch(self, node: NodeCheckpoints) -> bool:
        """Make a new copy, in which unchanged files are those of the last one; return False without a folder there.

        The copy is whole: if a file changes while it is read, or the node does not answer, the last copy stays.

        Raises:
            SkywardError, OSError: it was not made.
        """
        async with node.at_rest(self.name) as files:
            listing = await files.matching([self.name])
            if listing.unmatched:
                return False
            await self._copy(files, listing, node)
        return True

    async def _copy(self, files: NodeFiles, listing: NodeListing, node: NodeCheckpoints) -> None:
        number = max(self._numbers, default=0) + 1
        part = self._folder / f"{number}.part"
        await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        try:
            await self._fill(part, files, listing, node)
            await asyncio.to_thread(os.rename, part, self._folder / str(number))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, part, ignore_errors=True))
            raise
        earlier, self._numbers = self._numbers, [number]
        self._remember(listing, node)
        for last in earlier:
            await asyncio.to_thread(shutil.rmtree, self._folder / str(last), ignore_errors=True)

    async def put(self, node: NodeCheckpoints) -> int:
        """Replace the folder on a node by the copy; return the number of files. Without a copy the node has no folder.

        Raises:
            SkywardError, OSError: it could not be put there; nothing of it is there now, if the node answers.
        """
        try:
            await self._put(node)
            # The same content under the facts of that node's files: it is not fetched again.
            listing = await node.files().matching([self.name])
        except (SkywardError, OSError):
            with suppress(SkywardError, OSError):
                await self.remove_from(node)
            raise
        self._remember(listing, node)
        return len(listing.files)

    async def remove_from(self, node: NodeCheckpoints) -> None:
        """Remove the folder from a node."""
        await node.run("rm", "-rf", f"{node.folder}/{self.name}")

    async def remove(self) -> None:
        """Remove the copy. Idempotent."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # --- from a node --------------------------------------------------------------------------------------------------

    def _remember(self, listing: NodeListing, node: NodeCheckpoints) -> None:
        self._known_on, self._facts = node.instance_id, {file.name: file.facts for file in listing.files}

    async def _fill(self, part: Path, files: NodeFiles, listing: NodeListing, node: NodeCheckpoints) -> None:
        target = TargetFolder(part)
        for error in await asyncio.to_thread(target.make_folders, listing.folders):
            raise error
        for file in listing.files:
            path = target.claim(file.name)
            same = self._known_on == node.instance_id and self._facts.get(file.name) == file.facts
            if not (same and await asyncio.to_thread(self._link, file.name, path)):
                await files.fetch(file, path)
            target.keep(file.name)
        for name, leads_to in listing.links.items():
            await asyncio.to_thread(target.put_link, name, leads_to)

    def _last(self) -> Path | None:
        return self._folder / str(max(self._numbers)) if self._numbers else None

    def _link(self, name: str, path: Path) -> bool:
        """Make the file of the last copy that of the new one, too; return False where that is not possible."""
        if (last := self._last()) is None:
            return False
        try:
            os.link(last / name, path)
        except OSError:  # a disk without links
            return False
        return True

    # --- to a node ----------------------------------------------------------------------------------------------------

    async def _put(self, node: NodeCheckpoints) -> None:
        await self.remove_from(node)
        if (last := self._last()) is None:
            return
        top, place = last / self.name, f"{node.folder}/{self.name}"
        entries = await asyncio.to_thread(lambda: sorted(top.rglob("*")))
        folders = [path for path in entries if path.is_dir() and not path.is_symlink()]
        places = [place, *(f"{place}/{_below(top, path)}" for path in folders)]
        for first in range(0, len(places), _AT_ONCE):
            await node.run("mkdir", "-p", *places[first : first + _AT_ONCE])
        for path in entries:
            there = f"{place}/{_below(top, path)}"
            if path.is_symlink():
                await node.run("ln", "-s", path.readlink().as_posix(), there)
            elif path.is_file():
                data = await asyncio.to_thread(_mapped, path)
                await node.transport.put(data, there, mode=path.stat().st_mode & 0o777)


def _below(top: Path, path: Path) -> str:
    return path.relative_to(top).as_posix()


def _mapped(path: Path) -> memoryview | bytes:
    if not path.stat().st_size:
        return b""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
