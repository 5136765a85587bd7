"""Machines behind a fake vendor's records, virtual ones or containers."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from skyward.testing.loopback import reserve_network

__all__ = ["Room"]

_THREADS = 16
_JOIN_S = 30.0
_BOOT_S = 60.0


class Machine(Protocol):
    """One machine, from boot to its end. Verbs block and are thread-safe; ``end`` is idempotent."""

    folder: Path

    def boot(self) -> None: ...

    def end(self) -> None: ...

    def elapse(self) -> None: ...


M = TypeVar("M", bound=Machine)
Orders = TypeVar("Orders")


class Room(ABC, Generic[M, Orders]):
    """Machines of one fake vendor, each at an address of its own. A context manager.

    Args:
        folder: folder of the machines; None for addresses without machines.
        cache: folder of environments, shared by all machines.
        block: addresses are ``127.<block>.x.y``.

    Attributes:
        impostors: True for machines from now on that come up with another host key than ordered.
        dead: True for machines from now on that never come up.
    """

    port: ClassVar[int]
    """Port by which the room reserves its addresses."""

    def __init__(self, folder: Path | None, *, cache: Path | None, block: int) -> None:
        self.impostors = False
        self.dead = False
        self.folder = folder
        self.cache = cache or (folder / "cache" if folder else None)
        self.machines: dict[str, M] = {}
        self._block = block
        self._network = f"127.{block}.0"
        self._hosts = itertools.cycle(range(2, 255))  # of the first 253 machines, the oldest ended long ago
        self._boots: dict[str, Future[None]] = {}
        self._ends: list[Future[None]] = []
        self._stack = contextlib.ExitStack()

    @abstractmethod
    def make(self, folder: Path, address: str, orders: Orders, keys: Sequence[str], off: Callable[[], None]) -> M:
        """Return a new machine; ``off`` is called once it has powered itself off."""

    def prepare(self, folder: Path) -> None:
        """Prepare the folder of the machines."""

    def comes_up(self) -> bool:
        """Return whether a new machine boots."""
        return True

    def __enter__(self) -> Self:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.prepare(self.folder)
            self._network = self._stack.enter_context(reserve_network(self._block, self.port))
            self._threads = self._stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="machines"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in list(self.machines):
            self.end(machine)
        with contextlib.suppress(Exception):
            self.settle()
        self._stack.close()

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values for class variables of a provider, by name: how its machines are logged in to."""
        return {}

    def add(
        self, machine: str, orders: Orders, *, keys: Sequence[str] = (), powered_off: Callable[[], None] = lambda: None
    ) -> str:
        """Begin to boot a machine and return its address."""
        address = f"{self._network}.{next(self._hosts)}"
        if self.folder is not None:
            made = self.make(self.folder / machine, address, orders, keys, powered_off)
            made.folder.mkdir(mode=0o700)
            self.machines[machine] = made
            if self.comes_up():
                self._boots[machine] = self._threads.submit(made.boot)
        return address

    def begin(self, machine: str, verb: Callable[[M], None]) -> None:
        """Begin to do something with a machine; nothing with an unknown one."""
        if (found := self.machines.get(machine)) is not None:
            self._ends.append(self._threads.submit(verb, found))

    def end(self, machine: str) -> None:
        """Begin to end a machine: idempotent, for unknown ones too."""
        self.begin(machine, lambda found: found.end())

    def booted(self, machine: str) -> bool:
        """Return whether a machine has come up; one without a folder always has."""
        return self.folder is None or (machine in self._boots and self._boots[machine].done())

    def machine(self, machine: str) -> M:
        """Return a machine; raises KeyError if it was never there."""
        return self.machines[machine]

    def elapse(self) -> None:
        """Let the time of every machine pass, once each has booted; what it was set for follows."""
        for boot in list(self._boots.values()):
            boot.exception(_BOOT_S)
        for machine in list(self.machines.values()):
            machine.elapse()

    def settle(self) -> None:
        """Wait for machines that are ending or restarting."""
        for each in list(self._ends):
            each.result(_JOIN_S)

    def failures(self) -> Sequence[str]:
        """Return the errors of machines that did not boot."""
        return [repr(boot.exception()) for boot in self._boots.values() if boot.done() and boot.exception()]
