"""``skyward logs``: output of a pool's calls, and the logs of its supervisors and workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.cli._base import FAILED, Answer, answers
from skyward.cli._machines import known_pool
from skyward.display.words import line_text
from skyward.errors import SkywardError
from skyward.events import LogLine
from skyward.events.lines import KeptReader, lines_backwards
from skyward.provision.buying.ledger import Ledger, LedgerEntry
from skyward.provision.buying.ownership import is_in_use, known_folders
from skyward.provision.preparing.node_logs import LogFile, NodeLogs, kept_files, open_logs
from skyward.wire.terminal import cleaned, harmless

__all__ = ["logs"]

_LOOK_S = 0.5


@click.command()
@click.argument("pool", default="", metavar="POOL")
@click.option("--call", metavar="NAME", help="Only this call, such as 'train#3', or all calls of this name: train.")
@click.option("--node", type=click.IntRange(min=0), help="Only this node, by its rank.")
@click.option("--worker", type=click.IntRange(min=0), help="Only this worker, by its index on its node.")
@click.option("--system", is_flag=True, help="The logs of supervisors and workers instead of the output of calls.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last lines; with --system, of each log.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until the pool ends.")
@answers
def logs(
    *, pool: str, call: str | None, node: int | None, worker: int | None, system: bool, lines: int | None, follow: bool
) -> Answer:
    """Show the output of a pool's calls, while it is open and after it."""
    as_json: bool = click.get_current_context().params["as_json"]
    if as_json and follow:
        raise click.UsageError("--json prints one document, which --follow would never complete: leave one out")
    if call is not None and system:
        raise click.UsageError("--call selects output of calls, which --system leaves out: leave one out")
    ledger = Ledger.of_user()
    folders = {folder.name: folder for folder in known_folders()}
    pool_id = known_pool(ledger, pool, others=[*reversed(folders)])
    if not system:
        if pool_id not in folders:
            raise SkywardError(
                f"the output of pool {pool_id} is not kept any more, or never was; `skyward logs --system` shows the "
                "logs of its supervisors and workers where they are left"
            )
        chosen = _Chosen(call=call, node=node, worker=worker)
        shown = _Output(pool_id, folders[pool_id], chosen, lines=lines, aloud=not as_json)
        asyncio.run(shown.read(follow=follow))
        return Answer(document={"pool": pool_id, "lines": shown.document}, show=lambda _: None)
    return _system_logs(ledger.entries(pool_id=pool_id), folders.get(pool_id), node, worker, lines, follow=follow)


# --- calls --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Selection of lines; None selects all."""

    call: str | None
    node: int | None
    worker: int | None

    def has(self, line: LogLine) -> bool:
        """Return True if the line is selected."""
        return (
            self.call in (None, line.call, line.call.rpartition("#")[0])
            and self.node in (None, line.node)
            and self.worker in (None, line.worker)
        )

    def refuse(self, found: Collection[tuple[str, int, int | None]]) -> None:
        """Raise for the option that selects none of the pool's lines, given the call, node and worker of each."""
        calls = {call for call, _, _ in found}
        names = {call.rpartition("#")[0] for call in calls}
        nodes = {node for _, node, _ in found}
        if self.call is not None and self.call not in calls | names:
            known = f"; there are lines of {', '.join(sorted(names - {''}))}" if names - {""} else ""
            raise click.BadParameter(f"no line is of a call {self.call}{known}", param_hint="--call")
        if self.node is not None and self.node not in nodes:
            known = ", ".join(map(str, sorted(nodes)))
            raise click.BadParameter(f"no line is of node {self.node}; there are lines of {known}", param_hint="--node")
        if self.worker is not None and self.worker not in {worker for _, _, worker in found}:
            raise click.BadParameter(f"no line is of a worker {self.worker}", param_hint="--worker")


class _Output:
    """Output of calls; with ``aloud`` it is printed as it arrives.

    Attributes:
        document: the lines that were read, unless they were printed.
    """

    def __init__(self, pool_id: str, folder: Path, chosen: _Chosen, *, lines: int | None, aloud: bool) -> None:
        self._pool_id = pool_id
        self._folder = folder
        self._chosen = chosen
        self._lines = lines
        self._aloud = aloud
        self._reader = KeptReader(folder / "logs")
        self.document: list[dict[str, Any]] = []

    async def read(self, *, follow: bool) -> None:
        """Read all lines once; with ``follow``, until the pool's process has closed it, or is gone."""
        open_until_now = is_in_use(self._folder)
        found: set[tuple[str, int, int | None]] = set()
        count = self._show(self._first(found))
        if not found and not follow:
            click.echo(f"Pool {self._pool_id} has printed nothing.", err=True)
        elif not count and not follow and self._lines != 0:
            self._chosen.refuse(found)
        while follow and open_until_now:
            await SYSTEM_CLOCK.sleep(_LOOK_S)
            open_until_now = is_in_use(self._folder)  # before the lines: the last ones come before the end
            self._show(filter(self._chosen.has, self._reader.news()))

    def _first(self, found: set[tuple[str, int, int | None]]) -> Iterator[LogLine]:
        """Yield the chosen lines that exist now; add the call, node and worker of each line that was read."""

        def chosen(lines: Iterable[LogLine]) -> Iterator[LogLine]:
            for line in lines:
                found.add((line.call, line.node, line.worker))
                if self._chosen.has(line):
                    yield line

        if self._lines is None:
            return chosen(self._reader.news())
        # From the end: there may be a million lines before. At least one is read, which shows that there are any.
        last = [*islice(chosen(self._reader.backwards()), max(self._lines, 1))]
        return reversed(last[: self._lines])

    def _show(self, lines: Iterator[LogLine]) -> int:
        """Show lines, and return their number."""
        count = 0
        for line in lines:
            count += 1
            if not self._aloud:
                self.document.append(asdict(line))
                continue
            when = _local_time(line.timestamp)
            for text in line_text(line).split("\n"):
                click.echo(f"{when} {harmless(line.place)} | {cleaned(text, colours=sys.stdout.isatty())}")
        return count


