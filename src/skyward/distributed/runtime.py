"""Functions for user code on a node: its place in the pool, and its part of the data.

The worker's place is in its environment, so that subprocesses and threads of user code see it too. The running call is
state of the worker process only; in other processes the world is one worker.
"""

from __future__ import annotations

import inspect
import itertools
import json
import operator
import os
import random
import sys
import threading
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

from skyward.errors import ConfigurationError, NotInPoolError, PoolStateError

__all__ = [
    "CallContext",
    "DistributedSampler",
    "FreshProcessNeeded",
    "InstanceInfo",
    "bind_address",
    "current_accelerator",
    "current_call",
    "current_task",
    "enter_call",
    "enter_task",
    "instance_info",
    "is_on_node",
    "node_address",
    "node_rank",
    "refuse_inside_call",
    "shard",
    "visible_gpus",
]

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")


@dataclass(frozen=True)  # not slotted: vars(instance_info()) works
class InstanceInfo:
    """Place of the running code in its pool.

    Attributes:
        node: rank of this node, 0-based.
        total_nodes: number of nodes of the pool; under ``@`` of the call.
        is_head: True on worker 0 of node 0.
        accelerators: names of the accelerators that this worker may use, one per device.
        head_addr: address of node 0, if this node reaches it; else this node's own.
        head_port: a port of node 0 that was free when the call was sent, the same for all workers; 0 outside a call.
        job_id: the pool's id.
        worker: index of this worker on its node, 0-based.
        workers_per_node: workers on each node.
        total_accelerators: number of accelerators of all these nodes; each MIG partition counts as one.
    """

    node: int
    total_nodes: int
    is_head: bool
    accelerators: list[str]
    head_addr: str
    head_port: int
    job_id: str
    worker: int
    workers_per_node: int
    total_accelerators: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """Facts about a running call.

    Attributes:
        world: number of workers that run this call: all of them under ``@``, else 1.
        rank: this worker's position among them, 0-based.
        seed: number shared by these workers, different for every call.
        head_port: see :class:`InstanceInfo`.
        nodes: number of nodes whose workers run this call; 0 if unknown.
        local_rank: this worker's position among the call's workers on its node, 0-based.
        meet: in a gang's call, sends a text to the other workers, waits for theirs, and returns all texts by rank;
            None in other calls.
    """

    world: int = 1
    rank: int = 0
    seed: int = 0
    head_port: int = 0
    nodes: int = 0
    local_rank: int = 0
    meet: Callable[[str], Sequence[str]] | None = None


class FreshProcessNeeded(Exception):
    """Raised by a call that has not begun, if the earlier state of this process prevents it."""


_PLACE = "SKYWARD_WORKER"  # in the environment of workers and their children
_ALONE = CallContext()
_call: ContextVar[CallContext | None] = ContextVar("skyward_call", default=None)
# Threads of user code start with an empty context: they belong to the call that the process runs.
_running: list[CallContext] = []
_task = threading.local()


@contextmanager
def enter_call(context: CallContext) -> Generator[None]:
    """Make ``context`` the current call, also for threads of this process without one."""
    token = _call.set(context)
    _running.append(context)
    try:
        yield
    finally:
        _running.remove(context)
        _call.reset(token)


def current_call() -> CallContext | None:
    """Return the current call; None outside a call, in a service's tasks, and in programs that a call started."""
    return _call.get() or (None if current_task() is not None else next(reversed(_running), None))


@contextmanager
def enter_task(name: Callable[[], str]) -> Generator[None]:
    """Make this thread run a task of a service, which is no call; ``name`` returns its name while it runs."""
    outer = getattr(_task, "name", None)
    _task.name = name
    try:
        yield
    finally:
        _task.name = outer


def current_task() -> str | None:
    """Return the name of the task that this thread runs for a service, such as Dask; None if it runs none."""
    name: Callable[[], str] | None = getattr(_task, "name", None)
    return name() if name is not None else None


def instance_info() -> InstanceInfo:
    """Return the place of the running code: node, worker and pool.

    Raises:
        NotInPoolError: this process is neither a worker nor a descendant of one.
    """
    place = _place()
    if place is None:
        raise NotInPoolError(
            "instance_info() works only on a node: call it inside a function decorated with @compute and run that "
            "with `>> pool` or `@ pool`"
        )
    call = current_call() or _ALONE
    return InstanceInfo(
        node=place["node"],
        total_nodes=call.nodes or place["total_nodes"],
        is_head=place["node"] == 0 and place["worker"] == 0,
        accelerators=place["accelerators"],
        head_addr=place["head_addr"],
        head_port=call.head_port,
        job_id=place["pool_id"],
        worker=place["worker"],
        workers_per_node=place["workers_per_node"],
        total_accelerators=place["node_accelerators"] * (call.nodes or place["total_nodes"]),
    )


