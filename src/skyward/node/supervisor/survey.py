"""Resources of a node, and the supervisor's choices on it: ports, folders, shares of memory."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import secrets
import shutil
import socket
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import psutil

from skyward._concurrency.linux_parts import SHARED_MEMORY, ephemeral_ports, usable_cores
from skyward.node.cgroups import find_cpu_limit, find_memory_cgroup
from skyward.node.gpu.driver import Device
from skyward.node.supervisor.plan import NodePlan
from skyward.wire.node_config import NodeConfig, NodeReady

__all__ = [
    "claim_ports",
    "cpu_count",
    "free_ports",
    "make_folders",
    "make_plan",
    "memory_bytes",
    "package_versions",
    "port_count",
    "share_of",
    "usable",
]

_BLOB_SHARE = 4
_CALL_PORTS = 32

_UNIT = 64
"""Ports claimed together: the first one is bound for as long as the claim holds, the others are for use."""
_LOWEST_PORT = 10_240


def port_count(config: NodeConfig) -> int:
    """Return how many ports a node's plan needs, the two of its supervisor not counted."""
    return 1 + 3 * config.workers + _CALL_PORTS


@contextlib.contextmanager
def claim_ports(address: str, count: int) -> Generator[tuple[int, ...]]:
    """Reserve ``count`` TCP ports of ``address`` until the context ends, without binding them.

    Nodes on one address never share a port, and no outgoing connection takes one: the ports lie outside of the
    system's ephemeral range. Where that leaves too few, the rest are merely free at the moment.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for first in _units():
            if len(ports) >= count:
                break
            if (claim := _bound(address, first)) is not None:
                held.enter_context(claim)
                ports += [port for port in range(first + 1, first + _UNIT) if _is_free(address, port)]
        ports += free_ports(address, max(0, count - len(ports)))
        yield tuple(ports[:count])


def _units() -> list[int]:
    low, high = ephemeral_ports()
    starts = [first for first in range(_LOWEST_PORT, 65_536 - _UNIT + 1, _UNIT) if first + _UNIT <= low or first > high]
    return random.sample(starts, len(starts))


def _bound(address: str, port: int) -> socket.socket | None:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        sock.bind((address, port))
    except OSError:  # in use
        sock.close()
        return None
    return sock


def _is_free(address: str, port: int) -> bool:
    sock = _bound(address, port)
    if sock is not None:
        sock.close()
    return sock is not None


def free_ports(address: str, count: int) -> tuple[int, ...]:
    """Return ``count`` different TCP ports of ``address`` that are free at the moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((address, 0), backlog=1)) for _ in range(count)]
        return tuple(sock.getsockname()[1] for sock in sockets)


def cpu_count(bought: int = 0) -> int:
    """Return the number of cores that this process may use: of its affinity, its cgroup, and ``bought`` the fewest."""
    return usable(usable_cores(), find_cpu_limit(), bought)


def memory_bytes(bought: int = 0) -> int:
    """Return the usable memory: of the physical one, the cgroup's limit, and ``bought`` the least."""
    physical: int = psutil.virtual_memory().total
    cgroup = find_memory_cgroup()
    return usable(physical, cgroup.limit_bytes if cgroup else None, bought)


def usable(seen: int, *limits: float | None) -> int:
    """Return the smallest of ``seen`` and the limits, of which None and 0 are none.

    A part of a core counts as a core: a thread too many waits for its turn, one too few leaves bought time unused.
    """
    return math.ceil(min([seen, *filter(None, limits)]))


@cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of the packages that both ends of Dask must have in common; 34 ms the first time."""
    return {name: version(name) for name in ("dask", "distributed", "cloudpickle")}


def share_of(whole: int, *, sharers: int, least: int) -> int:
    """Return a node's part of a machine's resource: an equal one, or more if ``least`` is more; at least 1."""
    return min(whole, max(whole // sharers, least, 1))


def make_plan(
    config: NodeConfig,
    *,
    control_port: int,
    blob_port: int,
    ports: Sequence[int],
    devices: tuple[Device, ...] = (),
) -> NodePlan:
    """Choose everything else that stays fixed for the node's life, and make the blob folders.

    Args:
        config: the client's configuration.
        control_port: port of the supervisor.
        blob_port: port at which other nodes get large arguments.
        ports: :func:`port_count` ports for everything else.
        devices: devices of the workers.
    """
    memory = share_of(memory_bytes(config.bought_memory_bytes), sharers=config.sharers, least=config.least_memory_bytes)
    blob_dir, blob_dir_disk = make_folders(config)
    taken = _Ports(ports)
    scheduler = taken.take(1)[0]
    workers, lanes, nannies = (taken.take(config.workers) for _ in range(3))
    ready = NodeReady(
        control=f"{config.binds_to}:{control_port}",
        scheduler=f"tls://{config.address}:{scheduler}",
        workers=tuple(f"tls://{config.address}:{port}" for port in workers),
        lanes=tuple(f"{config.binds_to}:{port}" for port in lanes),
        blobs=f"{config.address}:{blob_port}",
        call_ports=taken.take(_CALL_PORTS),
        blob_dir=str(blob_dir),
        blob_dir_disk=str(blob_dir_disk),
        blob_budget_bytes=min(memory // _BLOB_SHARE, shutil.disk_usage(blob_dir).free),
        pid=os.getpid(),
        python=platform.python_version(),
        packages=dict(package_versions()),
        cpu_count=share_of(cpu_count(config.bought_cpu), sharers=config.sharers, least=config.least_cpu),
        memory_bytes=memory,
    )
    # The volumes' keys are the supervisor's only.
    return NodePlan(config=replace(config, volumes=()), ready=ready, nanny_ports=nannies, devices=devices)


class _Ports:
    def __init__(self, ports: Sequence[int]) -> None:
        self._left: Iterator[int] = iter(ports)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(next(self._left) for _ in range(count))


def make_folders(config: NodeConfig) -> tuple[Path, Path]:
    """Make the folder for large arguments in memory and the one on disk, which are one where memory has none.

    Any user of the machine may create names in memory's folder: the name cannot be guessed and must not exist yet, so
    that nobody can put a folder or a link of their own there.

    Raises:
        PermissionError: what stands in the place of the one on disk is no folder of this user alone.
    """
    disk = Path(config.workdir, "blobs")
    disk.mkdir(mode=0o700, exist_ok=True)
    found = disk.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{disk} is no folder of this user alone")
    if not SHARED_MEMORY.is_dir():
        return disk, disk
    # Short, since the path of a socket in it may have 107 characters.
    memory = SHARED_MEMORY / f"skyward-{os.getuid()}-{config.instance_id}-{secrets.token_hex(8)}"
    memory.mkdir(mode=0o700)
    return memory, disk
