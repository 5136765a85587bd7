"""The seam between Skyward and a machine: commands, files and connections on their way to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Completed", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Outcome of a command that ran to its end.

    Attributes:
        exit_code: the command's exit status; negative for the signal that ended it.
        stdout: the whole standard output, decoded as UTF-8 with replacement.
        stderr: the whole standard error, decoded in the same way.
    """

    exit_code: int
    stdout: str
    stderr: str


class Transport(Protocol):
    """Access to one machine. Four verbs; all of them are async, and none blocks the loop.

    Errors: :class:`~skyward.errors.AuthenticationError` (never retried) and
    :class:`~skyward.errors.UnreachableError` (the caller decides about a retry). A command that exits non-zero is not
    an error here.
    """

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """Run one command to its end. ``argv`` is passed as it is, never through a shell. Not idempotent.

        ``env`` adds variables to the environment of the machine's sessions; ``stdin`` is the whole standard input, and
        is not copied.

        After ``timeout_s`` the command is killed with its process group and ``UnreachableError`` is raised. Returns
        when the command itself exits, even if a daemon that it started still holds inherited streams.
        """
        ...

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """Write ``data`` to ``path``, whole or not at all (a temporary name, then a rename). Idempotent.

        Missing parent folders are created (mode 0700). A thread reads the memory, which must not change meanwhile.
        """
        ...

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """Return the (host, port) on this side at which the node's ``host:port`` answers.

        Idempotent; the pair stays the same for the life of the transport.
        """
        ...

    async def close(self) -> None:
        """Close the connection and its forwards. Idempotent. Processes on the machine are not affected."""
        ...
