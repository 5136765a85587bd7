"""A fleet without machines under a real Dask scheduler, for tests of code that drives one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import dask.config
from distributed import Scheduler, Worker

from skyward.base.loop import LoopThread, acquire_loop
from skyward.errors import ConfigurationError, PoolStateError
from skyward.request.request import NodeRange
from skyward.scheduling.certificates import issue
from skyward.submission import FleetStatus, NodeService, NodeStatus, ServiceAccess
from skyward_dask.modules import MODULES, take_modules
from skyward_dask.on_nodes import pass_modules_on
from skyward_dask.security import PoolSecurity

__all__ = ["FakeElasticFleet"]

_MEMORY_UNWATCHED = {f"distributed.worker.memory.{step}": False for step in ("target", "spill", "pause")}
"""The workers run in this process: their memory limits would count the memory of everything else in it."""


class FakeElasticFleet:
    """An :class:`~skyward.submission.ElasticFleet` in this process: a scheduler and workers of Dask's, over mutual TLS.

    Scaling starts and retires workers; they run tasks in threads. It can be entered, and left, again and again.

    Args:
        nodes: the number of nodes at the start.
        workers_per_node: workers on each.
        tunnelled: forwarded addresses differ from those forwarded, as behind SSH. Nothing listens there.

    Attributes:
        scaled: the arguments of every call of :meth:`scale`, in order.
        dashboard: the scheduler's answer to a request for its dashboard.
        dashboard_asked: the number of those requests.
        dashboard_comes: until it is set, that answer does not come.
        elastic: limits of an elastic pool's size; None for another one.
        boot_s: what its latest node took to boot.
    """

    def __init__(self, nodes: int = 1, *, workers_per_node: int = 1, tunnelled: bool = False) -> None:
        self.scaled: list[tuple[int, tuple[int, ...]]] = []
        self.dashboard: dict[str, str] = {"address": "127.0.0.1:8787", "token": "secret"}
        self.dashboard_asked = 0
        self.dashboard_comes = threading.Event()
        self.dashboard_comes.set()
        self.elastic: NodeRange | None = None
        self.boot_s = 60.0
        self._refusal: Exception | None = None
        self._first = nodes
        self._per_node = workers_per_node
        self._tunnelled = tunnelled
        self._thread: LoopThread | None = None

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise PoolStateError("this FakeElasticFleet is already open")
        self._thread = acquire_loop()
        self._fleet = _Fleet(self._per_node, {"skyward_dashboard": self._answer})
        self._thread.call(self._fleet.start(self._first))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.call(self._fleet.stop())
            thread.release()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, exc_type, exc, traceback)

    @property
    def is_active(self) -> bool:
        """True while it is open."""
        return self._thread is not None

    def service(self, service: NodeService) -> ServiceAccess:
        """See :meth:`skyward.submission.ElasticFleet.service`."""
        del service
        self._open()
        return ServiceAccess(
            address=self._fleet.scheduler.address.rpartition("://")[2],
            identity=self._fleet.security.identity,
            tunnelled=self._tunnelled,
        )

    @property
    def status(self) -> FleetStatus:
        """See :attr:`skyward.submission.ElasticFleet.status`."""
        self._open()
        return replace(self._fleet.status(), elastic=self.elastic, boot_s=self.boot_s)

    def scale(self, nodes: int, *, drop: Collection[int] = ()) -> Future[None]:
        """See :meth:`skyward.submission.ElasticFleet.scale`."""
        thread = self._open()
        if nodes < 1:
            raise ConfigurationError(f"nodes must be a whole number ≥ 1, got {nodes!r}")
        self.scaled.append((nodes, tuple(drop)))
        if self._refusal is not None:
            refused: Future[None] = Future()
            refused.set_exception(self._refusal)
            return refused
        return asyncio.run_coroutine_threadsafe(self._fleet.scale(nodes, tuple(drop)), thread.loop)

    def forward(self, address: str) -> str:
        """See :meth:`skyward.submission.ElasticFleet.forward`."""
        self._open()
        return f"127.0.0.2:{address.rpartition(':')[2]}" if self._tunnelled else address

    def refuse(self, error: Exception) -> None:
        """Let the futures of :meth:`scale` raise ``error`` from now on; nothing changes."""
        self._refusal = error

    def pause_boots(self) -> None:
        """Keep new nodes in the state ``"launching"`` from now on."""
        self._open().loop.call_soon_threadsafe(self._fleet.boots.clear)

    def resume_boots(self) -> None:
        """Let the nodes that are launching come up."""
        self._open().loop.call_soon_threadsafe(self._fleet.boots.set)

    def replace_scheduler(self) -> None:
        """Replace the head node: its scheduler and all workers end, others start at other addresses."""
        self._open().call(self._fleet.replace())

    def lose_scheduler(self) -> None:
        """End the head node without a replacement."""
        self._open().call(self._fleet.lose())

    async def _answer(self) -> dict[str, str]:
        self.dashboard_asked += 1
        await asyncio.to_thread(self.dashboard_comes.wait)
        return self.dashboard

    def _open(self) -> LoopThread:
        if self._thread is None:
            raise PoolStateError("this FakeElasticFleet is not open; use it inside `with FakeElasticFleet() as fleet:`")
        return self._thread


class _HeadlessScheduler(Scheduler):
    def start_http_server(self, *_args: Any, **_kwargs: Any) -> None:
        """Serve no HTTP."""


class _HeadlessWorker(Worker):
    def start_http_server(self, *_args: Any, **_kwargs: Any) -> None:
        """Serve no HTTP."""


class _Fleet:
    """The scheduler and the workers, by node. To be used on one event loop."""

    def __init__(self, per_node: int, handlers: Mapping[str, Callable[..., Any]]) -> None:
        self.security = PoolSecurity(issue())
        self.boots = asyncio.Event()
        self.boots.set()
        self.wanted = 0
        self._per_node = per_node
        self._handlers = handlers
        self._folder = TemporaryDirectory(prefix="fake-fleet-")
        self._states: dict[int, str] = {}
        self._workers: dict[int, list[Worker]] = {}
        self._held: set[int] = set()
        self._booting: dict[int, asyncio.Task[None]] = {}

    async def start(self, nodes: int) -> None:
        self.scheduler = await self._new_scheduler()
        await self.scale(nodes, ())

    async def stop(self) -> None:
        await asyncio.gather(*(self._end_boot(rank) for rank in list(self._booting)))
        await asyncio.gather(*(self._close(rank) for rank in list(self._states)))
        await self.scheduler.close()
        # Dask's servers add their folders, and remove them if nothing was added after them.
        sys.path[:] = [entry for entry in sys.path if not str(entry).startswith(self._folder.name)]
        await asyncio.to_thread(self._folder.cleanup)

    def status(self) -> FleetStatus:
        nodes = (
            NodeStatus(
                rank=rank, state=state, workers=self._names(rank), instance_id=f"fake-{rank}", price_per_hour=1.0
            )
            for rank, state in sorted(self._states.items())
        )
        return FleetStatus(wanted=self.wanted, workers_per_node=self._per_node, nodes=tuple(nodes), cost=0.5)

    async def scale(self, nodes: int, drop: Collection[int]) -> None:
        self.wanted = nodes
        staying = sorted(rank for rank, state in self._states.items() if state != "ending")
        first_to_go = sorted((rank for rank in staying if rank > 0), key=lambda rank: (rank not in drop, -rank))
        going = first_to_go[: max(len(staying) - nodes, 0)]
        free = (rank for rank in range(len(self._states) + nodes) if rank not in self._states)
        coming = [next(free) for _ in range(nodes - len(staying))]
        self._states |= dict.fromkeys(going, "ending") | dict.fromkeys(coming, "launching")
        for rank in coming:
            self._booting[rank] = asyncio.create_task(self._boot(rank))
        booting = [self._booting[rank] for rank in coming]
        await asyncio.gather(*booting, *(self._drain(rank) for rank in going))

    async def replace(self) -> None:
        await self.lose()
        self.scheduler = await self._new_scheduler()
        await asyncio.gather(*(self._boot(rank) for rank in self._states))

    async def lose(self) -> None:
        await asyncio.gather(*(self._close_workers(rank) for rank in self._states))
        await self.scheduler.close()

    async def _boot(self, rank: int) -> None:
        self._held.add(rank)
        await self.boots.wait()
        self._held.discard(rank)
        with dask.config.set(_MEMORY_UNWATCHED):
            workers: list[Worker] = [
                _HeadlessWorker(
                    self.scheduler.address,
                    name=name,
                    nthreads=1,
                    host="127.0.0.1",
                    protocol="tls",
                    security=self.security,
                    memory_limit=str(1 << 30),
                    local_directory=self._folder.name,
                )
                for name in self._names(rank)
            ]
        for worker in workers:
            worker.stream_handlers[MODULES] = take_modules
        self._workers[rank] = workers
        await asyncio.gather(*workers)
        if self._states[rank] == "launching":
            self._states[rank] = "ready"

    async def _drain(self, rank: int) -> None:
        await self._end_boot(rank)
        await self.scheduler.retire_workers(names=list(self._names(rank)), close_workers=True, remove=True)
        await asyncio.gather(*(worker.finished() for worker in self._workers.pop(rank, [])))
        del self._states[rank]

    async def _end_boot(self, rank: int) -> None:
        """See to it that the node has workers or never will: Dask's cannot be given up while they start."""
        booting = self._booting.pop(rank, None)
        if booting is not None:
            if rank in self._held:
                self._held.discard(rank)
                booting.cancel()
            await asyncio.wait([booting])

    async def _close(self, rank: int) -> None:
        await self._close_workers(rank)
        self._states.pop(rank, None)

    async def _close_workers(self, rank: int) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers.pop(rank, [])))

    async def _new_scheduler(self) -> Scheduler:
        with dask.config.set({"temporary-directory": self._folder.name}):
            scheduler = _HeadlessScheduler(
                host="127.0.0.1", port=0, protocol="tls", security=self.security, dashboard=False
            )
        scheduler.handlers.update(self._handlers)
        pass_modules_on(scheduler)
        return await scheduler

    def _names(self, rank: int) -> tuple[str, ...]:
        return tuple(f"node{rank}-worker{index}" for index in range(self._per_node))
