"""Machines of fake vendors: each boots by running its first-boot orders, in front of a real sshd."""

from __future__ import annotations

import json
import os
import pwd
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from skyward.testing.hosts import SshHost, share_cache
from support.clouds.room import Room

__all__ = ["BootOrders", "BootedMachine", "MachineRoom", "read_orders"]

SSH_PORT: Final = 22022
_JOIN_S = 10.0
_COMMAND_S = 60.0
_BOOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SHIMS = ("halt", "poweroff", "reboot", "shutdown", "sync", "systemctl", "systemd-run")
"""Programs that would act on this machine; each sends its name and arguments to the emulated one instead."""

_SHIM = """\
#!/bin/sh
exec {python} -ISc '
import json, os, sys
os.write(os.open(os.environ["MACHINE_ORDERS"], os.O_WRONLY), json.dumps(sys.argv[1:]).encode() + b"\\n")
' "${{0##*/}}" "$@"
"""

_PLACES = re.compile(r"(?<![\w./-])/(etc|root|run|usr/local|var)(?![\w-])")
"""Folders that every machine has for itself."""

_PROGRAMS = re.compile(rf"(?<![\w.-])/(?:usr/)?s?bin/({'|'.join(_SHIMS)})(?![\w-])")

_SCRIPT = "/var/lib/first-boot"
"""Place of a script with first-boot orders. As an argument everybody on this machine could read its keys."""

