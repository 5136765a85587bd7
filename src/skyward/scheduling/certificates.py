"""Certificate of one pool: every connection of the pool presents it, and trusts nothing else."""

from __future__ import annotations

import datetime as dt

from skyward.wire.frames import TlsIdentity

_NAME = "skyward-pool"
# Tolerated difference between the clocks of a node and this machine, in either direction.
_CLOCK_SKEW = dt.timedelta(days=1)
# In addition to a node's `timeout`: a pool whose nodes are replaced outlives the first of them.
_MARGIN = dt.timedelta(days=365)
# A timeout may be so long that the date would overflow; no pool lives for a century.
_LONGEST = dt.timedelta(days=100 * 365)


def issue(timeout_s: float = 0.0) -> TlsIdentity:
    """Make a fresh P-256 key and its self-signed certificate. Nothing is written to disk.

    Args:
        timeout_s: hard cap on the life of the pool's nodes, in seconds; the certificate is valid for longer.
    """
    # Imported here: only a process that opens a pool needs it, and importing skyward must load nothing heavy.
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
