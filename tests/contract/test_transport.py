from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyward.testing.transport import TransportContract
from skyward.transport.access import LocalAccess
from skyward.transport.local import LocalTransport


class TestLocalTransport(TransportContract):
    @pytest.fixture
    async def transport(self, tmp_path: Path) -> AsyncIterator[LocalTransport]:
        transport = LocalTransport(LocalAccess(address="127.0.0.1", workdir=str(tmp_path / "work")))
        yield transport
        await transport.close()
