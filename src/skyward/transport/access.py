"""How a machine is reached: one type per transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["TAGS_FILE", "Access", "LocalAccess", "SSHAccess", "SSHTarget"]

TAGS_FILE = "instance.json"
"""In a node's folder, where its provider has no other record of it: the tags that make the folder an instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAccess:
    """The machine is this one.

    Attributes:
        address: the loopback address the node's ports bind to.
        workdir: the node's own folder.
    """

    address: str
    workdir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHTarget:
    """Who answers over SSH, and how one proves who one is. Equal targets share one connection.

    Attributes:
        host: name, address, or an alias of the SSH configuration.
        port: None means the SSH configuration's, or 22.
        user: None means the SSH configuration's, or this user's own name.
        key_path: the one private key to offer; None means the agent's, the SSH configuration's, and the usual files.
        known_hosts: file of host keys; None means the user's and the system's.
        host_keys: public keys (``"ssh-ed25519 AAAA…"``), one of which the machine must show; files are not read then.
        config_path: the SSH configuration; None means the user's.
        proxy: a command whose input and output are the connection; what the SSH configuration says of the way to the
            machine does not count then. Empty is none.
        patience_s: how long a machine that does not answer is tried again before that is an error.
        silence_s: how long a machine may say nothing, though it is asked, before its connection is given up.
    """

    host: str
    port: int | None = None
    user: str | None = None
    key_path: str | None = None
    known_hosts: str | None = None
    host_keys: tuple[str, ...] = ()
    config_path: str | None = None
    proxy: tuple[str, ...] = ()
    patience_s: float = 30.0
    silence_s: float = 15.0

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}{f':{self.port}' if self.port else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHAccess:
    """The machine answers over SSH.

    Attributes:
        target: where and how.
        address: the machine's own address, at which the pool's other machines reach it: what its ports bind to.
        workdir: the node's own folder, absolute.
        cache: folder of environments, absolute; it outlives the node.
        boot_s: so long a new machine may refuse everybody, or show another host key: it is still being set up.
    """

    target: SSHTarget
    address: str
    workdir: str
    cache: str = field(default="")
    boot_s: float = 0.0


Access: TypeAlias = LocalAccess | SSHAccess
