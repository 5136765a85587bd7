"""``skyward logs``: output of a pool's calls, and the logs of its supervisors and workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click

from skyward.api.jobs import Job
from skyward.base.waiting import SYSTEM_CLOCK
from skyward.cli._base import FAILED, Answer, answers
from skyward.cli._jobs import known_job
from skyward.cli._machines import known_pool
from skyward.display.words import line_text
from skyward.errors import SkywardError
from skyward.events import LogLine
from skyward.events.log_files import KeptReader, lines_backwards
from skyward.fleet.node_logs import LogFile, NodeLogs, kept_files, open_logs
from skyward.ledger.ledger import Ledger, LedgerEntry
from skyward.ledger.ownership import is_in_use, known_folders
from skyward.wire.terminal import cleaned, harmless

_LOOK_S = 0.5


@click.command()
@click.argument("pool", default="", metavar="POOL")
@click.argument("job", default="", metavar="[JOB]")
@click.option("--call", metavar="NAME", help="Only this call, such as 'train#3', or all calls of this name: train.")
@click.option("--node", type=click.IntRange(min=0), help="Only this node, by its rank.")
@click.option("--worker", type=click.IntRange(min=0), help="Only this worker, by its index on its node.")
@click.option("--system", is_flag=True, help="The logs of supervisors and workers instead of the output of calls.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last lines; with --system, of each log.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until the pool ends.")
@answers
def logs(
    *,
    pool: str,
    job: str,
    call: str | None,
    node: int | None,
    worker: int | None,
    system: bool,
    lines: int | None,
    follow: bool,
) -> Answer:
    """Show the output of a pool's calls, while it is open and after it; or that of a JOB of a kept pool."""
    as_json: bool = click.get_current_context().params["as_json"]
    if as_json and follow:
        raise click.UsageError("--json prints one document, which --follow would never complete: leave one out")
    if call is not None and system:
        raise click.UsageError("--call selects output of calls, which --system leaves out: leave one out")
    chosen = _Chosen(call=call, node=node, worker=worker, lines=lines)
    if job:
        if system:
            raise click.UsageError("--system has no output of jobs: leave one out")
        return _logs_of_job(known_job(job, pool), chosen, follow=follow, as_json=as_json)
    ledger = Ledger.of_user()
    folders = {folder.name: folder for folder in known_folders()}
    pool_id = known_pool(ledger, pool, others=[*reversed(folders)])
    folder = folders.get(pool_id)
    if system:
        kept = kept_files(folder / "system") if folder is not None else ()
        return asyncio.run(_NodeOutput(chosen, aloud=not as_json).read(_latest(ledger, pool_id), kept, follow=follow))
    if folder is None:
        raise SkywardError(
            f"the output of pool {pool_id} is not kept any more, or never was; `skyward logs --system` shows the "
            "logs of its supervisors and workers where they are left"
        )
    lines_of_calls = _call_lines(chosen, folder, follow=follow)
    document = {"pool": pool_id, "lines": [asdict(line) for line in lines_of_calls] if as_json else []}
    return Answer(document=document, text=_shown_lines(lines_of_calls))


def _logs_of_job(job: Job, chosen: _Chosen, *, follow: bool, as_json: bool) -> Answer:
    found = filter(chosen.has, job.logs(follow=follow))
    shown = deque(found, chosen.lines) if chosen.lines is not None and not follow else found
    document = {"job": job.id, "pool": job.pool, "lines": [asdict(line) for line in shown] if as_json else []}
    return Answer(document=document, text=_shown_lines(shown))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Selection of lines; None selects all."""

    call: str | None
    node: int | None
    worker: int | None
    lines: int | None

    def has(self, line: LogLine) -> bool:
        """Return True if the line is selected."""
        return (
            self.call in (None, line.call, line.call.rpartition("#")[0])
            and self.node in (None, line.node)
            and self.worker in (None, line.worker)
        )

    def refuse(self, places: Collection[tuple[str, int, int | None]]) -> None:
        """Raise for the option that selects none of the pool's lines, given the call, node and worker of each."""
        calls = {call for call, _, _ in places}
        names = {call.rpartition("#")[0] for call in calls}
        nodes = {node for _, node, _ in places}
        if self.call is not None and self.call not in calls | names:
            known = f"; there are lines of {', '.join(sorted(names - {''}))}" if names - {""} else ""
            raise click.BadParameter(f"no line is of a call {self.call}{known}", param_hint="--call")
        if self.node is not None and self.node not in nodes:
            known = ", ".join(map(str, sorted(nodes)))
            raise click.BadParameter(f"no line is of node {self.node}; there are lines of {known}", param_hint="--node")
        if self.worker is not None and self.worker not in {worker for _, _, worker in places}:
            raise click.BadParameter(f"no line is of a worker {self.worker}", param_hint="--worker")


