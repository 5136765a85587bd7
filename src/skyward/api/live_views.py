"""Views of an open pool: a notebook's output that changes in place, and snapshots for other processes of its user.

``skyward top`` connects to a Unix socket in the pool's folder, which no one else can enter, and reads one line of JSON.
Nothing is computed while no one connects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

from skyward.base.descriptors import keep_from_forks
from skyward.base.loop import LoopThread
from skyward.base.platform import socket_path, unix_socket
from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.display.tables import PoolView
from skyward.events.snapshot import PoolSnapshot

_REDRAW_EVERY_S: Final = 1.0


class PoolOutput:
    """View of a pool in the cells that show it; redrawn once a second while it changes, until :meth:`close`.

    Args:
        loop: the loop of the pool.
        take: returns a snapshot of the pool.
        make_handle: returns the handle of a new output; by default IPython's ``DisplayHandle``.
        clock: clock between two looks.
    """

    def __init__(
        self,
        loop: LoopThread,
        take: Take,
        *,
        make_handle: Callable[[], Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._loop = loop
        self._take = take
        self._make_handle = make_handle or _ipython_handle
        self._clock = clock
        self._lock = threading.Lock()
        self._handle: Any = None
        self._snapshot: PoolSnapshot | None = None
        self._shown: PoolView | None = None
        self._closed = False

    def show(self) -> None:
        """Show the pool in the present cell; all cells that show it share one output."""
        self._snapshot = self._loop.call(self._take())
        view = PoolView.of(self._snapshot, dated=True)
        with self._lock:
            first = self._handle is None
            handle = self._handle = self._handle or self._make_handle()
            self._shown = view
            handle.display(_data(view), raw=True)
        if first:
            self._loop.spawn(self._follow())

    def close(self) -> None:
        """Leave the last state, marked as closed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._handle is not None and self._snapshot is not None:
                self._handle.update(_data(PoolView.of(self._snapshot, closed=True, dated=True)), raw=True)

    async def _follow(self) -> None:
        while not self._closed:
            await self._clock.sleep(_REDRAW_EVERY_S)
            self._snapshot = await self._take()
            view = PoolView.of(self._snapshot, dated=True)
            if view != self._shown:
                await asyncio.to_thread(self._redraw, view)  # it writes to a socket of the kernel

    def _redraw(self, view: PoolView) -> None:
        with self._lock:
            if not self._closed:
                self._shown = view
                self._handle.update(_data(view), raw=True)


def _data(view: PoolView) -> dict[str, str]:
    return {"text/plain": view.text(), "text/html": view.html()}


def _ipython_handle() -> Any:
    from IPython.display import DisplayHandle  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return cast("Any", DisplayHandle)()


_NAME: Final = "snapshot"
_ANSWER_S: Final = 5.0
_LARGEST: Final = 64 << 20
_logger = logging.getLogger("skyward")

Take = Callable[[], Coroutine[Any, Any, PoolSnapshot]]


def serve_snapshots(folder: Path, loop: LoopThread, take: Take, closing: ExitStack) -> None:
    """Serve the snapshots that ``take`` returns until ``closing``; without a socket, log that and go on."""
    servers: list[asyncio.Server] = []

    async def close() -> None:
        (folder / _NAME).unlink(missing_ok=True)
        for server in servers:
            server.close()

    closing.callback(lambda: loop.finish(close()))  # before there is a server: Ctrl-C may come in the same moment as it
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

    listening = keep_from_forks(unix_socket())
    try:
        with socket_path(folder, _NAME) as address:
            listening.bind(address)
        servers.append(await asyncio.start_server(answer, sock=listening))
    except BaseException:
        listening.close()
        raise


def read_snapshot(folder: Path) -> PoolSnapshot:
    """Return the present snapshot of the open pool with this folder.

    Raises:
        OSError: no process answers there.
        ValueError: the answer is that of another version of Skyward.
    """
    parts: list[bytes] = []
    with unix_socket() as connection, socket_path(folder, _NAME) as address:
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
