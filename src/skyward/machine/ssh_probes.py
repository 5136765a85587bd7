"""What a machine finds at an address: open ports, and host keys of SSH servers. paramiko is imported on use."""

from __future__ import annotations

import enum
import time

from skyward.machine.paramiko_parts import RSA_SIGNATURES, Client, end_handshake, new_client, open_channel

_HANDSHAKE_S = 10.0
_PROHIBITED = 1  # RFC 4254: SSH_OPEN_ADMINISTRATIVELY_PROHIBITED
_ATTEMPTS = 3


def shown_key(client: Client) -> str:
    """Return the host key that the machine has shown: ``"ssh-ed25519 AAAA…"``."""
    key = client.get_remote_server_key()
    return f"{key.get_name()} {key.get_base64()}"


def key_at(client: Client, host: str, port: int, *, kind: str, timeout_s: float) -> str:
    """Return the key of that kind of the SSH server that the machine finds at ``host:port``. Blocks.

    Keys are exchanged with that server, from here, through the machine; nobody logs in.

    Args:
        client: the connection to the machine.
        host: address of the server, as the machine dials it.
        port: its port.
        kind: type of the key, such as ``ssh-ed25519``.
        timeout_s: seconds in which the machine must have connected. The exchange of keys has ten more.

    Raises:
        Exception: paramiko's own exceptions: the machine could not connect, or no such server answers there.
    """
    channel = open_channel(client, "direct-tcpip", (host, port), timeout_s=timeout_s)
    peer = new_client(channel, host, timeout_s=_HANDSHAKE_S)
    try:
        # A machine with keys of several types shows the first that both sides have.
        peer.get_security_options().key_types = RSA_SIGNATURES if kind == "ssh-rsa" else (kind,)
        peer.start_client(timeout=_HANDSHAKE_S)
        return shown_key(peer)
    finally:
        end_handshake(peer)
        peer.close()
        channel.close()


class PortState(enum.Enum):
    """What a machine finds at a port."""

    OPEN = enum.auto()
    """A program listens."""
    CLOSED = enum.auto()
    """The connection is refused."""
    PROHIBITED = enum.auto()
    """The machine's SSH server does not let this user try."""
    SILENT = enum.auto()
    """There is no answer in time."""


def probe_port(client: Client, host: str, port: int, *, timeout_s: float) -> PortState:
    """Have the machine connect to ``host:port``, and return the outcome. Blocks.

    Raises:
        StaleConnectionError: the connection to the machine has ended.
    """
    from paramiko import ssh_exception

    for _ in range(_ATTEMPTS):
        began = time.monotonic()
        try:
            open_channel(client, "direct-tcpip", (host, port), timeout_s=timeout_s).close()
        except ssh_exception.ChannelException as error:
            return PortState.PROHIBITED if error.code == _PROHIBITED else PortState.CLOSED
        except ssh_exception.SSHException:
            # By the time, not by the type, and once more: of two channels refused at once on a connection, paramiko
            # gives a reason for one only. By the type, 4 of 16 pools on four hosts took a pair of them for unconnected.
            if time.monotonic() - began >= timeout_s:
                return PortState.SILENT
        else:
            return PortState.OPEN
    return PortState.CLOSED
