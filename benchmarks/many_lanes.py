"""``python -m benchmarks.many_lanes WORKERS [--quick]``: real lanes to so many workers; prints figures as JSON."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles
from typing import Any, cast

import psutil

from benchmarks.node_farm import NodeFarm, node_farms
from skyward.base.descriptors import raised_descriptor_limit
from skyward.base.loop import LoopThread, acquire_loop
from skyward.base.waiting import SYSTEM_CLOCK, wait_until
from skyward.events.bus import EventBus
from skyward.fleet.control_client import ControlClient
from skyward.fleet.fleet import Fleet
from skyward.fleet.node import Node, SharedLooks
from skyward.machine.access import Access
from skyward.machine.local import LocalAccess
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.scheduling.certificates import issue
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.services import Services
from skyward.scheduling.worker_link import WorkerLink
from skyward.submission import Invocation
from skyward.testing.provider import FakeProvider
from skyward.wire.control import Fetch, Fetched
from skyward.wire.frames import TlsIdentity, client_context
from skyward.wire.node_config import NodeReady

__all__ = ["ScaleClient", "measure", "measure_calls", "resident_bytes", "scale_client"]

_CALLS_A_WORKER = 100
_LEAST_CALLS = 20_000
_NAPS_A_WORKER = 10
_LEAST_NAPS = 2_000
_NAP_S = 0.01
_ROUND_TRIPS = 300
_REPEATS = 3
_BLOB_BYTES = 1 << 20
_PATIENCE_S = 120.0
_OFFER = Offer(spec=InstanceSpec(name="farm", cpu=1, memory_gib=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FarAccess(LocalAccess):
    """Access to a machine that has this one's files, and is treated as another one of a network."""

    on_this_machine: bool = field(default=False, init=False, repr=False)


class _Node(Node):
    """A node of a farm: real but for the start of its supervisor.

    Attributes:
        sources: of each large argument that came from another node, the port that it came from.
    """

    def __init__(self, rank: int, ready: NodeReady, access: Access | None) -> None:
        host = ready.control.rpartition(":")[0]
        instance = Instance(
            id=f"farm-{rank}",
            key="",
            state=InstanceState.RUNNING,
            offer=_OFFER,
            access=access or _FarAccess(address=host, workdir="/"),
            network="farm",
        )
        looks = SharedLooks(FakeProvider(), clock=SYSTEM_CLOCK)
        super().__init__(rank=rank, instance=instance, launched_at=0.0, looks=looks)
        self.sources: dict[str, str] = {}
        self._ready = ready
        self.open()

    async def connect(self, identity: TlsIdentity) -> None:
        """Open the control connection."""
        self.lanes = tuple([await self.forward(lane) for lane in self.ready.lanes])
        address = await self.forward(self.ready.control)
        self._control = ControlClient(address, identity, on_message=self._receive, on_lost=self._connection_lost)
        await self._control.connect(_PATIENCE_S)

    async def fetch(self, order: Fetch) -> Fetched:
        """See :meth:`Node.fetch`."""
        fetched = await super().fetch(order)
        self.sources[order.blob_id] = order.sources[0]
        return fetched


class _Scheduler(Scheduler):
    """The pool's scheduler; counts connections."""

    linked_times = 0

    def lane_linked(self, link: WorkerLink, *, linked: bool) -> None:
        """See :meth:`Scheduler.lane_linked`."""
        self.linked_times += linked
        super().lane_linked(link, linked=linked)


class _Head:
    """The part of a fleet that the scheduler's services look at."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def head(self) -> Node:
        return self._node

    def started_nodes(self) -> Sequence[Node]:
        return ()


class _CollectorTime:
    """Time that Python's garbage collector takes, as one of its callbacks.

    Attributes:
        seconds: so far, of processor.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


