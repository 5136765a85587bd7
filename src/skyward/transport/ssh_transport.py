"""The transport to machines that answer over SSH: one connection each for commands, files and forwards."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, cast

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from skyward.errors import UnreachableError
from skyward.transport._command import PUT_COMMAND, CommandExit, Execution, exit_code, put_arguments, script
from skyward.transport._paramiko import RefusedSessionError
from skyward.transport._ssh_connection import SSHConnection, SSHConnections
from skyward.transport.access import SSHTarget
from skyward.transport.base import Completed

__all__ = ["SshTransport"]

_CONNECTIONS: Final = SSHConnections()
_TOKEN_BYTES = 16
_REFUSED_FOR_S = 10.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_SAID = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Read-only file system": errno.EROFS,
    "Permission denied": errno.EACCES,
    "Operation not permitted": errno.EPERM,
    "Is a directory": errno.EISDIR,
    "Not a directory": errno.ENOTDIR,
    "File exists": errno.ENOTDIR,
    "File name too long": errno.ENAMETOOLONG,
}
"""What programs print in the C locale, and which number it means."""


class SshTransport:
    """Implements :class:`~skyward.transport.base.Transport`; commands start in the user's home.

    Transports to equal targets share one connection, whatever event loop they are used on. It is made at the first
    use, and made again when it was lost. An exit status of 129 to 192 is taken for a signal's: a shell tells no more.

    Args:
        target: who answers, and how one logs in.
    """

    def __init__(self, target: SSHTarget) -> None:
        self._target = target
        self._connection: SSHConnection | None = None
        self._closed = False
        self._forwards: dict[tuple[str, int], tuple[str, int]] = {}

    @property
    def connected(self) -> bool:
        """Whether there is a connection now, as far as is known."""
        return self._connection is not None and self._connection.connected

    @property
    def last_error(self) -> str:
        """Why the last attempt to connect failed, or the last connection ended; empty if neither is so."""
        return self._connection.last_error if self._connection is not None else ""

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        """See :meth:`Transport.run <skyward.transport.base.Transport.run>`.

        Raises:
            ConfigurationError: a variable's name is none that a shell can set.
        """
        try:
            async with asyncio.timeout(timeout_s):
                ended = await self._execute(argv, dict(env or {}), [memoryview(stdin)])
        except TimeoutError as error:
            away = "" if self.connected else f"; there is no connection yet: {self.last_error or 'no answer'}"
            raise UnreachableError(f"{argv[0]} did not end within {timeout_s:g} s on {self._target}{away}") from error
        return Completed(
            exit_code=exit_code(self._status(ended, argv[0])),
            stdout=ended.stdout.decode(errors="replace"),
            stderr=ended.stderr.decode(errors="replace"),
        )

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """See :meth:`Transport.put <skyward.transport.base.Transport.put>`.

        Raises:
            OSError: the machine could not write it: its disk is full, or the like.
        """
        parts = [data] if isinstance(data, bytes | memoryview) else data
        views = [memoryview(part).cast("B") for part in cast("Sequence[bytes | memoryview]", parts)]
        nbytes = sum(view.nbytes for view in views)
        argv = ["sh", "-c", PUT_COMMAND, *put_arguments(path, nbytes, mode)]
        ended = await self._execute(argv, {}, views, to_the_end=True)
        if self._status(ended, f"writing {path}"):
            raise _write_error(ended.stderr.decode(errors="replace").strip(), path, self._target)

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """See :meth:`Transport.forward <skyward.transport.base.Transport.forward>`.

        Connects nowhere yet. A connection to that place is reset when the machine, or its port, is not to be had.
        """
        connection = self._acquired()
        if (host, port) not in self._forwards:
            self._forwards[host, port] = connection.listen(host, port)
        return self._forwards[host, port]

    async def close(self) -> None:
        """See :meth:`Transport.close <skyward.transport.base.Transport.close>`."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            for host, port in self._forwards:
                connection.unlisten(host, port)
            await asyncio.shield(asyncio.to_thread(_CONNECTIONS.release, connection))

    async def _execute(
        self, argv: Sequence[str], env: Mapping[str, str], views: Sequence[memoryview], *, to_the_end: bool = False
    ) -> CommandExit:
        token = secrets.token_hex(_TOKEN_BYTES)
        nbytes = None if to_the_end else sum(view.nbytes for view in views)
        line = script(argv, env, token=token, input_bytes=nbytes)
        connection = self._acquired()
        execution = Execution(connection.pump, [line, *views], token.encode(), end_input=to_the_end)
        turn = connection.commands.acquire()
        try:
            await asyncio.wrap_future(turn)
            await self._start(connection, execution)
            return await asyncio.wrap_future(execution.ended)
        except Exception as error:
            explained = self._explained(error, argv[0])
            if explained is error:
                raise
            raise explained from error
        finally:
            execution.abandon()
            if not turn.cancelled():
                connection.commands.release()

    async def _start(self, connection: SSHConnection, execution: Execution) -> None:
        """A server that allows no further command may have one that has just ended still in its books."""
        await asyncio.wrap_future(connection.perform(lambda client: client.is_active()))
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RefusedSessionError),
            stop=stop_after_delay(_REFUSED_FOR_S),
            wait=wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            reraise=True,
        )

        async def start() -> None:
            await asyncio.wrap_future(connection.perform(execution.start))

        await retrying(start)

    def _explained(self, error: Exception, what: str) -> BaseException:
        from skyward.transport._errors import translated

        return translated(error, f"{self._target} did not start {what}")

    def _acquired(self) -> SSHConnection:
        if self._closed:
            raise UnreachableError(f"the transport to {self._target} is closed")
        if self._connection is None:
            self._connection = _CONNECTIONS.acquire((self._target,))
        return self._connection

    def _status(self, ended: CommandExit, what: str) -> int:
        if ended.lost:
            why = self.last_error
            raise UnreachableError(f"the connection to {self._target} was lost during {what}{why and f': {why}'}")
        if ended.status is None:
            said = (ended.stderr + ended.stdout).decode(errors="replace").strip()[-500:]
            raise UnreachableError(
                f"the shell on {self._target} ended before {what} did; it said: {said or 'nothing'}. "
                f"Check that the user may log in there, and that /bin/sh is a POSIX shell"
            )
        return ended.status


def _write_error(text: str, path: str, target: SSHTarget) -> OSError:
    number = next((number for said, number in _SAID.items() if said in text), errno.EIO)
    return OSError(number, f"{os.strerror(number)}, writing {path} on {target}: {text}", path)
