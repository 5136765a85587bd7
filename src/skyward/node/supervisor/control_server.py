"""Node's end of the control connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, cast, get_args

from skyward.wire.control import Command, Report, from_frame, to_frame
from skyward.wire.frames import FrameError, TlsIdentity, read_frame, server_context, write_frame
from skyward.wire.listening import StreamPort, Streams

log = logging.getLogger("skyward.wire.control")

_FAREWELL_S = 10.0
_BACKLOG_BYTES = 1 << 20
_COMMANDS: tuple[type, ...] = get_args(Command)


class ControlHandler(Protocol):
    """Callbacks of the server. None of them blocks."""

    def joined(self) -> None:
        """Note that a client with the pool's certificate has connected."""
        ...

    def left(self) -> None:
        """Note that the connection was closed."""
        ...

    def told(self, command: Command, reply: Callable[[Report], None]) -> None:
        """Handle a message of the client."""
        ...

    def state(self) -> list[Report]:
        """Return the messages with which every new connection begins."""
        ...


class ControlServer:
    """Server for the pool's client, which may be connected twice for a moment when it redials."""

    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler
        self._port: StreamPort | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, address: str, identity: TlsIdentity) -> int:
        """Bind a free port of ``address`` and return it. Peers without a certificate of the pool are refused."""
        self._port = StreamPort(address, server_context(identity), self._serve)
        return self._port.number

    def broadcast(self, report: Report) -> None:
        """Send a message to every client."""
        for writer in tuple(self._writers):
            _send(writer, report)

    async def close(self) -> None:
        """Flush and close every connection, and stop listening. A client that does not read is waited for briefly."""
        if self._port is not None:
            await self._port.close()
        for writer in tuple(self._writers):
            writer.close()
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        except TimeoutError:
            log.info("a client is away, and does not hear the end")
            for writer in tuple(self._writers):
                writer.transport.abort()

    async def _serve(self, streams: Streams) -> None:
        writer = streams.writer
        self._writers.add(writer)
        self._handler.joined()
        try:
            for report in self._handler.state():
                _send(writer, report)
            await self._listen_to(streams.reader, writer)
        except (OSError, asyncio.IncompleteReadError) as error:
            log.info("a client has left: %r", error)
        except FrameError:
            log.exception("a client was dropped")
        finally:
            self._writers.discard(writer)
            self._handler.left()
            writer.close()

    async def _listen_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            message = from_frame(await read_frame(reader))
            if not isinstance(message, _COMMANDS):
                raise FrameError(f"a client may not say {message!r}")
            self._handler.told(cast("Command", message), lambda report: _send(writer, report))


def _send(writer: asyncio.StreamWriter, report: Report) -> None:
    transport: Any = writer.transport
    if transport.is_closing():
        return
    if transport.get_write_buffer_size() > _BACKLOG_BYTES:
        # The client is away; it learns the state when it comes back.
        transport.abort()
        return
    write_frame(writer, to_frame(report))