def current_accelerator() -> str | None:
    """Return the name of this worker's accelerator, e.g. ``"H100"``; None without one and outside a pool."""
    place = _place()
    return next(iter(place["accelerators"]), None) if place else None


def node_address() -> str:
    """Return the address at which other nodes reach this one; loopback outside a pool."""
    place = _place()
    return place["address"] if place else "127.0.0.1"


def bind_address() -> str:
    """Return the address of the interface to which this node's ports are bound; loopback outside a pool."""
    place = _place()
    return place["bind"] if place and place.get("bind") else node_address()


def node_rank() -> int:
    """Return the rank of this node, 0-based; 0 outside a pool."""
    place = _place()
    return place["node"] if place else 0


def visible_gpus() -> list[str]:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, indices or UUIDs; empty if it is unset or empty."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def refuse_inside_call() -> None:
    """Raise :class:`~skyward.errors.PoolStateError` on a node, where calls cannot submit calls."""
    if not is_on_node():
        return
    if module := _module_in_import():
        raise PoolStateError(
            f"the module {module} uses a pool while it is imported, here by a call on a node, and calls cannot submit "
            'calls: move that into a function that your program calls, or below `if __name__ == "__main__":`'
        )
    raise PoolStateError("a pool was used inside a call; calls cannot submit calls: return the data instead")


def _module_in_import() -> str:
    """Return the name of the module whose import runs in this thread, the innermost one; empty if none does."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return ""


def is_on_node() -> bool:
    """Return True in a worker's process and in its children, where calls cannot submit calls."""
    return _PLACE in os.environ


def _place() -> dict[str, Any] | None:
    text = os.environ.get(_PLACE)
    return json.loads(text) if text else None


