"""Host keys: those on file for a machine, and the check of the one that it shows."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate

from skyward.errors import AuthenticationError, ConfigurationError, HostKeyError
from skyward.transport._host_certificates import is_revoked, objection, signer
from skyward.transport._identities import rsa_bits
from skyward.transport._ssh_config import Settings, expanded

__all__ = ["HostKey", "KnownKeys", "known_keys", "unknown", "verify"]

log = logging.getLogger("skyward.transport")

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
        return KnownKeys(accepted=tuple(map(_given, settings.host_keys)))
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
    authority = HostKey(type="", blob=signer(certificate)) if certificate else None
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


def _doubt(certificate: bytes, shown: bytes, authority: HostKey, known: KnownKeys, settings: Settings) -> str:
    """Return the reason not to accept a machine's certificate; empty if it is good."""
    shows = f"{settings.host} port {settings.port} shows a host certificate"
    sources = [key.source for key in known.authorities if key.blob == authority.blob]
    if not sources:
        return f"{shows} of an authority that is not on file (@cert-authority): nothing was sent to it"
    reason = objection(certificate, shown, settings.names[-1], settings.algorithms.authorities)
    return f"{shows} that is not valid: {reason} ({sources[0]}). Nothing was sent to it." if reason else ""


def _refuse_revoked(
    shown: HostKey, authority: HostKey | None, known: KnownKeys, settings: Settings, certificate: bytes
) -> None:
    blobs = {shown.blob, authority.blob if authority else shown.blob}
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
    if hosts.startswith(_HASHED):
        return _hashes_to(hosts, name)
    found = False
    for pattern in hosts.lower().split(","):
        if re.fullmatch(_pattern(pattern.removeprefix("!")), name):
            if pattern.startswith("!"):  # a negated match excludes the line, even next to others
                return False
            found = True
    return found


def _pattern(pattern: str) -> str:
    """Return a regular expression for a pattern of OpenSSH's."""
    # Only `*` and `?` are special there; brackets enclose a host that has a port.
    return translate(pattern.replace("[", "[[]"))


def _hashes_to(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in hashed.removeprefix(_HASHED).split("|"))
    except ValueError:
        return False
    # `ssh-keygen -H` hashes names with HMAC-SHA1, for which the field's first part is the key.
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def _given(text: str) -> HostKey:
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
    length = int.from_bytes(blob[:4], "big")  # a key begins with its type, preceded by the length of that (RFC 4253)
    if not kind or blob[4 : 4 + length] != kind.encode():
        raise AuthenticationError(f"{source} is malformed: its host key of {name or 'the machine'} cannot be decoded")
    return HostKey(type=kind, blob=blob, source=source, name=name)
