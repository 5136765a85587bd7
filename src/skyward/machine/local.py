"""This machine: commands are subprocesses, forwards are the ports themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from skyward.base.platform import kill_group
from skyward.errors import UnreachableError
from skyward.machine.access import Access, Completed, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAccess:
    """:class:`~skyward.machine.access.Access` to this machine.

    Attributes:
        address: the loopback address that the node's ports bind to.
        workdir: the node's own folder.
        cache, bind, on_this_machine, boot_s, other_key_s: fixed values; see :class:`~skyward.machine.access.Access`.
    """

    address: str
    workdir: str
    cache: str = field(default="", init=False, repr=False)
    bind: str = field(default="", init=False, repr=False)
    on_this_machine: bool = field(default=True, init=False, repr=False)
    boot_s: float = field(default=0.0, init=False, repr=False)
    other_key_s: float = field(default=0.0, init=False, repr=False)

    def open(self) -> LocalTransport:
        """Return the transport to it."""
        return LocalTransport(self)

    def move(self, present: Access, transport: Transport) -> LocalAccess:  # noqa: ARG002
        """Return this access, and leave ``transport`` alone, whatever ``present`` is: the machine does not move."""
        return self


_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class LocalTransport:
    """Implementation of :class:`~skyward.machine.access.Transport` for this machine.

    Commands start in the access's ``workdir``. They inherit this process's environment, overridden by ``env``.
    """

    def __init__(self, access: LocalAccess) -> None:
        self._workdir = Path(access.workdir)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """Run a command: :meth:`Transport.run <skyward.machine.access.Transport.run>`."""
        self._workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Files, not pipes: a pipe ends only when the last daemon that inherited it does.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            await asyncio.to_thread(given.write, stdin)
            given.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    env=os.environ | dict(env or {}),
                    cwd=self._workdir,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                return Completed(exit_code=_NOT_FOUND, stdout="", stderr=str(error))
            except PermissionError as error:
                return Completed(exit_code=_NOT_EXECUTABLE, stdout="", stderr=str(error))
            exit_code = await _wait(process, argv, timeout_s)
            return Completed(exit_code=exit_code, stdout=_text(out), stderr=_text(err))

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """Write a file: :meth:`Transport.put <skyward.machine.access.Transport.put>`."""
        parts = [data] if isinstance(data, bytes | memoryview) else data
        await asyncio.to_thread(_write, cast("Sequence[bytes | memoryview]", parts), Path(path), mode)

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """Return the address itself: :meth:`Transport.forward <skyward.machine.access.Transport.forward>`."""
        return (host, port)

    async def close(self) -> None:
        """Do nothing: :meth:`Transport.close <skyward.machine.access.Transport.close>`."""


async def _wait(process: asyncio.subprocess.Process, argv: Sequence[str], timeout_s: float) -> int:
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    except TimeoutError as error:
        raise UnreachableError(f"{argv[0]} did not end within {timeout_s:g} s on this machine: killed") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                kill_group(process.pid)  # its children too: the session is its own
            await asyncio.shield(process.wait())  # reaped even when cancelled: no zombie may stay


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _write(parts: Sequence[bytes | memoryview], path: Path, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(descriptor, "wb") as file:
            file.writelines(parts)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)  # no half file may stay, Ctrl-C included
        raise
