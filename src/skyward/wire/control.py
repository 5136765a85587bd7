"""Messages of the control connection between the client and a node's supervisor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from skyward.events import GpuMetrics, Metrics, Progress
from skyward.wire.frames import FrameError, with_tuples

_SIGKILL = 9
"""Number on nodes, which may not be that of the client's system."""


EndKind = Literal["preemption", "call_timeout", "pool_timeout", "max_cost", "down"]
"""Kind of an end that a call is told of; see :class:`~skyward.distributed.grace.EndNotice`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Client to node: start the workers. Idempotent; running workers follow values that have changed.

    Attributes:
        head_addr: address of the head node, for :class:`~skyward.wire.node_config.WorkerPlace`.
        total_nodes: target size of the fleet, for the same.
    """

    head_addr: str
    total_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunService:
    """Client to node: keep a service running. Idempotent; another address replaces the one before.

    Attributes:
        name: name of the service.
        module: its module on the nodes; see :mod:`skyward.node.services`.
        address: ``host:port`` of its process. The node whose :attr:`~skyward.wire.node_config.NodeReady.service` this
            is runs that process; the workers of every node that gets the order join it.
    """

    name: str
    module: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Client to node: renew the lease. Answered with :class:`Pong`."""

    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Client to node: SIGKILL one worker, unless it has another incarnation by now. The node starts it again.

    Attributes:
        worker: index of the worker on its node.
        incarnation: its process.
        spare_jobs: True to leave a process alone that runs a call of a job, or has claimed one.
    """

    worker: int
    incarnation: str
    spare_jobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Client to node: get a large argument from other nodes. Answered with :class:`Fetched`; idempotent.

    Attributes:
        blob_id: BLAKE3 of its content, in hex.
        nbytes: its size.
        path: file for it, in one of the node's blob folders.
        sources: ``host:port`` of nodes that have it (:attr:`NodeReady.blobs`), in the order to ask them.
    """

    blob_id: str
    nbytes: int
    path: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Client to node: live on for so many seconds without a client (:attr:`NodeConfig.keep_s`), from now on.

    Answered with :class:`UnfinishedJobs`.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Client to node: end everything. Answered by :class:`Ending`; the connection closes after the last process.

    Attributes:
        restart: True if another supervisor is to follow on the machine, which stays what it is: on, and the pool's.
    """

    restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Node to client: the answer to the :class:`Ping` with the same number."""

    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRunning:
    """Node to client: a worker accepts calls. Sent again, for each, on every new connection.

    Attributes:
        worker: index of the worker on its node.
        incarnation: id of this process; a worker that comes back has another.
        pid: its process id, on the node.
    """

    worker: int
    incarnation: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRunning:
    """Node to client: a worker runs a call of a job, and takes no calls from its lane meanwhile.

    Sent again, for each, on every new connection.

    Attributes:
        worker: index of the worker on its node.
        incarnation: id of its process.
        job: the job and the call's index in it, ``"train/0"``; empty once that is over.
    """

    worker: int
    incarnation: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """Node to client: a worker's process has ended; the node starts the next incarnation by itself.

    Attributes:
        worker: index of the worker on its node.
        incarnation: id of the process that ended.
        exit_code: its exit status; None if a signal ended it, or if the status is lost.
        signal: number of the signal that ended it, or None.
        reason: exit status or signal in plain English.
        memory_limit_bytes: the limit, when exceeding it was the reason; else None.
        ended_for: reason for which the node ended it, in plain English; empty if it did not.
        last_words: end of the output that it may not have sent, such as the traceback of a crash; bytes as Latin-1.
        last_words_at: their offset in its log.
        omitted_bytes: number of bytes before the last words that are left out.
        begun: position of the last call that the process began, 0 if it began none; None when unknown.
        overran: position of the call for whose limits the node ended it; 0 if it did not.
        overran_memory: True if that limit was one of memory, not of time.
    """

    worker: int
    incarnation: str
    exit_code: int | None
    signal: int | None
    reason: str
    memory_limit_bytes: int | None
    ended_for: str = ""
    last_words: str = ""
    last_words_at: int = 0
    omitted_bytes: int = 0
    begun: int | None = None
    overran: int = 0
    overran_memory: bool = False

    @property
    def was_killed(self) -> bool:
        """True if it may have been killed from outside, neither by itself nor for its memory."""
        # Without exit code and signal its status is lost, so that SIGKILL cannot be excluded.
        return self.exit_code is None and self.signal in (None, _SIGKILL) and self.memory_limit_bytes is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Node to client: the outcome of a :class:`Fetch`.

    Attributes:
        blob_id: the id in the request.
        path: the path in the request; the file is there, whole, unless there is an error.
        error: reason of the failure, in plain English; empty after success.
        errno: the system's error number if the node could not store it; else 0.
        unreached: sources to which the node could not connect.
    """

    blob_id: str
    path: str
    error: str = ""
    errno: int = 0
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRunning:
    """Node to client: the service's process accepts connections. Sent again on every new connection.

    Attributes:
        name: name of the service.
        address: ``host:port`` of the process.
    """

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceExit:
    """Node to client: the service's process has ended; the node starts it again, at the same address."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMetrics:
    """Node to client: the node's load at one moment.

    Attributes:
        cpu_percent: load of all cores together since the previous sample, 0 to 100.
        memory_used_mb: used memory in MiB, without memory that the system could reclaim at once.
        memory_total_mb: memory in MiB: physical memory, or the control group's limit if that is smaller.
        gpus: GPUs that answered, by index.
    """

    cpu_percent: float
    memory_used_mb: float
    memory_total_mb: float
    gpus: tuple[GpuMetrics, ...] = ()

    @property
    def memory_percent(self) -> float:
        """Used memory, 0 to 100."""
        return 100 * self.memory_used_mb / self.memory_total_mb

    def to_event(self, *, instance_id: str, node: int) -> Metrics:
        """Return the event for the user."""
        utilizations = [gpu.utilization for gpu in self.gpus if gpu.utilization is not None]
        return Metrics(
            instance_id=instance_id,
            node=node,
            cpu_percent=self.cpu_percent,
            memory_percent=self.memory_percent,
            memory_used_mb=self.memory_used_mb,
            memory_total_mb=self.memory_total_mb,
            gpu_utilization=sum(utilizations) / len(utilizations) if utilizations else None,
            gpu_memory_used_mb=sum(gpu.memory_used_mb for gpu in self.gpus) if self.gpus else None,
            gpu_memory_total_mb=sum(gpu.memory_total_mb for gpu in self.gpus) if self.gpus else None,
            gpu_temperature=max((gpu.temperature for gpu in self.gpus if gpu.temperature is not None), default=None),
            gpus=self.gpus,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutWarning:
    """Node to client: the node's hard ``timeout`` is near."""

    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempting:
    """Node to client: its provider takes the machine back. Sent again on every new connection.

    Attributes:
        seconds_left: time until then, as of the sending.
    """

    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionLikely:
    """Node to client: its provider will probably take the machine back. Sent again on every new connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedJobs:
    """Node to client: the number of jobs for which a kept node stays.

    Sent on every new connection, after everything else that is sent then.
    """

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndComing:
    """Supervisor to worker: an end of the node is coming.

    Attributes:
        kind: see :class:`~skyward.distributed.grace.EndNotice`.
        at: time of the end, by the clock ``monotonic``, which is the same in all processes of a machine.
    """

    kind: EndKind
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeTrouble:
    """Node to client: changes of volumes are not written back, for this ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorTrouble:
    """Node to client: a part of the supervisor failed for this ``reason`` and was started again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Node to client: the node is ending everything. The connection closes when it has.

    Attributes:
        reason: reason in plain English.
        timed_out: True if its hard ``timeout`` is over: no other node takes its place then.
    """

    reason: str
    timed_out: bool = False


