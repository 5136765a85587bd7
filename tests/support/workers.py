"""Workers in memory: real lanes, sessions and queues, but no process, no socket and no user code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from skyward.base.waiting import wait_until
from skyward.errors import UnreachableError
from skyward.node.worker.call_mark import blank_mark
from skyward.node.worker.call_runner import CallRunner, ReceivedCall, ReceivedSources
from skyward.node.worker.lane_server import LaneServer
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.scheduling.worker_link import AttachedNode, LinkOwner, WorkerLink
from skyward.shipping.pickling import pack_result
from skyward.shipping.remote_exceptions import pack_error
from skyward.wire.lane import Connection
from skyward.wire.messages import CallResult, Outcome
from skyward.wire.node_config import HANDSHAKE_S
from support.simulation import SimulatedConnection

__all__ = ["SimulatedLink", "SimulatedNetwork", "SimulatedWorker", "Work"]

Work = Callable[[bytes, "SimulatedWorker"], Awaitable[Any]]
"""Does what a call does: takes the pickle of its arguments and where it runs, returns its result or raises."""

_FAREWELL_S = 0.5


class SimulatedNetwork:
    """Which workers answer where, and the connections to them.

    Attributes:
        latency_s: one way.
        down: hosts that cannot be reached.
        lost_greetings: how many of the next connections are cut before the worker's first answer arrives.
    """

    def __init__(self, latency_s: float = 0.001) -> None:
        self.latency_s = latency_s
        self.down: set[str] = set()
        self.lost_greetings = 0
        self._workers: dict[str, SimulatedWorker] = {}
        self._connections: dict[str, list[SimulatedConnection]] = {}

    def listen(self, address: str, worker: SimulatedWorker | None) -> None:
        """Have ``worker`` answer at ``host:port``, or nobody."""
        if worker is None:
            self._workers.pop(address, None)
        else:
            self._workers[address] = worker

    def dial(self, address: str) -> SimulatedConnection | None:
        """A connection to the worker at ``host:port``; None if nobody answers."""
        worker = self._workers.get(address)
        if worker is None or _host(address) in self.down:
            return None
        here, there = SimulatedConnection.pair(self.latency_s)
        self._connections.setdefault(address, []).append(here)
        worker.serve(there)
        if self.lost_greetings:
            self.lost_greetings -= 1
            asyncio.get_running_loop().call_later(1.5 * self.latency_s, here.cut)
        return here

    def cut(self, address: str) -> None:
        """Drop the connections to ``host:port``."""
        for connection in self._connections.pop(address, ()):
            connection.cut()

    def part(self, host: str, *, silently: bool) -> None:
        """Nothing on ``host`` can be reached, until :meth:`mend`; connections notice at once, or only then."""
        self.down.add(host)
        for address, connections in self._connections.items():
            for connection in connections if _host(address) == host else ():
                connection.silence() if silently else connection.cut()

    def mend(self, host: str) -> None:
        """``host`` can be reached again. Connections from before it was not end."""
        self.down.discard(host)
        for address in [address for address in self._connections if _host(address) == host]:
            self.cut(address)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


class SimulatedLink(WorkerLink):
    """A link over a simulated network, which is passed in the place of the TLS context."""

    def __init__(self, worker_id: WorkerId, address: str, network: Any, owner: LinkOwner, node: AttachedNode) -> None:
        self._network = cast("SimulatedNetwork", network)
        super().__init__(worker_id, address, network, owner, node)

    async def _dial(self) -> Connection | None:
        connection = self._network.dial(self._address)
        if connection is None:
            return None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._greet(connection)
        except OSError:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection


class _Runner(CallRunner):
    """Runs calls on the event loop."""

    def __init__(self, server: _Server, work: Callable[[bytes], Awaitable[Any]]) -> None:
        super().__init__(server, server.output, (), server.begun)
        self._work = work
        self._present: asyncio.Task[None] | None = None

    def add(self, calls: Iterable[ReceivedCall | ReceivedSources]) -> None:
        self._queue.extend(calls)
        self.wake()

    def wake(self) -> None:
        if self._closed:
            if self._present is not None:
                self._present.cancel()
        elif self._present is None:
            self._begin_next()

    def _begin_next(self) -> None:
        call = self._next()
        if call is not None:
            self._present = asyncio.ensure_future(self._go_through(call))
            if self._results:
                self._outlet.flush_soon()
        else:
            self._present = None
            self.hand_over_results()
            self._outlet.flush()

    async def _go_through(self, call: ReceivedCall) -> None:
        began = asyncio.get_running_loop().time()
        try:
            result = await self._work(call.data if call.payload is None else call.payload.data)
        except Exception as raised:
            packed = pack_error(raised)
            outcome = Outcome(seconds=asyncio.get_running_loop().time() - began, error=packed)
            self._outlet.push(CallResult(call.id, outcome))
            self._outlet.flush_soon()
        else:
            self._send(call.id, pack_result(result, what="a result"), asyncio.get_running_loop().time() - began)
        self._settle(call)
        self._begin_next()


class _Server(LaneServer):
    """Serves simulated connections; what would kill the process tells the worker."""

    def __init__(self, worker: SimulatedWorker, work: Work) -> None:
        super().__init__(incarnation=worker.incarnation, blob_dirs=())
        self._close_waker()  # no thread waits: thousands of these in a process would leave it no small descriptor
        self.begun = blank_mark()
        self._worker = worker
        self.runner = _Runner(self, lambda data: work(data, worker))

    def converse(self, connection: SimulatedConnection) -> None:
        self._spawn(self._converse(connection))

    async def _end_worker(self, call_id: int) -> None:
        self._flush_now()
        with suppress(UnreachableError):  # as a worker does
            await wait_until(self._all_seen, deadline_s=_FAREWELL_S, interval_s=0.05, what="the client to catch up")
        if self.runner.running == call_id:
            self._worker.die("ended by signal 9")


class SimulatedWorker:
    """A worker's process.

    Attributes:
        host: id of its instance.
        index: its number on its node.
        incarnation: its identity.
        died: done with the reason once it is no more.
    """

    def __init__(self, host: str, index: int, start: int, work: Work) -> None:
        self.host = host
        self.index = index
        self.incarnation = f"{host}/{index}/{start}"
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server = _Server(self, work)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return not self.died.done()

    @property
    def begun(self) -> int:
        """Position of the last call that it began."""
        return self._server.begun[0]

    def serve(self, connection: SimulatedConnection) -> None:
        """Take a connection from the client."""
        if self.alive:
            self._server.converse(connection)
        else:
            connection.close()

    def die(self, reason: str) -> None:
        """End, whatever runs. Idempotent."""
        if self.alive:
            self.died.set_result(reason)
            self._server.close()
