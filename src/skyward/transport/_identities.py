"""Private keys of the user, from ssh-agent and files, in the order of the attempts."""

from __future__ import annotations

import base64
import os
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward.errors import AuthenticationError
from skyward.transport._ssh_config import Settings

__all__ = ["Identities", "Identity", "identities"]

_OPENSSH_BEGIN, _OPENSSH_END = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Private key, in memory or in the agent.

    Attributes:
        key: paramiko's object for it.
        name: origin of the key, for messages.
    """

    key: Any = field(repr=False)
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identities:
    """Keys for a login.

    Attributes:
        usable: keys to try, in this order.
        unusable: reasons why other keys cannot be tried.
    """

    usable: tuple[Identity, ...]
    unusable: tuple[str, ...]


@contextmanager
def identities(settings: Settings) -> Generator[Identities]:
    """Yield the keys; those of the agent can sign until the context ends.

    Raises:
        AuthenticationError: the one key of ``key_path`` cannot be used.
    """
    from paramiko import Agent

    with closing(Agent()) as agent:  # without ssh-agent it has no keys, and raises nothing
        held = {key.asbytes(): key for key in agent.get_keys()}
        yield _given(settings.key_path, held) if settings.key_path else _usual(settings, held)


def _given(path: str, held: dict[bytes, Any]) -> Identities:
    public = _public_blob(path)
    if public in held:
        return Identities(usable=(Identity(key=held[public], name=f"{path} (agent)"),), unusable=())
    found = _load(path)
    if isinstance(found, str):
        raise AuthenticationError(found)
    return Identities(usable=(found,), unusable=())


def _usual(settings: Settings, held: dict[bytes, Any]) -> Identities:
    """Return the agent's keys that also lie in files, the agent's others, and the files' others."""
    # Servers count attempts: the keys that are configured or usual for this host come before the agent's many others.
    paths = [path for path in settings.identities if os.path.exists(path)]
    blobs = {_public_blob(path): path for path in paths}
    first = [Identity(key=key, name=f"{blobs[blob]} (agent)") for blob, key in held.items() if blob in blobs]
    others = [Identity(key=key, name=f"agent: {_comment(key)}") for blob, key in held.items() if blob not in blobs]
    loaded = [_load(path) for blob, path in blobs.items() if blob not in held]
    files = [found for found in loaded if isinstance(found, Identity)]
    return Identities(
        usable=(*first, *([] if settings.identities_only else others), *files),
        unusable=tuple(found for found in loaded if isinstance(found, str)),
    )


def _comment(key: Any) -> str:
    return str(getattr(key, "comment", "") or key.get_name())


def _load(path: str) -> Identity | str:
    """Return the key in a file, or the reason why it cannot be used."""
    from paramiko import PKey

    try:
        return Identity(key=PKey.from_path(path), name=path)
    except FileNotFoundError:
        return f"the private key {path} does not exist"
    except OSError as error:
        return f"the private key {path} cannot be read: {error.strerror}"
    except Exception as error:  # cryptography and paramiko raise TypeError, ValueError and SSHException, too
        if "password" in str(error).lower() or "encrypted" in str(error).lower():
            return f"the private key {path} is encrypted: unlock it with `ssh-add {path}`, so that ssh-agent signs"
        return f"the private key {path} is malformed, or of a type that is not supported: {error}"


def _public_blob(path: str) -> bytes:
    """Return the public half of a private key, without its passphrase; its path where that cannot be read."""
    # Compared with the agent's keys: an encrypted file can be used when the agent holds the key.
    for read in (_blob_beside, _blob_inside):
        try:
            if blob := read(path):
                return blob
        except (OSError, ValueError, IndexError):
            continue
    return os.fsencode(path)


def _blob_beside(path: str) -> bytes:
    return base64.b64decode(Path(f"{path}.pub").read_text(encoding="utf-8").split()[1], validate=True)


def _blob_inside(path: str) -> bytes:
    """Return the public half from a file in OpenSSH's format."""
    # That format does not encrypt the public half: magic, three strings, a count, then the public key.
    from paramiko import Message

    text = Path(path).read_text(encoding="utf-8").strip()
    if not text.startswith(_OPENSSH_BEGIN):
        return b""
    content = base64.b64decode(text.removeprefix(_OPENSSH_BEGIN).removesuffix(_OPENSSH_END))
    message: Any = Message(content.removeprefix(b"openssh-key-v1\0"))
    for _ in ("cipher", "derivation", "options"):
        message.get_binary()
    message.get_int()
    return bytes(message.get_binary())
