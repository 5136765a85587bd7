"""Keys of the user for SSH: in files, in agents, and their certificates, in the order in which OpenSSH offers them."""

from __future__ import annotations

import base64
import copy
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paramiko import Message, PKey, SSHException
from paramiko.pkey import PublicBlob

from skyward.base.descriptors import keep_from_forks
from skyward.base.platform import unix_socket
from skyward.errors import AuthenticationError
from skyward.machine.ssh_config import Settings
from skyward.machine.ssh_host_keys import blob_of, load_certificate, rsa_bits, type_of

_LIST, _LISTED, _SIGN, _SIGNED = 11, 12, 13, 14  # draft-ietf-sshm-ssh-agent
_RSA_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_CERTIFICATE: Final = "-cert-v01@openssh.com"
_ANSWER_S = 10.0
_SIGN_S = 45.0
"""Time for a person to touch a key or to unlock it."""
_LONGEST_ANSWER = 1 << 20
_SIGNATURE_BYTES = 64


class AgentKey(PKey):
    """Key that an agent holds. paramiko logs in with it as with a key of its own.

    Args:
        agent: the agent.
        blob: the public key, or the certificate.
        comment: the agent's comment.

    Attributes:
        blob: as given.
        comment: as given.
        public_blob: a certificate to show instead of the public key; None for the key itself.
        refusal: the reason for which the agent did not sign; empty if it did.
    """

    def __init__(self, agent: Agent, blob: bytes, comment: str) -> None:
        self._agent = agent
        self.blob = blob
        self.comment = comment
        self.name = Message(blob).get_text()
        self.public_blob: PublicBlob | None = None
        self.refusal = ""

    def asbytes(self) -> bytes:
        """Return the public key, or the certificate."""
        return self.blob

    def get_name(self) -> str:
        """Return the type of the key."""
        return self.name

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Message:
        """Return the agent's signature; a wrong one if it does not sign."""
        # paramiko's thread signs: an exception would end the connection, and the other keys could not be tried.
        try:
            return Message(self._agent.sign(self.blob, data, (algorithm or "").removesuffix(_CERTIFICATE)))
        except (OSError, SSHException) as error:
            self.refusal = str(error)
        wrong = Message()
        wrong.add_string(algorithm or self.name)
        wrong.add_string(bytes(_SIGNATURE_BYTES))
        return wrong


