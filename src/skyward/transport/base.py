"""The seam between Skyward and a machine: how commands, files and connections reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Completed", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a command left behind.

    Attributes:
        exit_code: as the shell would say it; negative for a signal.
        stdout: everything it printed, decoded as UTF-8 with replacement.
        stderr: likewise.
    """

    exit_code: int
    stdout: str
    stderr: str


class Transport(Protocol):
    """One machine, reached. Four verbs; all of them async, none of them blocks the loop.

    Errors: :class:`~skyward.errors.AuthenticationError` (never retried) and
    :class:`~skyward.errors.UnreachableError` (the caller decides whether to try again). A command that exits non-zero
    is not an error here.
    """

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        """Run one command to its end. ``argv`` is passed as it is, never through a shell. Not idempotent.

        Past ``timeout_s`` the command is killed with its process group and ``UnreachableError`` is raised. Returns
        when the command itself exits, even if a daemon it started still holds inherited streams.
        """
        ...

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """Write ``data`` to ``path``, whole or not at all (a temporary name, then a rename). Idempotent.

        Missing parent folders are made (0700). The memory is read in a thread and must not change meanwhile.
        """
        ...

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """The (host, port) on this side at which the node's ``host:port`` answers. Idempotent and stable for life."""
        ...

    async def close(self) -> None:
        """Give up the connection and its forwards. Idempotent. Nothing on the machine ends because of it."""
        ...
