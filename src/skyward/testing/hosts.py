"""Test hosts: real ``sshd`` processes on loopback addresses, each with keys, a home and processes of its own."""

from __future__ import annotations

import asyncio
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from skyward.base.waiting import wait_until
from skyward.errors import ConfigurationError, UnreachableError
from skyward.machine.ssh_config import SSHTarget

__all__ = ["SshHost", "find_openssh", "require_sshd", "share_cache", "write_known_hosts"]

_UNPACKED: Final = Path(__file__).parents[3] / "build" / "openssh"
"""Folder into which ``tools/sshd`` unpacks OpenSSH's server when it may not install it."""

_PORT = 22
_START_S = 10.0
_END_S = 15.0
_ATTEMPTS = 3

_SERVER = ("sshd", "sftp-server", "network-relay")
"""Names of processes that are no session's."""

# sshd starts in the account's home folder instead of $HOME, and passes the requested command to a forced command in
# SSH_ORIGINAL_COMMAND.
_SHELL = """\
cd "$HOME" || exit 1
command=${SSH_ORIGINAL_COMMAND-}
unset SSH_ORIGINAL_COMMAND
if [ -n "$command" ]; then exec "$SHELL" -c "$command"; fi
exec "$SHELL" -l
"""


def find_openssh(program: str) -> Path | None:
    """Return the path of a program of OpenSSH's: the system's, else the one unpacked by ``tools/sshd``, else None."""
    unpacked = [str(_UNPACKED / "usr" / folder) for folder in ("bin", "sbin")]
    found = shutil.which(program, path=":".join([os.environ.get("PATH", ""), "/usr/sbin:/usr/local/sbin", *unpacked]))
    return Path(found) if found else None


def require_sshd() -> None:
    """Skip the test, or the file of tests, where OpenSSH's server or client is missing."""
    if not (find_openssh("sshd") and find_openssh("ssh")):
        import pytest

        pytest.skip("there is no sshd, or no ssh: tools/sshd installs them", allow_module_level=True)


