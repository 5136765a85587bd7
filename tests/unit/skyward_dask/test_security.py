"""The pool's key is nowhere on disk, whenever a process is killed."""

import pickle
import ssl
import tempfile
from pathlib import Path

import pytest
from distributed import Security
from distributed.core import Server, rpc

from skyward.scheduling.certificates import issue
from skyward.wire.frames import client_context, server_context
from skyward_dask.security import PoolSecurity


@pytest.fixture(autouse=True)
def no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants to write one fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))


def test_the_control_needs_a_temporary_file() -> None:
    identity = issue()
    security = Security(tls_ca_file=identity.ca, tls_client_cert=identity.cert, tls_client_key=identity.key)
    with pytest.raises(FileNotFoundError):
        security.get_connection_args("client")


@pytest.mark.parametrize("linux", [True, False], ids=["Linux", "elsewhere"])
def test_connections_of_our_own_are_set_up_in_memory(*, linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = issue()
    if not linux:
        monkeypatch.delattr("os.memfd_create")
    for context in (client_context(identity), server_context(identity)):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("sent", [False, True], ids=["kept", "pickled"])
async def test_dask_listens_and_dials_from_memory(*, sent: bool) -> None:
    security = PoolSecurity(issue())
    if sent:
        security = pickle.loads(pickle.dumps(security))
    server = Server({"ping": lambda: "pong"}, connection_args=security.get_connection_args("worker"))
    await server.listen("tls://127.0.0.1:0", **security.get_listen_args("scheduler"))
    try:
        async with rpc(server.address, connection_args=security.get_connection_args("client")) as remote:
            assert await remote.ping() == "pong"
    finally:
        await server.close()


async def test_connections_do_not_read_the_certificates_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    security = PoolSecurity(issue())
    monkeypatch.setattr(ssl, "create_default_context", None)
    monkeypatch.setattr("tornado.iostream._client_ssl_defaults", None)
    server = Server({"ping": lambda: "pong"}, connection_args=security.get_connection_args("worker"))
    await server.listen("tls://127.0.0.1:0", **security.get_listen_args("scheduler"))
    try:
        async with rpc(server.address, connection_args=security.get_connection_args("client")) as remote:
            assert await remote.ping() == "pong"
    finally:
        await server.close()


async def test_dask_refuses_another_pools_key() -> None:
    pool, other = PoolSecurity(issue()), PoolSecurity(issue())
    server = Server({"ping": lambda: "pong"}, connection_args=pool.get_connection_args("worker"))
    await server.listen("tls://127.0.0.1:0", **pool.get_listen_args("scheduler"))
    try:
        async with rpc(server.address, connection_args=other.get_connection_args("client"), timeout=1) as remote:
            with pytest.raises(OSError, match="before comm was established"):
                await remote.ping()
    finally:
        await server.close()


def test_a_key_of_another_certificate_is_refused() -> None:
    identity = issue()
    with pytest.raises(OSError, match=r"(?i)key[ _]values[ _]mismatch"):
        client_context(type(identity)(ca=identity.ca, cert=identity.cert, key=issue().key))
