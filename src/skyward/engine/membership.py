"""Workers of a cluster: they come and go with their nodes, and one by one."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import cast

from skyward._concurrency.waiting import SYSTEM_CLOCK, wait_until
from skyward.engine.calls import CallTable, LiveCall
from skyward.engine.crashes import ShownCrashes
from skyward.engine.dispatch import Dispatch, GiveUp, WorkerId
from skyward.engine.lane import Lane, LaneOwner
from skyward.engine.performing import Performer
from skyward.engine.slots import AttachedNode, Slot, with_call
from skyward.events import Error, WorkerLost, WorkerReplaced
from skyward.events.bus import EventBus
from skyward.provision.fleet.topology import separation
from skyward.provision.preparing.node_handle import LinkDown, LinkUp, NodeHandle
from skyward.shipping.blobs import Exchange
from skyward.wire.control import Message, WorkerExit, WorkerRunning, WorkerStale

__all__ = ["Membership"]

# Results that a worker sent last may still be on their way when its end is reported, on another connection.
_EXIT_PATIENCE_S = 2.0
_IDLE_CHECK_S = 0.02
# A machine that is taken back kills its worker, its nanny and its supervisor one after the other, within this time.
_VERDICT_S = 1.0
# The supervisor may not have seen a new process yet, and then finds nothing to kill.
_KILL_AGAIN_S = 0.2
# Below 32768, where Linux begins to hand out ports of outgoing connections.
_UNASSIGNED_PORTS = 20_000, 32_768


class Membership:
    """Workers of a cluster's nodes, and sole owner of their slots. Belongs to the event loop.

    Attributes:
        slots: slots of the workers of attached nodes, by id; only this class changes the mapping.
        places: ids of the workers that the fleet should have, in order, present or not.
        lock: held while ``places`` changes; a broadcast holds it until its calls are queued.
        acting: executes the actions that follow from changes.
    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext,
        bus: EventBus,
        dispatch: Dispatch,
        calls: CallTable,
        workers_per_node: int,
    ) -> None:
        self.slots: dict[WorkerId, Slot] = {}
        self.places: tuple[WorkerId, ...] = ()
        self._crashes = ShownCrashes()
        self.lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._bus = bus
        self._dispatch = dispatch
        self._calls = calls
        self._workers_per_node = workers_per_node
        self.acting = Performer(dispatch, calls, self.slots.get)
        self._known: set[WorkerId] = set()  # had a process before: the next one is a replacement, not a first start
        self._leaving: frozenset[int] = frozenset()
        self._exchanges: defaultdict[str, Exchange] = defaultdict(Exchange)

    def expect(self, ranks: Iterable[int]) -> None:
        """Announce nodes of these ranks, so that calls wait for their workers."""
        new = [worker_id for rank in ranks for worker_id in self._of(rank)]
        for worker_id in new:
            self._dispatch.expect(worker_id)
        with self.lock:
            self.places = tuple(sorted({*self.places, *new}))

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """Take nodes of these ranks out of use; only calls pinned to their workers are still done there.

        If they are replaced (``comes_back``), pinned calls that have not begun wait for the replacement.
        """
        self._leaving = self._leaving.union(ranks) if comes_back else self._leaving.difference(ranks)
        retired = [worker_id for rank in ranks for worker_id in self._of(rank)]
        if not comes_back:
            self._take_places(retired)
        for worker_id in retired:
            self.acting.perform(self._dispatch.drain(worker_id, comes_back=comes_back))
        self.acting.perform(
            self._dispatch.finished((), self._loop.time())
        )  # calls of other workers may have become free

    def handle(self, node: NodeHandle, message: Message | LinkDown | LinkUp) -> None:
        """Handle those messages of a node that concern its workers; ignore the others."""
        match message:
            case WorkerExit():
                slot = self.slots.get(WorkerId(node.rank, message.worker))
                if slot is not None and slot.lane.incarnation == message.incarnation:
                    slot.exit_report = message
                    slot.exited.set()
                self.exited(
                    WorkerId(node.rank, message.worker), message.incarnation, message.reason, message.last_words
                )
            case WorkerRunning():
                self.started(WorkerId(node.rank, message.worker))
            case WorkerStale():
                self.stale(WorkerId(node.rank, message.worker), message.incarnation)
            case _:
                pass

    def attach(self, handle: NodeHandle, owner: LaneOwner) -> None:
        """Open lanes to the workers of a node."""
        self.expect((handle.rank,))  # workers of its predecessor may have been given up
        node = AttachedNode(handle, self._exchanges)
        for worker_id, address in zip(self._of(handle.rank), handle.lanes, strict=True):
            self.slots[worker_id] = Slot(Lane(worker_id, address, self._tls, owner), node)

    def separation(self) -> str:
        """Return which attached nodes reach each other if not all of them do; else empty. Thread-safe."""
        places, slots = self.places, tuple(self.slots.values())
        return separation({slot.id.node: slot.node.handle.instance.network for slot in slots if slot.id in places})

    def call_port(self) -> int:
        """Return a port that a call may listen on, on the node of the first worker: free when that node started.

        While the node is absent, return a random port below those of outgoing connections.
        """
        slot = self.slots.get(self.places[0]) if self.places else None
        return next(slot.node.call_ports) if slot is not None else random.randrange(*_UNASSIGNED_PORTS)

    async def wait_ready(self, rank: int, timeout_s: float) -> None:
        """Return when every worker of a node has answered once.

        Raises:
            BootstrapError: a worker cannot start, or has not answered in time.
        """
        slots = self._slots_of(rank)

        def give_up() -> None:
            for slot in slots:
                slot.give_up(f"{slot} did not answer for {timeout_s:g} s; its log: {slot.log_path}")

        patience = self._loop.call_later(timeout_s, give_up)
        try:
            await asyncio.gather(*(slot.ready for slot in slots))
        finally:
            patience.cancel()

    async def idle(self, rank: int) -> None:
        """Wait until the workers of a retired node have nothing left to do."""

        def is_idle() -> bool:
            waiting = rank not in self._leaving  # otherwise its successor does the waiting calls
            return all(self._dispatch.drained(worker_id, waiting=waiting) for worker_id in self._of(rank))

        await self._wait(is_idle, f"the calls on node {rank} to end")

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None:
        """Remove a node that is gone; its calls run elsewhere, pinned ones on its replacement."""
        for exchange in self._exchanges.values():
            exchange.leave(rank)
        for slot in self._slots_of(rank):
            slot.give_up(reason)
            self._leave(slot, reason, preempted=preempted)
        self._leaving -= {rank}
        if for_good:
            gone = self._of(rank)
            self._known.difference_update(gone)
            self._take_places(gone)
            for worker_id in gone:
                self.acting.perform(self._dispatch.worker_gone(worker_id, reason, self._loop.time()))

    def up(self, lane: Lane) -> None:
        """Use a worker whose new process has answered; it holds no calls."""
        slot = self.slots[lane.worker_id]
        if slot.id in self._known:
            self._bus.publish(WorkerReplaced(slot.id.node, slot.id.worker, slot.node.handle.instance.id))
        self._known.add(slot.id)
        slot.up()
        retired, now = slot.id not in self.places, self._loop.time()
        actions = self._dispatch.worker_up(
            slot.id, now, round_trip_s=lane.round_trip_s, retired=retired, held=slot.id.node in self._leaving
        )
        self.acting.perform(actions)

    def started(self, worker_id: WorkerId) -> None:
        """Dial a worker that its supervisor saw start, without the rest of the pause between attempts."""
        slot = self.slots.get(worker_id)
        if slot is not None and not slot.linked:
            slot.lane.nudge()

    def exited(self, worker_id: WorkerId, incarnation: str, reason: str, last_words: str = "") -> None:
        """Record the end of a worker that its supervisor reports, and lose the worker once its link is down."""
        slot = self.slots.get(worker_id)
        if slot is None:
            return
        if slot.lane.incarnation != incarnation:
            if (hopeless := slot.start_failed(reason, last_words)) is not None:
                self._give_up(slot, hopeless)
            return
        slot.exit_reason = reason
        if slot.linked:  # results may still arrive; but a forked child may hold the link open for ever
            self._loop.call_later(_EXIT_PATIENCE_S, slot.lane.drop_link, incarnation)
        else:
            self.lose(slot)

    def stale(self, worker_id: WorkerId, incarnation: str) -> None:
        """Replace a worker that cannot join the new scheduler, unless it is leaving anyway."""
        if worker_id in self.places:
            self.renew(worker_id, incarnation, "it joins the next scheduler")

    def renew(self, worker_id: WorkerId, incarnation: str, reason: str) -> None:
        """Replace a worker's process once it has no calls left."""
        slot = self.slots.get(worker_id)
        if slot is not None and slot.lane.incarnation == incarnation:
            self.acting.perform(self._dispatch.drain(worker_id, comes_back=True))
            self.acting.spawn(self._renew(slot, incarnation, reason))

    def expel(self, slot: Slot, call_id: int) -> None:
        """End the lane of a worker that answered for a call of another worker; it gets no more calls."""
        # The slot goes with the lane, because items already on their way must not count either.
        reason = f"{slot} answered for call {call_id}, which it does not have: it gets no more calls"
        self._bus.publish(Error(reason, slot.node.handle.instance.id))
        self._give_up(slot, reason)

    def lose(self, slot: Slot) -> None:
        """Lose a process that is reported to be gone; the next one keeps the slot.

        Where its machine may have been taken back with it, that verdict comes first: it decides about retries.
        """
        if (
            slot.alive
            and slot.was_killed
            and slot.node.handle.instance.offer.spot
            and slot.id.node not in self._leaving
        ):
            self.acting.spawn(self._lose_unless_preempted(slot, slot.lane.incarnation))
        else:
            self._lose(slot)

    async def lose_reported(self, slot: Slot) -> None:
        """Lose a slot whose next process answers already, once the end of the last one is reported.

        The report takes another connection than the answer. Without it all calls that were sent count as begun, and
        the error has no cause. A control connection that is down must not keep the next process waiting.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(slot.exited.wait(), _EXIT_PATIENCE_S)
        self._lose(slot)

    async def close(self) -> None:
        """Close all lanes and end background work. Idempotent."""
        nodes = {slot.node for slot in self.slots.values()}
        hanging_up = [slot.lane.close() for slot in self.slots.values()]
        await asyncio.gather(
            self.acting.close(), *hanging_up, *(node.blobs.close() for node in nodes), return_exceptions=True
        )

    def _take_places(self, gone: Sequence[WorkerId]) -> None:
        with self.lock:
            self.places = tuple(place for place in self.places if place not in gone)

    def _of(self, rank: int) -> list[WorkerId]:
        return [WorkerId(rank, worker) for worker in range(self._workers_per_node)]

    def _slots_of(self, rank: int) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.id.node == rank]

    async def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        async def probe() -> bool | None:
            return is_done() or None

        await wait_until(probe, deadline_s=math.inf, interval_s=_IDLE_CHECK_S, what=what)

    async def _renew(self, slot: Slot, incarnation: str, reason: str) -> None:
        def is_over() -> bool:
            drained = self._dispatch.drained(slot.id) and slot.id not in self.acting.unsettled
            return slot.lane.incarnation != incarnation or drained

        await self._wait(is_over, f"the calls on {slot} to end")

        async def killed() -> bool | None:
            """Kill the process again until it has gone: its supervisor may not have seen it start yet."""
            if slot.lane.incarnation != incarnation or not slot.alive:
                return True
            slot.end_for(reason)
            await slot.node.handle.kill_worker(slot.id.worker, incarnation)
            return None

        await wait_until(killed, deadline_s=math.inf, interval_s=_KILL_AGAIN_S, what=f"{slot} to be replaced")

    async def _lose_unless_preempted(self, slot: Slot, incarnation: str) -> None:
        def is_over() -> bool:
            return not slot.alive or slot.lane.incarnation != incarnation

        async def is_judged() -> bool | None:
            return is_over() or slot.node.handle.linked or None

        await SYSTEM_CLOCK.sleep(_VERDICT_S)
        await wait_until(is_judged, deadline_s=math.inf, interval_s=_IDLE_CHECK_S, what=f"the verdict on {slot}")
        if not is_over():
            self._lose(slot)

    def _lose(self, slot: Slot) -> None:
        """Move the calls of a process that is gone, and publish its last lines."""
        if not slot.alive:
            return
        slot.alive = False
        for line in self._crashes.once(slot.last_lines()):
            self._bus.publish(line)
        preempted = slot.was_killed and slot.id.node in self._leaving
        reason = f"{slot.exit_reason or 'its process is gone'}{', as its machine is preempted' if preempted else ''}"
        why_ended = slot.why_ended(self._dispatch.call)
        self._lost(slot, f"{why_ended} ({reason})" if why_ended else reason, why_ended, preempted=preempted)

    def _lost(self, slot: Slot, reason: str, why_ended: str = "", *, preempted: bool = False) -> None:
        self._calls.leave(slot.id)
        leaving = slot.id.node in self._leaving
        # otherwise the worker left as planned, and its end is no event
        is_event = (slot.id in self.places and not leaving) or not self._dispatch.drained(slot.id)
        ran = self._dispatch.begun_on(slot.id, slot.begun)
        losses = ran.losses if ran is not None else 0
        slot.unsent.clear()
        now = self._loop.time()
        overran = slot.exit_report.overran if slot.exit_report is not None else 0
        actions = self._dispatch.worker_lost(
            slot.id, reason, now, begun=slot.begun, preempted=preempted, overran=overran
        )
        if is_event:
            event = slot.loss(reason, why_ended)
            if ran is not None and isinstance(event, WorkerLost):
                failed = [action.call for action in actions if isinstance(action, GiveUp)]
                event = with_call(event, cast("LiveCall", ran), charged=ran.losses > losses, failed=ran in failed)
            self._bus.publish(event)
        self.acting.perform(actions)

    def _leave(self, slot: Slot, reason: str, *, preempted: bool = False) -> None:
        """Remove a slot, and close its lane."""
        if slot.alive:
            slot.alive = False
            self._lost(slot, reason, preempted=preempted)
        self.slots.pop(slot.id, None)
        self.acting.spawn(slot.lane.close())

    def _give_up(self, slot: Slot, reason: str) -> None:
        self._leave(slot, reason)
        self._take_places([slot.id])
        self.acting.perform(self._dispatch.worker_gone(slot.id, reason, self._loop.time()))
