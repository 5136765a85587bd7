"""Containers of fake vendors: each in namespaces of its own, with the vendor's environment and published port."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from skyward.testing.hosts import find_openssh, share_cache
from support.clouds.room import Room
from support.ssh_islands import GUARD, require_namespaces

__all__ = ["Container", "ContainerFault", "ContainerOrders", "ContainerRoom"]

IMAGE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` of the main process, as Ubuntu's image has it."""

RECORD_PORT: Final = 22022
"""Published port of containers that are records only."""

_INIT: Final = Path(__file__).with_name("container_init.py")
_PLACES: Final = ("root", "etc/ssh", "run", "usr/local/sbin", "var/lib", "var/log")
"""Folders that every container has for itself. Everything else is this machine's."""

_DATE: Final = """\
#!/bin/sh
if [ "$*" = +%s ]; then echo $(($(/bin/date +%s) + $(cat {shift}))); else exec /bin/date "$@"; fi
"""
"""Clock of the container's scripts, which a test can set forward."""

_STRANGER: Final = """\
mkdir -p /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/stranger
exec {sshd} -D -e -f /dev/null -p {port} -h /etc/ssh/stranger -o LogLevel=VERBOSE -o PidFile=none
"""
"""Main process of an impostor."""

_ENDLESS: Final = "exec sleep 100000"
_FORWARD_S: Final = 10_000_000
_JOIN_S: Final = 30.0
_LAST_LINES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOrders:
    """Order of a container, as its vendor understood it.

    Attributes:
        args: command line of its main process.
        env: environment of its main process, the vendor's variables included.
        port: port inside, which is published.
    """

    args: str
    env: Mapping[str, str]
    port: int

    @property
    def text(self) -> str:
        """Everything that was ordered, with packed variables unpacked."""
        return "\n".join([self.args, *(_unpacked(value) for value in self.env.values())])


def _unpacked(value: str) -> str:
    try:
        return gzip.decompress(base64.b64decode(value, validate=True)).decode()
    except (ValueError, OSError, EOFError):
        return value


class ContainerFault(Enum):
    """Fault of a container's host."""

    SILENT = "silent"
    """Nothing in it answers."""
    IMPOSTOR = "impostor"
    """Another sshd, with another host key, answers in its place."""
    SMALL = "small"
    """It has one core."""


