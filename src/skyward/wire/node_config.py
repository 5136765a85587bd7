"""Configuration of a node's supervisor, its report of readiness, and the place of its workers, as JSON; time limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Self

from skyward.request.volume import GrantedVolume
from skyward.wire.frames import TlsIdentity, with_tuples

# Time limits that the client and the programs on a node share: each end relies on the value of the other.

HANDSHAKE_S: Final = 10.0
"""Seconds for a new connection to authenticate and to exchange greetings, at either end."""

PING_S: Final = 5.0
"""Seconds between two pings of the client on a control connection."""
SILENT_PINGS: Final = 3
"""Number of pings without an answer after which the client gives the control connection up."""
SILENCE_S: Final = PING_S * SILENT_PINGS
"""Seconds of silence after which a node takes its client for away, not for gone, when the connection closes."""

# Eight GPUs are reset and partitioned one after the other.
MIG_START_S: Final = 240.0
"""Additional seconds that a node with MIG partitions may take to start."""
MIG_UNDO_S: Final = 120.0
"""Additional seconds that it may take to end."""

CHECKPOINTS: Final = "checkpoints"
"""Name of the folder, in the node's own, with a folder for the checkpoints of each call that has any."""

RELEASE_S: Final = 900.0
"""Seconds that an ending node may take to write the last changes of its volumes back."""


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """Record that travels as JSON: its fields by name."""

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record in a line."""
        return cls(**with_tuples(json.loads(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionWatch:
    """A metadata service that answers 404 until it has an announcement.

    Attributes:
        endpoint: its address, ``"http://host:port"``.
        endpoint_env: variable of the machine's environment that overrides it, where it is set.
        token_path: path at which PUT returns a token for every other request; empty if none is needed.
        token_request_headers: headers of that request.
        token_header: the header that carries the token.
        notice_path: path that answers with JSON once the machine will be taken back.
        notice_time_field: member of that answer with the time, ISO 8601 in UTC.
        hint_path: path that answers once preemption has become more likely; empty if there is none.
        interval_s: seconds between two requests.
    """

    endpoint: str
    notice_path: str
    notice_time_field: str
    endpoint_env: str = ""
    token_path: str = ""
    token_request_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    token_header: str = ""
    hint_path: str = ""
    interval_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(JsonRecord):
    """The node's one configuration file (mode 0600), as the client writes it.

    Attributes:
        pool_id: the pool's id.
        instance_id: the provider's id of this machine; every process of the node carries it in its environment.
        node: the node's rank, 0-based; it is reused by a replacement.
        total_nodes: the fleet's target size when the node was started.
        workers: number of worker processes on this node.
        head: True if this node is the head of its network: its workers start at once, and its process of ``service``.
        address: the address at which other nodes reach this one's ports.
        bind: the address of an interface, to which every port of the node binds; empty for ``address``.
        workdir: the node's own folder: logs, worker directories.
        files: the working folder of calls, with the image's includes; empty leaves it to the node.
        imports_files: True if that folder is the workers' first for imports: it holds includes.
        env: environment of every worker, set before user code; its values are secret.
        tls_ca: PEM certificate that every peer must chain to.
        tls_cert: PEM certificate of this node.
        tls_key: PEM private key of this node.
        timeout_s: hard cap on the node's life, in seconds.
        cap: the pool's parameter that it follows from: ``"timeout"`` or ``"max_cost"``.
        lease_s: seconds that the node lives on after the client closed its control connection.
        away_s: seconds that it lives on while the client is silent.
        keep_s: seconds that it lives on without a client, gone or silent, and without an unfinished job: instead of the
            two above. 0 for a node that ends with its client.
        results: folder in a writable volume for a copy of each job's outcome; empty for none.
        collect_metrics: True to report metrics.
        metrics_interval_s: seconds between two reports.
        accelerators: names of the requested accelerators, one for each.
        mig: profiles of the partitions to make of each of them; empty for whole ones.
        own_machine: True if the machine outlives the pool, and must be left as it was.
        watch: source of the notice that the machine will be taken back; None without one.
        power_off: command that ends the machine, and its bill, once everything on it has ended; empty for none.
        volumes: volumes on the node, to be written back and released; secret.
        sharers: number of nodes that share the machine's memory and cores, this one included.
        least_cpu: requested cores, which the node claims although its equal share is less.
        least_memory_bytes: requested memory, claimed in the same way.
        bought_cpu: cores of the rented machine as bought; the node uses no more, however many it sees. 0 is no limit.
        bought_memory_bytes: main memory as bought, in the same way.
        service: module of the service that the pool is opened with, loaded before the workers start; empty for none.
        service_name: name of that service.
        packages: distributions whose versions the node reports.
    """

    pool_id: str
    instance_id: str
    node: int
    total_nodes: int
    workers: int
    head: bool
    address: str
    workdir: str
    # Secrets, here and below: no log and no traceback may show them.
    env: Mapping[str, str] = field(repr=False)
    tls_ca: str = field(repr=False)
    tls_cert: str = field(repr=False)
    tls_key: str = field(repr=False)
    bind: str = ""
    files: str = ""
    imports_files: bool = False
    # The same defaults as in request/request.py: tests/unit/wire/test_limits.py compares them.
    timeout_s: float = 3600.0
    cap: str = "timeout"
    lease_s: float = 120.0
    away_s: float = 1800.0
    keep_s: float = 0.0
    results: str = ""
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
    bought_cpu: int = 0
    bought_memory_bytes: int = 0
    service: str = ""
    service_name: str = ""
    packages: tuple[str, ...] = ()

    @property
    def binds_to(self) -> str:
        """The address to which every port of the node binds."""
        return self.bind or self.address

    @property
    def results_folder(self) -> Path | None:
        """The pool's own folder in :attr:`results`; None without one."""
        return Path(self.results, self.pool_id) if self.results else None

    @property
    def identity(self) -> TlsIdentity:
        """Certificates and key of this node."""
        return TlsIdentity(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration in the file's text."""
        values = with_tuples(json.loads(text))
        values["watch"] = PreemptionWatch(**values["watch"]) if values.get("watch") else None
        values["volumes"] = tuple(map(GrantedVolume.from_dict, values.get("volumes", ())))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady(JsonRecord):
    """Ports and facts of a node: the one line that its supervisor prints. The ports stay the same for the node's life.

    The client reaches ``control`` and ``lanes`` through the node's transport: they name the address that the ports are
    bound to. The others name the address at which other nodes reach this one.

    Attributes:
        control: ``host:port`` of the supervisor's control port (mutual TLS).
        service: ``host:port`` for the process of a service beside the workers, if the node runs one.
        guests: ``host:port`` for a service's guest in each worker, by index.
        lanes: ``host:port`` of each worker's lane, by index.
        blobs: ``host:port`` at which other nodes of the pool get this one's large arguments (mutual TLS).
        call_ports: free ports of this node, handed out one per broadcast (``InstanceInfo.head_port``).
        blob_dir: folder in memory for large arguments, made by the supervisor, mode 0700.
        blob_dir_disk: folder on disk for those that do not fit.
        blob_budget_bytes: size limit of ``blob_dir``: a quarter of ``memory_bytes``.
        pid: the supervisor's process id.
        python: the node's Python version.
        packages: versions of those of :attr:`NodeConfig.packages` that are installed.
        cpu_count: usable cores: of the affinity, the cgroup's limit and the bought ones the fewest; the node's share of
            them where nodes share a machine.
        memory_bytes: usable memory: of the physical one, the cgroup's limit and the bought one the least; the node's
            share where nodes share a machine.
    """

    control: str
    service: str
    guests: tuple[str, ...]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace(JsonRecord):
    """Place of a worker process in the fleet: set in its environment (``SKYWARD_WORKER``) before any user code.

    Attributes:
        pool_id: the pool's id (``InstanceInfo.job_id``).
        instance_id: the provider's id of the machine.
        node: rank of the node.
        total_nodes: the fleet's target size.
        worker: index of the worker on its node.
        workers_per_node: workers on each node.
        head_addr: address of node 0, if this node reaches it; else this node's own.
        address: the node's own, for other nodes.
        accelerators: names of this worker's accelerators, one for each device.
        memory_limit_bytes: the worker's share of the node's memory.
        node_accelerators: accelerators of the whole node.
        bind: address of the interface that the node's ports are bound to; empty for ``address``.
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
    bind: str = ""
