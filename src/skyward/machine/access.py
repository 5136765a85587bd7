"""The seam between Skyward and a machine: how it is reached, and what is done over that way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

TAGS_FILE = "instance.json"
"""File in a node's folder with the tags of its instance, for providers that keep no record of their own."""


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


class Access(Protocol):
    """How a machine is reached. An immutable value: providers return it with each description of the machine.

    :class:`~skyward.machine.local.LocalAccess` and :class:`~skyward.machine.ssh.SSHAccess` are the two that come
    with Skyward; a provider may bring another.
    """

    @property
    def address(self) -> str:
        """Address at which other machines of its network reach it."""
        ...

    @property
    def workdir(self) -> str:
        """The node's own folder on it, absolute."""
        ...

    @property
    def cache(self) -> str:
        """Folder of environments, absolute; it outlives the node. Unused on this machine."""
        ...

    @property
    def bind(self) -> str:
        """Address of one of its interfaces, to which the node's ports bind; empty for :attr:`address`."""
        ...

    @property
    def on_this_machine(self) -> bool:
        """True if it is this machine: its files are read directly, and environments are those of this process."""
        ...

    @property
    def boot_s(self) -> float:
        """Seconds for which a new machine may refuse every login while it is set up; 0 for one that is ready."""
        ...

    @property
    def other_key_s(self) -> float:
        """Seconds for which a new machine may show another host key: its image's, or a previous machine's."""
        ...

    def open(self) -> Transport:
        """Return a transport to the machine. Does not block and sends nothing; it connects on first use."""
        ...

    def move(self, present: Access, transport: Transport) -> Access:
        """Return the access to use from now on, when the provider describes the machine by ``present``.

        Where the way to it has changed, redirect ``transport``, which keeps its forwards; otherwise, and where machines
        do not move, return ``self``. Does not block.
        """
        ...
