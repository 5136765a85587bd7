"""Keys, addresses and SSH accesses of rented machines: one key of the user, from which every host key is derived."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs

from skyward.errors import AuthenticationError, ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_HOST_KEY: Final = b"skyward host key "
_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """Key pair of type ed25519.

    Attributes:
        public: ``"ssh-ed25519 AAAA…"``.
        private: in OpenSSH's format. Secret.
    """

    public: str
    private: str = field(repr=False)


def make_key_pair() -> KeyPair:
    """Generate a key pair."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _key_pair(Ed25519PrivateKey.generate())


def user_key() -> tuple[Path, KeyPair]:
    """Return the path (mode 0600) of the user's key, and the key; generated on first use, once for all processes.

    Raises:
        AuthenticationError: the file cannot be read, or is no such key.
    """
    path, key = _user_key()
    return path, _key_pair(key)


def host_key(ledger_key: str) -> KeyPair:
    """Return the host key of the machine with that ``ledger_key``, derived from the user's private key.

    Every process of the user computes the same one, so that it is stored nowhere and is no tag. It reveals nothing of
    the user's key. Raises as :func:`user_key`.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    _, key = _user_key()
    derivation = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=_HOST_KEY + ledger_key.encode())
    return _key_pair(Ed25519PrivateKey.from_private_bytes(derivation.derive(key.private_bytes_raw())))


def _user_key() -> tuple[Path, Ed25519PrivateKey]:
    folder = platformdirs.user_data_path("skyward") / "ssh"
    path = folder / "id_ed25519"
    if not path.exists():
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _make_once(path)
    return path, _read(path)


def _make_once(path: Path) -> None:
    """Generate the key file, unless another process links its own first; readers never see a partial file."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(make_key_pair().private)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        os.unlink(draft)


def _read(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    advice = "remove it; a new one is generated for machines launched from then on"
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(_FILE_MODE)
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"Skyward's private key {path} cannot be used: {error}; {advice}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise AuthenticationError(f"Skyward's private key {path} is not an ed25519 key; {advice}")
    return key


def _key_pair(key: Ed25519PrivateKey) -> KeyPair:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return KeyPair(public=public.decode(), private=private.decode())


CLIENT_CIDR_VARIABLE: Final = "SKYWARD_CLIENT_CIDR"
"""Environment variable with the client's public address or network, such as ``203.0.113.7/32``."""

ADDRESS_URL: Final = "https://checkip.amazonaws.com"
"""Web page that answers with the client's public address, and nothing else."""

_ASK_TIMEOUT_S: Final = 5.0


async def client_cidr(address_url: str = ADDRESS_URL, *, otherwise: str = "") -> str:
    """Return the client's network: from the environment, else its public address as reported by ``address_url``.

    Args:
        address_url: web page that answers with the address.
        otherwise: another remedy for the error message, such as ``"use VM(tunnel=True)"``; empty for none.

    Raises:
        ConfigurationError: the value is malformed, or the address is in neither place.
    """
    given = os.environ.get(CLIENT_CIDR_VARIABLE)
    if given:
        return _cidr(given, f"{CLIENT_CIDR_VARIABLE} in the environment")
    try:
        seen = await asyncio.to_thread(_ask, address_url)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"this machine's public address could not be read from {address_url}: {error}. Machines admit only that "
            f"address over SSH: set {CLIENT_CIDR_VARIABLE}, e.g. to 203.0.113.7/32{otherwise and f', or {otherwise}'}"
        ) from error
    return _cidr(seen, f"the answer of {address_url}")


def _ask(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an HTTP URL")
    with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as answer:  # noqa: S310 - checked above
        return str(answer.read(100).decode("ascii"))


def _cidr(text: str, source: str) -> str:
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError as error:
        raise ConfigurationError(f"{source} must be an address or a network, got {text[:60]!r}") from error
    if network.prefixlen == 0:
        raise ConfigurationError(f"{source} is the whole internet, got {text[:60]!r}: name this machine's own address")
    return str(network)
