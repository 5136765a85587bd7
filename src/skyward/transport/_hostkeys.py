"""Host keys: those on file for a machine, and the check of the one that it shows."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import translate

from skyward.errors import AuthenticationError, ConfigurationError, HostKeyError
from skyward.transport._ssh_config import Settings

__all__ = ["HostKey", "KnownKeys", "known_keys", "verify"]

_AUTHORITY, _REVOKED = "@cert-authority", "@revoked"
_HASHED = "|1|"
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
        revoked: keys of which it may show none.
        notes: lines about the machine that are not supported, in words.
    """

    accepted: tuple[HostKey, ...]
    revoked: tuple[HostKey, ...] = ()
    notes: tuple[str, ...] = ()


def known_keys(settings: Settings) -> KnownKeys:
    """Return the keys on file for a machine.

    Raises:
        AuthenticationError: a file cannot be read, or a line about the machine is malformed.
        ConfigurationError: an entry of ``host_keys`` is no key.
    """
    if settings.host_keys:
        return KnownKeys(accepted=tuple(map(_given, settings.host_keys)))
    accepted: list[HostKey] = []
    revoked: list[HostKey] = []
    notes: list[str] = []
    for line in _lines(settings):
        name = next((name for name in settings.names if _speaks_of(line.hosts, name)), None)
        if name is None:
            continue
        if line.marker == _AUTHORITY:
            notes.append(f"{line.where} names a certificate authority for it: certificates are not supported")
        elif line.marker and line.marker != _REVOKED:
            notes.append(f"{line.where} has a marker that is not supported: {line.marker}")
        else:
            key = _key(line.type, line.key, source=line.where, name=name)
            (revoked if line.marker else accepted).append(key)
    return KnownKeys(accepted=tuple(accepted), revoked=tuple(revoked), notes=tuple(notes))


def verify(shown: HostKey, known: KnownKeys, settings: Settings) -> None:
    """Check the key that the machine has shown.

    Raises:
        HostKeyError: the key is revoked, or is not on file.
    """
    if revoked := next((key for key in known.revoked if key == shown), None):
        raise HostKeyError(
            f"{settings.host} port {settings.port} shows a host key that is revoked in {revoked.source}: "
            f"{shown.fingerprint}. Nothing was sent to it. The machine needs a new key."
        )
    if shown not in known.accepted:
        raise HostKeyError(_mismatch(shown, known, settings))


def unknown(known: KnownKeys, settings: Settings) -> HostKeyError:
    """Return the error for a machine without a key on file."""
    port = f" -p {settings.port}" if settings.names[0].startswith("[") else ""
    notes = "".join(f" NB: {note}." for note in known.notes)
    files = [each for each in settings.known_hosts if each not in _NO_FILES] or ["a file of known hosts"]
    return HostKeyError(
        f"{settings.host} port {settings.port} is not a known host: no key of it is in "
        f"{' or '.join(files)}. It was not contacted. Log in once with ssh, or add what "
        f"`ssh-keyscan{port} {settings.host}` prints to {files[0]} after you have compared its "
        f"fingerprint (`ssh-keygen -lf -`) with the one of the machine's console.{notes}",
        on_file=False,
    )


def _mismatch(shown: HostKey, known: KnownKeys, settings: Settings) -> str:
    expected = ", ".join(f"{key.fingerprint} ({key.source})" for key in known.accepted)
    removals = {
        f"`ssh-keygen -R '{key.name}' -f {key.source.rpartition(':')[0]}`" for key in known.accepted if key.name
    }
    removal = f" with {' and '.join(sorted(removals))}" if removals else ""
    return (
        f"{settings.host} port {settings.port} shows another host key than it should: {shown.fingerprint}; "
        f"expected: {expected}. Either the machine was reinstalled, or another one answers in its place; nothing "
        f"was sent to it. If you know why its key has changed, remove the old one{removal}, and add the new one."
    )


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
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            if settings.named_known_hosts:
                raise AuthenticationError(f"the file of host keys does not exist: {path}") from None
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise AuthenticationError(f"the file of host keys {path} cannot be read: {error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            marker = fields.pop(0) if fields[0].startswith("@") else ""
            hosts, kind, key, *_ = [*fields, "", "", ""]
            yield _Line(where=f"{path}:{number}", marker=marker, hosts=hosts, type=kind, key=key)


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