_ON_ACTIVE = re.compile(r"--on-active=(\d+(?:\.\d+)?)s?")
_TAKES_VALUE = {"-p", "--property", "--timer-property", "--unit", "-u", "--description", "-E", "--setenv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BootOrders:
    """First-boot orders of a machine, cloud-config or a script.

    Attributes:
        host_key: private host key, in place before sshd starts; empty for none.
        authorized_keys: public keys that may log in.
        files: contents of files to write, by path.
        early: commands that run before sshd starts.
        late: commands that run after it has started.
        root_refused: True if root may not log in.
    """

    host_key: str = ""
    authorized_keys: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    early: tuple[tuple[str, ...], ...] = ()
    late: tuple[tuple[str, ...], ...] = ()
    root_refused: bool = False


def read_orders(text: str) -> BootOrders:
    """Parse first-boot orders; a script (``#!``) is one late command."""
    import yaml

    if not text.strip():
        return BootOrders()
    if text.startswith("#!"):
        interpreter = text.partition("\n")[0].removeprefix("#!").split()
        return BootOrders(files={_SCRIPT: text}, late=((*interpreter, _SCRIPT),))
    if not text.startswith("#cloud-config\n"):
        raise AssertionError(f"first-boot orders are neither cloud-config nor a script: {text[:80]!r}")
    config: dict[str, Any] = yaml.safe_load(text)
    return BootOrders(
        host_key=config.get("ssh_keys", {}).get("ed25519_private", ""),
        authorized_keys=tuple(config.get("ssh_authorized_keys", ())),
        files={each["path"]: each.get("content", "") for each in config.get("write_files", ())},
        early=tuple(_argv(each) for each in config.get("bootcmd", ())),
        late=tuple(_argv(each) for each in config.get("runcmd", ())),
        root_refused=bool(config.get("disable_root", True)),
    )


def _argv(entry: str | Sequence[str]) -> tuple[str, ...]:
    return ("sh", "-c", entry) if isinstance(entry, str) else tuple(entry)


@dataclass(slots=True, kw_only=True, eq=False)
class BootedMachine:
    """One machine, from boot to its end. Verbs block and are thread-safe.

    It runs its orders on this machine, with folders of its own in place of ``/etc``, ``/var`` and the like, and with
    shims in place of the programs that start timers, restart services, or power off. Its folder must not be below one
    of those. ``boot.log`` in the folder has what the orders printed.

    Attributes:
        folder: folder of the machine.
        shims: folder of the shims.
        address: address of its sshd.
        orders: its first-boot orders.
        keys: public keys that the vendor puts there besides.
        root: True if it admits root by the vendor's keys, whatever this test's user is called.
        env: additional environment of sessions and of orders.
        cache: folder of environments, shared by all machines; None for none.
        minute_s: length of a minute of its timers.
        impostor: True if it comes up with another host key than ordered.
        powered_off: called once the machine has powered itself off.
        failures: orders that failed, with their exit status.
        off: True once it has powered itself off.
        services: names of the services that were started, stopped or restarted.
    """

    folder: Path
    shims: Path
    address: str
    orders: str
    keys: Sequence[str] = ()
    root: bool = True
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cache: Path | None = None
    minute_s: float = 60.0
    impostor: bool = False
    powered_off: Callable[[], None] = lambda: None
    failures: list[str] = field(default_factory=list[str])
    services: list[str] = field(default_factory=list[str])
    host: SshHost | None = None
    off: bool = False
    _timers: list[threading.Timer] = field(default_factory=list[threading.Timer])
    _background: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])
    _reader: threading.Thread | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _ended: bool = False

    @property
    def ended(self) -> bool:
        """True once it has begun to end, by itself or not."""
        return self._ended

    @property
    def own_root(self) -> Path:
        """Folder in place of ``/``."""
        return self.folder / "root"

    @property
    def log(self) -> str:
        """The log of its sshd; empty before its first start."""
        return "" if self.host is None or not self.host.log.exists() else self.host.log.read_text(encoding="utf-8")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of its orders."""
        path = f"{self.shims}:{self.env.get('PATH', _BOOT_PATH)}"
        return dict(self.env) | {"PATH": path, "MACHINE_ORDERS": str(self._orders_path)}

    def boot(self) -> None:
        """Boot it: early orders, keys, sshd, late orders. Does nothing once it has ended."""
        with self._lock:
            if self._ended:
                return
            orders = read_orders(self.orders)
            for place in (
                "etc/ssh",
                "etc/systemd/system",
                "root",
                "run",
                "usr/local/bin",
                "var/lib/cloud/instance",
                "var/log",
            ):
                (self.own_root / place).mkdir(parents=True)
            os.mkfifo(self._orders_path, 0o600)
            self._reader = threading.Thread(target=self._obey, name=f"machine-{self.address}", daemon=True)
            self._reader.start()
            for path, content in orders.files.items():
                place = Path(self._own(path))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(self._own(content), encoding="utf-8")
            self._run_all(orders.early)
            self.host = self._prepared(orders)
            self.host.start()
        self._run_all(orders.late)

    def end(self) -> None:
        """End it with every process on it. Idempotent."""
        with self._lock:
            self._ended = True
            for timer in self._timers:
                timer.cancel()
            for process in self._background:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._background.clear()
            if self.host is not None:
                self.host.stop()
            reader, self._reader = self._reader, None
        if reader is not None:
            with open(self._orders_path, "w", encoding="utf-8") as orders:
                orders.write("[]\n")
        me = threading.current_thread()
        for thread in (reader, *self._timers):
            if thread is not None and thread is not me and thread.is_alive():
                thread.join(_JOIN_S)

    def power_off(self) -> None:
        """Power it off, as it does itself: every process ends, and the vendor is not asked."""
        self.end()
        self.off = True
        self.powered_off()

    def elapse(self) -> None:
        """Let the time of its timers pass: each begins now what it was set for."""
        with self._lock:
            waiting = [timer for timer in self._timers if not timer.finished.is_set()]
        for timer in waiting:
            timer.cancel()
            timer.function()

    @property
    def _orders_path(self) -> Path:
        return self.folder / "orders"

    @property
    def _host_key(self) -> Path:
        return self.own_root / "etc/ssh/ssh_host_ed25519_key"

    def _own(self, text: str) -> str:
        """Replace this machine's folders and programs in a text by those of the emulated one."""
        return _PROGRAMS.sub(r"\1", _PLACES.sub(lambda found: f"{self.own_root}/{found[1]}", text))

    def _run_all(self, commands: Sequence[Sequence[str]]) -> None:
        for command in commands:
            process = self._start(command)
            if process is None:
                return
            status = _exit_status(process)
            if status and not self._ended:
                self.failures.append(f"{self.address}: exit status {status}: {shlex.join(command)[:200]}")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Start a command in a session of its own; None once the machine has ended."""
        with self._lock:
            if self._ended:
                return None
            with open(self.folder / "boot.log", "ab") as log:
                process = subprocess.Popen(
                    [self._own(each) for each in command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(self.environment) | {"HOME": str(self.own_root / "root")},
                    cwd=self.own_root,
                    start_new_session=True,
                )
            self._background.append(process)
            return process

    def _prepared(self, orders: BootOrders) -> SshHost:
        if orders.host_key and not self.impostor:
            for place in (self._host_key, self.folder / "host_key"):
                _write_private(place, orders.host_key)
        env = {name: value for name, value in self.environment.items() if name != "PATH"}
        path = self.environment["PATH"]
        client_key = self.folder / "nobodys_key"
        host = SshHost(self.folder, address=self.address, client_key=client_key, path=path, env=env)
        host.port = SSH_PORT
        refused = self.root and orders.root_refused and self.orders.startswith("#cloud-config")
        keys = () if refused else (*self.keys, *orders.authorized_keys)
        host.authorized_keys.write_text("".join(f"{key.strip()}\n" for key in keys), encoding="utf-8")
        if self.cache is not None:
            share_cache(host.home, self.cache)
        return host

    def _obey(self) -> None:
        """Carry out what the shims pass on, until the machine ends."""
        with os.fdopen(os.open(self._orders_path, os.O_RDWR), encoding="utf-8") as orders:
            for line in orders:
                match json.loads(line):
                    case []:
                        return
                    case ["systemd-run", *arguments]:
                        self._systemd_run(arguments)
                    case ["systemctl", *arguments]:
                        self._systemctl(arguments)
                    case ["poweroff" | "halt" | "reboot"] | ["shutdown", *_, "now"]:
                        self._in_thread(self.power_off)
                    case ["shutdown", *_, wait] if wait.startswith("+"):
                        self._after(float(wait) * 60, self.power_off)
                    case _:
                        continue

    def _systemd_run(self, arguments: Sequence[str]) -> None:
        rest = iter(arguments)
        after_s = 0.0
        command: list[str] = []
        for each in rest:
            if found := _ON_ACTIVE.fullmatch(each):
                after_s = float(found[1])
            elif each in _TAKES_VALUE:
                next(rest, None)
            elif not each.startswith("-"):
                command = [each, *rest]
        if command:
            self._after(after_s, lambda: self._start(command))

    def _systemctl(self, arguments: Sequence[str]) -> None:
        verbs = [each for each in arguments if not each.startswith("-")]
        self.services += verbs[1:]
        if verbs[:1] == ["poweroff"]:
            self._in_thread(self.power_off)
        if {each.removesuffix(".service") for each in verbs[1:]} & {"ssh", "sshd"}:
            self._in_thread(self._restart_sshd)

    def _restart_sshd(self) -> None:
        """Restart sshd with the host key that lies in its ``/etc/ssh`` now."""
        with self._lock:
            if self._ended or self.host is None:
                return
            if self._host_key.exists() and not self.impostor:
                _write_private(self.folder / "host_key", self._host_key.read_text(encoding="utf-8"))
            added = self.own_root / "root/.ssh/authorized_keys"
            if added.exists():
                with self.host.authorized_keys.open("a", encoding="utf-8") as keys:
                    keys.write(added.read_text(encoding="utf-8"))
            self.host.restart()

    def _in_thread(self, action: Callable[[], object]) -> None:
        self._after(0.0, action)

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        with self._lock:
            if self._ended:
                return
            timer = threading.Timer(seconds * self.minute_s / 60, action)
            timer.name, timer.daemon = f"timer-{self.address}", True
            self._timers.append(timer)
            timer.start()


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return its exit status; it stays a zombie, so that no other group can have its number."""
    handle = os.pidfd_open(process.pid)
    try:
        ended, _, _ = select.select([handle], [], [], _COMMAND_S)
    finally:
        os.close(handle)
    if not ended:
        return -signal.SIGALRM
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return 0 if result is None else result.si_status


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


