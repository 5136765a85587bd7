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
    listings = await asyncio.gather(*(node.working_files().matching(patterns) for node in nodes))
    found = list(zip(nodes, listings, strict=True))
    for error in _unmatched(found, patterns):
        raise error
    nbytes = sum(file.nbytes for listing in listings for file in listing.files)
    await asyncio.to_thread(_refuse_full, nbytes, to)
    folders = {node.rank: to / str(node.rank) if apart else to for node in nodes}
    parts: list[list[Path | FetchError]] = [[] for _ in found]
    work = [_fetch_from(node, each, folders[node.rank], part) for (node, each), part in zip(found, parts, strict=True)]
    await asyncio.gather(*work)
    outcomes = [outcome for part in parts for outcome in part]
    return FetchedFiles(
        paths=[each for each in outcomes if isinstance(each, Path)],
        failures=[each for each in outcomes if not isinstance(each, Path)],
        left_out=list(_left_out(found)),
    )


async def _fetch_from(node: Node, listing: NodeListing, to: Path, outcomes: list[Path | FetchError]) -> None:
    """Make folders, fetch files one after the other, and make links; add the path of each, or its error."""
    if not (listing.files or listing.folders or listing.links):
        return
    folder = TargetFolder(to)
    try:
        outcomes += await asyncio.to_thread(folder.make_folders, listing.folders)
        await _fetch_content(node, listing.files, folder, outcomes)
        for name, target in listing.links.items():
            try:
                outcomes.append(await asyncio.to_thread(folder.put_link, name, target))
            except FetchError as error:
                outcomes.append(error)
            except OSError as error:
                outcomes.append(FetchError(f"link {shown(name)} of node {node.rank} was not made: {error}"))
    finally:
        await asyncio.shield(asyncio.to_thread(folder.set_modes))


async def _fetch_content(
    node: Node, files: Sequence[NodeFile], folder: TargetFolder, outcomes: list[Path | FetchError]
) -> None:
    """Fetch files one after the other. Stop when the node cannot be reached."""
    reader = node.working_files()
    for number, file in enumerate(files):
        try:
            path = folder.claim(file.name)
            await reader.fetch(file, path)
        except FetchError as error:
            outcomes.append(error)
        except (OSError, SkywardError) as error:
            what = f"{shown(file.name)} ({_size(file.nbytes)}) of node {node.rank}"
            outcomes.append(FetchError(f"{what} was not fetched: {error}"))
            # Each further file would take the same 90 s.
            if isinstance(error, UnreachableError):
                if rest := len(files) - number - 1:
                    outcomes.append(FetchError(f"nor were {rest} more of node {node.rank}"))
                return
        else:
            folder.keep(file.name)
            outcomes.append(path)


def _left_out(found: Sequence[tuple[Node, NodeListing]]) -> Iterator[str]:
    for node, listing in found:
        for name, why in listing.left_out.items():
            yield f"{shown(name)} on node {node.rank} ({shown(why)})"


def _unmatched(found: Sequence[tuple[Node, NodeListing]], patterns: Sequence[str]) -> Iterator[FetchError]:
    """Yield an error for each pattern that matches on no node."""
    for pattern in patterns:
        if all(pattern in listing.unmatched for _, listing in found):
            there = ", ".join(f"on node {node.rank} {_content(listing)}" for node, listing in found[:_NAMED])
            left_out = list(_left_out(found))
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

    async def rescue_and_stop(self, nodes: Sequence[Node]) -> None:
        """Fetch the files of nodes that are about to end, and stop each one as soon as its own are here. Never raises.

        Each node's files go into a folder of its rank. A notice names them, or the reason why they were not fetched.
        """
        started = [node for node in nodes if node.lanes] if self._patterns else []
        there = [node for node in started if node.linked]
        if lost := [node for node in started if not node.linked]:
            self._publish(Notice(f"outputs of {_ranks(lost)} are lost: gone before their end", lost[0].instance.id))

        async def rescue_and_stop(node: Node) -> _Rescued:
            rescued = await self._rescue(node) if node in there else _Rescued(node)
            try:
                await node.stop(_STOP_TIMEOUT_S)
            except Exception as error:
                _logger.warning("node %d did not end when asked, and is ended with its machine: %s", node.rank, error)
            return rescued

        rescued = await asyncio.gather(*map(rescue_and_stop, nodes))
        if there:
            self._publish(Notice(self._summary([each for each in rescued if each.node in there])))

    async def _rescue(self, node: Node) -> _Rescued:
        rescued = _Rescued(node)
        try:
            async with asyncio.timeout(self._longest_s):
                rescued.listing = await node.working_files().matching(self._patterns)
                nbytes = sum(file.nbytes for file in rescued.listing.files)
                await asyncio.to_thread(_refuse_full, nbytes, self._to)
                await _fetch_from(node, rescued.listing, self._to / str(node.rank), rescued.outcomes)
        except TimeoutError:
            rescued.problems.append(f"outputs of node {node.rank} are incomplete after {self._longest_s:g} s")
        except Exception as error:
            rescued.problems.append(f"no outputs of node {node.rank} were fetched: {error}")
        return rescued

    def _summary(self, rescued: Sequence[_Rescued]) -> str:
        found = [(each.node, each.listing) for each in rescued if each.listing is not None]
        paths = [path for each in rescued for path in each.outcomes if isinstance(path, Path)]
        failures: list[object] = [*_unmatched(found, self._patterns)] if found else []
        failures += [error for each in rescued for error in each.outcomes if not isinstance(error, Path)]
        failures += [problem for each in rescued for problem in each.problems]
        nbytes = sum(file.nbytes for _, listing in found for file in listing.files)
        failures += [f"left out: {each}" for each in _left_out(found)]
        names = joined([shown(path.relative_to(self._to).as_posix()) for path in paths])
        text = f"outputs in {self._to}: {names} ({_size(nbytes)})" if names else "no outputs were fetched"
        return f"{text}; {joined(failures, '; ')}" if failures else text


@dataclass(slots=True)
class _Rescued:
    """Files of one node, as far as they are here."""

    node: Node
    listing: NodeListing | None = None
    outcomes: list[Path | FetchError] = field(default_factory=list[Path | FetchError])
    problems: list[str] = field(default_factory=list[str])


def _ranks(nodes: Sequence[Node]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {joined([node.rank for node in nodes])}"