def _local_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):  # a node's clock, or a node that lies
        return "????-??-?? ??:??:??"


# --- supervisors and workers ----------------------------------------------------------------------------------------


def _system_logs(
    entries: Sequence[LedgerEntry],
    folder: Path | None,
    node: int | None,
    worker: int | None,
    lines: int | None,
    *,
    follow: bool,
) -> Answer:
    kept = kept_files(folder / "system") if folder is not None else ()
    latest = _latest(entries)
    ranks = sorted({entry.node for entry in latest} | {file.node for file in kept})
    if node is not None and node not in ranks:
        raise click.BadParameter(
            f"the pool had no node {node}; it had {', '.join(map(str, ranks))}", param_hint="--node"
        )
    reader = _LogReader(worker=worker, lines=lines, aloud=not click.get_current_context().params["as_json"])
    for file in kept:
        if node in (None, file.node):
            reader.show_kept(file)
    copied = {file.instance_id for file in kept}
    left = [entry for entry in latest if node in (None, entry.node) and entry.instance_id not in copied]
    asyncio.run(reader.read(left, follow=follow))
    if worker is not None and reader.found and not reader.matched:
        raise click.BadParameter(f"there is no log of a worker {worker}", param_hint="--worker")
    document = {"logs": list(reader.document.values()), "unreadable": reader.errors}
    return Answer(document=document, show=lambda _: None, exit_code=FAILED if reader.errors else 0)


def _latest(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Return the last machine of each node; earlier ones were lost."""
    made = [entry for entry in entries if entry.instance_id is not None]
    return [entry for _, entry in sorted({entry.node: entry for entry in made}.items())]


class _LogReader:
    """Reader of the logs of nodes; with ``aloud``, it prints new lines as they arrive.

    Attributes:
        found: True if there is any log.
        matched: True if there is a log of the selected worker.
        document: lines that were read, by file.
        errors: messages about logs that could not be read.
    """

    def __init__(self, *, worker: int | None, lines: int | None, aloud: bool) -> None:
        self._worker = worker
        self._lines = lines
        self._aloud = aloud
        self.found = self.matched = False
        self.document: dict[tuple[int, str], dict[str, Any]] = {}
        self.errors: list[str] = []

    def show_kept(self, file: LogFile) -> None:
        """Show a log that was copied to this machine."""
        last = [*islice(lines_backwards(Path(file.path)), self._lines)]
        self._show(file, [line.decode("utf-8", "replace") for line in reversed(last)])

    async def read(self, entries: Sequence[LedgerEntry], *, follow: bool) -> None:
        """Read all logs once; with ``follow``, until all machines are gone."""
        async with AsyncExitStack() as stack:
            nodes: list[NodeLogs] = []
            for entry in entries:
                try:
                    nodes.append(await stack.enter_async_context(open_logs(entry)))
                except (SkywardError, OSError) as error:
                    self._fail(error)
            while nodes := [node for node in nodes if await self._look(node) and follow]:
                await SYSTEM_CLOCK.sleep(_LOOK_S)

    async def _look(self, node: NodeLogs) -> bool:
        """Show new lines of a node; return False when no more can come."""
        try:
            for file in await node.files():
                self.found = True
                if self._worker in (None, file.worker):
                    self._show(file, await node.news(file, at_most=self._lines))
        except (SkywardError, OSError) as error:
            self._fail(error)
            return False
        return not node.gone

    def _show(self, file: LogFile, news: Sequence[str]) -> None:
        self.found = True
        if self._worker not in (None, file.worker):
            return
        self.matched = True
        facts = {"node": file.node, "worker": file.worker, "instance": file.instance_id, "path": file.path}
        read = self.document.setdefault((file.node, file.path), facts | {"lines": []})
        if not self._aloud:
            read["lines"] += news
        for line in news if self._aloud else ():
            # Text of a node must not move the cursor, set the title or send replies of the user's terminal.
            text = cleaned(line, colours=sys.stdout.isatty())
            click.echo(f"node {file.node} {harmless(file.name)} | {text}")

    def _fail(self, error: Exception) -> None:
        self.errors.append(str(error))
        text = "\n".join(cleaned(line, colours=False) for line in str(error).split("\n"))
        click.echo(f"Error: {text}", err=True)
