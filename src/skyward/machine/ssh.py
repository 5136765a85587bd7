"""Transport to machines over SSH: one connection per machine carries commands, files and forwards."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar, cast

from skyward.errors import ConfigurationError, UnreachableError
from skyward.machine.access import Access, Completed, Transport
from skyward.machine.paramiko_parts import Client
from skyward.machine.ssh_commands import PUT_COMMAND, CommandExit, exit_code, put_arguments, run_script, script
from skyward.machine.ssh_config import SSHTarget, route, settings
from skyward.machine.ssh_connection import SSHConnection, SSHConnections
from skyward.machine.ssh_probes import PortState, key_at, probe_port, shown_key

T = TypeVar("T")

_CONNECTIONS: Final = SSHConnections()
_TOKEN_BYTES = 16
_WRITE_ERRORS = {
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
"""Error numbers by the text that programs print for them in the C locale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHAccess:
    """:class:`~skyward.machine.access.Access` to a machine over SSH.

    Attributes:
        target: the SSH server and the credentials.
        address: address at which other machines of its network reach it.
        workdir: the node's own folder, absolute.
        cache: folder of environments, absolute; it outlives the node.
        boot_s: seconds for which a new machine may refuse every login while it is set up.
        other_key_s: seconds for which it may show another host key: that of its image, or of the machine that had its
            address before.
        bind: address of one of its interfaces, to which the node's ports bind. Behind NAT it differs from ``address``;
            empty means that it does not.
        on_this_machine: False.
    """

    target: SSHTarget
    address: str
    workdir: str
    cache: str = ""
    boot_s: float = 0.0
    other_key_s: float = 10.0
    bind: str = ""
    on_this_machine: bool = field(default=False, init=False, repr=False)

    def __str__(self) -> str:
        return str(self.target)

    def open(self) -> SshTransport:
        """Return a transport to the machine; transports to equal targets share one connection."""
        return SshTransport(self.target)

    def move(self, present: Access, transport: Transport) -> SSHAccess:
        """Have ``transport`` dial the machine's server in ``present`` from now on; its folders stay."""
        if not isinstance(present, SSHAccess) or not isinstance(transport, SshTransport):
            return self
        if (self.target.host, self.target.port) == (present.target.host, present.target.port):
            return self
        transport.move(present.target)
        return replace(self, target=present.target)


def check_configuration(target: SSHTarget) -> None:
    """Read the SSH configuration for a target, and for its jump hosts; nothing is dialled. Blocks for milliseconds.

    Raises:
        ConfigurationError: it cannot be read, or demands what Skyward cannot do.
    """
    for hop in (*route(target), target):
        settings(hop)


