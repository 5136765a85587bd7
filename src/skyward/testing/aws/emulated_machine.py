"""Machine of the test EC2: an SSH host, a metadata service, and a shutdown timer."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from skyward.errors import ConfigurationError
from skyward.testing.hosts import SshHost, share_cache
from skyward.testing.loopback import serve

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

__all__ = [
    "METADATA_VARIABLE",
    "POWER_OFF_PATH",
    "EmulatedMachine",
    "Metadata",
    "UserData",
    "read_user_data",
]

METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable of AWS's libraries with the URL of another metadata service."""

_TIMER = re.compile(r"^(?:sh -c )?life=(\d+)$.*--on-active=.*\bshutdown\b", re.DOTALL | re.MULTILINE)
POWER_OFF_PATH: Final = "/power-off"
_SHUTDOWN = re.compile(r"\bshutdown\b.*\s\+(\d+)")
_TOKEN_TTL = "HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS"  # noqa: S105 - a header's name
_TOKEN = "HTTP_X_AWS_EC2_METADATA_TOKEN"  # noqa: S105 - a header's name
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserData:
    """The directives of cloud-config that the emulation reads.

    Attributes:
        host_key: private host key of the machine; empty for a generated one.
        authorized_keys: public keys that may log in.
        shutdown_min: minutes until the machine shuts itself down; None means never.
        commands: its commands, in order. None is run.
    """

    host_key: str = ""
    authorized_keys: tuple[str, ...] = ()
    shutdown_min: float | None = None
    commands: tuple[str, ...] = ()


def read_user_data(text: str) -> UserData:
    """Parse an instance's user data.

    Raises:
        ConfigurationError: it is no cloud-config.
    """
    import yaml

    if not text.strip():
        return UserData()
    content = yaml.safe_load(text)
    if not text.startswith("#cloud-config\n") or not isinstance(content, Mapping):
        raise ConfigurationError(f"user data is no cloud-config: {text[:80]!r}")
    config = cast("Mapping[str, Any]", content)
    commands = tuple(_command(each) for name in ("bootcmd", "runcmd") for each in config.get(name, ()))
    minutes = [each for command in commands if (each := _shutdown_min(command)) is not None]
    return UserData(
        host_key=config.get("ssh_keys", {}).get("ed25519_private", ""),
        authorized_keys=tuple(config.get("ssh_authorized_keys", ())),
        shutdown_min=minutes[0] if minutes else None,
        commands=commands,
    )


def _shutdown_min(command: str) -> float | None:
    """Return the minutes after which the command shuts the machine down, by a systemd timer or ``shutdown`` itself."""
    if timer := _TIMER.search(command):
        return int(timer[1]) / 60
    return float(found[1]) if (found := _SHUTDOWN.search(command)) else None


def _command(entry: str | Sequence[str]) -> str:
    return entry if isinstance(entry, str) else " ".join(entry)


class Metadata:
    """Metadata service, version 2: every answer requires a token. A WSGI application.

    It also serves the substitute for ``shutdown -h now`` of its machine.

    Attributes:
        facts: constant answers, by path below ``/latest/``.
        notice: announcement of a preemption; None for none.
        hint: rebalance recommendation; None for none.
    """

    def __init__(self, facts: Mapping[str, str], power_off: Callable[[], None]) -> None:
        self.facts = dict(facts)
        self._power_off = power_off
        self.notice: str | None = None
        self.hint: str | None = None
        self._token = os.urandom(12).hex()

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        status, text = self._answer(environ)
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
        return [text.encode()]

    def interrupt(self, in_s: float) -> None:
        """Announce preemption in ``in_s`` seconds."""
        self.notice = json.dumps({"action": "terminate", "time": _time(in_s)})

    def recommend(self) -> None:
        """Announce that preemption has become more likely."""
        self.hint = json.dumps({"noticeTime": _time(0)})

    def _answer(self, environ: Mapping[str, Any]) -> tuple[str, str]:
        path = environ["PATH_INFO"]
        if path == POWER_OFF_PATH:
            self._power_off()
            return "200 OK", ""
        if path == "/latest/api/token":
            granted = environ["REQUEST_METHOD"] == "PUT" and environ.get(_TOKEN_TTL, "").isdigit()
            return ("200 OK", self._token) if granted else ("400 Bad Request", "")
        if environ.get(_TOKEN) != self._token:
            return "401 Unauthorized", ""
        news = {
            "meta-data/spot/instance-action": self.notice,
            "meta-data/events/recommendations/rebalance": self.hint,
        }
        found = (self.facts | news).get(path.removeprefix("/latest/"))
        return ("404 Not Found", "") if found is None else ("200 OK", found)


def _time(in_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True, kw_only=True, eq=False)
class EmulatedMachine:
    """One machine, from boot to its end. Verbs block and are thread-safe.

    Attributes:
        folder: folder of the machine.
        address: its address.
        port: port of its sshd.
        user_data: its user data.
        facts: constant answers of its metadata service, see :class:`Metadata`.
        env: additional environment of sessions.
        cache: folder of environments, shared by all machines.
        switched_off: called when the machine has shut itself down.
    """

    folder: Path
    address: str
    port: int
    user_data: UserData
    facts: Mapping[str, str]
    env: Mapping[str, str]
    cache: Path
    switched_off: Callable[[], None]
    metadata: Metadata = field(init=False)
    host: SshHost | None = None
    _services: list[tuple[BaseWSGIServer, threading.Thread]] = field(default_factory=list[Any])
    _timer: threading.Timer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def __post_init__(self) -> None:
        self.metadata = Metadata(self.facts, self._switch_off)

    def boot(self) -> None:
        """Boot it, the timer of its user data first. Does nothing once it has ended."""
        with self._lock:
            if self._ended:
                return
            if self.user_data.shutdown_min is not None:
                self._timer = threading.Timer(60.0 * self.user_data.shutdown_min, self.switched_off)
                self._timer.daemon = True
                self._timer.start()
            service = serve(self.metadata, self.address, f"metadata-{self.address}")
            self._services.append(service)
            self.host = self._prepared(f"http://{self.address}:{service[0].server_port}")
            self.host.start()

    def elapse(self, minutes: int) -> None:
        """Shut it down if its timer is armed, and no longer than ``minutes``."""
        with self._lock:
            due = self._timer is not None and (self.user_data.shutdown_min or 0) <= minutes
        if due:
            self.switched_off()

    def _switch_off(self) -> None:
        """Shut it down from within, in a thread, so that the request is still answered."""
        threading.Thread(target=self.switched_off, name=f"power-off-{self.address}", daemon=True).start()

    def end(self) -> None:
        """End it with every process on it. Idempotent."""
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()
                if self._timer is not threading.current_thread():
                    self._timer.join(_JOIN_S)
            if self.host is not None:
                self.host.stop()
            for server, thread in self._services:
                server.shutdown()
                thread.join(_JOIN_S)
                server.server_close()
            self._services.clear()

    def _prepared(self, metadata_url: str) -> SshHost:
        """Return the host, which has only the keys of its user data."""
        self.folder.mkdir(parents=True, mode=0o700)
        if self.user_data.host_key:
            with open(
                os.open(self.folder / "host_key", os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(self.user_data.host_key)
        env = dict(self.env) | {METADATA_VARIABLE: metadata_url}
        host = SshHost(self.folder, address=self.address, client_key=self.folder / "nobodys_key", env=env)
        host.port = self.port
        keys = "".join(f"{key}\n" for key in self.user_data.authorized_keys)
        host.authorized_keys.write_text(keys, encoding="utf-8")
        share_cache(host.home, self.cache)
        return host
