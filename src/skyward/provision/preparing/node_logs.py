"""Reading the logs of nodes, from their machines or from what is left of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyward.errors import SkywardError, UnreachableError
from skyward.providers.base import InstanceState, Provider
from skyward.providers.registry import make_provider
from skyward.provision.buying.ledger import LedgerEntry
from skyward.provision.preparing.node_handle import open_transport
from skyward.transport.base import Transport

__all__ = ["LogFile", "NodeLogs", "open_logs"]

_WORKER = re.compile(r"worker-(\d+)")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log on a node.

    Attributes:
        node: the node's rank.
        instance_id: its machine.
        path: where it lies there.
    """

    node: int
    instance_id: str
    path: str

    @property
    def name(self) -> str:
        """``"supervisor"``, ``"worker-0"``, ..."""
        return self.path.rpartition("/")[2].removesuffix(".log")

    @property
    def worker(self) -> int | None:
        """The worker's index on its node; None if it is no worker's."""
        found = _WORKER.fullmatch(self.name)
        return int(found[1]) if found else None


class NodeLogs:
    """The logs of one node. Each read gives what was written since the last one.

    Attributes:
        entry: the node's machine in the ledger.
        gone: whether nothing was written there any more when :meth:`files` was last asked.
    """

    def __init__(self, entry: LedgerEntry, provider: Provider, transport: Transport, workdir: str) -> None:
        self.entry = entry
        self.gone = False
        self._provider = provider
        self._transport = transport
        self._workdir = workdir
        self._read: dict[str, int] = {}

    async def files(self) -> Sequence[LogFile]:
        """The logs there are, by name; none once the machine has taken them with it."""
        (seen,) = await self._provider.describe([self.entry.instance_id or ""])
        self.gone = seen.state is InstanceState.GONE
        if seen.access is None:
            return ()
        found = await self._run("find", self._workdir, "-maxdepth", "1", "-type", "f", "-name", "*.log")
        instance_id = self.entry.instance_id or ""
        files = [LogFile(node=self.entry.node, instance_id=instance_id, path=path) for path in found.splitlines()]
        return sorted(files, key=lambda file: (file.worker is not None, file.worker or 0, file.name))

    async def news(self, file: LogFile, *, at_most: int | None = None) -> Sequence[str]:
        """Its lines since the last time; of the first time, the last ``at_most``. A line is read once it is whole."""
        if file.path not in self._read:
            count = int((await self._run("wc", "-l", file.path)).split()[0]) if at_most is not None else 0
            self._read[file.path] = 0 if at_most is None else max(0, count - at_most)
        text = await self._run("tail", "-n", f"+{self._read[file.path] + 1}", file.path)
        *lines, rest = text.split("\n")
        self._read[file.path] += len(lines)
        return [*lines, rest] if rest and self.gone else lines

    async def _run(self, *argv: str) -> str:
        completed = await self._transport.run(argv, timeout_s=_TIMEOUT_S)
        if completed.exit_code:
            raise SkywardError(f"node {self.entry.node}: {completed.stderr.strip() or f'{argv[0]} failed'}")
        return completed.stdout


@asynccontextmanager
async def open_logs(entry: LedgerEntry) -> AsyncGenerator[NodeLogs]:
    """The logs of a machine of the ledger.

    Raises:
        UnreachableError: the machine, and its logs with it, are gone; or it does not answer.
    """
    provider = make_provider(entry.purchase.provider, entry.purchase.settings)
    try:
        (seen,) = await provider.describe([entry.instance_id or ""])
        if seen.access is None:
            raise UnreachableError(
                f"node {entry.node} of pool {entry.purchase.pool_id}: its machine is {seen.state.value}, "
                "and its logs went with it"
            )
        transport = open_transport(seen.access)
        try:
            yield NodeLogs(entry, provider, transport, seen.access.workdir)
        finally:
            await transport.close()
    finally:
        await asyncio.shield(provider.close())
