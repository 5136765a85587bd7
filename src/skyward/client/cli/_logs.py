"""``skyward logs``: logs of a pool's supervisors and workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import click

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.client.cli._answer import FAILED, Answer, answers
from skyward.client.cli._pool_commands import known_pool
from skyward.client.display.escapes import cleaned, harmless
from skyward.errors import SkywardError
from skyward.provision.buying.ledger import Ledger, LedgerEntry
from skyward.provision.preparing.node_logs import LogFile, NodeLogs, open_logs

__all__ = ["logs"]

_LOOK_S = 0.5


@click.command()
@click.argument("pool")
@click.option("--node", type=click.IntRange(min=0), help="Only the logs of this node, by its rank.")
@click.option("--worker", type=click.IntRange(min=0), help="Only the logs of this worker, by its index on its node.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last lines of each log.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until the pool ends.")
@answers
def logs(*, pool: str, node: int | None, worker: int | None, lines: int | None, follow: bool) -> Answer:
    """Show the logs of a pool's supervisors and workers."""
    as_json: bool = click.get_current_context().params["as_json"]
    if as_json and follow:
        raise click.UsageError("--json prints one document, which --follow would never complete: leave one out")
    ledger = Ledger.of_user()
    entries = _latest(ledger.entries(pool_id=known_pool(ledger, pool)))
    if node is not None and node not in {entry.node for entry in entries}:
        ranks = ", ".join(str(entry.node) for entry in entries)
        raise click.BadParameter(f"the pool had no node {node}; it had {ranks}", param_hint="--node")
    chosen = [entry for entry in entries if node in (None, entry.node)]
    reader = _Reader(worker=worker, lines=lines, aloud=not as_json)
    asyncio.run(reader.read(chosen, follow=follow))
    if worker is not None and reader.found and not reader.matched:
        raise click.BadParameter(f"there is no log of a worker {worker}", param_hint="--worker")
    document = {"logs": list(reader.document.values()), "unreadable": reader.errors}
    return Answer(document=document, show=lambda _: None, exit_code=FAILED if reader.errors else 0)


def _latest(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Return the last machine of each node; earlier ones were lost."""
    made = [entry for entry in entries if entry.instance_id is not None]
    return [entry for _, entry in sorted({entry.node: entry for entry in made}.items())]


class _Reader:
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
                    self.matched = True
                    self._show(file, await node.news(file, at_most=self._lines))
        except (SkywardError, OSError) as error:
            self._fail(error)
            return False
        return not node.gone

    def _show(self, file: LogFile, news: Sequence[str]) -> None:
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
