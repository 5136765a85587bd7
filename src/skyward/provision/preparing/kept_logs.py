"""Logs of a node's own processes, copied to this machine before its machine ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from skyward.transport.access import Access, Transport

__all__ = ["keep_logs"]

_logger = logging.getLogger("skyward.provision")

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
