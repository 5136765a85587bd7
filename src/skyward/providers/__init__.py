"""Providers of machines, and stores of volumes; the names that a provider in a package of its own may import.

Every public name here keeps its meaning between releases. The modules below this package are Skyward's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward.providers._common.create_once import MachineCalls, create_once
    from skyward.providers._common.logins import KeyPair, host_key, user_key
    from skyward.providers._common.machine_boot import cloud_config
    from skyward.providers.base import (
        REFUSALS,
        Finding,
        Instance,
        InstanceState,
        LaunchOrder,
        MachineSecret,
        Offer,
        Provider,
    )
    from skyward.providers.local import INSTANCE_VARIABLE
    from skyward.request.instance import InstanceSpec
    from skyward.request.request import PoolRequest
    from skyward.transport.access import Access, Completed, Transport
    from skyward.transport.local import LocalAccess
    from skyward.transport.ssh import SSHAccess
    from skyward.transport.ssh_config import SSHTarget
    from skyward.wire.node_config import PreemptionWatch

__all__ = [
    "INSTANCE_VARIABLE",
    "REFUSALS",
    "Access",
    "Completed",
    "Finding",
    "Instance",
    "InstanceSpec",
    "InstanceState",
    "KeyPair",
    "LaunchOrder",
    "LocalAccess",
    "MachineCalls",
    "MachineSecret",
    "Offer",
    "PoolRequest",
    "PreemptionWatch",
    "Provider",
    "SSHAccess",
    "SSHTarget",
    "Transport",
    "cloud_config",
    "create_once",
    "host_key",
    "user_key",
]

STORES: Mapping[str, str] = {"S3Volume": "skyward.providers.storage.s3"}
"""Module that implements each kind of volume, by the name of its class."""

# Loaded on first use: nodes import this package for their volumes, and need none of these.
_HOMES: Mapping[str, tuple[str, ...]] = {
    "skyward.providers._common.create_once": ("MachineCalls", "create_once"),
    "skyward.providers._common.machine_boot": ("cloud_config",),
    "skyward.providers._common.logins": ("KeyPair", "host_key", "user_key"),
    "skyward.providers.base": (
        "REFUSALS",
        "Finding",
        "Instance",
        "InstanceState",
        "LaunchOrder",
        "MachineSecret",
        "Offer",
        "Provider",
    ),
    "skyward.providers.local": ("INSTANCE_VARIABLE",),
    "skyward.request.instance": ("InstanceSpec",),
    "skyward.wire.node_config": ("PreemptionWatch",),
    "skyward.request.request": ("PoolRequest",),
    "skyward.transport.access": ("Access", "Completed", "Transport"),
    "skyward.transport.local": ("LocalAccess",),
    "skyward.transport.ssh": ("SSHAccess",),
    "skyward.transport.ssh_config": ("SSHTarget",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module 'skyward.providers' has no attribute {name!r}")
