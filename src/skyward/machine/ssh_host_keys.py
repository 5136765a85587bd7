"""Host keys of SSH servers: those that a machine may show, with known_hosts, certificates and revocations."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)
from cryptography.hazmat.primitives.serialization.ssh import SSHCertPublicKeyTypes
from paramiko import Message

from skyward.errors import AuthenticationError, ConfigurationError, HostKeyError
from skyward.machine.ssh_config import Settings, expanded, matches_any

log = logging.getLogger("skyward.machine")


_KRL = b"SSHKRL\n\0"
_KRL_S = 10.0
_SHA_1 = "ssh-rsa"
"""Signature that counts only where CASignatureAlgorithms names it, as for OpenSSH since 8.2: SHA-1 is broken."""


def signer(certificate: bytes) -> bytes:
    """Return the public key of the authority that has signed a certificate.

    Raises:
        AuthenticationError: it cannot be decoded.
    """
    return blob_of(load_certificate(certificate).signature_key())


def objection(certificate: bytes, key: bytes, name: str, algorithms: Sequence[str]) -> str:
    """Return the reason for which a certificate does not prove that its key is the machine's; empty if it does.

    Args:
        certificate: the certificate.
        key: the machine's key.
        name: the machine's name.
        algorithms: signatures that are accepted (CASignatureAlgorithms); empty for all without SHA-1.
    """
    loaded = load_certificate(certificate)
    principals = [principal.decode(errors="replace") for principal in loaded.valid_principals]
    signature = _signature_type(certificate)
    if loaded.type is not SSHCertificateType.HOST:
        return "it is a user's, not a host's"
    if blob_of(loaded.public_key()) != key:
        return "it is for another key"
    if name not in principals:  # no pattern, and no list is not every name
        return f"it is for {', '.join(principals) or 'no name'}, not for {name}"
    if not loaded.valid_after <= time.time() < loaded.valid_before:
        return "it has expired, or is not valid yet"
    if loaded.critical_options:
        return "it has critical options"
    if signature not in algorithms if algorithms else signature == _SHA_1:
        return f"CASignatureAlgorithms excludes its signature, {signature}"
    try:
        loaded.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return "its signature is wrong"
    return ""


def load_certificate(certificate: bytes) -> SSHCertificate:
    """Return a decoded certificate.

    Raises:
        AuthenticationError: it cannot be decoded.
    """
    try:
        loaded = load_ssh_public_identity(_line(certificate))
    except (UnsupportedAlgorithm, ValueError) as error:
        raise AuthenticationError(f"the certificate cannot be decoded: {error}") from error
    if not isinstance(loaded, SSHCertificate):
        raise AuthenticationError("the certificate cannot be decoded: it is a plain key")
    return loaded


def _line(blob: bytes) -> bytes:
    """Return a key or certificate in the format of files."""
    return type_of(blob).encode() + b" " + base64.b64encode(blob)


def blob_of(key: SSHCertPublicKeyTypes) -> bytes:
    """Return a public key in the format of the protocol."""
    return base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])


def is_revoked(path: str, blobs: Collection[bytes], shown: bytes) -> bool:
    """Return True if a file of revoked keys names a key.

    Args:
        path: the file: public keys, one a line, or a list in the binary format (KRL).
        blobs: the machine's key, and that of the authority that has signed it.
        shown: what the machine has shown: its key, or its certificate.

    Raises:
        AuthenticationError: the file cannot be read.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise AuthenticationError(f"RevokedHostKeys {path} cannot be read: {error.strerror}") from error
    if text.startswith(_KRL):
        return _in_krl(path, shown)
    encoded = {base64.b64encode(blob) for blob in blobs}
    return any(encoded & set(line.split()) for line in text.split(b"\n") if not line.lstrip().startswith(b"#"))


def _in_krl(path: str, shown: bytes) -> bool:
    with tempfile.NamedTemporaryFile(suffix=".pub") as file:
        file.write(_line(shown) + b"\n")
        file.flush()
        argv = ["ssh-keygen", "-Q", "-f", path, file.name]
        try:
            completed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_KRL_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise AuthenticationError(f"RevokedHostKeys {path} needs ssh-keygen to be read: {error}") from error
    if completed.returncode and b"REVOKED" not in completed.stdout:
        raise AuthenticationError(
            f"RevokedHostKeys {path} cannot be read: {completed.stderr.decode(errors='replace').strip()}"
        )
    return bool(completed.returncode)


