"""TLS of the pool for ``distributed``."""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any

from distributed import Security
from tornado.iostream import SSLIOStream

from skyward.wire.frames import TlsIdentity, client_context, forget_tls_errors, server_context

__all__ = ["PoolSecurity"]


class PoolSecurity(Security):
    """The pool's certificate for every role; only mutual TLS 1.3 is accepted.

    Contexts are made in memory.
    """

    def __init__(self, identity: TlsIdentity) -> None:
        roles = ("client", "scheduler", "worker")
        certificates: dict[str, Any] = {f"tls_{role}_cert": identity.cert for role in roles}
        keys: dict[str, Any] = {f"tls_{role}_key": identity.key for role in roles}
        super().__init__(
            require_encryption=True,
            tls_min_version=ssl.TLSVersion.TLSv1_3,
            tls_ca_file=identity.ca,
            **certificates,
            **keys,
        )

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return the arguments that open a connection of ``role``."""
        _keep_errors_apart()  # since each process with Dask's connections calls this
        # `distributed` would write the private key to a temporary file here, which a killed process leaves behind.
        return {
            "ssl_context": client_context(self._identity(role)),
            "require_encryption": self.require_encryption,
            "extra_conn_args": self.extra_conn_args,
        }

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments that open a port of ``role``."""
        return {"ssl_context": server_context(self._identity(role)), "require_encryption": self.require_encryption}

    def _identity(self, role: str) -> TlsIdentity:
        config = self.get_tls_config_for_role(role)
        return TlsIdentity(ca=config["ca_file"], cert=config["cert"], key=config["key"])


@cache
def _keep_errors_apart() -> None:
    """Empty OpenSSL's queue of errors whenever a TLS connection of tornado's, on which Dask's are built, closes."""
    stream: Any = SSLIOStream
    close = stream.close_fd

    def close_fd(self: Any) -> None:
        try:
            close(self)
        finally:
            forget_tls_errors()

    stream.close_fd = close_fd
