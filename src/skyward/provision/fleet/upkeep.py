"""Upkeep of a fleet's size: replaces lost nodes, adds and removes nodes on request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock, keep
from skyward.errors import (
    AuthenticationError,
    BudgetError,
    CapacityError,
    ConfigurationError,
    PoolStateError,
    SkywardError,
)
from skyward.events import Error, InstancePreempted, Notice, SkywardEvent
from skyward.provision.buying.sweep import reason_of
from skyward.provision.buying.unfit import UnfitMachineError
from skyward.provision.fleet.fleet import Fleet
from skyward.provision.fleet.topology import HEAD
from skyward.provision.preparing.node_handle import NodeHandle, NodeLoss, unless_gone

__all__ = ["FleetUser", "Upkeep"]

T = TypeVar("T")

_ATTEMPTS = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_SETTLED_S = 60.0
_BAR_S, _LONGEST_BAR_S = 12.0, 600.0
_GRACE_S = 10.0
"""Seconds after its announced end at which a preempted machine is given up."""
_HOPELESS = (AuthenticationError, BudgetError, ConfigurationError, PoolStateError)


class FleetUser(Protocol):
    """User of the nodes, such as the engine. Called on the event loop."""

    def expect(self, ranks: Iterable[int]) -> None:
        """Expect nodes of these ranks: work may be planned for them."""
        ...

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """Give no new work to nodes of these ranks, which will go.

        With ``comes_back``, calls bound to these ranks wait for the next nodes of the same ranks.
        """
        ...

    async def attach(self, node: NodeHandle) -> None:
        """Use a node; returns once its workers take calls. Raises when they do not."""
        ...

    async def drain(self, rank: int) -> None:
        """Return once the node has no work left and may be ended."""
        ...

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None:
        """Give up a node that is gone; unless ``for_good``, another one of its rank will come. Idempotent.

        If its provider took the machine back (``preempted``), calls that may be repeated are not charged for the loss.
        """
        ...


class Upkeep:
    """Keeper of a started fleet's intended size, until it is closed. Not thread-safe: one event loop runs it.

    A lost node is replaced under its rank; the backoff grows while replacements fail or do not last. When a machine is
    preempted, the next one is launched at once, while the node finishes its running calls; that is no attempt. After
    five attempts or three unfit machines, or at once if the node's ``timeout`` is over, the fleet stays smaller. After
    five nodes in a row that could not be added, further requests are refused for a minute or longer.

    Args:
        fleet: the nodes.
        user: the user of the nodes.
        publish: receives errors and notices; must not block.
        clock: the time, for backoff.
    """

    def __init__(
        self, fleet: Fleet, user: FleetUser, *, publish: Callable[[SkywardEvent], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._fleet = fleet
        self._user = user
        self._publish = publish
        self._clock = clock
        self._wanted: set[int] = set()
        self._attached: set[int] = set()
        self._up: dict[int, asyncio.Future[None]] = {}
        self._launching: dict[int, asyncio.Task[None]] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._reported: Exception | None = None
        self._failed_additions, self._barred_until = 0, -math.inf
        self._closed = False

    @property
    def wanted(self) -> frozenset[int]:
        """Ranks of the intended nodes."""
        return frozenset(self._wanted)

    async def start(self, ranks: Sequence[int]) -> None:
        """Start the fleet and keep it. If any node fails, the whole start fails, and the caller stops the fleet."""
        self._wanted = set(ranks)
        self._user.expect(ranks)
        await self._fleet.start()
        attaching = [asyncio.ensure_future(self._attach(node)) for node in self._fleet.nodes]
        for node in await _all_or_none(attaching):
            self._up[node.rank] = up = asyncio.get_running_loop().create_future()
            up.set_result(None)
            self._keepers[node.rank] = asyncio.create_task(self._keep(node))

    def scale(self, size: int, drop: Collection[int]) -> Coroutine[Any, Any, None]:
        """Grow or shrink the fleet to ``size`` nodes; the returned coroutine waits for it.

        The intended size changes at once, so a later call overrides an earlier one and cancels its wait for a node
        that is no longer needed.
        """
        if self._closed:
            raise PoolStateError("the pool is closed")
        if size > len(self._wanted) and (refusal := self._refusal()) is not None:
            return _raise(refusal)
        if HEAD not in self._wanted:  # it was given up; nodes in its reach share its scheduler again
            self._grow(1)
        surplus = len(self._wanted) - size
        if surplus > 0:
            for rank in _dispensable(self._wanted, self._attached, drop)[:surplus]:
                self._begin_to_leave(rank)
        elif surplus < 0:
            self._grow(-surplus)
        self._fleet.resize(len(self._wanted))
        return _all_of([*self._leaving.values(), *(self._up[rank] for rank in self._wanted)])

    async def close(self) -> None:
        """Stop all upkeep; the nodes stay as they are. Idempotent."""
        self._closed = True
        tasks = [*self._keepers.values(), *self._leaving.values(), *self._launching.values()]
        for task in (*tasks, *self._up.values()):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refusal(self) -> Exception | None:
        """Return the error for adding nodes now, after too many failures in a row: every attempt costs money."""
        wait_s = self._barred_until - self._clock.monotonic()
        if wait_s <= 0:
            return None
        return CapacityError(
            f"the last {self._failed_additions} nodes could not be added; there will be no further attempt for "
            f"{wait_s:.0f} s. The last error: {self._reported}"
        )

    # --- more nodes -------------------------------------------------------------------------------------------------

    def _grow(self, count: int) -> None:
        taken = self._wanted | self._leaving.keys()
        ranks = [rank for rank in range(len(taken) + count) if rank not in taken][:count]
        self._wanted.update(ranks)
        self._user.expect(ranks)
        launching = asyncio.create_task(self._fleet.launch(ranks))
        for rank in ranks:
            self._up[rank] = asyncio.get_running_loop().create_future()
            self._launching[rank] = launching
            self._keepers[rank] = asyncio.create_task(self._add(rank))

    async def _add(self, rank: int) -> None:
        try:
            await asyncio.shield(self._launching[rank])
            node = await self._attach(await self._fleet.bring_up(rank))
        except Exception as error:
            _unless_cancelled(error)
            self._failed_additions += 1
            if self._failed_additions >= _ATTEMPTS:
                self._barred_until = self._clock.monotonic() + min(_LONGEST_BAR_S, _BAR_S * self._failed_additions)
            self._report(f"node {rank} cannot be added", error)
            self._give_up(rank, f"node {rank} could not be added: {error}")
            _fail(self._up[rank], error)
            return
        self._failed_additions = 0
        _succeed(self._up[rank])
        await self._keep(node)

    async def _attach(self, node: NodeHandle) -> NodeHandle:
        """Hand the node to its user, unless it dies meanwhile; return it, or the next one if its machine is over."""
        while True:
            try:
                await unless_gone(node, self._user.attach(node))
            except UnfitMachineError as error:
                self._user.detach(node.rank, str(error), for_good=False)
                node = await self._fleet.bring_up_another(node.rank, error)
            except BaseException:
                self._user.detach(node.rank, "its workers did not answer", for_good=False)
                await self._fleet.end((node.rank,))
                raise
            else:
                self._fleet.accept(node.rank)
                self._attached.add(node.rank)
                return node

    # --- replacement of lost nodes ----------------------------------------------------------------------------------

    async def _keep(self, node: NodeHandle) -> None:
        """Replace the nodes of this rank, until it is given up or no longer intended."""
        present, failures = node, 0

        async def live() -> None:
            nonlocal present, failures
            while present is not None:
                before, failures = failures, failures + 1  # stays counted if this raises: each run may buy a machine
                present, failures = await self._outlive(present, before)

        what = f"keeping node {node.rank}"
        await keep(live, what=what, report=lambda why: self._publish(Error(why)), clock=self._clock)

    async def _outlive(self, node: NodeHandle, failures: int) -> tuple[NodeHandle | None, int]:
        """Wait for the node's loss; return its replacement, or None, and the number of recent failures."""
        rank, began = node.rank, self._clock.monotonic()
        try:
            loss = await _wait_lost(node, lambda: self._empty(rank), clock=self._clock)
            self._attached.discard(rank)
            self._fleet.discard(rank)
            reason = f"node {rank} {'is preempted' if loss.preempted else 'is lost'}: {loss.reason}"
            if rank not in self._wanted:
                self._user.detach(rank, reason, for_good=True, preempted=loss.preempted)
                return None, failures
            if loss.timed_out:
                self._publish(Error(reason, node.instance.id))
                self._give_up(rank, reason)
                return None, failures
            if loss.preempted and not loss.announced:
                self._publish(InstancePreempted(node.instance.id, rank, 0.0))
            kind = Notice if loss.preempted else Error
            self._publish(kind(f"{reason}; another takes its place", node.instance.id))
            up = self._up[rank] = asyncio.get_running_loop().create_future()
            self._user.detach(rank, reason, for_good=False, preempted=loss.preempted)
            failures = _recent_failures(failures, loss, lasted_s=self._clock.monotonic() - began)
            replacement, failures = await self._replace(rank, failures)
            if isinstance(replacement, str):
                reason = f"{reason}, and could not be replaced: {replacement}"
                self._give_up(rank, reason)
                _fail(up, CapacityError(reason))
                return None, failures
            _succeed(up)
            return replacement, failures
        finally:
            await self._fleet.drop_spare(rank)

    def _empty(self, rank: int) -> Coroutine[Any, Any, None] | None:
        """Launch the next machine of a preempted rank; return the draining of the present one."""
        if rank not in self._wanted:
            return None
        self._fleet.begin_spare(rank)
        self._user.retire((rank,), comes_back=True)
        return self._drain(rank)

    async def _replace(self, rank: int, failures: int) -> tuple[NodeHandle | str, int]:
        """Return another node for a lost one, or the reason for giving it up, and the number of recent failures."""
        why = "the nodes before it did not last either"
        while failures < _ATTEMPTS:
            await self._clock.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures) if failures > 1 else 0)
            try:
                await self._fleet.launch((rank,))
                node = await self._attach(await self._fleet.bring_up(rank))
            except _HOPELESS as error:
                _unless_cancelled(error)
                self._report(f"node {rank} cannot be replaced", error)
                return reason_of(error), failures
            except Exception as error:
                _unless_cancelled(error)
                self._report(f"node {rank} could not be replaced", error)
                why = reason_of(error)
                # Unfit machines cost money, and there were several: no further ones without an order of the user.
                failures = _ATTEMPTS if isinstance(error, CapacityError) and error.attempts else failures + 1
            else:
                return node, failures
        return why, failures

    def _give_up(self, rank: int, reason: str) -> None:
        self._wanted.discard(rank)
        self._user.detach(rank, reason, for_good=True)
        self._fleet.resize(len(self._wanted))
        if rank == HEAD:
            self._fleet.give_up_head()

    def _report(self, what: str, error: Exception) -> None:
        if error is not self._reported:  # many nodes may fail with one error, which is reported once
            self._reported = error
            self._publish(Error(f"{what}: {error}"))

    # --- fewer nodes ------------------------------------------------------------------------------------------------

    def _begin_to_leave(self, rank: int) -> None:
        self._wanted.discard(rank)
        self._user.retire((rank,))
        self._up[rank].cancel()
        self._leaving[rank] = asyncio.create_task(self._leave(rank))

    async def _drain(self, rank: int) -> None:
        try:
            await self._user.drain(rank)
        except Exception as error:  # the node ends all the same: it costs money
            _unless_cancelled(error)
            self._report(f"node {rank} could not be drained", error)

    async def _leave(self, rank: int) -> None:
        try:
            if rank in self._attached:
                await self._drain(rank)
            keeper = self._keepers[rank]
            keeper.cancel()
            launching = self._launching.get(rank)  # not cancelled: it launches other nodes too
            await asyncio.gather(keeper, *([launching] if launching else []), return_exceptions=True)
            self._attached.discard(rank)
            self._user.detach(rank, "the fleet was made smaller", for_good=True)
            await self._fleet.end((rank,))
        except SkywardError as error:
            self._report(f"node {rank} could not be ended", error)
            raise
        finally:
            del self._leaving[rank]


