"""Driver of a pool's nodes: performs the lifecycle's actions and leaves no machine behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, assert_never

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock, to_its_end
from skyward.errors import PoolStateError, SkywardError, TerminationError, UnreachableError
from skyward.events import SkywardEvent
from skyward.providers.base import Provider
from skyward.provision.buying.cost import CostReport
from skyward.provision.buying.ledger import Ledger
from skyward.provision.buying.unfit import UnfitMachineError
from skyward.provision.fleet.lifecycle import (
    Action,
    Add,
    Discard,
    End,
    Ended,
    EndNodes,
    Event,
    HeadGivenUp,
    Join,
    Joined,
    Launch,
    Launched,
    Lifecycle,
    Lost,
    NodeState,
    Prepare,
    Prepared,
    Started,
    StartSupervisor,
)
from skyward.provision.fleet.machines import Machine, Machines
from skyward.provision.fleet.node_setup import OpenNode, Starter
from skyward.provision.fleet.topology import HEAD, dask_out_of_reach, separation
from skyward.provision.preparing.node_handle import NodeHandle, NodeListener, open_node, unless_gone
from skyward.request.request import PoolRequest
from skyward.wire.control import Start
from skyward.wire.frames import TlsIdentity

__all__ = ["Fleet"]

_UP = (NodeState.JOINING, NodeState.READY)
_logger = logging.getLogger("skyward")


class Fleet:
    """A pool's nodes, from launch to confirmed termination. Not thread-safe: one event loop runs it.

    Args:
        provider: the provider of the machines.
        request: the pool's parameters.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: receives the events of provisioning and shutdown; must not block.
        on_node_message: receives the reports of the nodes; must not block.
        ledger: where machines are recorded before they are requested.
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
        self._size = request.nodes
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
            discard=self._end_in_background,
            check_reach=self._refuse_apart,
        )
        self.unended = self._machines.unended
        self._current: dict[int, Machine] = {}
        self._failures: dict[int, BaseException] = {}
        self._moved = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def nodes(self) -> tuple[NodeHandle, ...]:
        """The nodes that were reached and are not being ended, by rank."""
        return tuple(machine.node for _, machine in sorted(self._current.items()) if machine.node is not None)

    @property
    def machines(self) -> Mapping[int, Machine]:
        """The present machine of each rank that has one."""
        return self._current

    @property
    def states(self) -> Mapping[int, NodeState]:
        """State of each node by rank; includes every rank that ever existed."""
        return self._lifecycle.states

    def cost(self, now: float) -> CostReport:
        """Return the cost of the fleet until ``now``, an ``elapsed`` reading of its clock in seconds."""
        return CostReport(usages=tuple(machine.usage for machine in self._machines.all), now=now)

    async def start(self) -> None:
        """Launch, prepare and start the requested number of nodes; all are ready when it returns.

        Unfit machines are exchanged, as by :meth:`bring_up`. On any failure or cancellation, terminate every machine
        and confirm it before the error is raised. Machines that cannot be confirmed gone raise
        :class:`~skyward.errors.TerminationError`, with the first error in a note.
        """
        ranks = tuple(range(self._request.nodes))
        self._spawn(self._starter.secrets.renew())
        self._spawn(self._end_lost())
        try:
            await self._launch(ranks)
            await _all_or_the_first_error({rank: self._come_up(rank) for rank in ranks})
        except BaseException as error:
            await _clean_up_after(error, self.stop())
            raise

    async def launch(self, ranks: Sequence[int]) -> None:
        """Launch machines for more nodes, all or none; :meth:`bring_up` makes nodes of them.

        Raises the provider's errors, after the machines created until then are terminated and confirmed gone.
        """
        try:
            await self._launch(tuple(ranks))
        except BaseException as error:
            await _clean_up_after(error, self.end(ranks))
            raise

    async def bring_up(self, rank: int) -> NodeHandle:
        """Make a ready node of a launched machine, or of another one where it is unfit, three at most.

        On failure or cancellation, terminate the machine and confirm it before the error is raised.
        """
        return await self._or_end(rank, self._come_up(rank))

    async def bring_up_another(self, rank: int, error: UnfitMachineError) -> NodeHandle:
        """Make a ready node of another machine, since that of a ready node turned out unfit; see :meth:`bring_up`."""
        return await self._or_end(rank, self._come_up(rank, error))

    def accept(self, rank: int) -> None:
        """Forget the unfit machines of a rank whose node is in use: later ones are counted from one."""
        self._machines.unfit.forget(rank)

    async def _or_end(self, rank: int, coming_up: Coroutine[Any, Any, NodeHandle]) -> NodeHandle:
        try:
            return await coming_up
        except BaseException as error:
            await _clean_up_after(error, self.end((rank,)))
            raise

    async def end(self, ranks: Sequence[int]) -> None:
        """Stop these nodes' supervisors, terminate their machines, confirm it. A cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; termination is
        retried every minute.
        """
        for action in self._handle(End(ranks=tuple(rank for rank in ranks if rank in self.states))):
            assert isinstance(action, EndNodes)
            try:
                await to_its_end(self._end_nodes(action.ranks))
            finally:  # a machine that is not confirmed gone must not block its rank
                self._handle(Ended(ranks=action.ranks))
                for machine in self._machines.left(action.ranks):
                    self._spawn(self._machines.end_at_last(machine, reported=True))

    def discard(self, rank: int) -> None:
        """End the machine of a lost node in the background; its rank may be launched again at once."""
        self._handle(Lost(rank=rank))

    def begin_spare(self, rank: int) -> None:
        """Launch the next machine of ``rank`` in advance; the next :meth:`launch` takes it."""
        if not self._lifecycle.over:
            self._starter.begin_spare(rank, [each for each in self._current.values() if each.rank != rank])

    async def drop_spare(self, rank: int) -> None:
        """End the machine that was launched in advance for ``rank``, if any, in the background."""
        await to_its_end(self._drop_spare(rank))

    async def _drop_spare(self, rank: int) -> None:
        left = await self._starter.settle((rank,))
        for machine in () if self._lifecycle.over else left:  # :meth:`stop` ends all machines itself
            if machine is not self._current.get(rank):
                self._end_in_background(machine)

    def give_up_head(self) -> None:
        """Have the workers of every node join its own scheduler, until there is a head again."""
        self._handle(HeadGivenUp())
        self._announce_to_all()

    def resize(self, size: int) -> None:
        """Set the intended number of nodes and announce it to the ready ones."""
        self._size = size
        self._announce_to_all()

    async def stop(self) -> None:
        """Stop every supervisor, terminate every machine, confirm it. Idempotent; a cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; their ledger
        entries stay open, and another call retries.
        """
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        self._handle(End())
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._machines.settle_lost()
        try:
            await self._machines.end([machine for machine in self._machines.all if not machine.ended])
        finally:
            self._current.clear()

    def _handle(self, event: Event) -> Sequence[Action]:
        """Return the actions that follow from ``event``, except those that run in the background."""
        actions: list[Action] = []
        for action in self._lifecycle.handle(event):
            match action:
                case Join(rank=rank):
                    self._spawn(self._join(rank))
                case Discard(rank=rank):
                    if (machine := self._current.pop(rank, None)) is not None:
                        self._end_in_background(machine)
                case _:
                    actions.append(action)
        self._stir()
        return actions

    def _stir(self) -> None:
        """Wake every waiter of :meth:`_ready` once."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def _end_lost(self) -> None:
        """End the machines that appear after their create calls counted as without effect."""
        while True:
            for machine in await self._machines.appeared():
                self._end_in_background(machine)

    def _end_in_background(self, machine: Machine) -> None:
        self._spawn(self._machines.end_at_last(machine))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until :meth:`stop`. It reports its own errors."""

        def finish(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _logger.debug("background task of pool %s failed: %s", self._pool_id, error)

        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(finish)

    # --- launching and starting -------------------------------------------------------------------------------------

    async def _launch(self, ranks: tuple[int, ...]) -> None:
        for action in self._handle(Add(ranks=ranks)):
            assert isinstance(action, Launch)
            self._current.update(await self._machines_for(action.ranks))

    async def _machines_for(self, ranks: Sequence[int]) -> Mapping[int, Machine]:
        """Return a machine per rank: the one launched in advance where there is one, else a new one."""
        found = {rank: spare for rank in ranks if (spare := await self._starter.take_spare(rank)) is not None}
        if missing := [rank for rank in ranks if rank not in found]:
            others = [*found.values(), *(each for each in self._current.values() if each.rank not in ranks)]
            found |= {each.rank: each for each in await self._machines.launch(missing, beside=others)}
        return found

    async def _come_up(self, rank: int, unfit: UnfitMachineError | None = None) -> NodeHandle:
        """Make a ready node of the rank's machine, or of another one if it is, or turns out, ``unfit``."""
        while True:
            if unfit is not None:
                await self._exchange(rank, unfit)
            try:
                return await self._come_up_on_its_machine(rank)
            except UnfitMachineError as error:
                unfit = error

    async def _exchange(self, rank: int, error: UnfitMachineError) -> None:
        """Put another machine into the place of an unfit one, which is ended in the background.

        Raises :class:`~skyward.errors.CapacityError` after the last attempt, and the provider's errors.
        """
        machine = self._current[rank]
        self._machines.reject(machine, error)
        self._handle(Lost(rank=rank))
        others = [each for each in self._current.values() if each.rank != rank]
        for action in self._handle(Add(ranks=(rank,))):
            assert isinstance(action, Launch)
            self._current[rank] = await self._machines.instead_of(machine, beside=others)

    async def _come_up_on_its_machine(self, rank: int) -> NodeHandle:
        self._failures.pop(rank, None)  # an earlier machine's
        actions = self._handle(Launched(ranks=(rank,)))
        while actions:
            (action,) = actions
            actions = self._handle(await self._perform(action))
        node = self._node(rank)
        if node is not None and self.states[rank] in _UP:
            await unless_gone(node, self._ready(rank))
            return node
        raise SkywardError(f"node {rank} of pool {self._pool_id} was ended while it was starting")

    async def _perform(self, action: Action) -> Event:
        match action:
            case Prepare(rank=rank):
                self._current[rank] = await self._starter.prepare(self._current[rank])
                self._refuse_apart()
                return Prepared(rank=rank, network=self._current[rank].instance.network)
            case StartSupervisor(rank=rank):
                is_head = self._lifecycle.head_of(rank) == rank
                await self._starter.start(self._current[rank], self._size, head=is_head)
                return Started(rank=rank)
            case Launch() | Join() | Discard() | EndNodes():
                raise PoolStateError(f"{action} does not bring a node up")
            case _:
                assert_never(action)

    def _refuse_apart(self) -> None:
        """Raise if the nodes have to reach each other and do not, as far as their machines run."""
        running = {rank: each.instance.network for rank, each in self._current.items() if each.node is not None}
        if self._request.one_network and (apart := separation(running)):
            raise dask_out_of_reach(apart)

    async def _ready(self, rank: int) -> None:
        """Wait until the node has received its scheduler's address; if that is the head's, the head has to run."""
        while self.states[rank] is NodeState.JOINING:
            if (error := self._failures.pop(rank, None)) is not None:
                raise error
            await self._moved.wait()

    # --- announcing the scheduler and the fleet's size --------------------------------------------------------------

    async def _join(self, rank: int) -> None:
        """Announce the scheduler to a starting node.

        A node whose head is lost meanwhile stays in ``JOINING``: the next head's start announces it again.
        """
        machine = self._current.get(rank)
        try:
            joined = await self._announce(rank)
        except Exception as error:
            if self._current.get(rank) is machine:
                self._not_joined(rank, error)
            return
        if joined and self._current.get(rank) is machine:
            self._handle(Joined(rank=rank))
            if rank == HEAD:
                self._announce_to_all()

    def _not_joined(self, rank: int, error: Exception) -> None:
        self._failures[rank] = error
        self._stir()

    def _announce_to_all(self) -> None:
        """Announce the scheduler and the size to every ready node in the background."""
        for rank, state in self.states.items():
            if state is NodeState.READY:
                self._spawn(self._announce_again(rank))

    async def _announce_again(self, rank: int) -> None:
        try:
            await self._announce(rank)
        except (UnreachableError, PoolStateError) as error:  # the keeper of this rank notices a lost node
            _logger.debug("node %d did not receive a change of the fleet: %s", rank, error)

    async def _announce(self, rank: int) -> bool:
        """Send scheduler and size to a node that lacks them; return False without a scheduler or without the node."""
        leader = self._lifecycle.head_of(rank)
        if leader is None or self.states[leader] not in _UP:
            return False
        head, node = self._node(leader), self._node(rank)
        if head is None or node is None:
            return False
        order = Start(scheduler=head.ready.scheduler, head_addr=head.address, total_nodes=self._size)
        machine = self._current[rank]
        if machine.announced != order:
            await node.join(scheduler=order.scheduler, head_addr=order.head_addr, total_nodes=order.total_nodes)
            machine.announced = order
        return True

    def _node(self, rank: int) -> NodeHandle | None:
        machine = self._current.get(rank)
        return machine.node if machine is not None else None

    # --- ending -----------------------------------------------------------------------------------------------------

    async def _end_nodes(self, ranks: Sequence[int]) -> None:
        await self._starter.settle(ranks)
        try:
            await self._machines.end(self._machines.left(ranks))
        finally:
            for rank in ranks:  # even unconfirmed: it is no node any more
                self._current.pop(rank, None)


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
    # A task group treats a node's own CancelledError as success.
    if cancelled := [rank for rank, task in starting.items() if task.cancelled()]:
        raise SkywardError(f"nodes {cancelled} were cancelled while they were starting")
