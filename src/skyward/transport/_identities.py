"""Private keys of the user, from ssh-agent and files, in the order of the attempts."""

from __future__ import annotations

import base64
import copy
import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.errors import AuthenticationError
from skyward.transport._host_certificates import blob_of, load_certificate
from skyward.transport._ssh_config import Settings

if TYPE_CHECKING:
    from paramiko.pkey import PublicBlob

    from skyward.transport._agent import AgentKey

__all__ = ["Identities", "Identity", "identities", "rsa_bits"]

_OPENSSH_BEGIN, _OPENSSH_END = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----"
_USUAL_NAMES = {f"id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "xmss", "dsa")}
_RSA_CERTIFICATES = ("rsa-sha2-512-cert-v01@openssh.com", "rsa-sha2-256-cert-v01@openssh.com")
_ALGORITHMS = {
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
    "ssh-rsa-cert-v01@openssh.com": _RSA_CERTIFICATES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Private key, in memory or in the agent.

    Attributes:
        key: paramiko's object for it.
        name: origin of the key, for messages.
        in_agent: True if the agent signs, which may ask a person.
    """

    key: Any = field(repr=False)
    name: str
    in_agent: bool = False

    @property
    def type(self) -> str:
        """Type of the key, or of the certificate that is shown for it."""
        return str(self.key.public_blob.key_type if self.key.public_blob else self.key.get_name())


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
    from paramiko import SSHException

    from skyward.transport._agent import Agent  # imports paramiko

    held: list[AgentKey] = []
    complaints: list[str] = []
    with ExitStack() as stack:
        if settings.agent:
            try:
                held = stack.enter_context(closing(Agent(settings.agent))).keys
            except (OSError, SSHException) as error:
                complaints.append(f"the agent at {settings.agent} does not answer: {error}")
        yield _given(settings, held) if settings.key_path else _usual(settings, held, complaints)


def rsa_bits(blob: bytes) -> int | None:
    """Return the size of an RSA key; None for a key of another type."""
    from paramiko import Message

    message: Any = Message(blob)
    if message.get_binary() != b"ssh-rsa":
        return None
    message.get_binary()
    return int.from_bytes(message.get_binary(), "big").bit_length()


def _given(settings: Settings, held: Iterable[AgentKey]) -> Identities:
    path = str(settings.key_path)
    public = _public_blob(path)
    certificates, unusable = _certificates(settings, [path])
    for key in held:
        if key.blob == public:
            usable = _with_certificates(Identity(key=key, name=f"{path} (agent)", in_agent=True), certificates)
            return Identities(usable=usable, unusable=unusable)
    found = _load(path)
    if isinstance(found, str):
        raise AuthenticationError(found)
    return Identities(usable=_with_certificates(found, certificates), unusable=unusable)


def _usual(settings: Settings, held: Iterable[AgentKey], complaints: Iterable[str]) -> Identities:
    """Return the agent's keys that also lie in files, the agent's others, and the files' others."""
    # Servers count attempts: the keys that are configured or usual for this host come before the agent's many others.
    blobs = {_public_blob(path): path for path in settings.identities if _is_there(path)}
    certificates, unreadable = _certificates(settings, settings.identities)
    ours = {*blobs, *certificates, *(each.key_blob for several in certificates.values() for each in several)}
    first = [
        Identity(key=key, name=f"{blobs.get(key.blob, _comment(key))} (agent)", in_agent=True)
        for key in held
        if key.blob in ours
    ]
    others = [
        Identity(key=key, name=f"agent: {_comment(key)}", in_agent=True)
        for key in held
        if key.blob not in ours and not settings.identities_only
    ]
    in_agent = {key.blob for key in held}
    loaded = [_load(path) for blob, path in blobs.items() if blob not in in_agent]
    files = [found for found in loaded if isinstance(found, Identity)]
    all_keys = [shown for key in (*first, *others, *files) for shown in _with_certificates(key, certificates)]
    excluded = {each.name: reason for each in all_keys if (reason := _excluded(each, settings))}
    return Identities(
        usable=tuple(each for each in all_keys if not _excluded(each, settings)),
        unusable=(
            *complaints,
            *(found for found in loaded if isinstance(found, str)),
            *(f"the key {path} does not exist" for path in settings.identities if _is_missed(path)),
            *unreadable,
            *excluded.values(),
            *_tokens(settings),
        ),
    )


def _tokens(settings: Settings) -> list[str]:
    library = settings.token_provider
    return [f"keys of PKCS11Provider {library}: load them into the agent (`ssh-add -s {library}`)"] if library else []


def _is_there(path: str) -> bool:
    return os.path.exists(path) or os.path.exists(f"{path}.pub")


def _is_missed(path: str) -> bool:
    """Return True for a key that does not exist, and that is not one of the usual ones."""
    folder, name = os.path.split(path)
    return not _is_there(path) and not (folder == os.path.expanduser("~/.ssh") and name in _USUAL_NAMES)


def _excluded(identity: Identity, settings: Settings) -> str:
    """Return the reason why the configuration excludes a key; empty if it does not."""
    allowed = settings.algorithms.user_keys
    if allowed and not set(_ALGORITHMS.get(identity.type, (identity.type,))) & {*allowed}:
        return f"{identity.name} is of a type that PubkeyAcceptedAlgorithms excludes: {identity.type}"
    bits = rsa_bits(identity.key.asbytes()) if identity.type == "ssh-rsa" else None
    if bits is not None and bits < settings.rsa_bits:
        return f"{identity.name} has {bits} bits, and RequiredRSASize is {settings.rsa_bits}"
    return ""


def _certificates(settings: Settings, paths: Iterable[str]) -> tuple[Mapping[bytes, list[PublicBlob]], tuple[str, ...]]:
    """Return the certificates, named or beside the keys, by the key they certify; and what cannot be read."""
    from paramiko.pkey import PublicBlob

    certificates: defaultdict[bytes, list[PublicBlob]] = defaultdict(list)
    unreadable: list[str] = []
    beside = [f"{path}-cert.pub" for path in paths if os.path.exists(f"{path}-cert.pub")]
    for path in dict.fromkeys([*settings.certificates, *beside]):
        try:
            certificate = PublicBlob.from_file(path)
            certificates[blob_of(load_certificate(certificate.key_blob).public_key())].append(certificate)
        except Exception as error:  # cryptography and paramiko raise TypeError, ValueError and SSHException, too
            unreadable.append(f"the certificate {path} cannot be used: {error}")
    return certificates, tuple(unreadable)


def _with_certificates(identity: Identity, certificates: Mapping[bytes, list[PublicBlob]]) -> tuple[Identity, ...]:
    """Return the key with each of its certificates, then without."""
    shown: list[Identity] = []
    for certificate in certificates.get(identity.key.asbytes(), ()):
        key = copy.copy(identity.key)
        key.public_blob = certificate
        shown.append(Identity(key=key, name=f"{identity.name} with a certificate", in_agent=identity.in_agent))
    return (*shown, identity)


def _comment(key: AgentKey) -> str:
    return key.comment or key.get_name()


def _load(path: str) -> Identity | str:
    """Return the key in a file, or the reason why it cannot be used."""
    from paramiko import PKey

    try:
        key = PKey.from_path(path)
    except FileNotFoundError:
        return f"the private key {path} does not exist"
    except OSError as error:
        return f"the private key {path} cannot be read: {error.strerror}"
    except Exception as error:  # cryptography and paramiko raise TypeError, ValueError and SSHException, too
        if "password" in str(error).lower() or "encrypted" in str(error).lower():
            return f"the private key {path} is encrypted: unlock it with `ssh-add {path}`, so that ssh-agent signs"
        if kind := _type(_public_blob(path)):
            if _blob_at(path):
                return f"{path} is a public key, and ssh-agent does not have the private one"
            if kind.startswith("sk-"):
                return f"the key {path} needs its security key: `ssh-add {path}`, so that ssh-agent signs"
        return f"the private key {path} is malformed, or of a type that is not supported: {error}"
    key.public_blob = None  # paramiko would show only the certificate that lies beside the key
    return Identity(key=key, name=path)


def _type(blob: bytes) -> str:
    """Return the type of a public key; empty for other bytes."""
    length = int.from_bytes(blob[:4], "big")
    return blob[4 : 4 + length].decode(errors="replace") if length < len(blob) else ""


def _public_blob(path: str) -> bytes:
    """Return the public half of a private key, without its passphrase; its path where that cannot be read."""
    # Compared with the agent's keys: an encrypted file can be used when the agent holds the key, and a configuration
    # may name the public half.
    if blob := _blob_at(path) or _blob_at(f"{path}.pub"):
        return blob
    with suppress(OSError, ValueError, IndexError):
        return _blob_inside(path) or os.fsencode(path)
    return os.fsencode(path)


def _blob_at(path: str) -> bytes:
    """Return the public key in a file; empty if it contains none."""
    try:
        kind, text, *_ = Path(path).read_text(encoding="utf-8", errors="replace").split()
        blob = base64.b64decode(text, validate=True)
    except (OSError, ValueError):
        return b""
    return blob if _type(blob) == kind else b""


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