class ScaleClient:
    """One client of all nodes of the farms, with one worker on each.

    Attributes:
        nodes: the nodes.
        scheduler: the pool's scheduler.
        figures: what was measured.
    """

    def __init__(self, farms: Sequence[NodeFarm], identity: TlsIdentity, loop: LoopThread) -> None:
        self.nodes: list[_Node] = []
        self.figures: dict[str, float] = {}
        self._farms = farms
        self._identity = identity
        self._loop = loop
        self._bus = EventBus()

    def make_nodes(self, accesses: Sequence[Access | None]) -> None:
        """Make the nodes; without an access of its own, a node is reached directly."""

        async def make() -> None:
            ready = [node for farm in self._farms for node in farm.nodes]
            self.nodes = [_Node(rank, *both) for rank, both in enumerate(zip(ready, accesses, strict=True))]

        self._loop.call(make())

    def each_node(self, work: Callable[[_Node], Awaitable[object]]) -> None:
        """Do something with all nodes at once."""

        async def do_all() -> None:
            await asyncio.gather(*map(work, self.nodes))

        self._loop.call(do_all())

    def open_controls(self) -> None:
        """Open the control connections."""
        self.each_node(lambda node: node.connect(self._identity))

    def open_lanes(self) -> None:
        """Give the nodes to a new scheduler, and wait for the lanes."""

        async def make() -> None:
            services = Services(cast("Fleet", _Head(self.nodes[0])), tls=self._identity, publish=self._bus.publish)
            self.scheduler = _Scheduler(
                client_context(self._identity), self._bus, workers_per_node=1, thread=self._loop, services=services
            )
            self.scheduler.expect(range(len(self.nodes)))

        self._loop.call(make())
        self.each_node(self.scheduler.attach)
        self._wait_linked(len(self.nodes))

    def cut(self) -> None:
        """Cut every connection, and wait until all are back."""
        times = self.scheduler.linked_times + len(self.nodes)
        for farm in self._farms:
            farm.cut()
        self._wait_linked(times)

    def close(self) -> None:
        """Close every connection."""

        async def close() -> None:
            if hasattr(self, "scheduler"):
                await self.scheduler.close()
            await asyncio.gather(*(node.stop(1.0) for node in self.nodes), return_exceptions=True)

        self._loop.call(close())

    def run(self, calls: Sequence[Invocation], *, everywhere: bool = False) -> list[Any]:
        """Run calls, and return their results."""
        batch = self.scheduler.run(calls, everywhere=everywhere)
        return [batch.result(index) for index in range(len(batch))]

    @contextmanager
    def timed(self, name: str, calls: int = 1) -> Iterator[None]:
        """Note the seconds, this process's seconds of processor, and those of the garbage collector, per call."""
        collector = _CollectorTime()
        gc.callbacks.append(collector)
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.figures[f"{name}_cpu_s"] = (time.process_time() - cpu) / calls
        self.figures[f"{name}_s"] = (time.perf_counter() - wall) / calls
        gc.callbacks.remove(collector)
        self.figures[f"{name}_collector_s"] = collector.seconds / calls

    def _wait_linked(self, times: int) -> None:
        async def look() -> bool | None:
            done = self.scheduler.linked_times >= times and all(node.linked for node in self.nodes)
            return done or None

        self._loop.call(wait_until(look, deadline_s=_PATIENCE_S, interval_s=0.01, what="all workers to be connected"))


@contextmanager
def scale_client(workers: int) -> Iterator[ScaleClient]:
    """A client of so many workers that listen, until the block ends."""
    identity = issue()
    loop = acquire_loop()
    try:
        with raised_descriptor_limit(), node_farms(workers, identity) as farms:
            client = ScaleClient(farms, identity, loop)
            try:
                yield client
            finally:
                client.close()
    finally:
        loop.release()


