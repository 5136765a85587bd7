"""The user's key, by which machines let us in, and machines' keys, by which they prove who they are."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from skyward.errors import AuthenticationError

__all__ = ["KeyPair", "make_key_pair", "user_key"]

_FILE_MODE = 0o600
_FOLDER_MODE = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """An ed25519 key pair.

    Attributes:
        public: ``"ssh-ed25519 AAAA…"``.
        private: as OpenSSH keeps it. Secret.
    """

    public: str
    private: str = field(repr=False)


def make_key_pair() -> KeyPair:
    """A new one."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _key_pair(Ed25519PrivateKey.generate())


def user_key() -> tuple[Path, KeyPair]:
    """The user's own key and the file (0600) that it lies in; made the first time, once for all processes."""
    folder = platformdirs.user_data_path("skyward") / "ssh"
    path = folder / "id_ed25519"
    if not path.exists():
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _make_once(path)
    return path, _read(path)


def _make_once(path: Path) -> None:
    """Whoever links the file first has made the key; a reader sees all of it or nothing."""
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


def _read(path: Path) -> KeyPair:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    advice = "remove it, and a new one is made for machines that are launched from then on"
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(_FILE_MODE)
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"Skyward's private key {path} cannot be used: {error}; {advice}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise AuthenticationError(f"Skyward's private key {path} is none of ed25519; {advice}")
    return _key_pair(key)


def _key_pair(key: object) -> KeyPair:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    assert isinstance(key, Ed25519PrivateKey)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return KeyPair(public=public.decode(), private=private.decode())
