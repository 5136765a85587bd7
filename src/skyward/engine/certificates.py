"""A pool's own certificate: every connection of the pool shows it, and trusts nothing else."""

from __future__ import annotations

import datetime as dt

from skyward.wire.frames import TlsIdentity

__all__ = ["issue"]

_NAME = "skyward-pool"
_CLOCK_SKEW = dt.timedelta(days=1)
"""So far a node's clock may be behind or ahead of this machine's."""
_MARGIN = dt.timedelta(days=365)
"""Besides a node's ``timeout``: a pool outlives its first nodes when they are replaced."""
_LONGEST = dt.timedelta(days=100 * 365)


def issue(timeout_s: float = 0.0) -> TlsIdentity:
    """Make a fresh P-256 key and its self-signed certificate. Nothing is written anywhere.

    Args:
        timeout_s: the hard cap on the life of the pool's nodes; the certificate is valid for longer.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = dt.datetime.now(dt.UTC)
    lifetime = dt.timedelta(seconds=min(timeout_s, _LONGEST.total_seconds())) + _MARGIN + _CLOCK_SKEW
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return TlsIdentity(ca=pem, cert=pem, key=private)
