"""The places where workers run, and how a call gets to one of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from skyward.engine.blobs import NodeBlobs
from skyward.engine.dispatch import CallState, GiveUp, WorkerId
from skyward.engine.futures import RawOutcome, RemoteFuture
from skyward.engine.lane import Lane
from skyward.engine.packing import Parcel
from skyward.engine.receiving import Incoming
from skyward.errors import BootstrapError, SkywardError, WorkerLostError
from skyward.provision.nodes import NodeHandle
from skyward.wire.messages import CallHeader, Kind

__all__ = ["AttachedNode", "LiveCall", "Slot", "given_up"]

_FAILED_STARTS = 3


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall:
    """A call that is not over: its state for dispatch, what to send, whom to tell."""

    state: CallState
    parcel: Parcel
    header: CallHeader
    future: RemoteFuture
    incoming: Incoming
    held_on: NodeBlobs | None = None

    def let_go(self) -> None:
        """The call is on no worker now: its blobs may go."""
        if self.held_on is not None:
            self.held_on.release(self.parcel.blobs)
            self.held_on = None


class AttachedNode:
    """A node whose workers take calls."""

    def __init__(self, handle: NodeHandle) -> None:
        self.handle = handle
        self.blobs = NodeBlobs(handle.ready, handle.transport)
        self.call_ports = itertools.cycle(handle.ready.call_ports)

    def worker_log(self, worker: int) -> str:
        """Where a worker's log lies, on the node."""
        return f"{self.handle.access.workdir}/worker-{worker}.log"


class Slot:
    """One worker's place: its lane, and what is known of the process at the other end.

    Attributes:
        ready: done when the worker has answered for the first time; fails when it cannot start.
        linked: whether the lane's link is up.
        alive: whether the process that holds our calls is alive, as far as we know.
        exit_reason: why it ended, once its supervisor has said so.
        unsent: ids of calls given to it whose blobs are still on their way.
    """

    def __init__(self, lane: Lane, node: AttachedNode) -> None:
        self.lane = lane
        self.node = node
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.linked = False
        self.alive = False
        self.exit_reason = ""
        self.unsent: set[int] = set()
        self._failed_starts = 0

    @property
    def id(self) -> WorkerId:
        """The worker's id."""
        return self.lane.worker_id

    def up(self) -> None:
        """A new process answered."""
        self.alive, self.exit_reason = True, ""
        if not self.ready.done():
            self.ready.set_result(None)

    def start_failed(self, reason: str) -> None:
        """The process ended before it ever answered; after a few of them there is no more hope."""
        self._failed_starts += 1
        if self._failed_starts < _FAILED_STARTS or self.ready.done():
            return
        log_path = self.node.worker_log(self.id.worker)
        message = (
            f"worker {self.id.worker} of node {self.id.node} does not start: {reason}; its log on the node: {log_path}"
        )
        self.ready.set_exception(BootstrapError(message, node=self.id.node, step="server", log_path=log_path))

    def has_blobs_of(self, call: LiveCall) -> bool:
        """Whether the call can be sent at once."""
        return not call.parcel.blobs or self.node.blobs.has(call.parcel.blobs)

    def push(self, call: LiveCall) -> None:
        """Send a call whose blobs lie on the node."""
        lane, parcel = self.lane, call.parcel
        if parcel.blobs:
            self.node.blobs.hold(parcel.blobs)
            call.held_on = self.node.blobs
        if parcel.function_id not in lane.functions:
            lane.functions.add(parcel.function_id)
            function = parcel.function.payload
            lane.push([Kind.FUNCTION, parcel.function_id, function.to_wire()], len(function.data) + 64)
        payload = parcel.arguments.payload
        item = [Kind.CALL, call.state.id, parcel.function_id, payload.to_wire(), call.header.to_wire()]
        lane.push(item, len(payload.data) + 128)

    async def ship(self, call: LiveCall, fail: Callable[[LiveCall, RawOutcome], None]) -> None:
        """Put the call's blobs onto the node, then send it, unless it was taken away meanwhile."""
        incarnation = self.lane.incarnation
        self.unsent.add(call.state.id)
        try:
            await self.node.blobs.ensure(call.parcel.blobs)
        except (SkywardError, OSError) as error:
            fail(call, RawOutcome(error=error))
            return
        finally:
            self.unsent.discard(call.state.id)
        if call.state.worker == self.id and self.lane.incarnation == incarnation:
            self.push(call)


def given_up(call: LiveCall, action: GiveUp, slot: Slot | None) -> WorkerLostError:
    """The error of a call that lost its worker too often, or for good (then there is no slot)."""
    node, worker, losses = action.worker.node, action.worker.worker, action.call.losses
    log_path = slot.node.worker_log(worker) if slot is not None else ""
    fate = f"lost its worker {losses} times, the last one on" if losses else "has nowhere left to run but"
    message = (
        f"{call.parcel.label} {fate} node {node}, worker {worker}: {action.reason}. "
        f"Its log on the node: {log_path or 'gone with the node'}"
    )
    return WorkerLostError(message, node=node, worker=worker, reason=action.reason, log_path=log_path)
