"""The driver of a pool's nodes: performs what the lifecycle decides, and never leaves a machine behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, assert_never

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import PoolStateError, SkywardError, TerminationError
from skyward.events import SkywardEvent
from skyward.providers.base import Provider
from skyward.provision.buying.cost import CostReport
from skyward.provision.buying.ledger import Ledger
from skyward.provision.fleet.announcements import Herald, spawn
from skyward.provision.fleet.lifecycle import (
    HEAD,
    Action,
    Discard,
    End,
    Ended,
    EndNodes,
    Event,
    Join,
    Joined,
    Launch,
    Launched,
    Lifecycle,
    Lost,
    NodeState,
    Prepare,
    Prepared,
    Start,
    Started,
    Want,
)
from skyward.provision.fleet.machines import Machine, Machines, to_its_end
from skyward.provision.fleet.node_setup import OpenNode, Starter
from skyward.provision.fleet.spares import Spares
from skyward.provision.preparing.node_handle import NodeHandle, NodeListener, open_node, unless_gone
from skyward.request.request import PoolRequest
from skyward.wire.frames import TlsIdentity

__all__ = ["Fleet"]

_UP = (NodeState.JOINING, NodeState.READY)
_logger = logging.getLogger("skyward")


class Fleet:
    """A pool's nodes, from nothing to ready and back to nothing. Not thread-safe: one event loop runs it.

    Args:
        provider: who has the machines.
        request: what the pool asks for.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: hears the events of provisioning and shutdown; must not block.
        on_node_message: hears what the nodes report; must not block.
        ledger: where machines are written down before they are asked for.
        clock: the time, for deadlines and cost.
        open_node: makes the handle of a running machine.
    """

    def __init__(
        self,
        provider: Provider,
        request: PoolRequest,
        *,
        pool_id: str,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        on_node_message: NodeListener,
        ledger: Ledger,
        clock: Clock = SYSTEM_CLOCK,
        open_node: OpenNode = open_node,
    ) -> None:
        self._request = request
        self._pool_id = pool_id
        self._lifecycle = Lifecycle()
        self._machines = Machines(provider, request, pool_id=pool_id, publish=publish, ledger=ledger, clock=clock)
        self._starter = Starter(
            provider,
            request,
            self._machines,
            pool_id=pool_id,
            tls=tls,
            publish=publish,
            on_node_message=on_node_message,
            clock=clock,
            open_node=open_node,
        )
        self.unended = self._machines.unended
        self._current: dict[int, Machine] = {}
        self._spares = Spares(self._machines, self._starter, self._current, publish=publish)
        self._failures: dict[int, BaseException] = {}
        self._moved = asyncio.Event()
        self._headless: Exception | None = None
        self._herald = Herald(request.nodes, self._current, self._lifecycle.states)
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def nodes(self) -> tuple[NodeHandle, ...]:
        """The nodes that were reached and are not on their way out, by rank."""
        return tuple(machine.node for _, machine in sorted(self._current.items()) if machine.node is not None)

    @property
    def machines(self) -> Mapping[int, Machine]:
        """The present machine of each rank that has one."""
        return self._current

    @property
    def states(self) -> Mapping[int, NodeState]:
        """Each node's state, by rank, of all ranks there ever were."""
        return self._lifecycle.states

    def cost(self, now: float) -> CostReport:
        """Return the cost of the fleet until ``now``, an ``elapsed`` reading of its clock in seconds."""
        return CostReport(usages=tuple(machine.usage for machine in self._machines.all), now=now)

    async def start(self) -> None:
        """Launch, prepare and start as many nodes as were asked for; all are ready when it returns.

        When any of it fails, or is cancelled, everything that was created is terminated and confirmed gone before the
        error is raised. What cannot be is a :class:`~skyward.errors.TerminationError`, with the first error in a note.
        """
        ranks = tuple(range(self._request.nodes))
        try:
            await self._launch(ranks)
            await _all_or_the_first_error({rank: self._come_up(rank) for rank in ranks})
        except BaseException as error:
            await _clean_up_after(error, self.stop())
            raise

    async def launch(self, ranks: Sequence[int]) -> None:
        """Have machines for more nodes, all or none; :meth:`bring_up` makes nodes of them.

        Raises what the provider does, after what was created is terminated and confirmed gone.
        """
        try:
            await self._launch(tuple(ranks))
        except BaseException as error:
            await _clean_up_after(error, self.end(ranks))
            raise

    async def bring_up(self, rank: int) -> NodeHandle:
        """Make a ready node of a launched machine.

        When that fails, or is cancelled, the machine is terminated and confirmed gone before the error is raised.
        """
        try:
            return await self._come_up(rank)
        except BaseException as error:
            await _clean_up_after(error, self.end((rank,)))
            raise

    async def end(self, ranks: Sequence[int]) -> None:
        """Stop these nodes' supervisors, terminate their machines, confirm it. A cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; ending them is
        tried again every minute.
        """
        for action in self._handle(End(ranks=tuple(rank for rank in ranks if rank in self.states))):
            assert isinstance(action, EndNodes)
            try:
                await to_its_end(self._end_nodes(action.ranks))
            finally:  # what is not confirmed gone keeps no other from its rank
                self._handle(Ended(ranks=action.ranks))
                for machine in self._machines.left(action.ranks):
                    spawn(self._machines.end_at_last(machine, told=True), self._ending)

    def discard(self, rank: int) -> None:
        """A node was lost: end what is left of it in the background; its rank may be launched again at once."""
        self._handle(Lost(rank=rank))

    def begin_spare(self, rank: int) -> None:
        """This node's machine will be taken away: have the next one already, which :meth:`launch` then takes."""
        if not self._lifecycle.over:
            self._spares.begin(rank)

    async def drop_spare(self, rank: int) -> None:
        """No other machine is needed for ``rank``: end the one that was begun, if any, in the background."""
        await to_its_end(self._drop_spare(rank))

    async def _drop_spare(self, rank: int) -> None:
        left = await self._spares.settle((rank,))
        for machine in () if self._lifecycle.over else left:  # once it is over, all machines are ended
            spawn(self._machines.end_at_last(machine), self._ending)

    def fail_joining(self, error: Exception) -> None:
        """No scheduler will come unless a head is launched again: until then, who needs one fails with ``error``."""
        self._headless = error
        for rank in [rank for rank, state in self.states.items() if state is NodeState.JOINING]:
            self._not_joined(rank, error)

    def resize(self, size: int) -> None:
        """The fleet is meant to have ``size`` nodes: tell those there are."""
        self._herald.size = size
        self._herald.tell_all()

    async def stop(self) -> None:
        """Stop every supervisor, terminate every machine, confirm it. Idempotent; a cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; their ledger
        entries stay open, and calling again tries again.
        """
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        await self._herald.close()
        self._handle(End())
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._end_machines([machine for machine in self._machines.all if not machine.ended])

    def _handle(self, event: Event) -> Sequence[Action]:
        """The actions that follow from ``event``, but for those that are done here and now, or in the background."""
        actions: list[Action] = []
        for action in self._lifecycle.handle(event):
            match action:
                case Join(rank=rank):
                    self._herald.join(rank, self._joined, self._not_joined)
                case Discard(rank=rank):
                    if (machine := self._current.pop(rank, None)) is not None:
                        self._herald.forget(machine.node)
                        spawn(self._machines.end_at_last(machine), self._ending)
                case _:
                    actions.append(action)
        self._stir()
        return actions

    def _stir(self) -> None:
        """Wake who waits for something to happen to a node, once."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def _launch(self, ranks: tuple[int, ...]) -> None:
        if HEAD in ranks:
            self._headless = None
        for action in self._handle(Want(ranks=ranks)):
            assert isinstance(action, Launch)
            self._current.update(await self._spares.launch(action.ranks))

    async def _come_up(self, rank: int) -> NodeHandle:
        self._failures.pop(rank, None)  # an earlier machine's
        actions = self._handle(Launched(ranks=(rank,)))
        while actions:
            (action,) = actions
            actions = self._handle(await self._perform(action))
        node = self._current[rank].node if rank in self._current else None
        if node is not None and self.states[rank] in _UP:
            await unless_gone(node, self._ready(rank))
            return node
        raise SkywardError(f"node {rank} of pool {self._pool_id} was ended while it was starting")

    async def _perform(self, action: Action) -> Event:
        match action:
            case Prepare(rank=rank):
                await self._spares.prepare(self._current[rank])
                return Prepared(rank=rank)
            case Start(rank=rank):
                await self._starter.start(self._current[rank], self._herald.size)
                return Started(rank=rank)
            case Launch() | Join() | Discard() | EndNodes():
                raise PoolStateError(f"{action} does not bring a node up")
            case _:
                assert_never(action)

    async def _ready(self, rank: int) -> None:
        """Wait until the node was told of the scheduler, for which the head has to be there."""
        while self.states[rank] is NodeState.JOINING:
            if (error := self._failures.pop(rank, None) or self._headless) is not None:
                raise error
            await self._moved.wait()

    def _joined(self, rank: int) -> None:
        self._handle(Joined(rank=rank))
        if rank == HEAD:
            self._herald.tell_all()

    def _not_joined(self, rank: int, error: Exception) -> None:
        self._failures[rank] = error
        self._stir()

    async def _end_nodes(self, ranks: Sequence[int]) -> None:
        await self._spares.settle(ranks)
        await self._end_machines(self._machines.left(ranks))

    async def _end_machines(self, machines: Sequence[Machine]) -> None:
        try:
            await self._machines.end(machines)
        finally:
            for machine in machines:
                if self._current.get(machine.rank) is machine:  # even if it is not confirmed gone: it is no node now
                    del self._current[machine.rank]
                self._herald.forget(machine.node)


async def _clean_up_after(error: BaseException, ending: Coroutine[Any, Any, None]) -> None:
    try:
        await ending
    except TerminationError as left:
        left.add_note(f"this was to clean up after {type(error).__name__}: {error}")
        raise


async def _all_or_the_first_error(work: Mapping[int, Coroutine[Any, Any, object]]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            starting = {rank: tasks.create_task(coming_up) for rank, coming_up in work.items()}
    except BaseExceptionGroup as group:
        first, *others = group.exceptions
        for other in others:
            first.add_note(f"at the same time: {type(other).__name__}: {other}")
        raise first from first.__cause__
    # A task group takes a node's own CancelledError for success.
    if cancelled := [rank for rank, task in starting.items() if task.cancelled()]:
        raise SkywardError(f"nodes {cancelled} were cancelled while they were starting")