def _signature_type(certificate: bytes) -> str:
    """Return the type of the signature, the last field of a certificate that is known to be sound."""
    fields = Message(certificate)
    key_fields = 1 if fields.get_text().startswith("ssh-ed25519") else 2
    for _ in range(1 + key_fields):  # nonce, the key
        fields.get_binary()
    fields.get_bytes(8 + 4)  # serial number, type
    for _ in ("key id", "principals"):
        fields.get_binary()
    fields.get_bytes(8 + 8)  # validity
    for _ in ("critical options", "extensions", "reserved", "authority"):
        fields.get_binary()
    return Message(fields.get_binary()).get_text()


_AUTHORITY, _REVOKED = "@cert-authority", "@revoked"
_HASHED = "|1|"
_COMMAND_S = 30.0
_NO_KEY = "NONE"
"""Value of a token about a key before the machine has shown one."""
_NO_FILES = {"none", os.devnull}
"""Words with which ssh_config says that there is no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKey:
    """Public key of a machine.

    Attributes:
        type: type of the key, such as ``ssh-ed25519``.
        blob: the key itself.
        source: file and line of the key, for messages.
        name: name of the machine in that file.
    """

    type: str
    blob: bytes
    source: str = field(default="", compare=False)
    name: str = field(default="", compare=False)

    @property
    def fingerprint(self) -> str:
        """Fingerprint in the form of ``ssh-keygen -l``."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")
        return f"{self.type} SHA256:{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """Keys on file for a machine.

    Attributes:
        accepted: keys of which the machine must show one.
        authorities: keys of which one may have signed a certificate of the machine's key instead.
        revoked: keys of which it may show none.
        at_address: keys on file for its address, which must not contradict the others; see CheckHostIP.
        notes: lines about the machine that do not count, and options that are not obeyed, in words.
    """

    accepted: tuple[HostKey, ...]
    authorities: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()
    at_address: tuple[HostKey, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """True if no key of the machine could be accepted."""
        return not self.accepted and not self.authorities


def known_keys(settings: Settings, *, shown: HostKey | None = None, address: str = "") -> KnownKeys:
    """Return the keys on file for a machine, and those that KnownHostsCommand prints.

    Args:
        settings: the machine's settings.
        shown: the key that it has shown; None before it is dialled.
        address: its address, once it is dialled directly.

    Raises:
        AuthenticationError: a file cannot be read, or KnownHostsCommand fails.
        ConfigurationError: an entry of ``host_keys`` is no key.
    """
    if settings.host_keys:
        return KnownKeys(accepted=tuple(map(_given_key, settings.host_keys)))
    lines = [*_lines(settings), *(_printed(settings, shown) if settings.known_hosts_command else ())]
    found = _sorted(lines, settings.names, settings.host_key_notes)
    if not settings.check_address or not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return found
    names = tuple(dict.fromkeys((f"[{address}]:{settings.port}", address)))
    return replace(found, at_address=_sorted(lines, names, ()).accepted)


def _sorted(lines: Iterable[_Line], names: Sequence[str], options: Iterable[str]) -> KnownKeys:
    """Return what the lines say about a machine of these names."""
    keys: dict[str, list[HostKey]] = {"": [], _AUTHORITY: [], _REVOKED: []}
    notes = [f"{option} is not obeyed: keys are always verified" for option in options]
    for line in lines:
        name = next((name for name in names if _speaks_of(line.hosts, name)), None)
        if name is None:
            continue
        if line.marker not in keys:
            notes.append(f"{line.where} has a marker that is not supported: {line.marker}")
            continue
        try:
            keys[line.marker].append(_key(line.type, line.key, source=line.where, name=name))
        except AuthenticationError as error:
            if line.marker == _REVOKED:  # the key that must not be accepted is unknown
                raise
            notes.append(str(error))
            log.warning("%s; the line does not count", error)
    return KnownKeys(
        accepted=tuple(keys[""]),
        authorities=tuple(keys[_AUTHORITY]),
        revoked=tuple(keys[_REVOKED]),
        notes=tuple(notes),
    )


def verify(shown: HostKey, known: KnownKeys, settings: Settings, *, certificate: bytes = b"") -> None:
    """Check the key that the machine has shown.

    Args:
        shown: the key.
        known: the keys on file.
        settings: the machine's settings.
        certificate: the certificate that it has shown with it, if any.

    Raises:
        HostKeyError: the key is revoked, is not on file, or is too small, and no authority vouches for it.
    """
    authority = signer(certificate) if certificate else b""
    _refuse_revoked(shown, authority, known, settings, certificate)
    bits = rsa_bits(shown.blob)
    if bits is not None and bits < settings.rsa_bits:
        raise HostKeyError(
            f"{settings.host} port {settings.port} shows an RSA host key of {bits} bits, and RequiredRSASize is "
            f"{settings.rsa_bits}: it needs another key"
        )
    doubt = _doubt(certificate, shown.blob, authority, known, settings) if authority else ""
    if (not authority or doubt) and shown not in known.accepted:
        raise HostKeyError(doubt or _mismatch(shown, known, settings))
    contrary = [key for key in known.at_address if key.type == shown.type]
    if contrary and shown not in contrary:
        raise HostKeyError(
            f"{settings.host} port {settings.port} shows {shown.fingerprint}, which is on file for its name, and "
            f"{contrary[0].source} has another key for its address (CheckHostIP): correct that line"
        )


def _doubt(certificate: bytes, shown: bytes, authority: bytes, known: KnownKeys, settings: Settings) -> str:
    """Return the reason not to accept a machine's certificate; empty if it is good."""
    shows = f"{settings.host} port {settings.port} shows a host certificate"
    sources = [key.source for key in known.authorities if key.blob == authority]
    if not sources:
        return f"{shows} of an authority that is not on file (@cert-authority): nothing was sent to it"
    reason = objection(certificate, shown, settings.names[-1], settings.algorithms.get("CASignatureAlgorithms", ()))
    return f"{shows} that is not valid: {reason} ({sources[0]}). Nothing was sent to it." if reason else ""


