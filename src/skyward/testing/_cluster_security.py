"""Who may talk to a cluster with temporary certificates."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest
from distributed import Client
from distributed.security import Security

from skyward.testing._cluster_base import ClusterSuite

__all__ = ["ClusterSecurity"]


class ClusterSecurity(ClusterSuite):
    """Mutual TLS: the cluster shows who it is, and so must everybody else."""

    def test_certificates_encrypt_everything(self, cluster: Any, client: Any) -> None:
        """The scheduler's and every worker's address say so."""
        addresses = [cluster.scheduler_address, *client.scheduler_info(n_workers=-1)["workers"]]
        assert [address for address in addresses if not address.startswith("tls://")] == []

    def test_cluster_hands_out_its_certificates(self, cluster: Any) -> None:
        """Whoever has them is answered."""
        with Client(cluster.scheduler_address, security=cluster.security, set_as_default=False) as client:
            self.check_works(client)
        assert self._answer(cluster.scheduler_address, _context(cluster.security)) != b""

    def test_client_without_certificates_is_refused(self, cluster: Any) -> None:
        """Even one that does not ask the cluster who it is."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        assert self._answer(cluster.scheduler_address, _trusting(context)) == b""

    def test_client_with_other_certificates_is_refused(self, cluster: Any) -> None:
        """Even one that does not ask the cluster who it is."""
        context = _context(Security.temporary())
        assert self._answer(cluster.scheduler_address, _trusting(context)) == b""

    def test_workers_refuse_other_certificates(self, cluster: Any) -> None:
        """As their scheduler does."""
        for worker in cluster.scheduler_info["workers"]:
            assert self._answer(worker, _context(cluster.security)) != b""
            assert self._answer(worker, _trusting(_context(Security.temporary()))) == b""

    async def test_refused_client_raises(self, cluster: Any) -> None:
        """Within its own timeout. A client without certificates may be given the cluster's, in its own process."""
        security = Security.temporary()
        client: Any = Client(cluster.scheduler_address, security=security, timeout=0.5, asynchronous=True)
        with pytest.raises((OSError, TypeError)):
            await client
        await client.close()

    def _answer(self, address: str, context: ssl.SSLContext) -> bytes:
        """The first bytes that a client with ``context`` is sent, who says nothing itself; empty if it is refused."""
        host, port = address.removeprefix("tls://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=self.patience_s) as plain:
            try:
                with context.wrap_socket(plain) as link:
                    return link.recv(16)
            except (ssl.SSLError, ConnectionError):
                return b""


def _context(security: Any) -> ssl.SSLContext:
    context = security.get_connection_args("client")["ssl_context"]
    assert isinstance(context, ssl.SSLContext)
    return context


def _trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
