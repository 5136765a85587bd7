"""Algorithms of a connection: those that the SSH configuration allows of paramiko's, and what the machine offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from skyward.errors import ConfigurationError
from skyward.transport._hostkeys import KnownKeys
from skyward.transport._paramiko import RSA_SIGNATURES
from skyward.transport._ssh_config import Algorithms

__all__ = ["agree", "disabled", "disagreement"]

# Without the CBC ciphers and the SHA-1 and MD5 hashes that paramiko also supports.
_CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "aes192-ctr",
    "aes256-ctr",
)
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_HOST_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_CERTIFICATE = "-cert-v01@openssh.com"
_NO_ALGORITHMS = {"ext-info-s", "kex-strict-s-v00@openssh.com"}
_OLD = ("sha1", "md5", "-cbc", "arcfour", "ssh-dss", "ssh-rsa", "group1-", "group14-sha1")
_LISTS = (
    ("kex_algo_list", "KexAlgorithms", "kex"),
    ("server_key_algo_list", "HostKeyAlgorithms", "key_types"),
    ("server_encrypt_algo_list", "Ciphers", "ciphers"),
    ("server_mac_algo_list", "MACs", "digests"),
)


def agree(client: Any, allowed: Algorithms, known: KnownKeys) -> None:
    """Have a connection offer what the SSH configuration allows, and prefer host keys that are on file.

    Raises:
        ConfigurationError: the configuration allows nothing that paramiko has.
    """
    options = client.get_security_options()
    options.kex = _allowed(options.kex, allowed.kex, "KexAlgorithms")
    options.ciphers = _allowed(_CIPHERS, allowed.ciphers, "Ciphers")
    options.digests = _MACS if all("gcm" in each for each in options.ciphers) else _allowed(_MACS, allowed.macs, "MACs")
    options.key_types = _allowed(_preferred(known), allowed.host_keys, "HostKeyAlgorithms")


def disabled(allowed: Algorithms) -> list[str]:
    """Return the algorithms of the user's keys that the configuration excludes."""
    names = {*allowed.user_keys}
    return [name for name in _HOST_KEY_TYPES if names and not {name, name + _CERTIFICATE} & names]


def disagreement(client: Any) -> str:
    """Return both sides' lists where they have nothing in common; empty if that is not the reason."""
    options = client.get_security_options()
    for field, option, ours in _LISTS:
        offered = [name for name in client.offered.get(field, ()) if name not in _NO_ALGORITHMS]
        mine: Sequence[str] = getattr(options, ours)
        if offered and not {*mine} & {*offered}:
            return (
                f"no {option} in common: the machine offers {', '.join(offered)}; this client {', '.join(mine)}. "
                f"{_reason(offered, option)}"
            )
    return ""


def _reason(offered: Iterable[str], option: str) -> str:
    if all(any(part in name for part in _OLD) for name in offered):
        return "All that the machine offers is outdated: update its SSH server"
    return (
        f"The machine is stricter than this client, or your SSH configuration is: allow one of this client's in the "
        f"machine's sshd_config ({option}), or update paramiko and cryptography here"
    )


def _allowed(ours: Sequence[str], allowed: Sequence[str], option: str) -> tuple[str, ...]:
    chosen = tuple(name for name in ours if not allowed or name in allowed)
    if not chosen:
        raise ConfigurationError(
            f"{option} of the SSH configuration allows only {', '.join(allowed)}; Skyward's client has only "
            f"{', '.join(ours)}: allow one of these"
        )
    return chosen


def _preferred(known: KnownKeys) -> tuple[str, ...]:
    """Return the types of host keys, those on file first."""
    # A machine shows the first of these types that it has: with another order it could show a key that is not on file.
    on_file = {name for key in known.accepted for name in (RSA_SIGNATURES if key.type == "ssh-rsa" else [key.type])}
    plain = sorted(_HOST_KEY_TYPES, key=lambda name: name not in on_file)
    certified = [name + _CERTIFICATE for name in _HOST_KEY_TYPES] if known.authorities else []
    return (*certified, *plain)
