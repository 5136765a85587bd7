"""Snapshots of an open pool for other processes of its user: one line of JSON for each connection to a Unix socket.

The socket lies in the pool's folder, which nobody else can enter. Nothing is computed while nobody connects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from skyward._concurrency.forking import keep_from_forks
from skyward._concurrency.linux_parts import socket_path
from skyward._concurrency.loop import LoopThread
from skyward.events.snapshot import PoolSnapshot

__all__ = ["read_snapshot", "serve_snapshots"]

_NAME: Final = "snapshot"
_ANSWER_S: Final = 5.0
_LARGEST: Final = 64 << 20
_logger = logging.getLogger("skyward")

Take = Callable[[], Coroutine[Any, Any, PoolSnapshot]]


def serve_snapshots(folder: Path, loop: LoopThread, take: Take, closing: ExitStack) -> None:
    """Serve the snapshots that ``take`` returns until ``closing``; without a socket, log that and go on."""
    servers: list[asyncio.Server] = []

    def close() -> None:
        with suppress(FileNotFoundError):
            (folder / _NAME).unlink()
        loop.finish(_close(servers))

    closing.callback(close)  # before there is a server: Ctrl-C may come in the same moment as it
    try:
        loop.finish(_serve(folder, take, servers))
    except OSError as error:
        _logger.debug("`skyward top` cannot see this pool: %s", error)


async def _serve(folder: Path, take: Take, servers: list[asyncio.Server]) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                writer.write(json.dumps((await take()).to_dict()).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError) as error:
            _logger.debug("a snapshot was not read: %s", error)
            writer.transport.abort()  # else its text stays in memory for as long as a stuck reader lives
        finally:
            writer.close()

    listening = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        with socket_path(folder, _NAME) as address:
            listening.bind(address)
        servers.append(await asyncio.start_unix_server(answer, sock=listening))
    except BaseException:
        listening.close()
        raise


async def _close(servers: list[asyncio.Server]) -> None:
    for server in servers:
        server.close()


def read_snapshot(folder: Path) -> PoolSnapshot:
    """Return the present snapshot of the open pool with this folder.

    Raises:
        OSError: no process answers there.
        ValueError: the answer is that of another version of Skyward.
    """
    parts: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, socket_path(folder, _NAME) as address:
        connection.settimeout(_ANSWER_S)
        connection.connect(address)
        while sum(map(len, parts)) < _LARGEST and (part := connection.recv(1 << 20)):
            parts.append(part)
    answer = b"".join(parts)
    if not answer.endswith(b"\n"):
        raise ConnectionResetError("the answer was cut off")
    try:
        return PoolSnapshot.from_dict(json.loads(answer))
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
