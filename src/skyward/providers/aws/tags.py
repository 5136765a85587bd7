"""Tags, by which what is Skyward's is found again (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "HOST_KEY_TAG",
    "KEY_TAG",
    "LIVE_STATES",
    "POOL_TAG",
    "filters",
    "machine_tags",
    "pool_tags",
    "read_tags",
    "tag_specification",
]

POOL_TAG: Final = "skyward:pool"
"""On everything that was made for a pool: the pool's id."""
KEY_TAG: Final = "skyward:key"
"""On a machine: its ledger key."""
HOST_KEY_TAG: Final = "skyward:host-key"
"""On a machine: the public key that it proves itself by."""
LIVE_STATES: Final = ("pending", "running", "stopping", "stopped", "shutting-down")
"""Of machines that are not gone."""


def pool_tags(pool_id: str) -> dict[str, str]:
    """Of everything."""
    return {POOL_TAG: pool_id, "Name": f"skyward-{pool_id}"}


def machine_tags(pool_id: str, key: str, host_key: str) -> dict[str, str]:
    """Of a machine, its disk and its network interface."""
    return {**pool_tags(pool_id), KEY_TAG: key, HOST_KEY_TAG: host_key}


def tag_specification(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """``tags`` for a new resource of that kind, as calls that make one take them."""
    return {"ResourceType": kind, "Tags": [{"Key": name, "Value": value} for name, value in tags.items()]}


def read_tags(row: Mapping[str, Any]) -> dict[str, str]:
    """The tags in an answer's row."""
    return {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())}


def filters(wanted: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """What listings are narrowed by: each name must have one of its values."""
    return [{"Name": name, "Values": list(values)} for name, values in wanted.items()]
