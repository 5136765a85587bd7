"""Certificates of host keys, and lists of revoked ones."""

from __future__ import annotations

import base64
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)
from cryptography.hazmat.primitives.serialization.ssh import SSHCertPublicKeyTypes

from skyward.errors import AuthenticationError

__all__ = ["blob_of", "is_revoked", "load_certificate", "objection", "signer"]

_KRL = b"SSHKRL\n\0"
_COMMAND_S = 10.0
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
    kind = certificate[4 : 4 + int.from_bytes(certificate[:4], "big")]
    try:
        loaded = load_ssh_public_identity(kind + b" " + base64.b64encode(certificate))
    except (UnsupportedAlgorithm, ValueError) as error:
        raise AuthenticationError(f"the certificate cannot be decoded: {error}") from error
    if not isinstance(loaded, SSHCertificate):
        raise AuthenticationError("the certificate cannot be decoded: it is a plain key")
    return loaded


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
        kind = shown[4 : 4 + int.from_bytes(shown[:4], "big")]
        file.write(kind + b" " + base64.b64encode(shown) + b"\n")
        file.flush()
        argv = ["ssh-keygen", "-Q", "-f", path, file.name]
        try:
            completed = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise AuthenticationError(f"RevokedHostKeys {path} needs ssh-keygen to be read: {error}") from error
    if completed.returncode and b"REVOKED" not in completed.stdout:
        raise AuthenticationError(
            f"RevokedHostKeys {path} cannot be read: {completed.stderr.decode(errors='replace').strip()}"
        )
    return bool(completed.returncode)


def _signature_type(certificate: bytes) -> str:
    """Return the type of the signature, the last field of a certificate that is known to be sound."""
    strings = certificate
    for _ in range(_fields_before_serial(certificate)):
        strings = _rest(strings)
    strings = strings[8 + 4 :]  # serial number, type
    for _ in ("key id", "principals"):
        strings = _rest(strings)
    strings = strings[8 + 8 :]  # validity
    for _ in ("critical options", "extensions", "reserved", "authority"):
        strings = _rest(strings)
    return _first(_first(strings)).decode(errors="replace")


def _fields_before_serial(certificate: bytes) -> int:
    kind = _first(certificate)
    return 2 + (1 if kind.startswith(b"ssh-ed25519") else 2)  # type, nonce, the key


def _first(strings: bytes) -> bytes:
    return strings[4 : 4 + int.from_bytes(strings[:4], "big")]


def _rest(strings: bytes) -> bytes:
    return strings[4 + int.from_bytes(strings[:4], "big") :]