def _refuse_revoked(shown: HostKey, authority: bytes, known: KnownKeys, settings: Settings, certificate: bytes) -> None:
    blobs = {shown.blob, authority or shown.blob}
    sources = [key.source for key in known.revoked if key.blob in blobs]
    sources += [path for path in settings.revoked_keys if is_revoked(path, blobs, certificate or shown.blob)]
    if sources:
        raise HostKeyError(
            f"{settings.host} port {settings.port} shows a host key that is revoked in {sources[0]}: "
            f"{shown.fingerprint}. Nothing was sent to it. The machine needs a new key."
        )


def unknown(known: KnownKeys, settings: Settings) -> HostKeyError:
    """Return the error for a machine without a key on file."""
    port = f" -p {settings.port}" if settings.names[0].startswith("[") else ""
    files = [each for each in settings.known_hosts if each not in _NO_FILES]
    files += ["what KnownHostsCommand prints"] if settings.known_hosts_command else []
    files = files or ["a file of known hosts"]
    return HostKeyError(
        f"{settings.host} port {settings.port} is not a known host: no key of it is in "
        f"{' or '.join(files)}. It was not contacted. Log in once with ssh, or add what "
        f"`ssh-keyscan{port} {settings.host}` prints to {files[0]} after you have compared its "
        f"fingerprint (`ssh-keygen -lf -`) with the one of the machine's console.{_notes(known)}",
        on_file=False,
    )


def _mismatch(shown: HostKey, known: KnownKeys, settings: Settings) -> str:
    if not known.accepted:
        return (
            f"{settings.host} port {settings.port} shows no host certificate, and on file are only authorities that "
            f"sign them ({', '.join(key.source for key in known.authorities)}): {shown.fingerprint}. Nothing was sent "
            f"to it. Add the key to known_hosts, or have the machine show its certificate (HostCertificate)."
        )
    expected = ", ".join(f"{key.fingerprint} ({key.source})" for key in known.accepted)
    removals = {
        f"`ssh-keygen -R '{key.name}' -f {key.source.rpartition(':')[0]}`" for key in known.accepted if key.name
    }
    removal = f" with {' and '.join(sorted(removals))}" if removals else ""
    return (
        f"{settings.host} port {settings.port} shows another host key than it should: {shown.fingerprint}; "
        f"expected: {expected}. Either the machine was reinstalled, or another one answers in its place; nothing "
        f"was sent to it. If you know why its key has changed, remove the old one{removal}, and add the new one."
        f"{_notes(known)}"
    )


