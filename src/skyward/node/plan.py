"""Plan of a node by its supervisor, as the node's processes receive it: ports, folders, memory, devices."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import random
import secrets
import shutil
import socket
import stat
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from skyward.base.platform import SHARED_MEMORY, ephemeral_ports, usable_cores
from skyward.node.cgroups import find_cpu_limit, find_memory_cgroup
from skyward.node.gpu.driver import Device
from skyward.wire.node_config import CHECKPOINTS, NodeConfig, NodeReady, WorkerPlace

if TYPE_CHECKING:
    from skyward.wire.control import Start

_BLOB_SHARE = 4
_CALL_PORTS = 32

_UNIT = 64
"""Ports claimed together: the first one is bound for as long as the claim holds, the others are for use."""
_LOWEST_PORT = 10_240

HASH_SEED = {"PYTHONHASHSEED": "6640"}
"""Variable with which the workers of all nodes hash alike; any number does."""
_THREAD_CAPS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def thread_variables(env: Mapping[str, str], *, workers: int, cpu_count: int) -> dict[str, str]:
    """Return the caps on threads of numerical libraries in a worker; those that the user has set in ``env`` count."""
    threads = str(max(1, cpu_count // workers))
    return {name: env.get(name, threads) for name in _THREAD_CAPS}


def process_env(config: NodeConfig, cpu_count: int) -> dict[str, str]:
    """Return the variables of every process of the node, besides those that its supervisor has.

    Args:
        config: the node.
        cpu_count: cores that it may use.
    """
    ours = thread_variables(config.env, workers=config.workers, cpu_count=cpu_count)
    # A loop inside a call counts the machine's cores otherwise.
    if config.sharers > 1 or config.bought_cpu:
        ours |= {"LOKY_MAX_CPU_COUNT": str(cpu_count)}
    return HASH_SEED | ours | dict(config.env) | {"SKYWARD_INSTANCE": config.instance_id}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node: the client's configuration and the supervisor's choices. Its processes get it as a pickle.

    It holds the node's private key: never in a log, an argument or a variable.

    Attributes:
        config: the client's configuration.
        ready: ports, folders and sizes.
        devices: devices of the workers, in the order in which they are dealt out.
    """

    config: NodeConfig
    ready: NodeReady
    devices: tuple[Device, ...] = ()

    @property
    def memory_limit_bytes(self) -> int:
        """Each worker's share of the node's memory."""
        return self.ready.memory_bytes // self.config.workers

    def here(self, address: str) -> str:
        """Return ``host:port`` of one of this node's servers as its own processes reach it."""
        return f"{self.config.binds_to}:{address.rpartition(':')[2]}"

    @property
    def worker_folder(self) -> str:
        """Folder of the workers' own directories; it goes when the node ends."""
        return str(Path(self.config.workdir, "workers"))

    @property
    def checkpoints(self) -> str:
        """Folder of the calls' checkpoints; it goes when the node ends."""
        return str(Path(self.config.workdir, CHECKPOINTS))

    def worker_log(self, worker: int) -> str:
        """Log file of worker number ``worker``."""
        return str(Path(self.config.workdir, f"worker-{worker}.log"))

    def process_env(self) -> dict[str, str]:
        """Return the variables of every process of the node, besides those that the supervisor has."""
        return process_env(self.config, self.ready.cpu_count)

    def devices_of(self, worker: int) -> tuple[Device, ...]:
        """Return the devices of worker number ``worker``.

        Devices are dealt round-robin; where there are fewer than workers, several workers share one.
        """
        if not self.devices:
            return ()
        return self.devices[worker :: self.config.workers] or (self.devices[worker % len(self.devices)],)

    def accelerators_of(self, worker: int) -> float:
        """Return the worker's number of devices, a fraction where workers share one."""
        devices = self.devices_of(worker)
        sharing = sum(self.devices_of(other) == devices for other in range(self.config.workers))
        return len(devices) / sharing

    def place(self, worker: int, order: Start) -> WorkerPlace:
        """Return the place of worker number ``worker`` in its pool."""
        config = self.config
        return WorkerPlace(
            pool_id=config.pool_id,
            instance_id=config.instance_id,
            node=config.node,
            total_nodes=order.total_nodes,
            worker=worker,
            workers_per_node=config.workers,
            head_addr=order.head_addr,
            address=config.address,
            accelerators=tuple(device.name for device in self.devices_of(worker)),
            memory_limit_bytes=self.memory_limit_bytes,
            node_accelerators=len(self.devices),
            bind=config.bind,
        )

    def worker_env(self, worker: int, order: Start) -> dict[str, str]:
        """Return the variables that worker number ``worker`` has besides those of :meth:`process_env`."""
        return (
            self._visible_devices(worker)
            | self._files()
            | {
                "SKYWARD_WORKER": self.place(worker, order).to_json(),
                "SKYWARD_BLOB_DIRS": os.pathsep.join((self.ready.blob_dir, self.ready.blob_dir_disk)),
            }
        )

    def _files(self) -> dict[str, str]:
        files = self.config.files
        if not self.config.imports_files:
            return {"SKYWARD_FILES": files} if files else {}
        others = self.config.env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        return {"SKYWARD_FILES": files, "PYTHONPATH": os.pathsep.join((files, others)) if others else files}

    def _visible_devices(self, worker: int) -> dict[str, str]:
        devices = self.devices_of(worker)
        nobody_asked = not self.config.accelerators and self.config.workers == 1
        if not devices or nobody_asked or "CUDA_VISIBLE_DEVICES" in self.config.env:  # the user has chosen
            return {}
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(device.shown_as for device in devices)}
        if "CUDA_VISIBLE_DEVICES" in os.environ:  # its devices and their order stay
            return visible
        # By default CUDA numbers GPUs by speed, and the driver by their place on the bus.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | visible


def port_count(config: NodeConfig) -> int:
    """Return how many ports a node's plan needs, the two of its supervisor not counted."""
    return 1 + 2 * config.workers + _CALL_PORTS


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


def node_cpu_count(config: NodeConfig) -> int:
    """Return the number of cores that the node may use: its share, where nodes share the machine."""
    return share_of(cpu_count(config.bought_cpu), sharers=config.sharers, least=config.least_cpu)


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


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the distributions that are installed."""
    versions: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


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
    numbers = iter(ports)
    service, *guests = itertools.islice(numbers, 1 + config.workers)
    lanes = tuple(itertools.islice(numbers, config.workers))
    ready = NodeReady(
        control=f"{config.binds_to}:{control_port}",
        service=f"{config.address}:{service}",
        guests=tuple(f"{config.address}:{port}" for port in guests),
        lanes=tuple(f"{config.binds_to}:{port}" for port in lanes),
        blobs=f"{config.address}:{blob_port}",
        call_ports=tuple(itertools.islice(numbers, _CALL_PORTS)),
        blob_dir=str(blob_dir),
        blob_dir_disk=str(blob_dir_disk),
        blob_budget_bytes=min(memory // _BLOB_SHARE, shutil.disk_usage(blob_dir).free),
        pid=os.getpid(),
        python=platform.python_version(),
        packages=package_versions(config.packages),
        cpu_count=node_cpu_count(config),
        memory_bytes=memory,
    )
    # The volumes' keys are the supervisor's only.
    return NodePlan(config=replace(config, volumes=()), ready=ready, devices=devices)


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