@dataclass(slots=True, kw_only=True, eq=False)
class Container:
    """One container, from its first start to its end. Verbs block and are thread-safe.

    Its main process runs in a mount, network and process namespace of its own, with exactly the ordered environment.
    Nothing there reaches anything outside but the vendor's API. All of it ends with this process.

    Attributes:
        folder: folder of the container; ``log`` there has the output of its main process.
        address: address of its host.
        order: see :class:`ContainerOrders`.
        cache: folder of environments, shared by all containers; None for none.
        api: place of the vendor's API, which is reached at the same address inside.
        fault: fault of its host; None for none.
        exited: called once the main process has ended by itself.
        port: published port, of its host; 0 before the first start.
        off: False: a container does not power off, it is deleted or costs money.
        exits: ends of main processes by themselves.
    """

    folder: Path
    address: str
    order: ContainerOrders
    cache: Path | None
    api: str
    fault: ContainerFault | None = None
    exited: Callable[[], None] = lambda: None
    port: int = 0
    off: bool = False
    exits: list[str] = field(default_factory=list[str])
    _guards: list[subprocess.Popen[str]] = field(default_factory=list["subprocess.Popen[str]"])
    _watch: threading.Thread | None = None
    _pid: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _ended: bool = False

    @property
    def ended(self) -> bool:
        """True once it has begun to end for good."""
        return self._ended

    @property
    def own_root(self) -> Path:
        """Folder with the container's own folders, in place of ``/``."""
        return self.folder / "root"

    @property
    def orders(self) -> str:
        """Text of its orders."""
        return self.order.text

    @property
    def log(self) -> str:
        """Output of its main process; empty before its first start."""
        log = self.folder / "log"
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def boot(self) -> None:
        """Start it for the first time. Does nothing once it has ended."""
        self._format()
        self._start()

    def restart(self, *, wiped: bool = False) -> None:
        """End its processes and start the main process again, behind another port; files stay unless it is wiped."""
        with self._lock:
            self._stop()
            if wiped:
                shutil.rmtree(self.own_root)
                self._format()
            self._start()

    def lose(self) -> None:
        """End its processes, without a word to anybody."""
        with self._lock:
            self._stop()

    def end(self) -> None:
        """End it for good. Idempotent."""
        with self._lock:
            self._ended = True
            self._stop()
            watch, self._watch = self._watch, None
        if watch is not None and watch is not threading.current_thread():
            watch.join(_JOIN_S)

    def move_port(self) -> None:
        """Publish another port; connections through the former one end."""
        with self._lock:
            former = self.port
            self.port = self._guard(f"@{self._pid}", [])
            for relay in psutil.Process(self._guards[0].pid).children():
                with contextlib.suppress(psutil.Error):
                    if any(each.laddr.port == former for each in relay.net_connections("inet4")):
                        relay.kill()

    def empty_keys(self) -> None:
        """Rewrite root's ``authorized_keys`` without a key."""
        keys = self.own_root / "root/.ssh/authorized_keys"
        keys.parent.mkdir(mode=0o700, exist_ok=True)
        keys.write_text("", encoding="utf-8")

    def elapse(self) -> None:
        """Set the clock of its scripts forward by months."""
        if (self.folder / "shift").exists():
            (self.folder / "shift").write_text(str(_FORWARD_S), encoding="utf-8")

    def processes(self) -> list[psutil.Process]:
        """Return its processes."""
        with self._lock, contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._pid).children(recursive=True) if self._pid else []
        return []

    def _format(self) -> None:
        for place in _PLACES:
            (self.own_root / place).mkdir(parents=True)
        if self.cache is not None:
            share_cache(self.own_root / "root", self.cache)
        (self.folder / "shift").write_text("0", encoding="utf-8")
        date = self.own_root / "usr/local/sbin/date"
        date.write_text(_DATE.format(shift=self.folder / "shift"), encoding="utf-8")
        date.chmod(0o755)

    def _start(self) -> None:
        with self._lock:
            if self._ended:
                return
            orders = {
                "places": self._places(),
                "cores": int(self.fault is ContainerFault.SMALL),
                "argv": self._main,
                "env": dict(self.order.env),
                "log": str(self.folder / "log"),
            }
            path = self.folder / "orders"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(orders, file)
            namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
            self.port = self._guard(f"<{self.api}", [*namespaces, sys.executable, "-I", str(_INIT), str(path)])
            self._watch = threading.Thread(
                target=self._wait, args=(self._pid,), name=f"container-{self.address}", daemon=True
            )
            self._watch.start()

    def _places(self) -> list[tuple[str, str]]:
        """Return source and target of each mount; environments and their interpreter stay, wherever they lie."""
        own = [(str(self.own_root / place), f"/{place}") for place in _PLACES]
        needed = [sys.base_prefix, *([str(self.cache)] if self.cache else [])]
        hidden = [each for each in needed if any(Path(each).is_relative_to(place) for _, place in own)]
        saved = [(each, str(self.folder / f"saved-{number}")) for number, each in enumerate(hidden)]
        return [*saved, *own, *((copy, each) for each, copy in saved)]

    @property
    def _main(self) -> list[str]:
        if self.fault is ContainerFault.SILENT:
            return ["sh", "-c", _ENDLESS]
        if self.fault is ContainerFault.IMPOSTOR:
            return ["sh", "-c", _STRANGER.format(sshd=find_openssh("sshd"), port=self.order.port)]
        return shlex.split(self.order.args)

    def _guard(self, network: str, command: Sequence[str]) -> int:
        """Publish the port, in the network of a container or in a new one, and run a command there; return the port."""
        guard = subprocess.Popen(
            [sys.executable, "-I", GUARD, f"{self.address}:0=127.0.0.1:{self.order.port}{network}", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._guards.append(guard)
        assert guard.stdin is not None
        assert guard.stdout is not None
        port = int(guard.stdout.readline())
        if command:
            guard.stdin.write("up\n")
            guard.stdin.flush()
            self._pid = int(guard.stdout.readline())
        return port

    def _stop(self) -> None:
        self._pid = 0
        for guard in reversed(self._guards):
            assert guard.stdin is not None
            assert guard.stdout is not None
            guard.stdin.close()
            guard.wait(_JOIN_S)
            guard.stdout.close()
        self._guards.clear()

    def _wait(self, pid: int) -> None:
        """Wait for the end of the main process, and report it if nobody asked for it."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                select.select([handle], [], [])
            finally:
                os.close(handle)
        with self._lock:
            if self._pid != pid:
                return
            self.exits.append(self.log[-_LAST_LINES:])
        self.exited()


class ContainerRoom(Room[Container, ContainerOrders]):
    """Containers of one fake vendor, each on a host with an address of its own.

    Args:
        folder: folder of the containers; None for addresses without containers.
        api: returns the URL of the vendor's API.
        cache: folder of environments, shared by all containers.
        env: variables of the images, besides ``PATH`` and ``HOME``.
        block: addresses are ``127.<block>.x.y``.

    Attributes:
        faults: faults of the next containers, one each, before impostors and dead ones.
    """

    port = RECORD_PORT

    def __init__(
        self,
        folder: Path | None = None,
        *,
        api: Callable[[], str],
        cache: Path | None = None,
        env: Mapping[str, str] | None = None,
        block: int = 83,
    ) -> None:
        super().__init__(folder, cache=cache, block=block)
        self.faults: list[ContainerFault] = []
        self._api = api
        self._env = dict(env or {}) | {"PATH": IMAGE_PATH, "HOME": "/root"}

    def prepare(self, folder: Path) -> None:
        """Skip the test where there are no namespaces."""
        del folder
        require_namespaces()

    def make(
        self, folder: Path, address: str, orders: ContainerOrders, keys: Sequence[str], off: Callable[[], None]
    ) -> Container:
        """Return a new container; keys are no use to it."""
        del keys
        place = urlsplit(self._api())
        return Container(
            folder=folder,
            address=address,
            order=ContainerOrders(args=orders.args, env=self._env | dict(orders.env), port=orders.port),
            cache=self.cache,
            api=f"{place.hostname}:{place.port}",
            fault=self._fault(),
            exited=off,
        )

    def restart(self, machine: str, *, wiped: bool = False) -> None:
        """Begin to restart the main process of a container, with an empty disk if it is wiped."""
        self.begin(machine, partial(Container.restart, wiped=wiped))

    def lose(self, machine: str) -> None:
        """Begin to end all processes of a container."""
        self.begin(machine, Container.lose)

    def published_port(self, machine: str) -> int:
        """Return the published port of a container."""
        return self.machines[machine].port if machine in self.machines else RECORD_PORT

    def failures(self) -> Sequence[str]:
        """Return the errors of containers that did not start, and the logs of main processes that ended."""
        return [*super().failures(), *(text for container in self.machines.values() for text in container.exits)]

    def _fault(self) -> ContainerFault | None:
        if self.faults:
            return self.faults.pop(0)
        return ContainerFault.IMPOSTOR if self.impostors else ContainerFault.SILENT if self.dead else None
