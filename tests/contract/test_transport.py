from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skyward.machine.local import LocalAccess, LocalTransport
from skyward.machine.ssh import SshTransport
from skyward.testing.hosts import SshHost, require_sshd
from skyward.testing.transport import TransportContract


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHost]:
    require_sshd()
    with SshHost(tmp_path_factory.mktemp("contract") / "host") as host:
        yield host


class TestLocalTransport(TransportContract):
    @pytest.fixture
    async def transport(self, tmp_path: Path) -> AsyncIterator[LocalTransport]:
        transport = LocalTransport(LocalAccess(address="127.0.0.1", workdir=str(tmp_path / "work")))
        yield transport
        await transport.close()


class TestSshTransport(TransportContract):
    @pytest.fixture
    async def transport(self, host: SshHost) -> AsyncIterator[SshTransport]:
        transport = SshTransport(host.target())
        yield transport
        await transport.close()