def _shown(place: str, text: str) -> str:
    # Text of a node must not move the cursor, set the title or send replies of the user's terminal.
    return f"{harmless(place)} | {cleaned(text, colours=sys.stdout.isatty())}"


def _shown_lines(lines: Iterable[LogLine]) -> Iterator[str]:
    for line in lines:
        for text in line_text(line).split("\n"):
            yield _shown(f"{_local_time(line.timestamp)} {line.place}", text)


def _call_lines(chosen: _Chosen, folder: Path, *, follow: bool) -> Iterator[LogLine]:
    """Yield the chosen lines that exist now; with ``follow``, more until the pool's process has closed it, or is gone.

    Raises :class:`click.BadParameter` if no line is chosen.
    """
    reader, places = KeptReader(folder / "logs"), set[tuple[str, int, int | None]]()

    def select(lines: Iterable[LogLine]) -> Iterator[LogLine]:
        for line in lines:
            places.add((line.call, line.node, line.worker))
            if chosen.has(line):
                yield line

    open_until_now, count = is_in_use(folder), 0
    lines = select(reader.news() if chosen.lines is None else reader.backwards())
    if chosen.lines is not None:
        # From the end: there may be a million lines before. At least one is read, which shows that there are any.
        lines = reversed([*islice(lines, max(chosen.lines, 1))][: chosen.lines])
    for count, line in enumerate(lines, start=1):  # noqa: B007
        yield line
    if not places and not follow:
        click.echo(f"Pool {folder.name} has printed nothing.", err=True)
    elif not count and not follow and chosen.lines != 0:
        chosen.refuse(places)
    while follow and open_until_now:
        asyncio.run(SYSTEM_CLOCK.sleep(_LOOK_S))
        open_until_now = is_in_use(folder)  # before the lines: the last ones come before the end
        yield from select(reader.news())


def _local_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):  # a node's clock, or a node that lies
        return "????-??-?? ??:??:??"


def _latest(ledger: Ledger, pool_id: str) -> list[LedgerEntry]:
    """Return the last machine of each node; earlier ones were lost."""
    launched = [entry for entry in ledger.entries(pool_id=pool_id) if entry.instance_id is not None]
    return [entry for _, entry in sorted({entry.node: entry for entry in launched}.items())]


class _NodeOutput:
    """Logs of supervisors and workers; with ``aloud`` they are printed as they arrive."""

    def __init__(self, chosen: _Chosen, *, aloud: bool) -> None:
        self._chosen = chosen
        self._aloud = aloud
        self._exists = False
        self._document: dict[tuple[int, str], dict[str, Any]] = {}
        self._errors: list[str] = []

    async def read(self, entries: Sequence[LedgerEntry], kept: Sequence[LogFile], *, follow: bool) -> Answer:
        """Read the logs kept here, then those of the other machines; with ``follow``, until these are gone."""
        ranks = sorted({entry.node for entry in entries} | {file.node for file in kept})
        node, worker = self._chosen.node, self._chosen.worker
        if node is not None and node not in ranks:
            raise click.BadParameter(
                f"the pool had no node {node}; it had {', '.join(map(str, ranks))}", param_hint="--node"
            )
        for file in kept:
            if node in (None, file.node):
                last = [*islice(lines_backwards(Path(file.path)), self._chosen.lines)]
                self._show(file, [line.decode("utf-8", "replace") for line in reversed(last)])
        copied = {file.instance_id for file in kept}
        remaining = [entry for entry in entries if node in (None, entry.node) and entry.instance_id not in copied]
        await self._read_nodes(remaining, follow=follow)
        if worker is not None and self._exists and not self._document:
            raise click.BadParameter(f"there is no log of a worker {worker}", param_hint="--worker")
        document = {"logs": list(self._document.values()), "unreadable": self._errors}
        return Answer(document=document, exit_code=FAILED if self._errors else 0)

    async def _read_nodes(self, entries: Sequence[LedgerEntry], *, follow: bool) -> None:
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
                self._exists = True
                if self._chosen.worker in (None, file.worker):
                    self._show(file, await node.news(file, at_most=self._chosen.lines))
        except (SkywardError, OSError) as error:
            self._fail(error)
            return False
        return not node.gone

    def _show(self, file: LogFile, news: Sequence[str]) -> None:
        self._exists = True
        if self._chosen.worker not in (None, file.worker):
            return
        facts = {"node": file.node, "worker": file.worker, "instance": file.instance_id, "path": file.path}
        read = self._document.setdefault((file.node, file.path), facts | {"lines": []})
        if not self._aloud:
            read["lines"] += news
        for line in news if self._aloud else ():
            click.echo(_shown(f"node {file.node} {file.name}", line))

    def _fail(self, error: Exception) -> None:
        self._errors.append(str(error))
        text = "\n".join(cleaned(line, colours=False) for line in str(error).split("\n"))
        click.echo(f"Error: {text}", err=True)
