"""Addresses of machines: one type per transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["TAGS_FILE", "Access", "LocalAccess", "SSHAccess", "SSHTarget"]

TAGS_FILE = "instance.json"
"""File in a node's folder with the tags of its instance, for providers that keep no record of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAccess:
    """Access to this machine.

    Attributes:
        address: the loopback address that the node's ports bind to.
        workdir: the node's own folder.
    """

    address: str
    workdir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHTarget:
    """SSH server and credentials for it. Equal targets share one connection.

    Attributes:
        host: name, address, or an alias of the SSH configuration.
        port: None means the SSH configuration's, or 22.
        user: None means the SSH configuration's, or this user's own name.
        key_path: the one private key to offer; None means the agent's, the SSH configuration's, and the usual files.
        known_hosts: file of host keys; None means the user's and the system's.
        host_keys: public keys (``"ssh-ed25519 AAAA…"``), one of which the machine must show instead of one on file.
        config_path: the SSH configuration; None means the user's.
        proxy: command whose input and output are the connection. It replaces ProxyJump and ProxyCommand of the SSH
            configuration; empty means none.
        direct: True for a host that is dialled from a jump host: ProxyJump and ProxyCommand do not count for it.
        patience_s: seconds of retries for a machine that does not answer, before that is an error.
        silence_s: seconds without an answer of the machine, after which its connection is given up.
    """

    host: str
    port: int | None = None
    user: str | None = None
    key_path: str | None = None
    known_hosts: str | None = None
    host_keys: tuple[str, ...] = ()
    config_path: str | None = None
    proxy: tuple[str, ...] = ()
    direct: bool = False
    patience_s: float = 30.0
    silence_s: float = 15.0

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}{f':{self.port}' if self.port else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHAccess:
    """Access to a machine over SSH.

    Attributes:
        target: the SSH server and the credentials.
        address: address at which other machines of its network reach it.
        workdir: the node's own folder, absolute.
        cache: folder of environments, absolute; it outlives the node.
        boot_s: seconds for which a new machine may refuse every login while it is set up.
        other_key_s: seconds for which it may show another host key: that of its image, or of the machine that had its
            address before.
        bind: address of one of its interfaces, to which the node's ports bind. Behind NAT it differs from ``address``;
            empty means that it does not.
    """

    target: SSHTarget
    address: str
    workdir: str
    cache: str = field(default="")
    boot_s: float = 0.0
    other_key_s: float = 10.0
    bind: str = ""


Access: TypeAlias = LocalAccess | SSHAccess