@overload
def shard(array: T, /, *, shuffle: bool = False, seed: int | None = None) -> T: ...
@overload
def shard(first: T1, second: T2, /, *, shuffle: bool = False, seed: int | None = None) -> tuple[T1, T2]: ...
@overload
def shard(
    first: T1, second: T2, third: T3, /, *, shuffle: bool = False, seed: int | None = None
) -> tuple[T1, T2, T3]: ...
@overload
def shard(*arrays: Any, shuffle: bool = False, seed: int | None = None) -> Any: ...
def shard(*arrays: Any, shuffle: bool = False, seed: int | None = None) -> Any:
    """Return this worker's part of data that every worker of the call has in full.

    Under ``@`` rank r of w workers gets the r-th of w contiguous parts, whose lengths differ by at most one. Together
    the parts contain each element once. Under ``>>`` and outside a call the part is the whole data.

    Args:
        arrays: lists, tuples, ranges, numpy arrays and memory maps, torch tensors, pandas frames and series, or
            anything else with a shape or with ``__len__`` and ``__getitem__``; all of the same length, in the first
            dimension. Types are preserved, and without ``shuffle`` the part is a view if the type supports views. A
            torch ``Dataset`` becomes a ``Subset``, without reading elements. Other types, and a shuffled range, become
            a list of their elements.
        shuffle: divide the elements in a random order, the same for all arrays and all workers.
        seed: seed of that order; None selects one that the call's workers share, so that all calls of ``shard`` in one
            call agree.

    Returns:
        The part of the only array, or a tuple with a part of each.

    Raises:
        ConfigurationError: no array, arrays of unequal length, or a value that cannot be divided, such as a dict, an
            iterator or a ``DataLoader``; the message names an alternative.
    """
    if not arrays:
        raise ConfigurationError("shard() needs at least one array, e.g. shard(x) or shard(x, y)")
    lengths = [_length(value) for value in arrays]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"arrays passed to shard() must have the same length, got lengths {lengths}")
    call = current_call() or _ALONE
    part = slice(lengths[0] * call.rank // call.world, lengths[0] * (call.rank + 1) // call.world)
    index = _permutation(lengths[0], call.seed if seed is None else seed)[part] if shuffle else part
    parts = [_take(value, index) for value in arrays]
    return tuple(parts) if len(parts) > 1 else parts[0]


def _length(value: object) -> int:
    shape = cast("Sequence[int] | None", getattr(value, "shape", None))
    if shape is not None and len(shape):
        return shape[0]
    if shape is not None or not _has_positions(value):
        raise _not_divisible(value, "it must be indexed by position, like a list, an array or a frame")
    return _size(value, "shard()")


def _has_positions(value: object) -> bool:
    return hasattr(value, "__getitem__") and not isinstance(value, Mapping) and not _is_torch(value, "IterableDataset")


def _not_divisible(value: object, why: str) -> ConfigurationError:
    return ConfigurationError(f"shard() cannot divide {_type_name(value)}: {why}. {_instead(value)}".rstrip())


def _instead(value: object) -> str:
    if isinstance(value, Mapping):
        return "Shard its values: shard(*data.values())"
    if isinstance(value, set | frozenset):
        return "Make a list with the same order on every worker: shard(sorted(data))"
    if _is_torch(value, "DataLoader"):
        return "Make the loader with sampler=DistributedSampler(dataset)"
    if hasattr(value, "__iter__") and not hasattr(value, "shape"):
        return "Take every world-th of its elements: itertools.islice(data, rank, None, world)"
    return ""


def _is_torch(value: object, name: str) -> bool:
    """Return True for an instance of the class ``name`` of torch.utils.data; never import torch."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, getattr(data, name))


def _size(value: object, user: str) -> int:
    if not isinstance(value, Sized):
        raise ConfigurationError(f"{user} needs a value with a length, got {_type_name(value)}")
    return len(value)


def _type_name(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _permutation(length: int, seed: int) -> Sequence[int]:
    """Return the order of ``length`` random keys; numpy is only faster, and gives the same order."""
    draw = random.Random(operator.index(seed)).random
    keys = array("d", (draw() for _ in range(length)))
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return sorted(range(length), key=keys.__getitem__)
    return numpy.asarray(keys).argsort(kind="stable")


def _take(value: Any, index: slice | Sequence[int]) -> Any:
    if hasattr(value, "shape"):
        return _indexed(value, index)
    if isinstance(index, slice):
        if isinstance(value, list | tuple | range | array | str | bytes | bytearray):
            return cast("Sequence[Any]", value)[index]
        index = range(index.start, index.stop)
    positions = [int(position) for position in index]
    if _is_torch(value, "Dataset"):
        return sys.modules["torch.utils.data"].Subset(value, positions)
    elements = [value[position] for position in positions]
    return tuple(elements) if isinstance(value, tuple) else elements


def _indexed(value: Any, index: slice | Sequence[int]) -> Any:
    """Return the selected rows of a value with a shape."""
    why = "it has a shape, but its rows cannot be selected by position"
    try:
        part = getattr(value, "iloc", value)[index]
    except (TypeError, KeyError, NotImplementedError) as error:
        raise _not_divisible(value, f"{why} ({error})") from error
    if isinstance(part, Mapping):
        raise _not_divisible(value, f"{why}: they are columns. Select the rows of shard(range(len(data)))")
    return part


class DistributedSampler:
    """Sampler for :class:`torch.utils.data.DataLoader` that divides a data set's indices among a call's workers.

    Every worker gets the same number of indices, so that all run the same number of steps: the last ones repeat the
    first, or are omitted with ``drop_last``. The indices equal those of torch's sampler of this name, without torch.

    Args:
        dataset: any value with a length.
        num_replicas: number of workers; None means the workers of the call.
        rank: rank of this worker; None means its rank in the call.
        shuffle: use a random order, different in each epoch (see :meth:`set_epoch`).
        seed: seed of that order; must be the same on all workers.
        drop_last: omit the remainder of an uneven division instead of repeating indices.

    Raises:
        ConfigurationError: the dataset has no length, or the rank is not one of ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        call = current_call() or _ALONE
        self.dataset = dataset
        self.num_replicas = call.world if num_replicas is None else num_replicas
        self.rank = call.rank if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigurationError(f"rank must be in 0..{self.num_replicas - 1}, got {self.rank}")
        self._length = _size(dataset, "DistributedSampler")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch's number, which selects the order; call it before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of indices of this worker, the same for every worker."""
        whole, rest = divmod(self._length, self.num_replicas)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[int]:
        """Yield this worker's indices, in the order of the current epoch."""
        total = len(self) * self.num_replicas
        return itertools.islice(itertools.cycle(self._order()), self.rank, total, self.num_replicas)

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self._length)
        torch = sys.modules.get("torch")
        if torch is None:
            return _torch_permutation(self._length, self.seed + self.epoch)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self._length, generator=generator).tolist()


def _torch_permutation(length: int, seed: int) -> list[int]:
    """Return the permutation of ``torch.randperm`` without torch, because other workers may have loaded torch."""
    draw = _mersenne_twister(seed).getrandbits
    order = list(range(length))
    for place in range(length - 1):
        other = place + draw(32) % (length - place)
        order[place], order[other] = order[other], order[place]
    return order


def _mersenne_twister(seed: int) -> random.Random:
    """Return the generator as C++ and torch seed it; Python's own seeding differs."""
    words = [seed & 0xFFFFFFFF]
    for index in range(1, 624):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + index) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*words, 624), None))
    return twister
