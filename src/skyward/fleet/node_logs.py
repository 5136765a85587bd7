"""Logs of nodes: read while they run, and their newest part kept here when they end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from skyward.errors import SkywardError, UnreachableError
from skyward.ledger.ledger import LedgerEntry
from skyward.machine.access import Access, Transport
from skyward.providers.base import InstanceState, Provider
from skyward.providers.registry import make_provider

_NODE = re.compile(r"node-(\d+)-(.+)")
_WORKER = re.compile(r"worker-(\d+)")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log on a node.

    Attributes:
        node: the node's rank.
        instance_id: its machine.
        path: its path there.
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
        """The worker's index on its node; None for another program's log."""
        found = _WORKER.fullmatch(self.name)
        return int(found[1]) if found else None


def kept_files(folder: Path) -> Sequence[LogFile]:
    """Return the logs that :func:`~skyward.fleet.node_logs.keep_logs` copied, by node and name."""
    found = ((_NODE.fullmatch(path.parent.name), path) for path in folder.glob("*/*.log"))
    files = (LogFile(node=int(node[1]), instance_id=node[2], path=str(path)) for node, path in found if node)
    return sorted(files, key=lambda file: (file.node, file.instance_id, *_order(file)))


def _order(file: LogFile) -> tuple[bool, int, str]:
    return file.worker is not None, file.worker or 0, file.name


class NodeLogs:
    """Logs of one node. Each read returns the lines since the last one.

    Attributes:
        entry: the node's machine in the ledger.
        gone: True if the machine was gone at the last call of :meth:`files`.
    """

    def __init__(self, entry: LedgerEntry, provider: Provider, transport: Transport, workdir: str) -> None:
        self.entry = entry
        self.gone = False
        self._provider = provider
        self._transport = transport
        self._workdir = workdir
        self._read: dict[str, int] = {}

    async def files(self) -> Sequence[LogFile]:
        """Return the logs on the machine, by name; none once it is gone."""
        (seen,) = await self._provider.describe([self.entry.instance_id or ""])
        self.gone = seen.state is InstanceState.GONE
        if seen.access is None:
            return ()
        found = await self._run("find", self._workdir, "-maxdepth", "1", "-type", "f", "-name", "*.log")
        instance_id = self.entry.instance_id or ""
        files = [LogFile(node=self.entry.node, instance_id=instance_id, path=path) for path in found.splitlines()]
        return sorted(files, key=_order)

    async def news(self, file: LogFile, *, at_most: int | None = None) -> Sequence[str]:
        """Return its complete lines since the last call; at the first call, the last ``at_most``."""
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
    """Open the logs of a machine of the ledger.

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
        transport = seen.access.open()
        try:
            yield NodeLogs(entry, provider, transport, seen.access.workdir)
        finally:
            await transport.close()
    finally:
        await asyncio.shield(provider.close())


# --- logs that are kept ---------------------------------------------------------------------------------------------

_logger = logging.getLogger("skyward.fleet")

_PATIENCE_S: Final = 3.0
_NEWEST_BYTES: Final = 1 << 20
_POOL_BYTES: Final = 64 << 20
"""Bound of the kept logs of a pool; those of the nodes that ended first go first."""
_LOG_NAME: Final = re.compile(r"[\w.-]+\.log", re.ASCII)
_PRINT: Final = 'cd "$1" && for log in *.log; do printf "\\n%s %s\\n" "$2" "$log"; tail -c "$3" "$log"; done'


async def keep_logs(transport: Transport, access: Access, folder: Path, name: str) -> None:
    """Copy the newest mebibyte of each of a node's logs into a folder, within three seconds. Never fails.

    Args:
        transport: the transport to the machine.
        access: the node's place on it.
        folder: the pool's folder of such logs.
        name: the node's folder in it, such as ``"node-0-i-123"``; made if it does not exist.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            if access.on_this_machine:
                logs = await asyncio.to_thread(_read, Path(access.workdir))
            else:
                logs = await _fetch(transport, access.workdir)
            await asyncio.to_thread(_write, folder, name, logs)
    except Exception as error:  # of any class: a log is not worth a pool that does not close
        _logger.debug("the logs of %s were not kept: %s", name, error)


def _read(workdir: Path) -> Mapping[str, bytes]:
    logs: dict[str, bytes] = {}
    for path in workdir.glob("*.log"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _NEWEST_BYTES))
            logs[path.name] = file.read()
    return logs


async def _fetch(transport: Transport, workdir: str) -> Mapping[str, bytes]:
    mark = secrets.token_hex(8)  # no log has this line
    argv = ["sh", "-c", _PRINT, "sh", workdir, mark, str(_NEWEST_BYTES)]
    done = await transport.run(argv, timeout_s=_PATIENCE_S)
    parts = (part.partition("\n") for part in done.stdout.split(f"\n{mark} ")[1:])
    # The machine's host may answer anything, and the names become paths here.
    return {name: text.encode() for name, _, text in parts if _LOG_NAME.fullmatch(name)}


def _write(folder: Path, name: str, logs: Mapping[str, bytes]) -> None:
    target = folder / name
    for log, data in logs.items():
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(target / log, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(data)
    size = 0
    for stat, path in sorted(((path.stat(), path) for path in folder.glob("*/*.log")), key=lambda it: -it[0].st_mtime):
        size += stat.st_size
        if size > _POOL_BYTES:
            path.unlink(missing_ok=True)
