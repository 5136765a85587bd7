"""Peers of a machine reached over SSH: their host keys, and whether they answer, as that machine finds them."""

from __future__ import annotations

import time

import paramiko

from skyward.transport._paramiko import RSA_SIGNATURES, Client, client_class, end_handshake, hush, open_channel

__all__ = ["answers", "key_at", "shown_key"]

_HANDSHAKE_S = 10.0


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
    peer = client_class()(channel)
    try:
        peer.name = f"skyward-ssh {host}"
        hush(peer)
        peer.banner_timeout = peer.handshake_timeout = _HANDSHAKE_S
        # A machine with keys of several types shows the first that both sides have.
        peer.get_security_options().key_types = RSA_SIGNATURES if kind == "ssh-rsa" else (kind,)
        peer.start_client(timeout=_HANDSHAKE_S)
        return shown_key(peer)
    finally:
        end_handshake(peer)
        peer.close()
        channel.close()


def answers(client: Client, host: str, port: int, *, timeout_s: float) -> bool:
    """Return False if the machine gets no answer from ``host:port`` in that time; a refusal is an answer. Blocks.

    Raises:
        Exception: the connection to the machine has ended.
    """
    began = time.monotonic()
    try:
        channel = open_channel(client, "direct-tcpip", (host, port), timeout_s=timeout_s)
    except paramiko.SSHException:
        # By the time, not by the type: of two channels refused at once, paramiko gives a reason for one only. By the
        # type, 4 of 16 pools on four hosts took a pair of them for unconnected.
        return time.monotonic() - began < timeout_s
    channel.close()
    return True