async def _wait_lost(
    node: NodeHandle, empty: Callable[[], Coroutine[Any, Any, None] | None], *, clock: Clock
) -> NodeLoss:
    """Return once the node is gone, or is to be given up because its machine is taken back.

    A preempted node is given up when it has no work left, at the latest ``_GRACE_S`` after its announced end. It may
    still run then: its caller ends it.

    Args:
        node: the node.
        empty: called when the provider announces that it takes the machine back. Returns work that ends when the node
            has nothing left to do, or None if another task ends the node.
        clock: the time.
    """
    gone, notice = asyncio.ensure_future(node.wait_gone()), asyncio.ensure_future(node.wait_notice())
    waiting: list[asyncio.Future[Any]] = [gone, notice]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        emptying = None if gone.done() else empty()
        if emptying is None:
            return await gone
        waiting += [asyncio.ensure_future(emptying), asyncio.ensure_future(clock.sleep(notice.result() + _GRACE_S))]
        await asyncio.wait({*waiting} - {notice}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return replace(gone.result(), announced=True, preempted=True)
        return NodeLoss(reason="its provider takes its machine back", announced=True, preempted=True)
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _recent_failures(failures: int, loss: NodeLoss, *, lasted_s: float) -> int:
    """Return the number of recent failures after a loss: a preemption is none, a node that lasted ends their series."""
    if lasted_s > _SETTLED_S:
        return 0
    return failures if loss.preempted else failures + 1


def _dispensable(wanted: AbstractSet[int], attached: AbstractSet[int], drop: Collection[int]) -> list[int]:
    """Order nodes by removal: those in ``drop``, those not attached yet, the highest ranks."""
    return sorted(wanted - {HEAD}, key=lambda rank: (rank not in drop, rank in attached, -rank))


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


async def _all_or_none(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    """Return all results; when one fails, cancel the others and wait for their end before raising its error."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_of(waiting: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.gather(*map(asyncio.shield, waiting))
