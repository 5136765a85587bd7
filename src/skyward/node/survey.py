"""What a node has, and what the supervisor chooses on it: ports, folders, shares of memory."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil

from skyward.node.config import NodeConfig, NodeReady
from skyward.node.gpus import Device
from skyward.node.metrics import find_memory_cgroup
from skyward.node.plan import NodePlan

__all__ = ["cpu_count", "free_ports", "make_folders", "make_plan", "memory_bytes"]

_SHARED_MEMORY = Path("/dev/shm")
_BLOB_SHARE = 4
_CALL_PORTS = 32


def free_ports(address: str, count: int) -> tuple[int, ...]:
    """``count`` different TCP ports that nobody uses on ``address`` at the moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((address, 0), backlog=1)) for _ in range(count)]
        return tuple(sock.getsockname()[1] for sock in sockets)


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory, or the cgroup's limit where that is less."""
    physical: int = psutil.virtual_memory().total
    cgroup = find_memory_cgroup()
    return min(physical, cgroup.limit_bytes) if cgroup else physical


def make_plan(config: NodeConfig, *, control_port: int, blob_port: int, devices: tuple[Device, ...] = ()) -> NodePlan:
    """Choose everything else that stays fixed for the node's life. Makes the blob folders."""
    memory = memory_bytes()
    blob_dir, blob_dir_disk = make_folders(config)
    ports = _Ports(free_ports(config.address, 1 + 3 * config.workers + _CALL_PORTS))
    scheduler = ports.take(1)[0]
    workers, lanes, nannies = (ports.take(config.workers) for _ in range(3))
    ready = NodeReady(
        control=f"{config.address}:{control_port}",
        scheduler=f"tls://{config.address}:{scheduler}" if config.head else "",
        workers=tuple(f"tls://{config.address}:{port}" for port in workers),
        lanes=tuple(f"{config.address}:{port}" for port in lanes),
        blobs=f"{config.address}:{blob_port}",
        call_ports=ports.take(_CALL_PORTS),
        blob_dir=str(blob_dir),
        blob_dir_disk=str(blob_dir_disk),
        blob_budget_bytes=min(memory // _BLOB_SHARE, shutil.disk_usage(blob_dir).free),
        pid=os.getpid(),
        python=platform.python_version(),
        packages={name: version(name) for name in ("dask", "distributed", "cloudpickle")},
        cpu_count=cpu_count(),
        memory_bytes=memory,
    )
    # The volumes' keys are the supervisor's only.
    return NodePlan(config=replace(config, volumes=()), ready=ready, nanny_ports=nannies, devices=devices)


class _Ports:
    def __init__(self, ports: tuple[int, ...]) -> None:
        self._left: Iterator[int] = iter(ports)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(next(self._left) for _ in range(count))


def make_folders(config: NodeConfig) -> tuple[Path, Path]:
    """The folder for large arguments in memory and the one on disk, which are one where memory has none.

    Raises:
        PermissionError: somebody else has made a folder of that name.
    """
    disk = Path(config.workdir, "blobs")
    memory = _SHARED_MEMORY / f"skyward-{os.getuid()}-{config.instance_id}"
    folders = (memory if _SHARED_MEMORY.is_dir() else disk, disk)
    for folder in folders:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
    return folders