class SshHost:
    """Emulated machine with a real sshd, on this machine. A context manager; entering and leaving block.

    Each host has its own address, port, host key, ``HOME``, and processes: :meth:`stop` ends every process that a
    session started, as powering a machine off would, and so does the end of this process. Hosts share the account
    (``~name``, ``pwd.getpwuid``), ``/tmp``, the rest of the file system, and the list of processes. Only the user who
    runs the tests can log in, and only with a key.

    Args:
        folder: folder of the host, created if it is missing.
        address: address of its sshd, in 127.0.0.0/8; of an island, the address outside.
        client_key: private key that can log in; created if it is missing. None means ``client_key`` next to
            ``folder``, so that hosts in sibling folders share one.
        path: the ``PATH`` of sessions; None means sshd's own.
        env: additional environment of sessions.
        sshd_options: more lines of its configuration, which take precedence over its own.

    Attributes:
        address: as given.
        port: port of its sshd, the same for the host's life; 0 before the first start.
        home: the sessions' ``HOME``.
        user: the user name that can log in.
        key_path: the private key that can log in.
        authorized_keys: file of the admitted public keys, read at every login.
        host_key: its public host key: ``"ssh-ed25519 AAAA…"``.
        log: sshd's log file.

    Raises:
        ConfigurationError: there is no sshd.
        UnreachableError: it does not answer; quotes the log.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.2",
        client_key: Path | None = None,
        path: str | None = None,
        env: Mapping[str, str] | None = None,
        sshd_options: Sequence[str] = (),
    ) -> None:
        self.address = address
        self.port = 0
        self.home = folder / "home"
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.key_path = client_key or folder.parent / "client_key"
        self.authorized_keys = folder / "authorized_keys"
        self.log = folder / "sshd.log"
        self._folder = folder
        self._env = dict(env or {}) | {"HOME": str(self.home)} | ({} if path is None else {"PATH": path})
        self._options = tuple(sshd_options)
        self._guard: subprocess.Popen[str] | None = None
        self._program = Path()
        self._pid = 0
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.host_key = _public_key(folder / "host_key")
        self.authorized_keys.write_text(f"{_public_key(self.key_path)}\n", encoding="utf-8")
        (folder / "shell").write_text(_SHELL, encoding="utf-8")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the listening sshd; 0 while the host is off."""
        return self._pid

    def start(self) -> None:
        """Start the host at its former port and wait until it answers. Does nothing while it is on."""
        if self._guard is not None:
            return
        program = find_openssh("sshd")
        if program is None:
            raise ConfigurationError("there is no sshd on this machine: tools/sshd installs one")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
        self._program = program
        self._guard = subprocess.Popen(
            [
                *self._guard_command(),
                program,
                "-D",
                "-f",
                self._config,
                "-E",
                self.log,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_server_env(program),
            text=True,
            start_new_session=True,
        )
        try:
            self._enter_network()
            self._up()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the host: every process on it ends at once. Idempotent."""
        guard, self._guard, self._pid = self._guard, None, 0
        if guard is None:
            return
        assert guard.stdin is not None
        assert guard.stdout is not None
        guard.stdin.close()
        guard.wait(_END_S)
        guard.stdout.close()

    def restart(self) -> None:
        """Replace sshd at the same port: connections and SFTP end, processes of sessions continue.

        Raises:
            UnreachableError: the host is switched off, or sshd does not answer.
        """
        self._up()

    def processes(self) -> list[psutil.Process]:
        """Return its processes, daemons included, except sshd's own. Empty while it is off."""
        if self._guard is None:
            return []
        below = psutil.Process(self._guard.pid).children(recursive=True)
        return [process for process in below if not _name(process).startswith(_SERVER)]

    def connections(self) -> int:
        """Return the number of its SSH connections, including those not logged in yet."""
        return len(psutil.Process(self._pid).children()) if self._pid else 0

    def target(self, place: tuple[str, int] | None = None) -> SSHTarget:
        """Return its SSH target, with its host key; ``place`` is the address of a proxy in front of it."""
        host, port = place or (self.address, self.port)
        return SSHTarget(host=host, port=port, user=self.user, key_path=str(self.key_path), host_keys=(self.host_key,))

    def known_hosts_line(self, *, host: str | None = None, port: int | None = None) -> str:
        """Return its line of a known_hosts file; ``host`` and ``port`` are those of a proxy in front of it."""
        name, number = host or self.address, port or self.port
        return f"{name if number == _PORT else f'[{name}]:{number}'} {self.host_key}"

    @property
    def _config(self) -> Path:
        return self._folder / "sshd_config"

    def _up(self) -> None:
        """Start sshd through the guard; the free port is chosen once, again only if another process took it."""
        for attempt in range(_ATTEMPTS):
            fresh = not self.port
            self.port = self.port or _free_port(self.address)
            self._config.write_text(self._configuration(self._program), encoding="utf-8")
            self._pid = self._order("up")
            if self._answers():
                return
            if "already in use" not in self._log_tail() or attempt == _ATTEMPTS - 1:
                break
            self.port = 0 if fresh else self.port
        raise UnreachableError(f"sshd at {self.address}:{self.port} does not answer:\n{self._log_tail()}")

    def _order(self, order: str) -> int:
        guard = self._guard
        if guard is None or guard.stdin is None or guard.stdout is None:
            raise UnreachableError(f"the test host at {self.address} is switched off")
        guard.stdin.write(f"{order}\n")
        guard.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._guard is not None
        assert self._guard.stdout is not None
        return int(self._guard.stdout.readline() or 0)

    def _guard_command(self) -> Sequence[str | Path]:
        """Return the command of its guard; sshd's follows it."""
        return (sys.executable, "-I", Path(__file__).with_name("_guard.py"))

    def _enter_network(self) -> None:
        """Learn the place of its network; by default it is this machine's."""

    def _listen_address(self) -> str:
        return f"{self.address}:{self.port}"

    def _answers(self) -> bool:
        """Wait for sshd's banner; False if it has ended. Runs in a thread, since this thread may run an event loop."""
        waiting = wait_until(
            self._ask, deadline_s=_START_S, interval_s=0.01, what=f"sshd at {self.address}:{self.port} to answer"
        )
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(asyncio.run, waiting).result()

    async def _ask(self) -> bool | None:
        if not psutil.pid_exists(self._pid):
            return False
        try:
            reader, writer = await asyncio.open_connection(self.address, self.port)
        except OSError:
            return None
        try:
            banner = await reader.read(4)
            return banner == b"SSH-" if banner else None  # a relay hangs up while sshd does not listen yet
        finally:
            writer.transport.abort()

    def _log_tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:] if self.log.exists() else "(no log)"

    def _configuration(self, program: Path) -> str:
        lines = [
            *self._options,  # sshd uses the first of two values
            f"ListenAddress {self._listen_address()}",
            f"HostKey {_quoted(self._folder / 'host_key')}",
            f"AuthorizedKeysFile {_quoted(self.authorized_keys)}",
            f"ForceCommand /bin/sh {shlex.quote(str(self._folder / 'shell'))}",
            "SetEnv " + " ".join(_quoted(f"{name}={value}") for name, value in self._env.items()),
            f"Subsystem sftp {_helper(program, 'sftp-server')}",
            *_split_programs(program),
            *_FIXED,
        ]
        return "\n".join(lines) + "\n"


