"""Files in the working folder of a node's calls: listed, and fetched piece by piece through the node's transport."""

from __future__ import annotations

import asyncio
import base64
import glob
import inspect
import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from skyward.base.waiting import NotYet, wait_until
from skyward.errors import FetchError, UnreachableError
from skyward.fleet.download_folder import set_mode
from skyward.machine.access import Completed, Transport
from skyward.node.storage import file_reader
from skyward.request.checks import is_matched

_PIECE_BYTES: Final = 8 << 20
_AT_ONCE: Final = 3
"""Pieces of a file on their way at a time; with their encoding and its copies each takes about 40 MB here."""
_AGAIN_S = 0.5
_ANSWER_S = 60.0
_PATIENCE_S = 90.0


class _ChangedError(Exception):
    """A file is no longer the listed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    """File on a node.

    Attributes:
        name: path in the working folder.
        facts: size in bytes, time of change, inode and permissions.
    """

    name: str
    facts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.facts[0]

    @property
    def mode(self) -> int:
        """Permissions of owner, group and others."""
        return self.facts[3] & 0o777


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListing:
    """What patterns match on a node.

    Attributes:
        files: the files.
        folders: permissions of folders, by name: all that hold something that matches, and empty ones.
        links: names that links lead to, by name.
        left_out: why something that matches cannot be fetched, by name.
        unmatched: patterns that match nothing else.
        there: the first names in the folder, if a pattern is unmatched.
        others: number of further names in the folder.
    """

    files: tuple[NodeFile, ...]
    folders: Mapping[str, int]
    links: Mapping[str, str]
    left_out: Mapping[str, str]
    unmatched: tuple[str, ...]
    there: tuple[str, ...]
    others: int


class NodeFiles:
    """Files in the working folder of one node's calls.

    Args:
        transport: the transport to the node.
        python: an interpreter there.
        folder: the working folder there.
        node: the node's rank, for messages.
    """

    def __init__(self, transport: Transport, *, python: str, folder: str, node: int) -> None:
        self._transport = transport
        self._python = python
        self._folder = folder
        self._node = node

    async def matching(self, patterns: Sequence[str]) -> NodeListing:
        """Return what matches. Raises :class:`~skyward.errors.UnreachableError` after 90 s."""
        answer = await self._ask(verb="listing", patterns=list(patterns))
        self._check_names(answer, patterns)
        return NodeListing(
            files=tuple(NodeFile(name=name, facts=tuple(facts)) for name, facts in answer["files"].items()),
            folders={name: mode & 0o777 for name, mode in answer["folders"].items()},
            links=answer["links"],
            left_out=answer["left_out"],
            unmatched=tuple(answer["unmatched"]),
            there=tuple(answer["there"]),
            others=answer["all"] - len(answer["there"]),
        )

    def _check_names(self, answer: Mapping[str, Any], patterns: Sequence[str]) -> None:
        """Refuse names that become paths here and that a node must not choose."""
        names = [name for kind in ("files", "folders", "links") for name in answer[kind]]
        above = {str(parent) for name in names for parent in PurePosixPath(name).parents}.intersection(
            answer["folders"]
        )
        wrong = [name for name in names if not (_stays(name) and (name in above or is_matched(name, patterns)))]
        for name in (*wrong, *(name for name, count in Counter(names).items() if count > 1)):
            raise FetchError(f"node {self._node} names a file that was not asked for: {name!r}")
        for target in answer["links"].values():
            if target != "." and not _stays(target):
                raise FetchError(f"node {self._node} names a link that leads out of its folder, to {target!r}")

    async def fetch(self, file: NodeFile, path: Path) -> None:
        """Write the file to ``path``, whole or not at all; a file that changes meanwhile is fetched again, once.

        Raises:
            FetchError: it changed again, or is gone.
            OSError: ``path`` cannot be written.
            UnreachableError: the node does not answer for 90 s.
        """
        try:
            await self._fetch_once(file, path)
        except _ChangedError:
            files = {each.name: each for each in (await self.matching([glob.escape(file.name)])).files}
            if (again := files.get(file.name)) is None:
                raise FetchError(f"{shown(file.name)} on node {self._node} was removed while it was read") from None
            try:
                await self._fetch_once(again, path)
            except _ChangedError:
                raise FetchError(
                    f"{shown(file.name)} on node {self._node} changed while it was read, twice: fetch it when no call "
                    "writes to it, or have the call write another name and rename it"
                ) from None

    async def _fetch_once(self, file: NodeFile, path: Path) -> None:
        name = path.with_name(f".{secrets.token_hex(8)}.part")  # as short for a name of the longest length
        name.touch(0o600, exist_ok=False)
        offsets = iter(range(0, file.nbytes, _PIECE_BYTES))

        async def read() -> None:
            for offset in offsets:  # shared: the next reader takes the next piece
                await self._fetch_piece(file, offset, name)

        readers = [asyncio.ensure_future(read()) for _ in range(_AT_ONCE)]
        try:
            await asyncio.gather(*readers)
            set_mode(name, file.mode)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)  # no half file may stay
            raise
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _fetch_piece(self, file: NodeFile, offset: int, path: Path) -> None:
        length = min(_PIECE_BYTES, file.nbytes - offset)
        answer = await self._ask(verb="piece", name=file.name, offset=offset, length=length, facts=file.facts)
        if "data" not in answer:
            raise _ChangedError
        data = base64.b64decode(answer["data"])
        if len(data) != length:
            raise FetchError(f"node {self._node} sent {len(data)} bytes of {shown(file.name)} where {length} were due")
        await asyncio.to_thread(_write, path, data, offset)

    async def _ask(self, **order: Any) -> dict[str, Any]:
        argv = [self._python, "-I", "-S", "-X", "utf8", "-c", _source()]  # names are bytes, in any locale
        stdin = json.dumps(order | {"folder": self._folder}).encode()

        async def once() -> Completed | NotYet:
            try:
                return await self._transport.run(argv, stdin=stdin, timeout_s=_ANSWER_S)
            except UnreachableError as error:
                return NotYet(str(error))

        what = f"node {self._node} to read its files"
        done = await wait_until(once, deadline_s=_PATIENCE_S, interval_s=_AGAIN_S, what=what)
        if done.exit_code:
            *_, why = done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"]
            raise FetchError(f"the files of node {self._node} in {self._folder} cannot be read: {why}")
        return json.loads(done.stdout)


def _write(path: Path, data: bytes, offset: int) -> None:
    # By its path: a thread cannot be cancelled, and a descriptor may be that of another file by the time it runs.
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _source() -> str:
    return inspect.getsource(file_reader)


def _stays(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path) == name and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def shown(name: str) -> str:
    """Return a name for a message: quoted if it has characters that cannot be printed."""
    return name if name.isprintable() else repr(name)
