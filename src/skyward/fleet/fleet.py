"""A pool's fleet: one coroutine per rank launches, prepares, starts, watches, replaces and terminates its node."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from skyward.base.waiting import SYSTEM_CLOCK, Clock, keep, to_its_end
from skyward.errors import (
    AuthenticationError,
    BootstrapError,
    BudgetError,
    CapacityError,
    ConfigurationError,
    FetchError,
    PoolStateError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.events import Error, InstancePreempted, Notice, SkywardEvent
from skyward.fleet.kept import FleetKeeping
from skyward.fleet.machines import Machines
from skyward.fleet.node import MakeNode, Node, NodeLoss, NodeState, unless_gone
from skyward.fleet.node_setup import NodeSetup, renew_secrets
from skyward.fleet.outputs import fetch_files, joined
from skyward.fleet.topology import HEAD, separation, service_out_of_reach
from skyward.ledger.fleet_record import FleetRecord
from skyward.ledger.ledger import Ledger
from skyward.ledger.sweep import reason_of
from skyward.market.budget import charged_price
from skyward.market.choose import UnfitMachineError
from skyward.market.cost import CostReport
from skyward.providers.base import Offer, Provider
from skyward.request.request import PoolRequest, Spot
from skyward.submission import FleetStatus, NodeStatus, worker_names
from skyward.wire.control import Start
from skyward.wire.frames import TlsIdentity

T = TypeVar("T")

_ATTEMPTS = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_SETTLED_S = 60.0
_BOOT_S = 60.0
"""Assumed seconds of a boot before the first one was measured."""
_BAR_S, _LONGEST_BAR_S = 12.0, 600.0
_GRACE_S = 10.0
"""Seconds after its announced end at which a preempted machine is given up."""
_SPOT_AGAIN_S, _LONGEST_SPOT_AGAIN_S = 600.0, 3600.0
"""Seconds between two attempts to have spot machines in the place of those on demand."""
_MOVES = 2
"""Spot machines in a row that do not come up, after which nodes on demand stay."""
_SOON_S = 900.0
"""Seconds for which a node on demand may be busy when a spot machine is bought to take its place."""
_MOVED = NodeLoss(reason="an hour of work costs less there", announced=True, preempted=True, moves=True)
_HOPELESS = (AuthenticationError, BudgetError, ConfigurationError, PoolStateError)
_logger = logging.getLogger("skyward")


_UP = (NodeState.JOINING, NodeState.READY)
_COMING_UP = (NodeState.PREPARING, NodeState.PREPARED, NodeState.STARTING, NodeState.JOINING)


class FleetUser(Protocol):
    """User of the nodes: the pool's scheduler. Called on the event loop."""

    def expect(self, ranks: Iterable[int]) -> None:
        """Expect nodes of these ranks: work may be planned for them."""
        ...

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """Give no new work to nodes of these ranks, which will go.

        With ``comes_back``, calls bound to these ranks wait for the next nodes of the same ranks.
        """
        ...

    async def attach(self, node: Node) -> None:
        """Use a node; returns once its workers take calls. Raises when they do not."""
        ...

    def busy_for_s(self, rank: int) -> float:
        """Return the seconds until a node's running calls end, as far as can be expected; infinite if unknown."""
        ...

    async def drain(self, rank: int) -> None:
        """Return once the node has no work left and may be ended."""
        ...

    def detach(
        self, rank: int, reason: str, *, for_good: bool, preempted: bool = False, unpaid: BudgetError | None = None
    ) -> None:
        """Give up a node that is gone; unless ``for_good``, another one of its rank will come. Idempotent.

        Args:
            rank: its rank.
            reason: why, for users.
            for_good: whether the rank has no node any more.
            preempted: whether its provider took the machine back: calls that may be repeated are not charged for that.
            unpaid: why there is no node, if the pool may not spend more.
        """
        ...


@dataclass(slots=True, eq=False)
class _JointLaunch:
    """Order of the first machines of several ranks.

    Attributes:
        members: the ranks.
        between: set while it buys nothing.
        task: its coroutine.
    """

    members: Sequence[Member]
    between: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Mapping[int, Node]] = field(init=False)

    def is_wanted(self, rank: int) -> bool:
        """Return whether a rank needs a machine of this order; it may have left, and be wanted of another order."""
        return any(member.wanted for member in self.members if member.rank == rank)

    async def leave(self) -> None:
        """Return once it buys nothing for ranks that have left the fleet, nor will; it goes on for the others."""
        paused = asyncio.ensure_future(self.between.wait())
        try:
            await asyncio.wait((self.task, paused), return_when=asyncio.FIRST_COMPLETED)
        finally:
            paused.cancel()
        if not any(member.wanted for member in self.members):
            self.task.cancel()


@dataclass(slots=True, eq=False)
class Member:
    """One rank of the fleet, which may have one node after another.

    Attributes:
        rank: the rank.
        node: its present node; None before the launch and after a loss.
        used: the node that the engine uses, or has used and that is not replaced yet.
        network: the network of its last node; None before the first, empty for an island.
        wanted: False once it has to leave the fleet, or was given up.
        leave: set once it has to leave.
        up: done when its node is in use.
        failures: number of recent failures in a row.
        launching: order of its first machine, together with those of other ranks.
        spare: launches and prepares the next machine of a preempted node; returns None if none could be launched.
        task: its coroutine.
    """

    rank: int
    node: Node | None = None
    used: Node | None = None
    network: str | None = None
    wanted: bool = True
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    up: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failures: int = 0
    launching: _JointLaunch | None = None
    spare: asyncio.Task[Node | None] | None = None
    task: asyncio.Task[None] | None = None

    @property
    def state(self) -> NodeState:
        """State of its present node."""
        node = self.node  # which the loop changes while another thread reads
        return NodeState.LAUNCHING if node is None else node.state

    @property
    def in_use(self) -> bool:
        """True while the engine uses its node."""
        return self.used is not None and self.used is self.node


