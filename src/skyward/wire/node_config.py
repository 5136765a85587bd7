"""What the client tells a node's supervisor, and what it answers: the two ends of one file and one line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skyward.request.metadata import PreemptionWatch
from skyward.request.volume import GrantedVolume
from skyward.wire.frames import TlsIdentity

__all__ = ["NodeConfig", "NodeReady", "WorkerPlace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The node's one configuration file (mode 0600), as the client writes it.

    Attributes:
        pool_id: the pool's id.
        instance_id: the provider's id of this machine; every process of the node carries it in its environment.
        node: the node's rank, 0-based; it is reused by a replacement.
        total_nodes: the fleet's wanted size when the node was started.
        workers: how many worker processes this node runs.
        head: whether this node runs the scheduler (on an island every node does).
        address: the address that every port of the node binds to.
        workdir: the node's own folder: logs, worker directories.
        files: folder of what the image includes: the workers' current one, and the first they import from; empty if
            there is none.
        env: environment of every worker, set before user code; its values are secret.
        tls_ca: PEM certificate that every peer must chain to.
        tls_cert: PEM certificate of this node.
        tls_key: PEM private key of this node.
        timeout_s: hard cap on the node's life.
        lease_s: how long the node lives on after the client's control connection was closed by its peer.
        away_s: how long it lives on while the client is silent.
        collect_metrics: whether to report metrics.
        metrics_interval_s: how often.
        accelerators: names of the accelerators that were asked for, one for each.
        mig: profiles of the partitions to make of each of them; empty for whole ones.
        own_machine: whether the machine was there before the pool and outlives it, and is to be left as it was.
        watch: where the machine is told that it will be taken back; None where nobody tells it.
        power_off: command that ends the machine, and its bill, once everything on it has ended; empty for none.
        volumes: what was made available on it, to be written back and released; secret.
        sharers: how many nodes share the machine's memory and cores, this one included.
        least_cpu: cores that were asked for, which the node claims although its equal share is less.
        least_memory_bytes: memory that was asked for, claimed in the same way.
    """

    pool_id: str
    instance_id: str
    node: int
    total_nodes: int
    workers: int
    head: bool
    address: str
    workdir: str
    env: Mapping[str, str] = field(repr=False)
    tls_ca: str = field(repr=False)
    tls_cert: str = field(repr=False)
    tls_key: str = field(repr=False)
    files: str = ""
    timeout_s: float = 3600.0
    lease_s: float = 120.0
    away_s: float = 1800.0
    collect_metrics: bool = True
    metrics_interval_s: float = 2.0
    accelerators: tuple[str, ...] = ()
    mig: tuple[str, ...] = ()
    own_machine: bool = True
    watch: PreemptionWatch | None = None
    power_off: tuple[str, ...] = ()
    volumes: tuple[GrantedVolume, ...] = field(default=(), repr=False)
    sharers: int = 1
    least_cpu: int = 0
    least_memory_bytes: int = 0

    @property
    def identity(self) -> TlsIdentity:
        """The certificate that this node shows and trusts."""
        return TlsIdentity(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> NodeConfig:
        """Read the file's text."""
        values = _fields(text, tuples=("accelerators", "mig", "power_off"))
        values["watch"] = PreemptionWatch(**values["watch"]) if values.get("watch") else None
        values["volumes"] = tuple(map(GrantedVolume.from_dict, values.get("volumes", ())))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady:
    """The one line a supervisor prints once its ports are chosen; they stay the same for the node's life.

    Attributes:
        control: ``host:port`` of the supervisor's control port (mutual TLS).
        scheduler: ``tls://host:port`` of the node's scheduler; empty where it runs none.
        workers: ``tls://host:port`` of each worker, by index.
        lanes: ``host:port`` of each worker's lane, by index.
        blobs: ``host:port`` at which other nodes of the pool get this one's large arguments (mutual TLS).
        call_ports: free ports of this node, handed out one per broadcast (``InstanceInfo.head_port``).
        blob_dir: folder in memory for large arguments, made by the supervisor, mode 0700.
        blob_dir_disk: folder on disk for those that do not fit.
        blob_budget_bytes: how much may lie in ``blob_dir``: a quarter of ``memory_bytes``.
        pid: the supervisor's process id.
        python: the node's Python version.
        packages: versions of the packages that both ends of Dask must have alike.
        cpu_count: usable cores; the node's share of them where nodes share a machine.
        memory_bytes: physical memory, or the cgroup's limit; the node's share where nodes share a machine.
    """

    control: str
    scheduler: str
    workers: tuple[str, ...]
    lanes: tuple[str, ...]
    blobs: str
    call_ports: tuple[int, ...]
    blob_dir: str
    blob_dir_disk: str
    blob_budget_bytes: int
    pid: int
    python: str
    packages: Mapping[str, str]
    cpu_count: int
    memory_bytes: int

    def to_json(self) -> str:
        """The line's text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeReady:
        """Read the line's text."""
        return cls(**_fields(text, tuples=("workers", "lanes", "call_ports")))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker process stands: set in its environment (``SKYWARD_WORKER``) before any user code.

    Attributes:
        pool_id: the pool's id (``InstanceInfo.job_id``).
        instance_id: the provider's id of the machine.
        node: rank of the node.
        total_nodes: the fleet's wanted size.
        worker: index of the worker on its node.
        workers_per_node: workers on each node.
        head_addr: address of node 0.
        address: the node's own.
        accelerators: names of what this worker may use, one for each device.
        memory_limit_bytes: the worker's share of the node's memory.
        node_accelerators: accelerators of the whole node.
    """

    pool_id: str
    instance_id: str
    node: int
    total_nodes: int
    worker: int
    workers_per_node: int
    head_addr: str
    address: str
    accelerators: tuple[str, ...]
    memory_limit_bytes: int
    node_accelerators: int = 0

    def to_json(self) -> str:
        """The variable's text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerPlace:
        """Read the variable's text."""
        return cls(**_fields(text, tuples=("accelerators",)))


def _fields(text: str, *, tuples: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    return values | {name: tuple(values[name]) for name in tuples}
