"""Ephemeral accelerator compute: ordinary Python on machines that exist only while they work.

::

    import skyward as sky

    @sky.compute
    def square(x: int) -> int:
        return x * x

    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        four = square(2) >> pool

All public names are here. Each is loaded on first use, so that importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward import accelerators, distributed, errors, integrations
    from skyward.api.calls import ComputeFunction, PendingBatch, PendingCompute, compute, gather
    from skyward.api.executor import PoolExecutor
    from skyward.api.market import offers
    from skyward.api.multipool import MultiPool
    from skyward.api.pool import ComputePool
    from skyward.distributed.runtime import DistributedSampler, InstanceInfo, current_accelerator, instance_info, shard
    from skyward.errors import (
        AuthenticationError,
        BootstrapError,
        BudgetError,
        CallTimeoutError,
        CapacityError,
        ConfigurationError,
        FetchError,
        HostKeyError,
        LedgerError,
        NotInPoolError,
        PoolStateError,
        QuotaError,
        RateLimitError,
        RemoteError,
        RemoteTraceback,
        SerializationError,
        SkywardError,
        TerminationError,
        UnreachableError,
        UnsentCallWarning,
        WorkerLostError,
    )
    from skyward.events import (
        BootstrapCompleted,
        BootstrapProgress,
        BootstrapStarting,
        Callback,
        CostFinal,
        CostUpdate,
        Error,
        GpuMetrics,
        InfraCreated,
        InfraCreating,
        InstanceLaunching,
        InstancePreempted,
        InstanceProvisioned,
        InstanceStopping,
        LogLine,
        Metrics,
        NodeReachable,
        NodeUnreachable,
        Notice,
        PoolStarted,
        PoolStopped,
        PoolStopping,
        Progress,
        ProviderName,
        SkywardEvent,
        TimeoutApproaching,
        WorkerLost,
        WorkerReplaced,
        WorkerRestarting,
        compose,
        emit,
        use_callback,
    )
    from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot
    from skyward.providers.aws.provider import AWS
    from skyward.providers.digitalocean import DigitalOcean
    from skyward.providers.local import Local
    from skyward.providers.runpod import RunPod
    from skyward.providers.ssh import SSH
    from skyward.providers.vastai import VastAI
    from skyward.providers.verda import Verda
    from skyward.request.accelerators import NVIDIA, Accelerator, is_nvidia, is_trainium
    from skyward.request.image import Image
    from skyward.request.instance import InstanceSpec, select_instance
    from skyward.request.request import Spot, SpotLike
    from skyward.request.volume import S3Volume
    from skyward.submission import CallFuture

__all__ = [
    "AWS",
    "NVIDIA",
    "SSH",
    "Accelerator",
    "AuthenticationError",
    "BootstrapCompleted",
    "BootstrapError",
    "BootstrapProgress",
    "BootstrapStarting",
    "BudgetError",
    "CallFuture",
    "CallTimeoutError",
    "Callback",
    "CapacityError",
    "ComputeFunction",
    "ComputePool",
    "ConfigurationError",
    "CostFinal",
    "CostUpdate",
    "DigitalOcean",
    "DistributedSampler",
    "Error",
    "FetchError",
    "GpuMetrics",
    "HostKeyError",
    "Image",
    "InfraCreated",
    "InfraCreating",
    "InstanceInfo",
    "InstanceLaunching",
    "InstancePreempted",
    "InstanceProvisioned",
    "InstanceSpec",
    "InstanceStopping",
    "LedgerError",
    "Local",
    "LogLine",
    "Metrics",
    "MultiPool",
    "NodeReachable",
    "NodeSnapshot",
    "NodeUnreachable",
    "NotInPoolError",
    "Notice",
    "PendingBatch",
    "PendingCompute",
    "PoolExecutor",
    "PoolSnapshot",
    "PoolStarted",
    "PoolStateError",
    "PoolStopped",
    "PoolStopping",
    "Progress",
    "ProviderName",
    "QuotaError",
    "RateLimitError",
    "RemoteError",
    "RemoteTraceback",
    "RunPod",
    "S3Volume",
    "SerializationError",
    "SkywardError",
    "SkywardEvent",
    "Spot",
    "SpotLike",
    "TerminationError",
    "TimeoutApproaching",
    "UnreachableError",
    "UnsentCallWarning",
    "VastAI",
    "Verda",
    "WorkerLost",
    "WorkerLostError",
    "WorkerReplaced",
    "WorkerRestarting",
    "WorkerSnapshot",
    "accelerators",
    "compose",
    "compute",
    "current_accelerator",
    "distributed",
    "emit",
    "errors",
    "gather",
    "instance_info",
    "integrations",
    "is_nvidia",
    "is_trainium",
    "offers",
    "select_instance",
    "shard",
    "use_callback",
]

_MODULES = ("accelerators", "distributed", "errors", "integrations")
_HOMES = {
    "skyward.errors": (
        "AuthenticationError",
        "BootstrapError",
        "BudgetError",
        "CallTimeoutError",
        "CapacityError",
        "ConfigurationError",
        "FetchError",
        "HostKeyError",
        "LedgerError",
        "NotInPoolError",
        "PoolStateError",
        "QuotaError",
        "RateLimitError",
        "RemoteError",
        "RemoteTraceback",
        "SerializationError",
        "SkywardError",
        "TerminationError",
        "UnreachableError",
        "UnsentCallWarning",
        "WorkerLostError",
    ),
    "skyward.events": (
        "BootstrapCompleted",
        "BootstrapProgress",
        "BootstrapStarting",
        "Callback",
        "CostFinal",
        "CostUpdate",
        "Error",
        "GpuMetrics",
        "InfraCreated",
        "InfraCreating",
        "InstanceLaunching",
        "InstancePreempted",
        "InstanceProvisioned",
        "InstanceStopping",
        "LogLine",
        "Metrics",
        "NodeReachable",
        "NodeUnreachable",
        "Notice",
        "PoolStarted",
        "PoolStopped",
        "PoolStopping",
        "Progress",
        "ProviderName",
        "SkywardEvent",
        "TimeoutApproaching",
        "WorkerLost",
        "WorkerReplaced",
        "WorkerRestarting",
        "compose",
        "emit",
        "use_callback",
    ),
    "skyward.events.snapshot": ("NodeSnapshot", "PoolSnapshot", "WorkerSnapshot"),
    "skyward.api.executor": ("PoolExecutor",),
    "skyward.api.market": ("offers",),
    "skyward.api.multipool": ("MultiPool",),
    "skyward.api.calls": ("ComputeFunction", "PendingBatch", "PendingCompute", "compute", "gather"),
    "skyward.api.pool": ("ComputePool",),
    "skyward.providers.aws.provider": ("AWS",),
    "skyward.providers.digitalocean": ("DigitalOcean",),
    "skyward.providers.local": ("Local",),
    "skyward.providers.runpod": ("RunPod",),
    "skyward.providers.ssh": ("SSH",),
    "skyward.providers.vastai": ("VastAI",),
    "skyward.providers.verda": ("Verda",),
    "skyward.distributed.runtime": (
        "DistributedSampler",
        "InstanceInfo",
        "current_accelerator",
        "instance_info",
        "shard",
    ),
    "skyward.request.accelerators": ("Accelerator", "NVIDIA", "is_nvidia", "is_trainium"),
    "skyward.request.image": ("Image",),
    "skyward.request.instance": ("InstanceSpec", "select_instance"),
    "skyward.request.request": ("Spot", "SpotLike"),
    "skyward.request.volume": ("S3Volume",),
    "skyward.submission": ("CallFuture",),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"skyward.{name}")
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module 'skyward' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