_FIXED = (
    "KbdInteractiveAuthentication no",
    "LogLevel VERBOSE",
    "LoginGraceTime 30",
    "MaxAuthTries 20",
    "MaxSessions 500",
    "MaxStartups 500",
    "PasswordAuthentication no",
    "PermitRootLogin yes",
    "PidFile none",
    "PrintLastLog no",
    "PrintMotd no",
    "StrictModes no",
    "UseDNS no",
    "UsePAM no",
)


def write_known_hosts(path: Path, *hosts: SshHost, through: Mapping[tuple[str, int], SshHost] | None = None) -> Path:
    """Write the known_hosts file ``path`` with ``hosts``, and with each host of ``through`` at its proxy's address."""
    lines = [host.known_hosts_line() for host in hosts]
    lines += [host.known_hosts_line(host=name, port=port) for (name, port), host in (through or {}).items()]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def share_cache(home: Path, cache: Path) -> None:
    """Link ``~/.cache/skyward`` of that home to ``cache``, except its folder of nodes."""
    own = home / ".cache/skyward"
    own.mkdir(mode=0o700, parents=True)
    for name in ("cache", "envs", "locks", "logs", "sent"):
        (cache / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (own / name).symlink_to(cache / name)


def _public_key(private: Path) -> str:
    """Return the public key of a private key file, which is created if it is missing."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if private.exists():
        key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
    else:
        key = Ed25519PrivateKey.generate()
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        with open(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def _helper(program: Path, name: str) -> Path:
    """Return the path of a helper program of sshd; the unpacked server has its own."""
    folder = _UNPACKED if program.is_relative_to(_UNPACKED) else Path("/")
    for libexec in ("usr/lib/openssh", "usr/libexec/openssh", "usr/libexec", "usr/lib/ssh"):
        if (folder / libexec / name).exists():
            return folder / libexec / name
    return folder / "usr/lib/openssh" / name


def _split_programs(program: Path) -> list[str]:
    """Return options with the paths of the programs that sshd consists of since 9.8; the unpacked one needs them."""
    if not program.is_relative_to(_UNPACKED):
        return []
    parts = {"SshdSessionPath": _helper(program, "sshd-session"), "SshdAuthPath": _helper(program, "sshd-auth")}
    return [f"{option} {_quoted(path)}" for option, path in parts.items() if path.exists()]


def _server_env(program: Path) -> dict[str, str]:
    """Return the server's environment, which sessions do not inherit; the unpacked server needs its library path."""
    if not program.is_relative_to(_UNPACKED):
        return dict(os.environ)
    folders = [str(path) for folder in ("lib", "usr/lib") for path in (_UNPACKED / folder).glob("*-linux-*")]
    return os.environ | {"LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])}


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