class SshTransport:
    """Implementation of :class:`~skyward.machine.access.Transport` over SSH; commands start in the user's home.

    Transports to equal targets share one connection, also across event loops. It is opened at the first use, and
    opened again after a loss. An exit status of 129 to 192 counts as a signal's: a shell reports no more than that.

    Args:
        target: the SSH server and the credentials.
    """

    def __init__(self, target: SSHTarget) -> None:
        self._target = target
        self._connection: SSHConnection | None = None
        self._closed = False
        self._forwards: dict[tuple[str, int], tuple[str, int]] = {}

    @property
    def connected(self) -> bool:
        """True while the connection is open, as far as is known."""
        return self._connection is not None and self._connection.connected

    @property
    def last_error(self) -> str:
        """Reason of the last failed attempt, or of the last connection's end; empty if there is none."""
        return self._connection.last_error if self._connection is not None else ""

    def keep_connection(self) -> None:
        """Keep the connection open for other transports to the same target; sends nothing."""
        self._acquired()

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """Run a command: :meth:`Transport.run <skyward.machine.access.Transport.run>`.

        Raises:
            ConfigurationError: a shell cannot set a variable of such a name.
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
        """Write a file: :meth:`Transport.put <skyward.machine.access.Transport.put>`.

        Raises:
            OSError: the machine could not write it, for example because its disk is full.
        """
        parts = [data] if isinstance(data, bytes | memoryview) else data
        views = [memoryview(part).cast("B") for part in cast("Sequence[bytes | memoryview]", parts)]
        nbytes = sum(view.nbytes for view in views)
        argv = ["sh", "-c", PUT_COMMAND, *put_arguments(path, nbytes, mode)]
        ended = await self._execute(argv, {}, views, to_the_end=True)
        if self._status(ended, f"writing {path}"):
            raise _write_error(ended.stderr.decode(errors="replace").strip(), path, self._target)

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """Open a local port: :meth:`Transport.forward <skyward.machine.access.Transport.forward>`.

        Does not connect yet. A connection to the local port is reset when the machine, or its port, does not answer.
        """
        connection = self._acquired()
        if (host, port) not in self._forwards:
            self._forwards[host, port] = connection.listen(host, port)
        return self._forwards[host, port]

    def move(self, target: SSHTarget) -> None:
        """Reach the same machine at another address from now on; forwards keep their local ports.

        Commands that wait for a connection to the former address fail as unreachable, and may be repeated.
        """
        self._target = target
        if self._connection is not None:
            _CONNECTIONS.move(self._connection, target)

    async def host_key(self) -> str:
        """Return the host key that the machine has shown: ``"ssh-ed25519 AAAA…"``.

        Raises:
            AuthenticationError: the user was refused.
            UnreachableError: the machine does not answer.
        """
        return await asyncio.wrap_future(self._acquired().perform(shown_key))

    async def key_at(self, host: str, port: int, *, kind: str, timeout_s: float) -> str:
        """Return the key of that kind of the SSH server that the machine finds at ``host:port``.

        Nobody logs in there. The machine has ``timeout_s`` to connect, then the server ten seconds to show its key.

        Raises:
            UnreachableError: the machine does not reach it, may not try, or no such server answers there.
        """
        return await self._dialled(
            lambda client: key_at(client, host, port, kind=kind, timeout_s=timeout_s), f"{host} port {port}"
        )

    async def probe_port(self, host: str, port: int, *, timeout_s: float) -> PortState:
        """Have the machine connect to ``host:port``, and return the outcome.

        Raises:
            UnreachableError: the machine itself does not answer.
        """
        return await self._dialled(
            lambda client: probe_port(client, host, port, timeout_s=timeout_s), f"{host} port {port}"
        )

    async def check_login(self) -> None:
        """Return if the machine runs commands as they are given; takes a few seconds at most.

        Raises:
            AuthenticationError: the user was refused.
            ConfigurationError: it does not; the message names the cause, such as a startup file that reads the input.
            UnreachableError: the machine does not answer, or allows no further command.
        """
        from skyward.machine.ssh_commands import Login, login_fault, try_login  # imports paramiko

        connection = self._acquired()

        async def check() -> Login:
            async with connection.commands:
                return await connection.start(lambda client: try_login(client, connection.gate))

        with self._translated("did not start a command"):
            login = await asyncio.wrap_future(connection.submit(check))
        if fault := login_fault(login):
            raise ConfigurationError(f"{self._target} runs no commands: {fault}")

    async def _dialled(self, dial: Callable[[Client], T], where: str) -> T:
        with self._translated(f"does not reach {where}"):
            return await asyncio.wrap_future(self._acquired().perform(dial))

    async def close(self) -> None:
        """Release the shared connection: :meth:`Transport.close <skyward.machine.access.Transport.close>`."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            for host, port in self._forwards:
                connection.unlisten(host, port)
            # In a thread, as the last release waits for the connection's threads; shielded, as it must not end halfway.
            # No task: asyncio.run() cancels those that are left, also one whose thread has not started.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, _CONNECTIONS.release, connection))

    async def _execute(
        self, argv: Sequence[str], env: Mapping[str, str], views: Sequence[memoryview], *, to_the_end: bool = False
    ) -> CommandExit:
        # Random, so that no output of the command or of a login script can contain it.
        token = secrets.token_hex(_TOKEN_BYTES)
        # With the length, a watcher behind the input sees the end of the connection and kills the command.
        nbytes = None if to_the_end else sum(view.nbytes for view in views)
        line = script(argv, env, token=token, input_bytes=nbytes)
        connection = self._acquired()
        run = partial(run_script, connection, [line, *views], token.encode(), end_input=to_the_end)
        with self._translated(f"did not start {argv[0]}"):
            return await asyncio.wrap_future(connection.submit(run))

    @contextmanager
    def _translated(self, failure: str) -> Generator[None]:
        """Raise exceptions of paramiko and the system as Skyward's own."""
        try:
            yield
        except Exception as error:
            from skyward.machine.ssh_login import translated  # imports paramiko

            explained = translated(error, f"{self._target} {failure}")
            if explained is error:
                raise
            raise explained from error

    def _acquired(self) -> SSHConnection:
        if self._closed:
            raise UnreachableError(f"the transport to {self._target} is closed: open a new one")
        if self._connection is None:
            self._connection = _CONNECTIONS.acquire((self._target,))
        return self._connection

    def _status(self, ended: CommandExit, what: str) -> int:
        if ended.lost:
            reason = self.last_error
            raise UnreachableError(f"the connection to {self._target} was lost during {what}{reason and f': {reason}'}")
        if ended.status is None:
            printed = (ended.stderr + ended.stdout).decode(errors="replace").strip()[-500:]
            raise UnreachableError(
                f"the shell on {self._target} ended before {what} did; its output: {printed or 'none'}. "
                f"Check that the user may log in there, and that /bin/sh is a POSIX shell"
            )
        return ended.status


def _write_error(text: str, path: str, target: SSHTarget) -> OSError:
    number = next((number for printed, number in _WRITE_ERRORS.items() if printed in text), errno.EIO)
    return OSError(number, f"{os.strerror(number)}, writing {path} on {target}: {text}", path)