def _notes(known: KnownKeys) -> str:
    return "".join(f" NB: {note}." for note in known.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    where: str
    marker: str
    hosts: str
    type: str
    key: str


def _lines(settings: Settings) -> Iterator[_Line]:
    for path in (each for each in settings.known_hosts if each not in _NO_FILES):
        try:
            with open(path, "rb") as file:
                text = file.read()
        except FileNotFoundError:
            if settings.named_known_hosts:
                raise AuthenticationError(f"the file of host keys does not exist: {path}") from None
            continue
        except OSError as error:
            raise AuthenticationError(f"the file of host keys {path} cannot be read: {error}") from error
        yield from _parsed(text, path)


def _printed(settings: Settings, shown: HostKey | None) -> list[_Line]:
    """Return the lines that KnownHostsCommand prints."""
    tokens = {
        **settings.tokens,
        "H": settings.names[0],
        "I": "HOSTNAME" if shown else "ORDER",
        "t": shown.type if shown else _NO_KEY,
        "f": shown.fingerprint.partition(" ")[2] if shown else _NO_KEY,
        "K": base64.b64encode(shown.blob).decode() if shown else _NO_KEY,
    }
    argv = [expanded(argument, tokens, "KnownHostsCommand") for argument in settings.known_hosts_command]
    try:
        completed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise AuthenticationError(f"KnownHostsCommand of the SSH configuration fails: {error}") from error
    lines = _parsed(completed.stdout, f"KnownHostsCommand {argv[0]}")
    return [line for line in lines if line.type != _NO_KEY]  # it may print its arguments


def _parsed(text: bytes, source: str) -> Iterator[_Line]:
    # Bytes that are not UTF-8 may lie in comments, and only a line feed ends a line.
    for number, line in enumerate(text.decode(errors="surrogateescape").split("\n"), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0).lower() if fields[0].startswith("@") else ""
        hosts, kind, key, *_ = [*fields, "", "", ""]
        yield _Line(where=f"{source}:{number}", marker=marker, hosts=hosts, type=kind, key=key)


def _speaks_of(hosts: str, name: str) -> bool:
    if not hosts.startswith(_HASHED):
        return matches_any(name, hosts.lower().split(","))
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in hosts.removeprefix(_HASHED).split("|"))
    except ValueError:
        return False
    # `ssh-keygen -H` hashes names with HMAC-SHA1, for which the field's first part is the key.
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def _given_key(text: str) -> HostKey:
    kind, key, *_ = [*text.split(), "", ""]
    try:
        return _key(kind, key, source="given as host_keys", name="")
    except AuthenticationError as error:
        raise ConfigurationError(f"host_keys: {text!r} is no public key like 'ssh-ed25519 AAAA…'") from error


def _key(kind: str, text: str, *, source: str, name: str) -> HostKey:
    try:
        blob = base64.b64decode(text, validate=True)
    except binascii.Error:
        blob = b""
    if not kind or type_of(blob) != kind:
        raise AuthenticationError(f"{source} is malformed: its host key of {name or 'the machine'} cannot be decoded")
    return HostKey(type=kind, blob=blob, source=source, name=name)


def rsa_bits(blob: bytes) -> int | None:
    """Return the size of an RSA key; None for a key of another type."""
    message: Any = Message(blob)
    if message.get_binary() != b"ssh-rsa":
        return None
    message.get_binary()
    return int.from_bytes(message.get_binary(), "big").bit_length()


def type_of(blob: bytes) -> str:
    """Return the type of a public key; empty for other bytes."""
    length = int.from_bytes(blob[:4], "big")
    return blob[4 : 4 + length].decode(errors="replace") if length < len(blob) else ""