class Fleet:
    """A pool's nodes, kept at the intended number from :meth:`start` to :meth:`stop`. Belongs to one event loop.

    Args:
        provider: the provider of the machines.
        request: the pool's parameters.
        pool_id: the pool's id.
        tls: the certificates every node gets.
        publish: receives the events of provisioning and shutdown; must not block.
        ledger: where machines are recorded before they are requested.
        clock: the time, for deadlines and cost.
        make_node: maker of the nodes.
        keeping: the record of the fleet, if it is kept for other clients.

    Attributes:
        boot_s: seconds from the latest launch of a node until it took calls.
    """

    _user: FleetUser

    def __init__(
        self,
        provider: Provider,
        request: PoolRequest,
        *,
        pool_id: str,
        tls: TlsIdentity,
        publish: Callable[[SkywardEvent], None],
        ledger: Ledger,
        clock: Clock = SYSTEM_CLOCK,
        make_node: MakeNode = Node,
        keeping: FleetKeeping | None = None,
    ) -> None:
        self._request = request
        self._keeping = keeping
        self._pool_id = pool_id
        self._publish = publish
        self._clock = clock
        self._machines = Machines(
            provider, request, pool_id=pool_id, publish=publish, ledger=ledger, clock=clock, make_node=make_node
        )
        self._setup = NodeSetup(self._machines, tls)
        self._members: dict[int, Member] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reported: Exception | None = None
        self.boot_s = _BOOT_S
        self._failed_additions, self._barred_until = 0, -math.inf
        self._failed_order: _JointLaunch | None = None
        self._moving = asyncio.Lock()  # nodes go back to spot one after the other
        self._spot_again_at, self._spot_pause_s, self._failed_moves = -math.inf, _SPOT_AGAIN_S, 0
        self._closed = False
        self._is_whole = True  # False while it is taken over: its record is that of the last client

    @property
    def members(self) -> Mapping[int, Member]:
        """The ranks that have, or will have, a node, and those that leave."""
        return self._members

    @property
    def wanted(self) -> frozenset[int]:
        """Ranks of the intended nodes. Thread-safe."""
        return frozenset(member.rank for member in list(self._members.values()) if member.wanted)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that were reached and are not being ended, by rank."""
        nodes = [member.node for _, member in sorted(self._members.items())]
        return tuple(node for node in nodes if node is not None and node.is_open)

    def cost(self, now: float) -> CostReport:
        """Return the cost of the fleet until ``now``, an ``elapsed`` reading of its clock in seconds."""
        return CostReport(usages=tuple(self._machines.usages()), now=now, provider=self._machines.provider.name)

    def status(self) -> FleetStatus:
        """Return the present state of the fleet. Thread-safe."""
        cost = self.cost(self._clock.elapsed())
        members = dict(self._members)  # a copy, because the loop changes it while another thread reads
        return FleetStatus(
            wanted=len(self.wanted),
            workers_per_node=self._request.workers_per_node,
            nodes=tuple(self._node_status(member) for _, member in sorted(members.items())),
            cost=cost.total,
            cost_by_provider=cost.by_provider,
            boot_s=self.boot_s,
            elastic=self._request.elastic,
        )

    def _node_status(self, member: Member) -> NodeStatus:
        state = "ending" if not member.wanted else "starting" if member.state in _COMING_UP else member.state.value
        workers = worker_names(member.rank, self._request.workers_per_node)
        if (node := member.node) is None:
            return NodeStatus(rank=member.rank, state=state, workers=workers)
        offer = node.instance.offer
        return NodeStatus(
            rank=member.rank,
            state=state,
            workers=workers,
            instance_id=node.instance.id,
            instance_type=offer.spec.name,
            accelerators=(offer.spec.accelerator,) * offer.spec.accelerator_count if offer.spec.accelerator else (),
            spot=offer.spot,
            price_per_hour=charged_price(node.instance),
        )

    # --- nodes in use -----------------------------------------------------------------------------------------------

    def started_nodes(self) -> list[Node]:
        """Return the nodes whose supervisor runs."""
        return [node for node in self.nodes if node.state in _UP]

    def ready_nodes(self) -> list[Node]:
        """Return the nodes that the engine uses, or is about to use."""
        return [node for node in self.nodes if node.state is NodeState.READY]

    def head(self) -> Node:
        """Return the head node.

        Raises :class:`~skyward.errors.PoolStateError` while it is being replaced, or if it was given up.
        """
        if HEAD not in self.wanted:
            raise PoolStateError("node 0, where the scheduler runs, is gone for good; pool.scale() brings another")
        for node in self.ready_nodes():
            if node.rank == HEAD:
                return node
        raise PoolStateError("the head node, where the scheduler runs, is being replaced; try again in a moment")

    def separation(self) -> str:
        """Return which nodes in use do not reach each other; empty if all do."""
        wanted = self.wanted
        return separation({node.rank: node.instance.network for node in self.ready_nodes() if node.rank in wanted})

    async def forward(self, address: str) -> str:
        """Return the ``host:port`` through which this process reaches ``host:port`` of the head node."""
        return await self.head().forward(address)

    async def fetch(self, patterns: Sequence[str], to: Path, rank: int | None) -> list[Path]:
        """See :meth:`skyward.api.pool.ComputePool.fetch`."""
        nodes = self.ready_nodes()
        if rank is not None:
            ranks = ", ".join(str(node.rank) for node in nodes) or "none"
            nodes = [node for node in nodes if node.rank == rank]
            if not nodes:
                raise ConfigurationError(f"node must be the rank of a node that is ready ({ranks}), got {rank!r}")
        fetched = await fetch_files(nodes, patterns, to, apart=rank is None and len(self.wanted) > 1)
        if fetched.left_out:
            self._publish(Notice(f"not fetched: {joined(fetched.left_out)}"))
        if fetched.failures:
            others = f"; {len(fetched.paths)} others are in {to}" if fetched.paths else ""
            raise FetchError(f"{joined(fetched.failures, '; ')}{others}")
        return list(fetched.paths)

    # --- opening, scaling, closing ----------------------------------------------------------------------------------

    async def start(self, user: FleetUser) -> None:
        """Bring the first nodes up, have ``user`` use them, and keep that number from then on.

        Unfit machines are exchanged, three at most for each rank. On any failure or cancellation, terminate every
        machine and confirm it before the error is raised. Machines that cannot be confirmed gone raise
        :class:`~skyward.errors.TerminationError`, with the first error in a note.
        """
        self._user = user
        members = self._add_members(range(self._request.first_nodes))
        self._spawn(renew_secrets(self._machines))
        self._spawn(self._end_lost_machines())
        try:
            await self._machines.ask_for_elastic()
            nodes = await self._machines.launch([member.rank for member in members])
            await _all_or_the_first_error(
                {node.rank: self._make_node(self._members[node.rank], node) for node in nodes}
            )
        except BaseException as error:
            await _clean_up_after(error, self.stop())
            raise
        for member in members:
            _succeed(member.up)
            member.task = self._spawn(self._run_member(member))

    async def resume(self, user: FleetUser, record: FleetRecord, *, restart: str = "", must_live: bool = False) -> None:
        """Take a kept fleet over, have ``user`` use its nodes, and keep their number from then on.

        Nodes that are gone are replaced. On failure the fleet stays as it was.

        Args:
            user: the user of the nodes.
            record: the fleet.
            restart: what is to be applied by restarting the nodes' supervisors, in words; empty for nothing. A restart
                during which a client was killed is done again.
            must_live: True if a fleet without a living node is an error.

        Raises:
            PoolStateError: no node lives; or there is something to apply, and jobs are unfinished.
            UnreachableError: a node does not answer, and may live.
        """
        self._user, self._is_whole = user, False
        self._machines.count_past(record.spent)
        members = {member.rank: member for member in self._add_members([kept.rank for kept in record.nodes])}
        self._spawn(renew_secrets(self._machines))
        self._spawn(self._end_lost_machines())
        restart = restart or ("what another program began to change" if record.restarting else "")
        found = {kept.rank: self._machines.resume(kept) for kept in record.nodes}
        try:
            await self._machines.ask_for_elastic()
            await _all_or_the_first_error(
                {rank: self._find(members[rank], node, halted=record.restarting) for rank, node in found.items()}
            )
            present = [member for member in members.values() if member.node is not None]
            if must_live and not present:
                raise PoolStateError(f"no node of the kept fleet {record.name!r} lives any more: open it again")
            if restart:
                self._refuse_restart(present, restart)
                await self._note_restart()
            for member in members.values():
                if member.node is None:
                    member.task = self._spawn(self._run_member(member))
            work = {member.rank: self._reuse(member, restart=bool(restart)) for member in present}
            await _all_or_the_first_error(work)
        except BaseException as error:
            await _clean_up_after(error, to_its_end(self._let_go(found.values())))
            raise
        self._is_whole = True
        for member in present:
            if member.used is not None:
                _succeed(member.up)
                member.task = self._spawn(self._run_member(member))
        self._record()

    async def leave(self) -> Sequence[Node]:
        """Leave the nodes in use to another client, and end every other machine. A cancellation waits for its end.

        Returns the nodes that stay; none if their record cannot be written.

        Raises :class:`~skyward.errors.TerminationError` with the ids of other machines that may still exist.
        """
        return await to_its_end(self._leave())

    async def _leave(self) -> Sequence[Node]:
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._machines.settle_lost()
        kept = self._nodes_to_keep()
        self._members.clear()
        if self._keeping is None or not await self._keeping.leave(kept, spent=self._spent()):
            kept = []  # no one would find them
        try:
            await self._end_all_but(kept)
        finally:
            if self._keeping is not None and kept:  # what has ended since counts, too
                self._keeping.follow(kept, spent=self._spent())
                await self._keeping.settle()
            await self._machines.leave(kept)
        return kept

    async def _note_restart(self) -> None:
        """Have the record say that a node without a supervisor still has its machine."""
        if self._keeping is not None:
            await self._keeping.begin_restart()

    async def _let_go(self, nodes: Collection[Node]) -> None:
        """Leave a fleet as it was found, with these nodes: what was launched beside it ends."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        found = [node for node in nodes if node.has_rank and not node.ended]
        self._members.clear()
        try:
            await self._end_all_but(found)
        finally:
            await asyncio.gather(*(node.leave() for node in found), return_exceptions=True)

    async def _end_all_but(self, kept: Collection[Node]) -> None:
        await self._machines.end([machine for machine in self._machines.unended() if machine not in kept])

    def _nodes_to_keep(self) -> list[Node]:
        members = [member for _, member in sorted(self._members.items()) if member.wanted and member.in_use]
        return [member.node for member in members if member.node is not None]

    def _spent(self) -> Mapping[str, float]:
        """Return the cost of machines that are gone, in USD by provider."""
        cost = self.cost(self._clock.elapsed())
        return replace(cost, usages=tuple(usage for usage in cost.usages if usage.ended_at is not None)).by_provider

    def _record(self) -> None:
        """Have the record of a kept fleet follow its nodes."""
        if self._keeping is not None and self._is_whole and not self._closed:
            self._keeping.follow(self._nodes_to_keep(), spent=self._spent())

    async def keep_for(self, seconds: float) -> None:
        """Have the nodes of a kept fleet wait for so many seconds for its next client."""
        if self._keeping is not None:
            self._keeping.keep_for(seconds)
        nodes = self._nodes_to_keep()
        for error in await asyncio.gather(*(node.keep_for(seconds) for node in nodes), return_exceptions=True):
            if isinstance(error, SkywardError):  # a node that is lost is no reason not to keep the others
                self._report("a node was not told how long it is kept", error)

    async def _find(self, member: Member, node: Node, *, halted: bool) -> None:
        """Connect to a kept node. If it is certainly gone, its rank has no node.

        If it may have been ``halted`` for another supervisor, its machine is used without one.
        """
        member.node, member.network = node, node.instance.network
        self._setup.open(node)
        node.state = NodeState.JOINING
        try:
            await unless_gone(node, node.resume())
        except BootstrapError as error:
            if halted:
                await node.begin_again(is_used=True)
            else:
                self._miss(member, node, error)
        except UnfitMachineError as error:
            self._miss(member, node, error)

    def _miss(self, member: Member, node: Node, error: Exception) -> None:
        """Note that a kept node is certainly gone."""
        self._publish(Notice(f"node {member.rank} of the kept fleet is gone: {error}", node.instance.id))
        self._discard(member)

    def _refuse_restart(self, members: Iterable[Member], restart: str) -> None:
        nodes = [member.node for member in members if member.node is not None]
        if jobs := sum(node.unfinished_jobs for node in nodes):
            raise PoolStateError(
                f"the kept fleet has {jobs} unfinished job{'s' * (jobs > 1)}, which a change would end ({restart}): "
                "wait for them, cancel them, or open the fleet as it is"
            )

    async def _reuse(self, member: Member, *, restart: bool) -> None:
        """Have the engine use a kept node, with fresh worker processes, or with a fresh supervisor."""
        node = member.node
        assert node is not None
        if restart:
            if node.state is NodeState.JOINING:
                await node.halt()
            await self._make_node(member, node)
            return
        try:
            await unless_gone(node, node.renew_workers())
            if node.kept is not None and node.kept.config.keep_s != self._request.keep_s:
                await node.keep_for(self._request.keep_s)
            self._wake_waiters()
            await self._take_into_use(member, node)
        except (UnfitMachineError, BootstrapError) as error:
            self._miss(member, node, error)
            member.task = self._spawn(self._run_member(member))

    def scale(self, size: int, drop: Collection[int]) -> Coroutine[Any, Any, None]:
        """Grow or shrink the fleet to ``size`` nodes; the returned coroutine waits for it.

        The intended size changes at once, so a later call overrides an earlier one and cancels its wait for a node
        that is no longer needed.

        Args:
            size: the intended number of nodes. At 0, node 0 leaves too; else it stays.
            drop: ranks that leave first.
        """
        if self._closed:
            raise PoolStateError("the pool is closed")
        if size > len(self.wanted) and (refusal := self._refusal()) is not None:
            return _raise(refusal)
        if size and HEAD not in self.wanted:  # it was given up, or left; nodes in its reach are told of it again
            self._grow(max(1, size - len(self.wanted)))
        surplus = len(self.wanted) - size
        if surplus > 0:
            for member in self._dispensable(drop, with_head=not size)[:surplus]:
                self._dismiss(member)
        elif surplus < 0:
            self._grow(-surplus)
        self._announce()
        members = self._members.values()
        leaving = [member.task for member in members if not member.wanted and member.task is not None]
        return _all_of([*leaving, *(member.up for member in members if member.wanted)])

    def close(self) -> None:
        """Add and replace no nodes from now on; the present ones stay as they are. Idempotent."""
        self._closed = True
        for member in self._members.values():
            member.up.cancel()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Stop every supervisor, terminate every machine, confirm it. Idempotent; a cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; their ledger
        entries stay open, and another call retries.
        """
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        self.close()
        settling = asyncio.gather(*self._tasks, return_exceptions=True)
        failure: TerminationError | None = None
        while True:
            # Healthy nodes end at once, those that come up meanwhile when the tasks have ended.
            settled = settling.done()
            await self._machines.settle_lost()
            unended = self._machines.unended()
            # A machine that does not end is named already: a second attempt would only take twice as long.
            if {node.instance.id for node in unended} != set(failure.instance_ids if failure else ()):
                try:
                    await self._machines.end(unended)
                    failure = None
                except TerminationError as error:
                    failure = error
            if settled:
                break
            await settling
        self._members.clear()
        if failure is not None:
            raise failure

    def _refusal(self) -> Exception | None:
        """Return the error for adding nodes now, after too many failures in a row: every attempt costs money."""
        wait_s = self._barred_until - self._clock.monotonic()
        if wait_s <= 0:
            return None
        return CapacityError(
            f"the last {self._failed_additions} times no node could be added; there will be no further attempt for "
            f"{wait_s:.0f} s. The last error: {self._reported}"
        )

    def _add_members(self, ranks: Iterable[int]) -> Sequence[Member]:
        members = [Member(rank) for rank in ranks]
        self._members.update({member.rank: member for member in members})
        self._user.expect([member.rank for member in members])
        return members

    def _grow(self, count: int) -> None:
        leaving = self._members.get(HEAD)
        if leaving is not None and leaving.wanted:
            leaving = None
        taken = self._members.keys() - ({HEAD} if leaving else set())
        free = [rank for rank in range(len(self._members) + count) if rank not in taken]
        members = self._add_members(free[:count])
        launching = _JointLaunch(members)
        launching.task = self._spawn(self._launch_after(leaving, launching))
        for member in members:
            member.launching = launching
            member.task = self._spawn(self._run_member(member))

    async def _launch_after(self, leaving: Member | None, order: _JointLaunch) -> Mapping[int, Node]:
        """Launch machines, once the former head has left if one of them takes its rank."""
        order.between.set()
        if leaving is not None and leaving.task is not None:
            await asyncio.wait([leaving.task])
        ranks = [member.rank for member in order.members if member.wanted]
        if not ranks:
            return {}
        others = self._others(ranks)
        # An elastic pool asks again by itself, for fewer; only its first node is waited for, without which calls fail.
        waits = self._request.elastic is None or not others
        nodes = await self._machines.launch(
            ranks, beside=others, waits=waits, is_wanted=order.is_wanted, between=order.between
        )
        return {node.rank: node for node in nodes}

    def _dispensable(self, drop: Collection[int], *, with_head: bool) -> list[Member]:
        """Order members by removal: those in ``drop``, those not in use yet, the highest ranks."""
        members = [member for member in self._members.values() if member.wanted and (with_head or member.rank != HEAD)]
        return sorted(members, key=lambda member: (member.rank not in drop, member.in_use, -member.rank))

    def _dismiss(self, member: Member) -> None:
        """Have a member leave the fleet: at once if its node is not in use yet, else once the node has no work left."""
        member.wanted = False
        self._user.retire((member.rank,))
        member.up.cancel()
        member.leave.set()
        if not member.in_use and member.task is not None:
            asyncio.get_running_loop().call_soon(member.task.cancel)  # not before its first step: it cleans up

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` until :meth:`close`. It reports its own errors."""

        def finish(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _logger.debug("task of pool %s failed: %s", self._pool_id, error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(finish)
        return task

    # --- the life of a member ---------------------------------------------------------------------------------------

    async def _run_member(self, member: Member) -> None:
        """Bring a node up, watch it, replace it after a loss, until its rank is given up or leaves the fleet.

        Raises :class:`~skyward.errors.TerminationError` if it leaves and its machine may still exist.
        """
        try:
            if member.used is not None or await self._add(member):
                what = f"keeping node {member.rank}"
                # Any failure starts it again: each of its steps is repeatable, and the nodes of other ranks go on.
                await keep(
                    lambda: self._outlive_nodes(member),
                    what=what,
                    report=lambda why: self._publish(Error(why)),
                    clock=self._clock,
                )
        except asyncio.CancelledError:
            if self._closed or not member.leave.is_set():
                raise
        if not member.leave.is_set() or self._closed:
            return
        if member.launching is not None:  # not cancelled: it launches other nodes too
            await member.launching.leave()
        self._user.detach(member.rank, "the fleet was made smaller", for_good=self._is_last_of_rank(member))
        try:
            await self._end(member)
        except SkywardError as error:
            self._report(f"node {member.rank} could not be ended", error)
            raise
        finally:
            self._forget(member)

    async def _add(self, member: Member) -> bool:
        """Bring the first node of a new rank up; give the rank up if that fails."""
        rank = member.rank
        try:
            await self._bring_up(member)
        except Exception as error:
            _unless_cancelled(error)
            order = member.launching  # None once its machine was launched
            self._failed_additions += order is None or order is not self._failed_order
            self._failed_order = order
            if self._failed_additions >= _ATTEMPTS:
                self._barred_until = self._clock.monotonic() + min(_LONGEST_BAR_S, _BAR_S * self._failed_additions)
            self._report(f"node {rank} cannot be added", error)
            unpaid = error if isinstance(error, BudgetError) else None
            self._give_up(member, f"node {rank} could not be added: {error}", unpaid=unpaid)
            _fail(member.up, error)
            return False
        self._failed_additions = 0
        _succeed(member.up)
        return True

    async def _outlive_nodes(self, member: Member) -> None:
        while (node := member.used) is not None:
            failures, member.failures = member.failures, member.failures + 1  # counted if this raises: it may buy
            member.failures = await self._outlive(member, node, failures)

    async def _outlive(self, member: Member, node: Node, failures: int) -> int:
        """Wait for a node's loss and replace it; return the number of recent failures.

        Without a replacement, :attr:`Member.used` is None afterwards.
        """
        rank, began = member.rank, self._clock.monotonic()
        try:
            loss = await self._watch(member, node)
            if loss is None:
                member.used = None
                return failures
            if loss.preempted and not loss.moves:
                self._machines.note_preempted(node)
            self._discard(member)
            fate = "moves to spot" if loss.moves else "is preempted" if loss.preempted else "is lost"
            reason = f"node {rank} {fate}: {loss.reason}"
            if not member.wanted:
                self._user.detach(rank, reason, for_good=self._is_last_of_rank(member), preempted=loss.preempted)
                member.used = None
                return failures
            if loss.timed_out:
                self._publish(Error(reason, node.instance.id))
                self._give_up(member, reason)
                return failures
            if loss.preempted and not loss.announced:
                self._publish(InstancePreempted(node.instance.id, rank, 0.0))
            kind = Notice if loss.preempted else Error
            self._publish(kind(f"{reason}; another takes its place", node.instance.id))
            member.up = asyncio.get_running_loop().create_future()
            self._user.detach(rank, reason, for_good=False, preempted=loss.preempted)
            failures = _recent_failures(failures, loss, lasted_s=self._clock.monotonic() - began)
            why, failures = await self._replace(member, failures)
            if why:
                reason = f"{reason}, and could not be replaced: {why}"
                self._give_up(member, reason)
                _fail(member.up, CapacityError(reason))
            else:
                _succeed(member.up)
            return failures
        finally:
            await to_its_end(self._drop_spare(member))

    async def _watch(self, member: Member, node: Node) -> NodeLoss | None:
        """Return how a node was lost; None if its rank leaves the fleet, once the node has no work left.

        A preempted node is given up when it has no work left, at the latest ``_GRACE_S`` after its announced end, while
        its successor is launched and prepared. It may still run then.
        """
        gone, notice = asyncio.ensure_future(node.wait_gone()), asyncio.ensure_future(node.wait_notice())
        leave = asyncio.ensure_future(member.leave.wait())
        on_spot = asyncio.ensure_future(self._wait_for_spot(member, node))
        waiting: list[asyncio.Future[Any]] = [gone, notice, leave, on_spot]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            preempted = notice.done() and not gone.done() and not leave.done()
            moves = on_spot.done() and on_spot.result() and not gone.done() and not leave.done() and not preempted
            if moves:
                self._user.retire((member.rank,), comes_back=True)
            if preempted:
                self._machines.note_preempted(node)
                if member.spare is None:
                    member.spare = self._spawn(self._launch_spare(member))
                self._user.retire((member.rank,), comes_back=True)
                waiting.append(asyncio.ensure_future(self._drain(member.rank)))
                waiting.append(asyncio.ensure_future(self._clock.sleep(notice.result() + _GRACE_S)))
                await asyncio.wait({*waiting} - {notice, on_spot}, return_when=asyncio.FIRST_COMPLETED)
                if not gone.done() and not leave.done():
                    return NodeLoss(reason="its provider takes its machine back", announced=True, preempted=True)
            if not gone.done():
                draining = asyncio.ensure_future(self._drain(member.rank))
                waiting.append(draining)
                await asyncio.wait((gone, draining), return_when=asyncio.FIRST_COMPLETED)
                if not gone.done():
                    return _MOVED if moves else None
            return replace(gone.result(), announced=True, preempted=True) if preempted else gone.result()
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _wait_for_spot(self, member: Member, node: Node) -> bool:
        """Return True once a spot machine is prepared to take the place of a node on demand; for others never return.

        Nodes of elastic pools leave when they are idle, and the next ones are bought in the usual order.
        """
        request, offer = self._request, node.instance.offer
        falls_back = isinstance(request.spot, Spot.IfAvailable) and not (offer.spot or request.one_network)
        falls_back = falls_back and bool(offer.price_per_hour) and request.elastic is None
        while falls_back and self._failed_moves < _MOVES:
            now = self._clock.monotonic()
            await self._clock.sleep(max(_SPOT_AGAIN_S, self._spot_again_at - now))
            async with self._moving:
                now = self._clock.monotonic()
                later = now < self._spot_again_at or self._failed_moves >= _MOVES
                if later or self._user.busy_for_s(member.rank) > _SOON_S:
                    continue
                if await self._prepare_on_spot(member, offer):
                    self._spot_pause_s, self._failed_moves = _SPOT_AGAIN_S, 0
                    return True
                self._spot_pause_s = min(_LONGEST_SPOT_AGAIN_S, 2 * self._spot_pause_s)
                self._spot_again_at = self._clock.monotonic() + self._spot_pause_s
        return await asyncio.get_running_loop().create_future()

    async def _prepare_on_spot(self, member: Member, offer: Offer) -> bool:
        """Launch and prepare a spot machine in place of ``offer`` as the spare one of a rank, if there is a cheaper."""
        member.spare = self._spawn(self._launch_on_spot(member.rank, offer))
        if await asyncio.shield(member.spare) is not None:
            return True
        member.spare = None
        return False

    async def _drain(self, rank: int) -> None:
        try:
            await self._user.drain(rank)
        except Exception as error:  # the node ends all the same: it costs money
            _unless_cancelled(error)
            self._report(f"node {rank} could not be drained", error)

    async def _replace(self, member: Member, failures: int) -> tuple[str, int]:
        """Bring another node up for a lost one.

        Returns:
            Why the rank has to be given up, empty if it has a node; and the number of recent failures.
        """
        rank, why = member.rank, "the nodes before it did not last either"
        while failures < _ATTEMPTS:
            await self._clock.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures) if failures > 1 else 0)
            try:
                await self._bring_up(member)
            except _HOPELESS as error:
                _unless_cancelled(error)
                self._report(f"node {rank} cannot be replaced", error)
                return reason_of(error), failures
            except Exception as error:
                _unless_cancelled(error)
                self._report(f"node {rank} could not be replaced", error)
                why = reason_of(error)
                # Unfit machines cost money, and there were several: no further ones without an order of the user. What
                # was waited for in vain is given up, too.
                over = isinstance(error, CapacityError) and (error.attempts or self._request.wait_for_capacity_s)
                failures = _ATTEMPTS if over else failures + 1
            else:
                return "", failures
        return why, failures

    def _give_up(self, member: Member, reason: str, *, unpaid: BudgetError | None = None) -> None:
        member.wanted, member.used = False, None
        self._forget(member)
        self._user.detach(member.rank, reason, for_good=True, unpaid=unpaid)
        if member.rank == HEAD:  # until there is a head again, every node is its own
            self._wake_waiters()
        self._announce()

    def _is_last_of_rank(self, member: Member) -> bool:
        """Return True unless the rank of a member that leaves has been given to another, which waits for its end."""
        return self._members.get(member.rank) is member

    def _forget(self, member: Member) -> None:
        if self._is_last_of_rank(member):
            del self._members[member.rank]
            self._record()

    def _report(self, what: str, error: Exception) -> None:
        if error is not self._reported:  # many nodes may fail with one error, which is reported once
            self._reported = error
            self._publish(Error(f"{what}: {error}"))

    # --- one node: launch, prepare, start, join ---------------------------------------------------------------------

    async def _bring_up(self, member: Member) -> None:
        """Launch a machine and make it a node in use; on failure, terminate it and confirm that."""
        try:
            await self._make_node(member, await self._launch_for(member))
        except BaseException as error:
            if member.wanted and not self._closed:  # else whoever cancelled this ends the machine
                await _clean_up_after(error, self._end(member))
            raise

    async def _launch_for(self, member: Member) -> Node:
        """Return a machine for a rank: of the order it is part of, the spare one, or a new one."""
        if member.launching is not None:
            nodes = await asyncio.shield(member.launching.task)
            member.launching = None  # not before: an interrupted member waits for its machine, and ends it
            return nodes[member.rank]
        if (spare := member.spare) is not None:
            try:
                node = await asyncio.shield(spare)
            finally:
                if spare.done():
                    member.spare = None
            if node is not None:
                return node
        return (await self._launch([member.rank]))[member.rank]

    async def _launch(
        self, ranks: Sequence[int], *, instead_of: Offer | None = None, waits: bool = True
    ) -> Mapping[int, Node]:
        nodes = await self._machines.launch(ranks, beside=self._others(ranks), instead_of=instead_of, waits=waits)
        return {node.rank: node for node in nodes}

    def _others(self, ranks: Collection[int]) -> list[Node]:
        """Return the present nodes of all other ranks."""
        members = [member for member in self._members.values() if member.rank not in ranks]
        return [member.node for member in members if member.node is not None]

    async def _launch_spare(self, member: Member) -> Node | None:
        """Launch and prepare the next machine of a rank; return None if none could be launched.

        It does not wait for capacity: the replacement's launch does, once the present node is gone.

        On cancellation and failure its machine is ended in the background.
        """
        rank, earlier = member.rank, len(self._machines.all)
        node: Node | None = None
        try:
            node = (await self._launch([rank], waits=False))[rank]
            while node.state is NodeState.PREPARING:
                try:
                    await self._prepare(node)
                except UnfitMachineError as error:
                    node = await self._exchange(node, error, waits=False)
        except BaseException as error:
            self._end_in_background(*self._machines.unended_of(rank, since=earlier))
            if node is not None or not isinstance(error, Exception):
                raise
            self._publish(Error(f"no machine could be launched in advance for node {rank}: {error}"))
        return node

    async def _launch_on_spot(self, rank: int, offer: Offer) -> Node | None:
        """Launch and prepare a spot machine in place of ``offer``; return None if none comes up.

        On cancellation and failure its machine is ended in the background.
        """
        earlier = len(self._machines.all)
        node: Node | None = None
        try:
            node = (await self._launch([rank], instead_of=offer))[rank]
            await self._prepare(node)
        except BaseException as error:
            self._end_in_background(*self._machines.unended_of(rank, since=earlier))
            if not isinstance(error, Exception):
                raise
            if node is not None:
                self._note_failed_move(node, error)
            return None
        return node

    def _note_failed_move(self, node: Node, error: Exception) -> None:
        """Publish why a spot machine did not come up: it has cost money, and after the second no other is bought.

        One that was taken back shows what its market is like, and is no fault.
        """
        if isinstance(error, UnfitMachineError):
            if error.preempted:
                self._machines.note_preempted(node)
                return
            self._machines.unfit.avoid_host(node.instance)
        self._failed_moves += 1
        outcome = "another is tried later" if self._failed_moves < _MOVES else "nodes on demand stay as they are"
        why = f"the spot machine for node {node.rank} did not come up: {error}; {outcome}"
        self._publish(Notice(why, node.instance.id))

    async def _drop_spare(self, member: Member) -> None:
        """End the spare machine of a rank in the background, unless it was used."""
        spare, member.spare = member.spare, None
        if spare is None:
            return
        spare.cancel()
        await asyncio.wait([spare])
        if not spare.cancelled() and spare.exception() is None and (node := spare.result()) is not None:
            self._end_in_background(node)

    async def _make_node(self, member: Member, node: Node) -> None:
        """Have the engine use the node on a machine, or on another one as long as it is, or turns out, unfit."""
        while True:
            member.node = node
            try:
                if node.state is NodeState.PREPARING:
                    await self._prepare(node)
                await self._start_node(member, node)
            except UnfitMachineError as error:
                member.node = None
                node = await self._exchange(node, error)
            else:
                return

    async def _prepare(self, node: Node) -> None:
        """Wait until a machine runs, reach it, and give it its environment.

        Raises:
            UnfitMachineError: the machine cannot become a node, for a fault of its own.
        """
        await self._machines.wait_running(node)
        self._setup.open(node)
        self._refuse_apart(node)  # before the environment, which takes minutes
        await self._setup.equip(node)
        node.state = NodeState.PREPARED

    async def _start_node(self, member: Member, node: Node) -> None:
        """Start the supervisor of a prepared machine, have it join, and have the engine use the node."""
        self._refuse_apart(node)
        node.state, member.network = NodeState.STARTING, node.instance.network
        await self._setup.start(node, len(self.wanted), head=self._head_of(member) is member)
        node.state = NodeState.JOINING
        self._wake_waiters()
        await self._take_into_use(member, node)
        self.boot_s = self._clock.elapsed() - node.usage.launched_at

    async def _take_into_use(self, member: Member, node: Node) -> None:
        """Have a node whose supervisor runs join, and have the engine use it."""
        rank = member.rank
        await unless_gone(node, self._join(member, node))
        node.state = NodeState.READY
        if rank == HEAD:
            self._announce()
        try:
            await unless_gone(node, self._user.attach(node))
        except BaseException as error:
            reason = str(error) if isinstance(error, UnfitMachineError) else "its workers did not answer"
            self._user.detach(rank, reason, for_good=False)
            raise
        self._machines.unfit.forget(rank)  # later ones are counted from one
        member.used = node
        self._record()

    async def _exchange(self, node: Node, error: UnfitMachineError, *, waits: bool = True) -> Node:
        """Launch another machine in the place of an unfit one, which is ended in the background.

        Raises :class:`~skyward.errors.CapacityError` after the last attempt, and the provider's errors.
        """
        self._machines.reject(node, error)
        self._end_in_background(node)
        return await self._machines.instead_of(node, beside=self._others((node.rank,)), waits=waits)

    def _refuse_apart(self, node: Node) -> None:
        """Raise if the nodes have to reach each other and do not, as far as their machines run."""
        if not self._request.one_network:
            return
        running = {other.rank: other.instance.network for other in self._others((node.rank,)) if other.is_open}
        running[node.rank] = node.instance.network
        if apart := separation(running):
            raise service_out_of_reach(self._request.service_name, apart)

    # --- announcing the head and the fleet's size -------------------------------------------------------------------

    def _wake_waiters(self) -> None:
        """Wake every node that waits for its head."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _join(self, member: Member, node: Node) -> None:
        """Send a node the order to start its workers; the head that it names has to run."""
        while (order := self._order_for(member)) is None:
            await self._changed.wait()
        node.join(order)

    def _order_for(self, member: Member) -> Start | None:
        """Return the order that tells a node its head and the fleet's size; None without a head."""
        head = self._head_of(member)
        if head is None or head.node is None or head.node.state not in _UP:
            return None
        return Start(head_addr=head.node.address, total_nodes=len(self.wanted))

    def _head_of(self, member: Member) -> Member | None:
        """Return the head of a member's node: rank 0 if the node reaches it, else the node itself.

        None until rank 0 has had a node, whose network decides that: who reached the former one waits for the next.
        """
        head = self._members.get(HEAD)
        if head is None or member is head or not member.network:
            return member
        if head.network is None:
            return None
        return head if head.network == member.network else member

    def _announce(self) -> None:
        """Send the head and the size to every ready node."""
        for member in self._members.values():
            if (node := member.node) is None or node.state is not NodeState.READY:
                continue
            try:
                if (order := self._order_for(member)) is not None:
                    node.join(order)
            except (UnreachableError, PoolStateError) as error:  # its own coroutine notices a lost node
                _logger.debug("node %d did not receive a change of the fleet: %s", member.rank, error)

    # --- terminating ------------------------------------------------------------------------------------------------

    async def _end(self, member: Member) -> None:
        """Stop the supervisor of a member, terminate its machines, confirm it. A cancellation waits for its end.

        Raises :class:`~skyward.errors.TerminationError` with the ids of machines that may still exist; termination is
        retried every minute.
        """
        if member.node is not None:
            member.node.state = NodeState.ENDING
        await to_its_end(self._end_machines(member))

    async def _end_machines(self, member: Member) -> None:
        await self._drop_spare(member)
        nodes = self._machines.unended_of(member.rank)
        try:
            await self._machines.end(nodes)
        finally:  # a machine that is not confirmed gone must not block its rank
            member.node = None
            self._end_in_background(*(node for node in nodes if not node.ended))

    def _discard(self, member: Member) -> None:
        """End the machine of a lost node in the background; its rank may be launched again at once."""
        node, member.node = member.node, None
        self._record()
        if node is not None:
            self._end_in_background(node)

    def _end_in_background(self, *nodes: Node) -> None:
        for node in nodes:
            node.has_rank = False
            if not self._closed:  # :meth:`stop` ends all machines itself
                self._spawn(self._end_at_last(node))

    async def _end_at_last(self, node: Node) -> None:
        await self._machines.end_at_last(node)
        self._record()  # its cost is known now

    async def _end_lost_machines(self) -> None:
        """End the machines that appear after their create calls counted as without effect."""
        while True:
            self._end_in_background(*await self._machines.appeared())


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


def _recent_failures(failures: int, loss: NodeLoss, *, lasted_s: float) -> int:
    """Return the number of recent failures after a loss: a preemption is none, a node that lasted ends their series."""
    if lasted_s > _SETTLED_S:
        return 0
    return failures if loss.preempted else failures + 1


def _unless_cancelled(error: Exception) -> None:
    """Raise the cancellation that an error of its own clean-up has replaced."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def _succeed(up: asyncio.Future[None]) -> None:
    if not up.done():  # it was cancelled if the node is no longer intended
        up.set_result(None)


def _fail(up: asyncio.Future[None], error: Exception) -> None:
    if not up.done():
        up.set_exception(error)
        up.exception()  # retrieved here, since it was published: asyncio logs unretrieved ones


async def _raise(error: Exception) -> None:
    raise error


async def _all_of(waiting: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.gather(*map(asyncio.shield, waiting))