def measure(workers: int, *, quick: bool) -> dict[str, float]:
    """Connect, call, broadcast, send a large argument, cut and come back; return the figures."""
    with scale_client(workers) as client:
        client.make_nodes([None] * workers)
        figures = client.figures
        before, threads = resident_bytes(), threading.active_count()
        with client.timed("controls"):
            client.open_controls()
        controlled = resident_bytes()
        with client.timed("lanes"):
            client.open_lanes()
        figures["bytes_a_control"] = (controlled - before) / workers
        figures["bytes_a_lane"] = (resident_bytes() - controlled) / workers
        figures["threads"] = threading.active_count() - threads
        figures["descriptors_a_worker"] = psutil.Process().num_fds() / workers
        measure_calls(client, quick=quick)
        _measure_all_workers(client)
        figures["bytes_a_worker_after"] = (resident_bytes() - before) / workers
        with client.timed("redial"):
            client.cut()
        assert client.run([Invocation(fn=abs, args=(-1,))] * workers) == [1] * workers
    return figures


def measure_calls(client: ScaleClient, *, quick: bool) -> None:
    """Measure no-ops and 10 ms calls, as many for each worker, and calls one after the other; ``quick``: fewer."""
    workers = len(client.nodes)
    calls = _CALLS_A_WORKER * workers
    nothing = [Invocation(fn=abs, args=(number,)) for number in range(calls)]
    client.run(nothing[: 2 * workers])
    _time_rounds(client, "no_op", nothing, 1 if quick else max(1, _LEAST_CALLS // calls))
    nap = Invocation(fn=time.sleep, args=(_NAP_S,))  # noqa: TID251  # the call itself
    naps = [nap] * (_NAPS_A_WORKER * workers)
    client.run(naps[:workers])
    _time_rounds(client, "nap", naps, 1 if quick else max(1, _LEAST_NAPS // len(naps)))
    times = [_seconds(lambda: client.run(nothing[:1])) for _ in range(_ROUND_TRIPS // 10 if quick else _ROUND_TRIPS)]
    client.figures["round_trip_p50_s"] = median(times)
    client.figures["round_trip_p99_s"] = quantiles(times, n=100)[-1]


def _time_rounds(client: ScaleClient, name: str, calls: Sequence[Invocation], repeats: int) -> None:
    """Time three rounds of calls; note the one that took the least processor time: the machine has other work, too."""
    rounds: list[dict[str, float]] = []
    for _ in range(_REPEATS):
        with client.timed(name, len(calls) * repeats):
            for _ in range(repeats):
                client.run(calls)
        rounds.append({figure: value for figure, value in client.figures.items() if figure.startswith(f"{name}_")})
    client.figures |= min(rounds, key=lambda figures: figures[f"{name}_cpu_s"])


def _measure_all_workers(client: ScaleClient) -> None:
    figures, workers = client.figures, len(client.nodes)
    one = [Invocation(fn=abs, args=(1,))]
    times: list[float] = []
    with client.timed("broadcast", _REPEATS):
        times += [_seconds(lambda: client.run(one, everywhere=True)) for _ in range(_REPEATS)]
    figures["broadcast_s"] = median(times)
    data = Random(0).randbytes(_BLOB_BYTES)
    with client.timed("blob"):
        lengths = client.run([Invocation(fn=len, args=(data,))], everywhere=True)
    assert lengths == [_BLOB_BYTES] * workers
    figures |= _tree(client.nodes)


def _tree(nodes: Sequence[_Node]) -> dict[str, float]:
    """Return the way of the large argument: times the client sent it, depth of the tree, most from one node."""
    parents = {node.ready.blobs: next(iter(node.sources.values()), "") for node in nodes}
    depths: dict[str, int] = {"": -1}

    def depth(port: str) -> int:
        if port not in depths:
            depths[port] = depth(parents[port]) + 1
        return depths[port]

    given = Counter(parent for parent in parents.values() if parent)
    return {
        "blob_from_client": sum(not parent for parent in parents.values()),
        "blob_depth": max(map(depth, parents)),
        "blob_most_from_one": max(given.values(), default=0),
    }


def resident_bytes() -> float:
    """Return this process's memory, without what the allocator keeps for later."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), quick="--quick" in sys.argv), indent=1))