Command: TypeAlias = Start | RunService | Ping | Kill | Fetch | Keep | Stop
"""Messages from the client."""
Report: TypeAlias = (
    Pong
    | WorkerRunning
    | JobRunning
    | WorkerExit
    | Fetched
    | ServiceRunning
    | ServiceExit
    | NodeMetrics
    | Progress
    | TimeoutWarning
    | UnfinishedJobs
    | VolumeTrouble
    | SupervisorTrouble
    | Preempting
    | PreemptionLikely
    | Ending
)
"""Messages from a node; an event of progress is that of a service's work."""
Message: TypeAlias = Command | Report

# Without a version: a node runs the very files of its client's Skyward.
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Report))}


def to_frame(message: Message) -> dict[str, Any]:
    """Return the message as a map for a frame, or for a line of JSON."""
    return {"kind": type(message).__name__, **asdict(message)}


def from_frame(frame: dict[str, Any]) -> Message:
    """Return the message in a map.

    Raises:
        FrameError: the map is no message of this version.
    """
    values = with_tuples(frame)
    kind = values.pop("kind", None)
    try:
        if kind == NodeMetrics.__name__:
            values["gpus"] = tuple(GpuMetrics(**gpu) for gpu in values["gpus"])
        return _KINDS[kind](**values)
    except (KeyError, TypeError) as error:
        raise FrameError(
            f"not a control message of this version of Skyward: kind {kind!r} with {sorted(values)}"
        ) from error
