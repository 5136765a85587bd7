"""Telling nodes of what changes around them: which scheduler their workers join, and how many nodes there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from skyward.errors import PoolStateError, UnreachableError
from skyward.provision.fleet.lifecycle import HEAD, NodeState
from skyward.provision.fleet.machines import Machine
from skyward.provision.preparing.node_handle import NodeHandle

__all__ = ["Herald", "spawn"]

_UP = (NodeState.JOINING, NodeState.READY)
_logger = logging.getLogger("skyward")


class Herald:
    """Tells the nodes of a fleet what they have to know of it, each time it changes. Not thread-safe.

    Attributes:
        size: how many nodes the fleet is meant to have.

    Args:
        size: how many it has to begin with.
        machines: the present machine of each rank; whoever owns the mapping keeps it true.
        states: each node's state, by rank; likewise.
    """

    def __init__(self, size: int, machines: Mapping[int, Machine], states: Mapping[int, NodeState]) -> None:
        self.size = size
        self._machines = machines
        self._states = states
        self._told: dict[NodeHandle, tuple[str, str, int]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def join(self, rank: int, on_joined: Callable[[int], None], on_failure: Callable[[int, Exception], None]) -> None:
        """Tell a node that waits for it of the scheduler, in the background.

        It is told again by the next head if this one is lost meanwhile, and then neither function is called.
        """
        spawn(self._join(rank, on_joined, on_failure), self._telling)

    def tell_all(self) -> None:
        """Tell every ready node what it does not know yet, in the background."""
        for rank, state in self._states.items():
            if state is NodeState.READY:
                spawn(self._tell_again(rank), self._telling)

    def forget(self, node: NodeHandle | None) -> None:
        """The node is no more."""
        if node is not None:
            self._told.pop(node, None)

    async def close(self) -> None:
        """Tell nobody anything more. Idempotent."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def _join(
        self, rank: int, on_joined: Callable[[int], None], on_failure: Callable[[int, Exception], None]
    ) -> None:
        machine = self._machines.get(rank)
        try:
            told = await self._tell(rank)
        except Exception as error:
            if self._machines.get(rank) is machine:
                on_failure(rank, error)
            return
        if told and self._machines.get(rank) is machine:
            on_joined(rank)

    async def _tell_again(self, rank: int) -> None:
        try:
            await self._tell(rank)
        except (UnreachableError, PoolStateError) as error:  # whoever guards the node finds out
            _logger.debug("node %d was not told of a change: %s", rank, error)

    async def _tell(self, rank: int) -> bool:
        """Tell a node; False if there is no scheduler at the moment, or no such node."""
        head, node = self._node(HEAD), self._node(rank)
        if head is None or node is None or self._states[HEAD] not in _UP:
            return False
        news = scheduler, address, size = head.ready.scheduler, head.access.address, self.size
        if self._told.get(node) != news:
            await node.join(scheduler=scheduler, head_addr=address, total_nodes=size)
            self._told[node] = news
        return True

    def _node(self, rank: int) -> NodeHandle | None:
        machine = self._machines.get(rank)
        return machine.node if machine is not None else None


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Run ``work`` in the background, as one of ``tasks``. An error in it is said where it is raised."""

    def finish(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.debug("in the background: %s", error)

    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(finish)
