"""Size of an open elastic pool, kept at what its work is worth."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from skyward.base.waiting import SYSTEM_CLOCK, Clock, keep
from skyward.events import Error, Notice, SkywardEvent
from skyward.fleet.fleet import Fleet
from skyward.fleet.topology import HEAD
from skyward.market.autoscale import Backlog, Workload, wanted
from skyward.request.request import NodeRange

_LOOK_S = 0.5
_logger = logging.getLogger("skyward")


class ElasticSize:
    """Growth and shrinkage of a fleet with its work. Belongs to the event loop.

    Args:
        fleet: the fleet.
        size: limits of its size.
        workload: returns the work at present, and the idle time of every node that can be used, or is coming.
        per_node: workers on each node.
        serves: returns True once a service of a front-end runs on the nodes. Its work does not show here: from then on
            the front-end removes nodes, and node 0 stays.
        publish: receiver of notices; must not block.
        clock: the time.
    """

    def __init__(
        self,
        fleet: Fleet,
        size: NodeRange,
        *,
        workload: Callable[[], Workload],
        per_node: int,
        serves: Callable[[], bool],
        publish: Callable[[SkywardEvent], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._fleet = fleet
        self._size = size
        self._workload = workload
        self._per_node = per_node
        self._serves = serves
        self._publish = publish
        self._clock = clock
        self._backlog = Backlog()
        self._most_more = math.inf
        self._tasks: set[asyncio.Future[None]] = set()

    def begin(self) -> None:
        """Keep the size from now on."""
        what = "keeping the size of the pool"
        self._follow(keep(self._keep_size, what=what, report=lambda why: self._publish(Error(why)), clock=self._clock))

    def close(self) -> None:
        """Leave the size as it is. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _keep_size(self) -> None:
        while True:
            self.adjust()
            await self._clock.sleep(_LOOK_S)

    def adjust(self) -> None:
        """Order nodes, or have some leave, if the work is worth another number than there are."""
        load, present = self._workload(), self._fleet.wanted
        nodes, boot_s = len(present), self._fleet.boot_s
        # Nodes all of whose workers were given up. Node 0 leaves with the last one.
        lost = present - load.idle_s.keys()
        if lost := lost if lost == present else lost - {HEAD}:
            self._scale(nodes - len(lost), lost, "their workers do not start")
            return
        workers = nodes * self._per_node
        is_refilled = self._backlog.is_refilled(load.calls, workers, self._clock.monotonic(), boot_s=boot_s)
        target = wanted(load, self._size, nodes=nodes, per_node=self._per_node, boot_s=boot_s, is_refilled=is_refilled)
        if not target and len(self._fleet.members) > nodes:  # others still finish their calls: node 0 goes last
            target = min(nodes, 1)
        if target > nodes:
            more = ", and more for each that ends" if is_refilled else ""
            self._grow(
                int(min(target - nodes, self._most_more)),
                f"calls: {load.calls}, about {load.work_s:.0f} s of work{more}",
            )
        elif target < nodes and not self._serves():
            idle = load.idle_nodes(self._size)
            self._scale(target, idle, f"{len(idle)} without work for {self._size.idle_s:g} s")

    def _grow(self, more: int, why: str) -> None:
        """Order nodes, as a provider sells all of an order or none: after a failure, half as many the next time."""

        def learn(task: asyncio.Future[None]) -> None:
            if not task.cancelled():
                self._most_more = max(1, more // 2) if task.exception() else math.inf

        nodes = len(self._fleet.wanted)
        if not nodes and more > 1:  # an order by itself: without any node, calls would fail
            self._scale(1, (), why)
        self._scale(nodes + more, (), why).add_done_callback(learn)

    def _scale(self, size: int, drop: Collection[int], why: str) -> asyncio.Future[None]:
        before = len(self._fleet.wanted)
        # The fleet publishes errors itself, and refuses further nodes for a while after several.
        task = self._follow(self._fleet.scale(size, drop))
        if (after := len(self._fleet.wanted)) != before:
            self._publish(Notice(f"nodes: {before} → {after} ({why})"))
        return task

    def _follow(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        def finish(task: asyncio.Future[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _logger.debug("the size of the pool was not reached: %s", error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(finish)
        return task
