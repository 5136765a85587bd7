"""TLS of the pool for ``distributed``."""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any, cast

from distributed import Security
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

from skyward.wire.frames import TlsIdentity, client_context, forget_tls_errors, server_context


class PoolSecurity(Security):
    """The pool's certificate for every role; only mutual TLS 1.3 is accepted.

    Contexts are made in memory.

    Attributes:
        identity: certificates and key.
        tunnelled: True if their holder reaches only the scheduler, and not the workers.
    """

    def __init__(self, identity: TlsIdentity, *, tunnelled: bool = False) -> None:
        self.identity = identity
        self.tunnelled = tunnelled
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
        _mend_streams()
        # `distributed` would write the private key to a temporary file here, which a killed process leaves behind.
        return {
            "ssl_context": client_context(self._identity(role)),
            "require_encryption": self.require_encryption,
            "extra_conn_args": self.extra_conn_args,
        }

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments that open a port of ``role``."""
        _mend_streams()
        return {"ssl_context": server_context(self._identity(role)), "require_encryption": self.require_encryption}

    def _identity(self, role: str) -> TlsIdentity:
        config = self.get_tls_config_for_role(role)
        return TlsIdentity(ca=config["ca_file"], cert=config["cert"], key=config["key"])


@cache
def _mend_streams() -> None:
    """Keep the failure of one of tornado's TLS connections, on which Dask's are built, from other code; open them fast.

    OpenSSL's queue of errors is emptied whenever such a connection closes. A peer that resets its connection before TLS
    begins, as a killed scheduler's does, counts as a closed connection. tornado raises ValueError for it
    (https://github.com/tornadoweb/tornado/issues/2546), and Dask dials again after an OSError only.

    Without ``ssl_options`` tornado reads the machine's certificates, for 30 ms in each process, although the socket has
    a context already.
    """
    plain, encrypted = cast("Any", IOStream), cast("Any", SSLIOStream)
    start, make, close = plain.start_tls, encrypted.__init__, encrypted.close_fd

    def start_tls(self: Any, *args: Any, **options: Any) -> Any:
        if self.closed():
            raise StreamClosedError(self.error)
        return start(self, *args, **options)

    def make_stream(self: Any, socket: Any, *args: Any, **options: Any) -> None:
        known = {"ssl_options": socket.context} if isinstance(socket, ssl.SSLSocket) else {}
        make(self, socket, *args, **(known | options))

    def close_fd(self: Any) -> None:
        try:
            close(self)
        finally:
            forget_tls_errors()

    plain.start_tls, encrypted.__init__, encrypted.close_fd = start_tls, make_stream, close_fd
