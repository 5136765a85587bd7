from __future__ import annotations

from dataclasses import fields

from skyward.request.request import PoolRequest
from skyward.wire.node_config import NodeConfig


def test_node_and_pool_have_the_same_default_limits() -> None:
    of_pool, of_node = ({field.name: field.default for field in fields(cls)} for cls in (PoolRequest, NodeConfig))

    assert [of_pool[name] for name in ("timeout_s", "lease_s", "away_s")] == [
        of_node[name] for name in ("timeout_s", "lease_s", "away_s")
    ]
