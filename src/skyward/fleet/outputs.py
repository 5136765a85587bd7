"""Files of nodes brought here: on request, and those of ``Image(outputs=)`` before their nodes end."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from skyward.errors import ConfigurationError, FetchError, SkywardError, UnreachableError
from skyward.events import Notice, SkywardEvent
from skyward.fleet.download_folder import TargetFolder
from skyward.fleet.node import Node
from skyward.fleet.node_files import NodeFile, NodeListing, shown
from skyward.request.request import PoolRequest

_LONGEST_S: Final = 600.0
_LONGEST_ON_A_BUDGET_S: Final = 30.0
"""Longest time for the outputs of a node that is about to end; below the time that a budget has for the end."""
_STOP_TIMEOUT_S: Final = 10.0
_NAMED = 10
_KILO = 1000
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFiles:
    """Result of a fetch.

    Attributes:
        paths: the files here, by node and name.
        failures: one error for each thing that could not be fetched.
        left_out: what matches and is not fetched, such as sockets, with the reason.
    """

    paths: Sequence[Path]
    failures: Sequence[SkywardError]
    left_out: Sequence[str]


async def fetch_files(nodes: Sequence[Node], patterns: Sequence[str], to: Path, *, apart: bool) -> FetchedFiles:
    """Fetch the files that match from each node, in parallel.

    Args:
        nodes: the nodes.
        patterns: patterns of files.
        to: the folder here.
        apart: True if each node's files get a folder of its rank in it.

    Raises:
        ConfigurationError: ``to`` is a file.
        FetchError: nothing matches a pattern, or there is no room here.
    """
    parts = [_NodeFetch(node, to / str(node.rank) if apart else to) for node in nodes]
    await asyncio.gather(*(part.find(patterns) for part in parts))
    for error in _unmatched(parts, patterns):
        raise error
    await asyncio.to_thread(_refuse_full, sum(part.nbytes for part in parts), to)
    await asyncio.gather(*(part.fetch() for part in parts))
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    return FetchedFiles(
        paths=[each for each in outcomes if isinstance(each, Path)],
        failures=[each for each in outcomes if not isinstance(each, Path)],
        left_out=[text for part in parts for text in part.left_out],
    )


@dataclass(slots=True, eq=False)
class _NodeFetch:
    """Files of one node on their way here.

    Attributes:
        node: the node.
        to: the folder here.
        listing: what is to be fetched; None until it was found.
        outcomes: the path of each thing that is here, and an error for each that could not be fetched.
    """

    node: Node
    to: Path
    listing: NodeListing | None = None
    outcomes: list[Path | FetchError] = field(default_factory=list[Path | FetchError])

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.listing.files) if self.listing else 0

    @property
    def left_out(self) -> list[str]:
        """What matches and is not fetched, with the reasons."""
        left_out = self.listing.left_out if self.listing else dict[str, str]()
        return [f"{shown(name)} on node {self.node.rank} ({shown(why)})" for name, why in left_out.items()]

    async def find(self, patterns: Sequence[str]) -> None:
        """List what matches."""
        self.listing = await self.node.working_files().matching(patterns)

    async def fetch(self) -> None:
        """Make folders, fetch files one after the other, and make links."""
        listing = self.listing
        if listing is None or not (listing.files or listing.folders or listing.links):
            return
        folder = TargetFolder(self.to)
        try:
            self.outcomes += await asyncio.to_thread(folder.make_folders, listing.folders)
            await self._fetch_content(listing.files, folder)
            for name, target in listing.links.items():
                try:
                    self.outcomes.append(await asyncio.to_thread(folder.put_link, name, target))
                except FetchError as error:
                    self.outcomes.append(error)
                except OSError as error:
                    self.fail(f"link {shown(name)} of node {self.node.rank} was not made: {error}")
        finally:
            await asyncio.shield(asyncio.to_thread(folder.set_modes))

    async def _fetch_content(self, files: Sequence[NodeFile], folder: TargetFolder) -> None:
        """Fetch files one after the other. Stop when the node cannot be reached."""
        rank, reader = self.node.rank, self.node.working_files()
        for number, file in enumerate(files):
            try:
                path = folder.claim(file.name)
                await reader.fetch(file, path)
            except FetchError as error:
                self.outcomes.append(error)
            except (OSError, SkywardError) as error:
                self.fail(f"{shown(file.name)} ({_size(file.nbytes)}) of node {rank} was not fetched: {error}")
                # Each further file would take the same 90 s.
                if isinstance(error, UnreachableError):
                    if rest := len(files) - number - 1:
                        self.fail(f"nor were {rest} more of node {rank}")
                    return
            else:
                folder.keep(file.name)
                self.outcomes.append(path)

    def fail(self, reason: str) -> None:
        """Add an error."""
        self.outcomes.append(FetchError(reason))


def _unmatched(parts: Sequence[_NodeFetch], patterns: Sequence[str]) -> Iterator[FetchError]:
    """Yield an error for each pattern that matches on no node."""
    found = [(part.node, part.listing) for part in parts if part.listing is not None]
    for pattern in patterns if found else ():
        if all(pattern in listing.unmatched for _, listing in found):
            there = ", ".join(f"on node {node.rank} {_content(listing)}" for node, listing in found[:_NAMED])
            left_out = [text for part in parts for text in part.left_out]
            but = f". Left out: {joined(left_out)}. Have a call copy what they hold into the folder" if left_out else ""
            yield FetchError(f"no file matches {pattern!r} in the working folder of calls; {there}{but}")


def _content(listing: NodeListing) -> str:
    if not listing.there:
        return "it is empty"
    more = f" and {listing.others} more" if listing.others else ""
    return f"there are {', '.join(map(shown, listing.there))}{more}"


def _refuse_full(nbytes: int, to: Path) -> None:
    place = next(each for each in (to, *to.parents) if each.exists())
    if not place.is_dir():
        raise ConfigurationError(f"to must be a folder, and {place} is a file")
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise FetchError(f"the files have {_size(nbytes)}, and {place} has room for {_size(free)} only")


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < _KILO:
            return f"{nbytes:.3g} {unit}"
        nbytes /= _KILO
    return f"{nbytes:,.1f} GB"


def joined(items: Sequence[object], separator: str = ", ") -> str:
    """Return the first ten items as text, and the number of the others."""
    more = len(items) - _NAMED
    return separator.join(map(str, items[:_NAMED])) + (f" and {more} more" if more > 0 else "")


class Outputs:
    """Files that are fetched before their nodes end, as far as possible.

    Args:
        request: the pool's parameters; without ``outputs`` in its image, nothing is done.
        pool_id: the pool's id.
        publish: receives notices; must not block.
    """

    def __init__(self, request: PoolRequest, pool_id: str, publish: Callable[[SkywardEvent], None]) -> None:
        self._patterns = request.image.outputs
        self._publish = publish
        self._longest_s = _LONGEST_S if request.max_cost is None else _LONGEST_ON_A_BUDGET_S
        # At the opening: the program may have another current folder when the pool closes.
        self._to = Path.cwd() / "outputs" / pool_id if self._patterns else Path()

    async def rescue_and_stop(self, nodes: Sequence[Node], *, leave: bool = False) -> None:
        """Fetch the files of nodes that are about to end, and stop each one as soon as its own are here. Never raises.

        With ``leave`` they are kept for another client instead, and only their connections are closed.

        Each node's files go into a folder of its rank. A notice names them, or the reason why they were not fetched.
        """
        started = [node for node in nodes if node.lanes] if self._patterns else []
        there = [node for node in started if node.linked]
        if lost := [node for node in started if not node.linked]:
            self._publish(Notice(f"outputs of {_ranks(lost)} are lost: gone before their end", lost[0].instance.id))

        async def rescue_and_stop(node: Node) -> _NodeFetch:
            part = await self._rescue(node) if node in there else _NodeFetch(node, self._to)
            try:
                await (node.leave() if leave else node.stop(_STOP_TIMEOUT_S))
            except Exception as error:
                _logger.warning("node %d did not end when asked, and is ended with its machine: %s", node.rank, error)
            return part

        parts = await asyncio.gather(*map(rescue_and_stop, nodes))
        if there:
            self._publish(Notice(self._summary([part for part in parts if part.node in there])))

    async def _rescue(self, node: Node) -> _NodeFetch:
        part = _NodeFetch(node, self._to / str(node.rank))
        try:
            async with asyncio.timeout(self._longest_s):
                await part.find(self._patterns)
                await asyncio.to_thread(_refuse_full, part.nbytes, self._to)
                await part.fetch()
        except TimeoutError:
            part.fail(f"outputs of node {node.rank} are incomplete after {self._longest_s:g} s")
        except Exception as error:
            part.fail(f"no outputs of node {node.rank} were fetched: {error}")
        return part

    def _summary(self, parts: Sequence[_NodeFetch]) -> str:
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        paths = [path for path in outcomes if isinstance(path, Path)]
        failures: list[object] = [*_unmatched(parts, self._patterns)]
        failures += [error for error in outcomes if not isinstance(error, Path)]
        failures += [f"left out: {text}" for part in parts for text in part.left_out]
        names = joined([shown(path.relative_to(self._to).as_posix()) for path in paths])
        size = _size(sum(part.nbytes for part in parts))
        text = f"outputs in {self._to}: {names} ({size})" if names else "no outputs were fetched"
        return f"{text}; {joined(failures, '; ')}" if failures else text


def _ranks(nodes: Sequence[Node]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {joined([node.rank for node in nodes])}"
