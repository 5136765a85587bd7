"""Settings for a host: the user's SSH configuration, overridden by the fields of the target."""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import ConfigurationError
from skyward.transport.access import SSHTarget

__all__ = ["Settings", "route", "settings"]

_PORT = 22
_DEEPEST = 16
_USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USUAL_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_HEADER = re.compile(r"(?i)(host|match)\b")
_INCLUDE = re.compile(r"(?i)include(?:\s*=\s*|\s+)(.+)")
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>.+)@)?(?P<host>\[[^]]+\]|[^:/@]+)(?::(?P<port>\d+))?/?")
# paramiko would resolve names in the DNS for this option: connecting does that, with a time limit.
_IGNORED = re.compile(r"(?i)canonicalizehostname\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the connection to one machine.

    Attributes:
        host: name or address to connect to.
        port: port to connect to.
        user: name of the user on the machine.
        names: names of the machine in files of host keys.
        known_hosts: these files.
        named_known_hosts: True if the target names the file, which must exist then.
        host_keys: keys that are accepted instead; files are not read then.
        key_path: the one private key to use, if the target names one.
        identities: files of private keys to try otherwise.
        identities_only: True to leave the agent's other keys unused.
        proxy_command: command that carries the connection, if there is one.
        jumps: jump hosts, in the words of the configuration.
        silence_s: seconds without an answer after which the machine counts as lost.
    """

    host: str
    port: int
    user: str
    names: tuple[str, ...]
    known_hosts: tuple[str, ...]
    named_known_hosts: bool
    host_keys: tuple[str, ...]
    key_path: str | None
    identities: tuple[str, ...]
    identities_only: bool
    proxy_command: str | None
    jumps: tuple[str, ...]
    silence_s: float

    def __str__(self) -> str:
        return f"{self.user}@{self.host} port {self.port}"


def settings(target: SSHTarget) -> Settings:
    """Return the settings for a target.

    Raises:
        ConfigurationError: the configuration cannot be read.
    """
    found = _look_up(target)
    host = str(found.get("hostname", target.host))
    port = _port(found.get("port", _PORT), target)
    name = str(found.get("hostkeyalias", host)).lower()
    named = target.known_hosts or found.get("userknownhostsfile")
    files = [target.known_hosts] if target.known_hosts else shlex.split(str(named or _USUAL_KNOWN_HOSTS))
    system = [] if target.known_hosts else shlex.split(str(found.get("globalknownhostsfile", _SYSTEM_KNOWN_HOSTS)))
    jump = "none" if target.proxy else found.get("proxyjump") or "none"
    return Settings(
        host=host,
        port=port,
        user=str(found.get("user") or _own_name(target)),
        names=_filed_under(name, port, alias="hostkeyalias" in found),
        known_hosts=tuple(os.path.expanduser(path) for path in files + system),
        named_known_hosts=target.known_hosts is not None,
        host_keys=target.host_keys,
        key_path=os.path.expanduser(target.key_path) if target.key_path else None,
        identities=tuple(os.path.expanduser(path) for path in found.get("identityfile", _USUAL_KEYS)),
        identities_only=str(found.get("identitiesonly", "no")).lower() == "yes",
        proxy_command=shlex.join(target.proxy) if target.proxy else found.get("proxycommand"),
        jumps=() if jump.lower() == "none" else tuple(part.strip() for part in jump.split(",")),
        silence_s=target.silence_s,
    )


def route(target: SSHTarget) -> tuple[SSHTarget, ...]:
    """Return the jump hosts of a target, first to last; those of the first one come before it.

    Raises:
        ConfigurationError: the configuration cannot be read, or leads in a circle.
    """
    hops: list[SSHTarget] = []
    first = target
    for _ in range(_DEEPEST):
        own = settings(first)
        nearer = [_hop(jump, target) for jump in own.jumps]
        places = [_place(hop) for hop in nearer]
        if not nearer or _place(first) in places:  # `Host *` with a ProxyJump means its jump host, too
            return tuple(hops)
        hops[:0] = nearer
        first = nearer[0]
    raise ConfigurationError(f"the SSH configuration's ProxyJump for {target.host} leads in a circle: correct it")


def _hop(jump: str, target: SSHTarget) -> SSHTarget:
    parts = _JUMP.fullmatch(jump)
    if parts is None:
        raise ConfigurationError(f"the SSH configuration's ProxyJump for {target.host} names no host: {jump!r}")
    user, host, port = parts["user"], parts["host"], parts["port"]
    return SSHTarget(
        host=host.strip("[]"),
        port=int(port) if port else None,
        user=user,
        known_hosts=target.known_hosts,
        config_path=target.config_path,
        patience_s=target.patience_s,
        silence_s=target.silence_s,
    )


def _place(target: SSHTarget) -> tuple[str, int]:
    own = settings(target)
    return (own.host.lower(), own.port)


def _filed_under(name: str, port: int, *, alias: bool) -> tuple[str, ...]:
    """Return the names to look up: with the port and without, or without only if it is 22 or there is an alias."""
    return (name,) if alias or port == _PORT else (f"[{name}]:{port}", name)


def _own_name(target: SSHTarget) -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # a container may run under a user id without a name
        raise ConfigurationError(f"no user name for {target.host}, as this user has none: pass user=") from error


def _port(value: Any, target: SSHTarget) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(
            f"the SSH configuration's Port for {target.host} is no number: {value!r}; correct it"
        ) from None


def _look_up(target: SSHTarget) -> dict[str, Any]:
    from paramiko import SSHConfig

    path = Path(os.path.expanduser(target.config_path or "~/.ssh/config"))
    asked_for = {"Port": target.port, "User": target.user}
    lines = [
        f"{key} {value}" for key, value in asked_for.items() if value is not None
    ]  # before the file: the first value of a key counts
    try:
        if target.config_path is not None or path.exists():
            lines += _lines(path, 0)
        return dict(SSHConfig.from_text("\n".join(lines)).lookup(target.host))
    except ConfigurationError:
        raise
    except Exception as error:  # paramiko raises KeyError and ImportError, too
        raise ConfigurationError(f"the SSH configuration {path} cannot be used for {target.host}: {error}") from error


def _lines(path: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a configuration and of the files that it includes."""
    # paramiko ignores Include.
    if depth > _DEEPEST:
        raise ConfigurationError(f"the SSH configuration {path} includes itself")
    header = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if _HEADER.match(text):
            header = text
        if included := _INCLUDE.match(text):
            for name in shlex.split(included[1]):
                for file in sorted(glob.glob(os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(name)))):
                    yield from _lines(Path(file), depth + 1)
            yield header or "Host *"  # an included file may end inside of another block
        elif not _IGNORED.match(text):
            yield line
