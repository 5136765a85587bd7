"""Torch on the workers of a call: its process group, and the environment variables of torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

import psutil

from skyward.distributed._gang import Decorator, Gang, Peer, checked_backend, decorator, environment, imported, own_rank
from skyward.distributed.runtime import FreshProcessNeeded, bind_address, visible_gpus
from skyward.errors import ConfigurationError

BACKENDS = ("nccl", "gloo", "cpu:gloo,cuda:nccl")
_PARTITION = "MIG-"
_AS_LONG_AS_IT_TAKES = timedelta(days=365)


def torch(backend: str | None = None) -> Decorator:
    """Run the function with ``torch.distributed`` initialised: one process group of all workers of the call.

    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK`` (the node's), ``MASTER_ADDR`` and
    ``MASTER_PORT`` are set as torchrun sets them, with one exception. A worker sees its own GPUs only; if
    ``LOCAL_RANK`` were none of their indices it is 0, so that as a device index it always selects the worker's own.
    That device is the current one.

    Args:
        backend: ``"nccl"`` for GPUs, ``"gloo"`` for CPUs, or ``"cpu:gloo,cuda:nccl"`` for tensors of both. None
            selects nccl if every worker has a whole GPU of its own, else gloo.

    Raises:
        ConfigurationError: the backend does not exist; in the call: torch is not installed on the node.
    """
    return decorator(partial(TorchSession, checked_backend(backend, BACKENDS, "torch")))


class TorchSession:
    """Process group of one training.

    The process of rank 0 binds its port at once and keeps it, so that no other program can take it in the meantime.

    Attributes:
        port: port of the group's store; 0 for all ranks except the first.
        gpus: UUIDs of the GPUs that torch may use here.
    """

    def __init__(self, backend: str | None) -> None:
        self._torch: Any = imported("torch", pip="torch")
        # Import it before the group exists: its functions keep the current group as default for the process's life.
        imported("torch.distributed.nn.functional", pip="torch")
        if self._torch.distributed.is_initialized():
            raise FreshProcessNeeded(
                "torch.distributed already has a process group in this process: "
                "torch.distributed.destroy_process_group() removes it"
            )
        self._backend = backend
        self._listener = None
        if own_rank() == 0:
            self._listener = socket.create_server((bind_address(), 0), backlog=1024)
        self.port = self._listener.getsockname()[1] if self._listener else 0
        self.gpus = usable_gpus(self._torch)

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        dist = self._torch.distributed
        backend = self._backend or chosen_backend(gang.peers)
        if backend == "nccl" and not self.gpus:
            raise ConfigurationError(
                f'backend="nccl" needs a GPU, and torch can use none on node {gang.mine.node}: '
                "backend=None selects gloo there"
            )
        device = device_index(gang.mine.local_rank, self._torch.cuda.device_count() if self.gpus else 0)
        with environment(variables(gang, device) | unless_set(_interface(bind_address()))):
            options: dict[str, Any] = {}
            if self.gpus:
                self._torch.cuda.set_device(device)
            if "nccl" in backend and self.gpus:
                options["device_id"] = self._torch.device("cuda", device)
            store = self._store(gang)
            dist.init_process_group(backend, store=store, rank=gang.rank, world_size=gang.world, **options)
            try:
                yield
            finally:
                _leave(dist, store, gang)

    def _store(self, gang: Gang) -> Any:
        """Return the store through which the workers find each other, on the first one's port."""
        descriptor = {"master_listen_fd": self._listener.detach()} if self._listener else {}
        return self._torch.distributed.TCPStore(
            gang.first.address, gang.first.port, gang.world, is_master=gang.rank == 0, **descriptor
        )


def chosen_backend(peers: Sequence[Peer]) -> str:
    """Return the backend for ``peers``: nccl if each has a whole GPU that no other one uses, else gloo.

    MIG partitions do not count as whole GPUs: nccl does not work between them.
    """
    devices = [gpu for peer in peers for gpu in peer.gpus]
    shared = len(set(devices)) < len(devices)
    parts = any(gpu.startswith(_PARTITION) for gpu in devices)
    return "nccl" if all(peer.gpus for peer in peers) and not shared and not parts else "gloo"


def device_index(local_rank: int, count: int) -> int:
    """Return ``LOCAL_RANK`` for a worker that sees ``count`` devices: programs use it as their device index.

    If the worker sees fewer devices than its node has, the index of its own device is 0.
    """
    return local_rank if not count or local_rank < count else 0


def variables(gang: Gang, local_rank: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for this worker."""
    return {
        "RANK": str(gang.rank),
        "WORLD_SIZE": str(gang.world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(gang.local_world),
        "GROUP_RANK": str(gang.mine.node),
        "MASTER_ADDR": gang.first.address,
        "MASTER_PORT": str(gang.first.port),
    }


def _interface(address: str) -> dict[str, str]:
    """Return variables that restrict gloo and nccl to the interface of the nodes' private network."""
    name = interface_of(address, interfaces())
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def unless_set(values: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``values`` whose variables are not set in this process."""
    return {name: value for name, value in values.items() if name not in os.environ}


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of this machine's network interfaces, by interface name."""
    return {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}


def interface_of(address: str, interfaces: Mapping[str, Collection[str]]) -> str | None:
    """Return the name of the interface that carries ``address``, or None.

    All of 127.0.0.0/8 belongs to the loopback interface, although it lists one address only.
    """
    wanted = ip_address(address)
    for name, addresses in interfaces.items():
        for text in addresses:
            if text == address or (wanted.is_loopback and _is_loopback(text)):
                return name
    return None


def _is_loopback(text: str) -> bool:
    try:
        return ip_address(text).is_loopback
    except ValueError:  # a hardware address
        return False


def usable_gpus(torch: Any) -> tuple[str, ...]:
    """Return the UUIDs of usable GPUs. Indices would be ambiguous for several nodes on one machine."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ()
    partitions = tuple(name for name in visible_gpus() if name.startswith(_PARTITION))
    devices = range(torch.cuda.device_count())
    return partitions or tuple(str(torch.cuda.get_device_properties(device).uuid) for device in devices)


def _leave(dist: Any, store: Any, gang: Gang) -> None:
    """Destroy the group. The first worker, which holds the store, leaves last: others may still read from it."""
    if dist.is_initialized():  # unless the function has destroyed it
        dist.destroy_process_group()
    others = [f"skyward/left/{rank}" for rank in range(1, gang.world)]
    if gang.rank:
        store.set(others[gang.rank - 1], "")
    elif others:
        store.wait(others, _AS_LONG_AS_IT_TAKES)