class Agent:
    """Connection to an agent.

    Args:
        path: its socket.
        sign_s: time for one signature.

    Raises:
        OSError: no agent answers there.
        SSHException: another program than an agent answers.
    """

    def __init__(self, path: str, *, sign_s: float = _SIGN_S) -> None:
        self._path = path
        self._sign_s = sign_s
        self._socket = _connected(path)
        try:
            answer = self._ask(bytes([_LIST]), _LISTED)
            self.keys = [self._key(answer) for _ in range(answer.get_int())]
        except BaseException:
            self._socket.close()
            raise

    def sign(self, blob: bytes, data: bytes, algorithm: str) -> bytes:
        """Return a signature.

        Raises:
            SSHException: the agent refuses to sign.
            OSError: it does not answer.
        """
        request = Message()
        request.add_byte(bytes([_SIGN]))
        request.add_string(blob)
        request.add_string(data)
        request.add_int(_RSA_FLAGS.get(algorithm, 0))
        self._socket.settimeout(self._sign_s)
        try:
            return bytes(self._ask(request.asbytes(), _SIGNED).get_binary())
        except OSError:  # the answer may still come, and must not count for the next key
            self._socket.close()
            self._socket = _connected(self._path)
            raise

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _key(self, answer: Message) -> AgentKey:
        blob = answer.get_binary()
        return AgentKey(self, blob, answer.get_binary().decode(errors="replace"))

    def _ask(self, request: bytes, kind: int) -> Message:
        self._socket.sendall(struct.pack(">I", len(request)) + request)
        (length,) = struct.unpack(">I", self._received(4))
        if length > _LONGEST_ANSWER:
            raise SSHException("the answer of ssh-agent is too long")
        answer = Message(self._received(length))
        if answer.get_byte() != bytes([kind]):
            raise SSHException("ssh-agent refuses")
        return answer

    def _received(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            if not (part := self._socket.recv(length - len(data))):
                raise SSHException("ssh-agent has closed the connection")
            data += part
        return data


def _connected(path: str) -> socket.socket:
    sock = keep_from_forks(unix_socket())
    try:
        sock.settimeout(_ANSWER_S)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


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
    held: list[AgentKey] = []
    complaints: list[str] = []
    with ExitStack() as stack:
        if settings.agent:
            try:
                held = stack.enter_context(closing(Agent(settings.agent))).keys
            except (OSError, SSHException) as error:
                complaints.append(f"the agent at {settings.agent} does not answer: {error}")
        yield _identities(settings, held, complaints)


def _identities(settings: Settings, held: Iterable[AgentKey], complaints: Iterable[str]) -> Identities:
    """Return the agent's keys that also lie in files, the agent's others, and the files' others."""
    given = settings.key_path
    paths = [given] if given else [path for path in settings.identities if not _is_usual(path) or _exists(path)]
    blobs = {_public_blob(path): path for path in paths}
    certificates, unreadable = _certificates(settings, paths)
    ours = {*blobs, *certificates, *(each.key_blob for several in certificates.values() for each in several)}
    # Servers count attempts: the keys that are configured or usual for this host come before the agent's many others.
    in_agent = [
        Identity(key=key, name=f"{path} (agent)" if (path := blobs.get(key.blob)) else _comment(key), in_agent=True)
        for key in sorted(held, key=lambda key: key.blob not in ours)
        if key.blob in ours or not (given or settings.identities_only)
    ]
    agent_blobs = {identity.key.blob for identity in in_agent}
    loaded = [_load(path) for blob, path in blobs.items() if blob not in agent_blobs]
    files = [key for key in loaded if isinstance(key, Identity)]
    shown = [(key, _exclusion(key, settings)) for each in (*in_agent, *files) for key in _certified(each, certificates)]
    usable = tuple(key for key, exclusion in shown if not exclusion)
    unusable = (
        *complaints,
        *(failure for failure in loaded if isinstance(failure, str)),
        *unreadable,
        *dict.fromkeys(exclusion for _, exclusion in shown if exclusion),
        *_tokens(settings),
    )
    if given and not usable:
        raise AuthenticationError("; ".join(unusable))
    return Identities(usable=usable, unusable=unusable)


def _tokens(settings: Settings) -> list[str]:
    library = settings.token_provider
    return [f"keys of PKCS11Provider {library}: load them into the agent (`ssh-add -s {library}`)"] if library else []


def _exists(path: str) -> bool:
    return os.path.exists(path) or os.path.exists(f"{path}.pub")


def _is_usual(path: str) -> bool:
    """Return True for a key that OpenSSH looks for without configuration."""
    folder, name = os.path.split(path)
    return folder == os.path.expanduser("~/.ssh") and name in _USUAL_NAMES


def _exclusion(identity: Identity, settings: Settings) -> str:
    """Return the reason why the configuration excludes a key; empty if it does not."""
    allowed = settings.algorithms.get("PubkeyAcceptedAlgorithms", ())
    if allowed and not set(_ALGORITHMS.get(identity.type, (identity.type,))) & {*allowed}:
        return f"{identity.name} is of a type that PubkeyAcceptedAlgorithms excludes: {identity.type}"
    bits = rsa_bits(identity.key.asbytes()) if identity.type == "ssh-rsa" else None
    if bits is not None and bits < settings.rsa_bits:
        return f"{identity.name} has {bits} bits, and RequiredRSASize is {settings.rsa_bits}"
    return ""


def _certificates(settings: Settings, paths: Iterable[str]) -> tuple[Mapping[bytes, list[PublicBlob]], tuple[str, ...]]:
    """Return the certificates, named or beside the keys, by the key they certify; and what cannot be read."""
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


def _certified(identity: Identity, certificates: Mapping[bytes, list[PublicBlob]]) -> tuple[Identity, ...]:
    """Return the key with each of its certificates, then without."""
    shown: list[Identity] = []
    for certificate in certificates.get(identity.key.asbytes(), ()):
        key = copy.copy(identity.key)
        key.public_blob = certificate
        shown.append(Identity(key=key, name=f"{identity.name} with a certificate", in_agent=identity.in_agent))
    return (*shown, identity)


def _comment(key: AgentKey) -> str:
    return f"agent: {key.comment or key.get_name()}"


def _load(path: str) -> Identity | str:
    """Return the key in a file, or the reason why it cannot be used."""
    try:
        key = PKey.from_path(path)
    except FileNotFoundError:
        return f"the private key {path} does not exist"
    except OSError as error:
        return f"the private key {path} cannot be read: {error.strerror}"
    except Exception as error:  # cryptography and paramiko raise TypeError, ValueError and SSHException, too
        if "password" in str(error).lower() or "encrypted" in str(error).lower():
            return f"the private key {path} is encrypted: unlock it with `ssh-add {path}`, so that ssh-agent signs"
        if kind := type_of(_public_blob(path)):
            if _blob_at(path):
                return f"{path} is a public key, and ssh-agent does not have the private one"
            if kind.startswith("sk-"):
                return f"the key {path} needs its security key: `ssh-add {path}`, so that ssh-agent signs"
        return f"the private key {path} is malformed, or of a type that is not supported: {error}"
    key.public_blob = None  # paramiko would show only the certificate that lies beside the key
    return Identity(key=key, name=path)


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
    return blob if type_of(blob) == kind else b""


def _blob_inside(path: str) -> bytes:
    """Return the public half from a file in OpenSSH's format."""
    # That format does not encrypt the public half: magic, three strings, a count, then the public key.
    text = Path(path).read_text(encoding="utf-8").strip()
    if not text.startswith(_OPENSSH_BEGIN):
        return b""
    content = base64.b64decode(text.removeprefix(_OPENSSH_BEGIN).removesuffix(_OPENSSH_END))
    message: Any = Message(content.removeprefix(b"openssh-key-v1\0"))
    for _ in ("cipher", "derivation", "options"):
        message.get_binary()
    message.get_int()
    return bytes(message.get_binary())
