"""Client's end of the control connection, which keeps a node alive and receives its reports."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable

from skyward.base.descriptors import keep_from_forks
from skyward.base.waiting import SYSTEM_CLOCK, NotYet, keep, wait_until
from skyward.errors import AuthenticationError, UnreachableError
from skyward.wire.control import Command, Ending, Message, Ping, Pong, Stop, from_frame, to_frame
from skyward.wire.frames import MAX_FRAME_BYTES, FrameError, TlsIdentity, client_context
from skyward.wire.lane import Connection, turn_to_dial
from skyward.wire.node_config import HANDSHAKE_S, PING_S, SILENT_PINGS

log = logging.getLogger("skyward.fleet.control_client")

_REDIAL_S = 0.1
_LOST = (OSError, FrameError)


class ControlClient:
    """Connection to one node's supervisor until :meth:`close`; sends pings and redials when the link is lost.

    A node whose connection ends without :meth:`stop_node` lives on until its lease expires.

    Args:
        address: ``host:port`` at which the supervisor's control port answers.
        identity: the pool's certificates.
        on_message: called on the loop with every report of the node; after a reconnect the running workers come
            first. Must not block.
        on_lost: called on the loop whenever the connection is lost, also after
            :class:`~skyward.wire.control.Ending`, when the node has ended.
        ping_s: seconds between pings; after three unanswered ones the connection counts as lost.
    """

    def __init__(
        self,
        address: str,
        identity: TlsIdentity,
        *,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
        ping_s: float = PING_S,
    ) -> None:
        self._address = address
        self._context = client_context(identity)
        self._on_message = on_message
        self._on_lost = on_lost
        self._ping_s = ping_s
        self._connection: Connection | None = None
        self._connected = asyncio.Event()
        self._ended = asyncio.Event()
        self._ending = False
        self._standing: dict[type[Command], Command] = {}
        self._dialled: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """True while the connection is up."""
        return self._connection is not None

    async def connect(self, deadline_s: float) -> None:
        """Dial until the node answers, then stay connected in the background.

        Raises:
            AuthenticationError: the node has no certificate of this pool, or refuses ours.
            UnreachableError: no answer within ``deadline_s``.
        """
        self._dialled = await self._dial(deadline_s)
        self._task = asyncio.create_task(
            keep(self._stay_connected, what=f"the connection to the node at {self._address}")
        )
        await self._connected.wait()

    async def send(self, command: Command) -> None:
        """Send a command to the node; while the connection is lost, wait for it.

        Raises:
            UnreachableError: the node has ended, or this client was closed.
        """
        await self._connected.wait()
        if self._connection is None:
            raise UnreachableError(f"the node at {self._address} has ended")
        self._write(self._connection, command)

    def keep_saying(self, command: Command) -> None:
        """Send a command now, unless it was sent, and after every reconnect until another one of its kind replaces it.

        Raises:
            UnreachableError: the node has ended, or this client was closed.
        """
        if self._ended.is_set():
            raise UnreachableError(f"the node at {self._address} has ended")
        if self._standing.get(type(command)) == command:
            return
        self._standing[type(command)] = command
        if self._connection is not None:
            self._write(self._connection, command)

    async def stop_node(self, timeout_s: float, *, restart: bool = False) -> None:
        """Have the node end all its processes and wait for it; no-op when it has ended.

        With ``restart`` another supervisor is to follow on its machine.

        Raises:
            UnreachableError: it has not confirmed within ``timeout_s``.
            AuthenticationError: as :meth:`connect`, when that was cancelled before the node answered.
        """
        if self._ended.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                if self._task is None:  # the opening was cancelled while it dialled, and nobody else would dial again
                    await self.connect(timeout_s)
                await self.send(Stop(restart=restart))
                await self._ended.wait()
        except TimeoutError as error:
            raise UnreachableError(f"the node at {self._address} did not end within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Close the connection. Unless it was stopped before, the node ends when its lease expires. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._dialled is not None:  # cancelled before the background task took the connection over
            self._dialled.close()
            self._dialled = None
        self._finish()

    async def _dial(self, deadline_s: float) -> Connection:
        return await wait_until(
            self._try, deadline_s=deadline_s, interval_s=_REDIAL_S, what=f"the node at {self._address} to answer"
        )

    async def _try(self) -> Connection | NotYet:
        # Not asyncio's streams: their TLS has buffers of 256 KiB a connection, the most of what a node costs here.
        try:
            sock = keep_from_forks(socket.socket())
            connection = Connection(sock, self._context, largest_bytes=MAX_FRAME_BYTES)
        except OSError as error:  # no descriptor is free
            return NotYet(str(error))
        try:
            async with turn_to_dial(self._context), asyncio.timeout(HANDSHAKE_S):
                await connection.connect(self._address)
                await connection.handshake()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise AuthenticationError(f"the node at {self._address} is not of this pool: {error}") from error
        except OSError as error:
            connection.close()
            return NotYet(str(error))
        except BaseException:
            connection.close()
            raise
        return connection

    async def _stay_connected(self) -> None:
        while not self._ending:
            dialled, self._dialled = self._dialled, None
            await self._converse(dialled or await self._dial(math.inf))
            self._on_lost()
            await SYSTEM_CLOCK.sleep(0 if self._ending else _REDIAL_S)
        self._finish()

    async def _converse(self, connection: Connection) -> None:
        self._connection = connection
        self._connected.set()
        for command in self._standing.values():
            self._write(connection, command)
        pinging = asyncio.create_task(self._ping(connection))
        try:
            while True:
                async with asyncio.timeout(self._ping_s * SILENT_PINGS):
                    message = from_frame(await connection.next_message())
                self._ending = self._ending or isinstance(message, Ending)
                if not isinstance(message, Pong):
                    self._deliver(message)
        except TimeoutError:
            log.info("the node at %s has not answered %d pings", self._address, SILENT_PINGS)
        except _LOST as error:
            level = logging.DEBUG if self._ending else logging.INFO  # expected when a node ends
            log.log(level, "connection to the node at %s lost: %s", self._address, error)
        except Exception:  # an unreadable message; the next connection may be sound
            log.exception("connection to the node at %s given up", self._address)
        finally:
            self._connected.clear()
            self._connection = None
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
            asyncio.get_running_loop().remove_writer(connection)
            connection.close()

    def _write(self, connection: Connection, command: Command) -> None:
        connection.write(to_frame(command))
        self._send_written(connection)

    def _send_written(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            if connection.send():
                loop.remove_writer(connection)
            else:
                loop.add_writer(connection, self._send_written, connection)
        except OSError:  # which its reader notices
            loop.remove_writer(connection)

    def _deliver(self, message: Message) -> None:
        try:
            self._on_message(message)
        except Exception:  # an error of the callback must not cost the node its connection
            log.exception("a message of the node at %s could not be handled: %s", self._address, message)

    async def _ping(self, connection: Connection) -> None:
        n = 0
        while True:
            n += 1
            self._write(connection, Ping(n=n))
            await SYSTEM_CLOCK.sleep(self._ping_s)

    def _finish(self) -> None:
        self._ended.set()
        self._connected.set()