class MachineRoom(Room[BootedMachine, str]):
    """Machines of one fake vendor that run first-boot orders.

    Args:
        folder: folder of the machines; None for addresses without machines.
        cache: folder of environments, shared by all machines.
        env: additional environment of sessions and of orders.
        minute_s: length of a minute of their timers.
        block: addresses are ``127.<block>.x.y``.
        root: see :attr:`BootedMachine.root`.
    """

    port = SSH_PORT

    def __init__(
        self,
        folder: Path | None = None,
        *,
        cache: Path | None = None,
        env: Mapping[str, str] | None = None,
        minute_s: float = 60.0,
        block: int = 80,
        root: bool = True,
    ) -> None:
        super().__init__(folder, cache=cache, block=block)
        self._env = dict(env or {})
        self._minute_s = minute_s
        self._root = root

    def prepare(self, folder: Path) -> None:
        """Make the shims, and the home that all machines share."""
        assert self.cache is not None
        share_cache(folder / "home", self.cache)
        shims = folder / "shims"
        shims.mkdir()
        for name in _SHIMS:
            (shims / name).write_text(_SHIM.format(python=shlex.quote(sys.executable)), encoding="utf-8")
            (shims / name).chmod(0o755)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values for class variables of a provider, by name: how its machines are logged in to."""
        home = str((self.folder or Path("/nonexistent")) / "home")
        return {"user": pwd.getpwuid(os.getuid()).pw_name, "port": SSH_PORT, "home": home}

    def make(
        self, folder: Path, address: str, orders: str, keys: Sequence[str], off: Callable[[], None]
    ) -> BootedMachine:
        """Return a new machine."""
        return BootedMachine(
            folder=folder,
            shims=folder.parent / "shims",
            address=address,
            orders=orders,
            keys=keys,
            root=self._root,
            env=self._env,
            cache=self.cache,
            minute_s=self._minute_s,
            impostor=self.impostors,
            powered_off=off,
        )

    def comes_up(self) -> bool:
        """Return whether a new machine boots."""
        return not self.dead

    def failures(self) -> Sequence[str]:
        """Return the errors of machines that did not boot, and orders that failed."""
        return [*super().failures(), *(failure for machine in self.machines.values() for failure in machine.failures)]
