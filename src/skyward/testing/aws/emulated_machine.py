"""What an instance of the test EC2 is: a host that answers over SSH, a metadata service, a timer that ends it."""

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

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

__all__ = [
    "METADATA_VARIABLE",
    "POWER_OFF_PATH",
    "EmulatedMachine",
    "Metadata",
    "UserData",
    "read_user_data",
    "serve",
]

METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Where AWS's own libraries look for another metadata service."""

_TIMER = re.compile(r"^(?:sh -c )?life=(\d+)$.*--on-active=.*\bshutdown\b", re.DOTALL | re.MULTILINE)
POWER_OFF_PATH: Final = "/power-off"
_SHUTDOWN = re.compile(r"\bshutdown\b.*\s\+(\d+)")
_TOKEN_TTL = "HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS"  # noqa: S105 - a header's name
_TOKEN = "HTTP_X_AWS_EC2_METADATA_TOKEN"  # noqa: S105 - likewise
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserData:
    """What cloud-init would do, of all that it can.

    Attributes:
        host_key: the private key that the machine shows; empty means one that nobody knows.
        authorized_keys: who may log in.
        shutdown_min: when the machine switches itself off, in minutes; None means never.
        commands: what it would run, in order. Nothing runs here.
    """

    host_key: str = ""
    authorized_keys: tuple[str, ...] = ()
    shutdown_min: float | None = None
    commands: tuple[str, ...] = ()


def read_user_data(text: str) -> UserData:
    """Of an instance.

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
    """When the command has the machine switched off: by a timer of systemd's, else of ``shutdown`` itself."""
    if timer := _TIMER.search(command):
        return int(timer[1]) / 60
    return float(found[1]) if (found := _SHUTDOWN.search(command)) else None


def _command(entry: str | Sequence[str]) -> str:
    return entry if isinstance(entry, str) else " ".join(entry)


class Metadata:
    """A metadata service as of version 2: nothing is said without a token. A WSGI application.

    Besides it stands in for ``shutdown -h now``, which is meant for no other machine than this.

    Attributes:
        facts: what is said at once, by path below ``/latest/``.
        notice: what is said of an interruption; None means that there is none.
        hint: likewise of a rebalance recommendation.
    """

    def __init__(self, facts: Mapping[str, str], power_off: Callable[[], None]) -> None:
        self.facts = dict(facts)
        self._power_off = power_off
        self.notice: str | None = None
        self.hint: str | None = None
        self._token = os.urandom(12).hex()

    def __call__(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        status, text = self._said(environ)
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
        return [text.encode()]

    def interrupt(self, in_s: float) -> None:
        """Say that the machine will be taken back, and when."""
        self.notice = json.dumps({"action": "terminate", "time": _time(in_s)})

    def recommend(self) -> None:
        """Say that this has become more likely."""
        self.hint = json.dumps({"noticeTime": _time(0)})

    def _said(self, environ: Mapping[str, Any]) -> tuple[str, str]:
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
        said = (self.facts | news).get(path.removeprefix("/latest/"))
        return ("404 Not Found", "") if said is None else ("200 OK", said)


def _time(in_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def serve(application: Any, address: str, name: str, port: int = 0) -> tuple[BaseWSGIServer, threading.Thread]:
    """Serve a WSGI application in threads of this process, quietly."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's name
            """Nothing: the requests are recorded by who answers them."""

    server = make_server(address, port, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True, args=(0.05,))
    thread.start()
    return server, thread


@dataclass(slots=True, kw_only=True, eq=False)
class EmulatedMachine:
    """One machine, from boot to the end. Its verbs block, and may be called from any thread.

    Attributes:
        folder: the machine's own.
        address: where it is.
        port: where its sshd listens.
        user_data: what it was started with.
        facts: what its metadata service says, see :class:`Metadata`.
        env: what sessions find in their environment.
        cache: where environments are kept, the same for all machines.
        minute_s: how long a minute of its shutdown timer lasts.
        switched_off: is told when the machine has switched itself off.
    """

    folder: Path
    address: str
    port: int
    user_data: UserData
    facts: Mapping[str, str]
    env: Mapping[str, str]
    cache: Path
    minute_s: float
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
        """Switch it on: the timer first, as user data has it. Does nothing once it has ended."""
        with self._lock:
            if self._ended:
                return
            if self.user_data.shutdown_min is not None:
                self._timer = threading.Timer(self.user_data.shutdown_min * self.minute_s, self.switched_off)
                self._timer.daemon = True
                self._timer.start()
            service = serve(self.metadata, self.address, f"metadata-{self.address}")
            self._services.append(service)
            self.host = self._prepared(f"http://{self.address}:{service[0].server_port}")
            self.host.start()

    def _switch_off(self) -> None:
        """From within; whoever asks for it gets an answer still."""
        threading.Thread(target=self.switched_off, name=f"power-off-{self.address}", daemon=True).start()

    def end(self) -> None:
        """Cut it off: every process on it ends. Idempotent."""
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
        """The host with the keys of its user data, and nobody else's."""
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
