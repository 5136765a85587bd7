"""Scheduler of an open pool: calls from any thread to the workers of its nodes, and their outcomes back.

:mod:`skyward.scheduling.dispatch_and_retries` decides which worker gets which call; the scheduler tells it what
happens, and carries its orders out over the links to the workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import shutil
import ssl
import threading
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never, cast

from skyward import events as ev
from skyward.base.exits import uninterrupted
from skyward.base.loop import LoopThread
from skyward.base.waiting import EAGER_S, SYSTEM_CLOCK, BusyWaits, wait_until
from skyward.errors import BudgetError, ConfigurationError, PoolStateError, SkywardError
from skyward.events.bus import Courier, EventBus
from skyward.events.log_files import handle_record
from skyward.events.snapshot import PoolSnapshot, WorkerSnapshot
from skyward.fleet.node import LinkDown, LinkUp, Node
from skyward.fleet.topology import separation
from skyward.market.autoscale import Workload
from skyward.scheduling.calls import (
    CallBatch,
    CallGang,
    CallNumbers,
    CallObserver,
    CallSink,
    CallTable,
    Incoming,
    LiveCall,
    RawOutcome,
    RemoteFuture,
    WorkCount,
    pack_calls,
)
from skyward.scheduling.checkpoints import Checkpoint
from skyward.scheduling.dispatch_and_retries import Action, Cancel, Dispatch, GiveUp, Revoke, Send, WorkerId
from skyward.scheduling.jobs import FleetJobs
from skyward.scheduling.services import Services
from skyward.scheduling.streams import StreamBatch
from skyward.scheduling.worker_link import (
    AttachedNode,
    ShownCrashes,
    WorkerLink,
    given_up,
    out_of_reach,
    used_up,
    with_call,
)
from skyward.shipping.blobs import Exchange
from skyward.shipping.function_cache import FunctionCache
from skyward.shipping.pickling import LARGE_BYTES
from skyward.submission import ArgumentMemo, CallLimits, Invocation, worker_names
from skyward.wire import messages
from skyward.wire.control import JobRunning, Message, WorkerExit, WorkerRunning

log = logging.getLogger("skyward.scheduling")

_GIB = 1 << 30
# Closing a pool must not hang because one of the user's callbacks does.
_CALLBACKS_TIMEOUT_S = 10.0
# Between two looks for overdue calls, so that calls behind one wait no longer than this once it counts as overdue.
_REBALANCE_S = 0.1
# Limit of a new node's workers for their first answer.
_FIRST_ANSWER_S = 120.0
# Results that a worker sent last may still be on their way when its end is reported, on another connection.
_EXIT_PATIENCE_S = 2.0
_IDLE_CHECK_S = 0.02
_LOOK_S = 5.0  # a wait that lasts longer looks again
# A machine that is taken back kills its worker and its supervisor one after the other, within this time.
_VERDICT_S = 1.0
# The supervisor may not have seen a new process yet, and then finds nothing to kill.
_KILL_AGAIN_S = 0.2
# Below 32768, where Linux begins to hand out ports of outgoing connections.
_UNASSIGNED_PORTS = 20_000, 32_768
_OUTPUT = (messages.PrintedLines.CODE, messages.EmittedEvent.CODE, messages.LoggedRecord.CODE)
# After this the supervisor kills a worker that has not ended a cancelled call: a call may hold the interpreter's lock.
_CANCEL_PATIENCE_S = 1.0
# A generator that nothing reads any more, and that does not end at its next yield within this time, is cancelled.
_STOP_PATIENCE_S = 0.8
# Fresh processes for one call. A third would be used up by the call's own arguments or module (decision 013).
_RENEWALS = 2
# A killed rank's connections close at once, so other ranks may report errors before its supervisor reports its end.
_ECHO_S = 0.5
# Limit of the wait while the link to a silent rank is down: the rank that raised keeps its worker that long.
_ECHO_PATIENCE_S = 10.0


class Scheduler:
    """Calls of a pool, and the workers of its nodes. Belongs to the event loop, except for the methods that submit.

    Args:
        tls: context of the connections to workers.
        bus: receiver of events.
        workers_per_node: workers on each node.
        thread: the client's loop thread, in which it is made.
        services: services of front-ends on the nodes.
        functions: pickles of the functions that the pool has sent.
        large_bytes: size from which buffers of arguments are kept out of the pickle, and are sent to a node once.
        subscribed: callbacks that receive everything on the bus already.
        observer: receiver of the calls; None without telemetry.
        bring_node: waits for a first node, on an elastic pool, whose calls wait where there is none; None on others.
        checkpoints: folder here for copies of calls' checkpoints; None keeps none.

    Attributes:
        links: links to the workers of attached nodes, by id.
        places: ids of the workers that the fleet should have, in order, present or not.
        calls: the unfinished calls.
        jobs: the jobs on the nodes; None for a pool that is not kept.
    """

    jobs: FleetJobs | None = None

    _unpaid: tuple[str, BudgetError | None] = "", None
    """Why the last rank got no node, if the pool could not pay it, in words and as an error."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        bus: EventBus,
        *,
        workers_per_node: int,
        thread: LoopThread,
        services: Services,
        functions: FunctionCache | None = None,
        large_bytes: int = LARGE_BYTES,
        subscribed: tuple[ev.Callback, ...] = (),
        observer: CallObserver | None = None,
        bring_node: Callable[[], None] | None = None,
        checkpoints: Path | None = None,
    ) -> None:
        self.links: dict[WorkerId, WorkerLink] = {}
        self.places: tuple[WorkerId, ...] = ()
        self.calls = CallTable(bus.publish)
        self._loop = asyncio.get_running_loop()
        self._thread = thread
        self._services = services
        self._bus = bus
        self._tls, self._workers_per_node = tls, workers_per_node
        self._bring_node = bring_node
        self._dispatch = Dispatch()
        # Submission, from any thread.
        self._functions = functions or FunctionCache()
        self._large_bytes = large_bytes
        self._subscribed = subscribed
        self._observer, self._checkpoints = observer, checkpoints
        self._ids = itertools.count(1)
        self._numbers = CallNumbers()
        self._waiting: deque[LiveCall] = deque()
        self._due = False
        self._entrance = threading.RLock()  # reentrant: a finalizer in the thread that holds it may cancel a future
        self._closed_for: SkywardError | None = None
        self._callbacks = Courier("skyward-callbacks", what="a done-callback of a call")
        # Held while `places` changes; a broadcast holds it until its calls are queued.
        self._placing = threading.Lock()
        # Orders under way.
        self._actions: deque[Action] = deque()
        self._performing = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy_since = 0.0
        self._busy_waits = BusyWaits()
        self._ticking: asyncio.TimerHandle | None = None
        # Workers: those that had a process before, whose next one is a replacement; nodes that leave, to come back.
        self._known: set[WorkerId] = set()
        self._jobs: dict[WorkerId, str] = {}  # incarnations of workers that run a call of a job
        self._leaving: frozenset[int] = frozenset()
        # Workers whose call of a gang has raised, until the gang's outcome is settled. Their processes must live that
        # long: some frameworks end all other ranks when one process goes.
        self._unsettled: set[WorkerId] = set()
        self._exchanges: defaultdict[str, Exchange] = defaultdict(Exchange)
        self._crashes = ShownCrashes()

    # --- submission, from any thread ----------------------------------------------------------------------------------

    def submit(
        self, calls: Iterable[Invocation], memo: ArgumentMemo, batch: CallSink | None = None
    ) -> list[RemoteFuture]:
        """Pickle calls and queue them, each for any worker; a ``batch`` is for a caller that waits for all of them."""
        packed = pack_calls(calls, memo, self._functions, large_bytes=self._large_bytes)
        if len(self.places) > 1:
            for call in packed:
                if call.together:
                    raise ConfigurationError(
                        f"{call.label} is decorated with skyward.distributed: all {len(self.places)} workers of the "
                        f"pool run it together; use @, as in {call.label}(...) @ pool"
                    )
        return self._queue(packed, batch)

    def broadcast(self, call: Invocation, batch: CallSink | None = None) -> list[RemoteFuture]:
        """Pickle a call and queue it on every worker, ordered by (node, worker); ``batch`` is as for :meth:`submit`."""
        (packed,) = pack_calls([call], ArgumentMemo(), self._functions, large_bytes=self._large_bytes)
        if self._bring_node is not None and not self.places:
            self._bring_node()  # here, as pickling may take longer than a node stays idle
        with self._placing:  # a leaving node must not look idle before it has these calls
            calls = [replace(packed, pinned=worker, header=header) for worker, header in self._ranks(packed)]
            if call.gang:
                CallGang(calls)
            return self._queue(calls, batch)

    def run(self, calls: Iterable[Invocation], *, all_of_them: bool = False, everywhere: bool = False) -> CallBatch:
        """As :meth:`submit`, and wait: the first failure drops the other calls, except with ``all_of_them``.

        With ``everywhere``, the one call runs on every worker. Ctrl-C ends running calls: their workers are replaced,
        and the pool stays usable.
        """
        batch = CallBatch()
        try:
            # Ctrl-C may come once the first call has begun, before this returns.
            self.broadcast(*calls, batch=batch) if everywhere else self.submit(calls, ArgumentMemo(), batch)
            while not batch.wait(_LOOK_S) or (all_of_them and batch.remaining):
                if all_of_them:
                    batch.rearm()
            if batch.remaining:
                self.cancel(batch.unfinished(), kill=False)  # running ones go on: ending them would cost their workers
        except BaseException:
            with uninterrupted():
                self.cancel(batch.unfinished())
            raise
        return batch

    def cancel(self, calls: Iterable[Any], *, kill: bool = True) -> None:
        """See :meth:`end_calls`; calls that have not come in yet are cancelled too."""
        self._on_loop(partial(self.end_calls, list(calls), kill=kill))

    def grant(self, call: LiveCall, items: int, nbytes: int) -> None:
        """Let a generator run on: its reader has read so many items, of that size, in total."""

        def send() -> None:
            for link, _ in self._held([call]):
                link.send_item(messages.StreamCredit(call.id, items, nbytes))

        self._on_loop(send)

    def stop_stream(self, call: LiveCall) -> None:
        """Drop a generator that is queued, and close one that runs; one that does not end at once is ended."""
        self._on_loop(partial(self._stop_stream, call))

    def join(self) -> None:
        """Wait up to 10 s for running callbacks. Not on the loop."""
        if not self._callbacks.close(_CALLBACKS_TIMEOUT_S):
            log.warning("a done-callback is still busy %g s after its pool was closed", _CALLBACKS_TIMEOUT_S)

    def _queue(self, calls: Sequence[LiveCall], batch: CallSink | None) -> list[RemoteFuture]:
        """Queue calls; return their futures, none with a batch."""
        callbacks = ev.current_callbacks()
        if callbacks:
            callbacks = tuple(callback for callback in callbacks if callback not in self._subscribed)
        if batch is not None:
            batch.fill(calls)
        futures: list[RemoteFuture] = []
        for index, call in enumerate(calls):
            if batch is None:
                call.sink = future = RemoteFuture(self._drop, self._run_callback)
                future.call = call
                futures.append(future)
            else:
                call.sink, call.index, call.work = batch, index, batch.work
            call.id = next(self._ids)
            call.number = next(self._numbers[call.label])
            call.callbacks = callbacks
            if call.limits is not None:
                call.header = _limited(call.header, call.limits)
            if self._observer is not None:
                self._observer.begin(call)
        with self._entrance:
            if self._closed:
                reason = self._closed_for or "open it with `with ComputePool(...) as pool:`"
                raise PoolStateError(f"the pool is closed; {reason}")
            self._waiting.extend(calls)
            # One wake-up for all calls queued before the loop runs: each costs about 25 µs (decision 007).
            if not self._due:
                self._loop.call_soon_threadsafe(self._take_in)
                self._due = True  # afterwards: Ctrl-C in between would leave all later calls waiting for it
        return futures

    def _ranks(self, call: LiveCall) -> list[tuple[WorkerId, messages.CallHeader]]:
        """Return every worker, with the header of its call of a broadcast."""
        workers = self.places
        if not workers:
            raise PoolStateError("every node of the pool is gone")
        if call.together and (apart := self.separation()):
            raise out_of_reach(call.label, apart)
        # One seed and one port for all ranks: they have to agree on both without a message between them.
        seed, port = random.getrandbits(32), self._call_port()
        counts = Counter(worker.node for worker in workers)
        firsts = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
        world = messages.CallHeader(
            world=len(workers), seed=seed, head_port=port, nodes=len(counts), gang=call.together
        )
        return [
            (worker, replace(world, rank=rank, local_rank=rank - firsts[worker.node]))
            for rank, worker in enumerate(workers)
        ]

    def _call_port(self) -> int:
        """Return a port that a call may listen on, on the node of the first worker: free when that node started.

        While the node is absent, return a random port below those of outgoing connections.
        """
        link = self.links.get(self.places[0]) if self.places else None
        return next(link.node.call_ports) if link is not None else random.randrange(*_UNASSIGNED_PORTS)

    def _drop(self, call: LiveCall) -> None:
        self.cancel([call], kill=False)

    def _on_loop(self, work: Callable[[], None]) -> None:
        with self._entrance:
            if not self._closed:
                self._loop.call_soon_threadsafe(work)

    def _run_callback(self, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        """Run a done-callback, never on the loop: callbacks may block and take locks."""
        if self._thread.is_current:
            self._callbacks.run(partial(fn, future))
        else:
            fn(future)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Submit the queued calls to dispatch; without a worker, or once closed, they fail at once."""
        with self._entrance:
            self._due = False
            calls = list(self._waiting)
            self._waiting.clear()
        if self._closed or not (self.places or self._bring_node):
            why = "the pool was closed before the call was done" if self._closed else "every node of the pool is gone"
            for call in calls:
                call.sink.deliver(call.index, RawOutcome(error=self._closed_for or PoolStateError(why)))
            return
        now, unfinished = self._loop.time(), self.calls.unfinished
        alone = not unfinished and len(calls) == 1
        if not unfinished:
            self._busy_since = now
        self.calls.add(calls, now)
        self._perform(self._dispatch.submit(calls, now))
        # Waking an idle core takes 20 to 40 µs, and cold caches cost more: staying awake took a round trip of one call
        # after the other from 610 to 400 µs, and left gather as it was (decision 007).
        if self._busy_waits.due and alone:
            self._stay_awake()
        if self._ticking is None and unfinished:
            self._ticking = self._loop.call_later(_REBALANCE_S, self._tick)

    def _stay_awake(self) -> None:
        """Keep the loop from sleeping for ``EAGER_S``, because the last calls were answered soon."""
        if self.calls.unfinished and self._loop.time() < self._busy_since + EAGER_S:
            self._loop.call_soon(self._stay_awake)

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(_REBALANCE_S, self._tick) if self.calls.unfinished else None
        now = self._loop.time()
        self.calls.publish_progress(now, self._running_works)
        self._perform(self._dispatch.rebalance(now))
        for worker_id in self._dispatch.held_up():
            if (link := self.links.get(worker_id)) is not None:
                link.send_item(messages.CallsWait())

    def end_calls(self, calls: Iterable[LiveCall], *, kill: bool, error: Exception | None = None) -> None:
        """Drop queued calls; end running ones with their worker, or without ``kill`` ignore their results."""
        self._take_in()
        unfinished = [call for call in calls if self.calls.unfinished.get(call.id) is call]
        actions = self._dispatch.cancel([call.id for call in unfinished], kill=kill)
        for call in unfinished:
            self._complete(call, RawOutcome(error=error or CancelledError("the call was cancelled")))
        self._perform(actions)

    def _stop_stream(self, call: LiveCall) -> None:
        self.end_calls([call], kill=False)
        for link, _ in self._held([call]):
            link.send_item(messages.StopStream(call.id))
            self._loop.call_later(_STOP_PATIENCE_S, self._end_stream, link, call)

    def _end_stream(self, link: WorkerLink, call: LiveCall) -> None:
        if self._is_current(link) and self._dispatch.call(call.id) is call and call.worker == link.id:
            self._take_back(link, Cancel(link.id, [call.id]))
            self._insist(link, [call.id], link.incarnation)  # at once: it runs alone, and has had its time

    def _complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """Complete a call; if it has failed, the other calls of its gang fail with it and are ended.

        An exception from a call of a gang is held back for a moment: if another rank turns out to be lost, that loss
        is the cause, although the broken connections to the lost rank are reported sooner.
        """
        if call.gang is not None and len(call.gang.calls) > 1 and isinstance(raw.error, messages.PackedError):
            call.gang.raised.add(call.id)
            if raw.worker is not None:
                self._unsettled.add(raw.worker)
            self._loop.call_later(_ECHO_S, self._settle, call, call.gang, raw, self._loop.time() + _ECHO_PATIENCE_S)
        else:
            self._complete_now(call, raw)

    def _settle(self, call: LiveCall, gang: CallGang, raw: RawOutcome, until: float) -> None:
        """Complete a call of a gang, after waiting for ranks that have not raised and whose link is down."""
        silent = [member for member in gang.calls if member.id not in gang.raised]
        # A rank without a link may be lost, which its supervisor reports, or still has an error on the way.
        doubtful = any(not link.linked or link.exit_report for link, _ in self._held(silent))
        if doubtful and not gang.failed and self._loop.time() < until:
            self._loop.call_later(_ECHO_S, self._settle, call, gang, raw, until)
        else:
            self._complete_now(call, raw)
            if raw.worker is not None:
                self._unsettled.discard(raw.worker)

    def _complete_now(self, call: LiveCall, raw: RawOutcome) -> None:
        self.calls.complete(call, raw)
        if call.gang is None or raw.error is None or not call.gang.fail():
            return
        # Killed, not taken down: jax waits at a barrier for stuck ranks, TensorFlow never leaves (decision 013).
        others = [other for other in call.gang.calls if self.calls.unfinished.get(other.id) is other]
        actions = self._dispatch.cancel([other.id for other in others], kill=True)
        for other in others:
            # Before they are ended, or each would fail with its own end as the cause. Each outcome gets a name.
            self.calls.complete(other, replace(raw))
        self._perform(actions)

    def _held(self, calls: Iterable[LiveCall]) -> Iterator[tuple[WorkerLink, LiveCall]]:
        """Yield the calls that a worker holds, each with the link to it."""
        for call in calls:
            if call.worker is not None and (link := self.links.get(call.worker)) is not None:
                yield link, call

    async def close(self, reason: SkywardError | None = None) -> None:
        """Refuse calls, fail unfinished ones, with ``reason`` if there is one, and close all links. Idempotent."""
        with self._entrance:
            self._closed = True
            self._closed_for = reason
        if self._ticking is not None:
            self._ticking.cancel()
        error = reason or PoolStateError("the pool was closed before the call was done")
        self._take_in()
        for call in self.calls:
            self.calls.complete(call, RawOutcome(error=error))
        for task in self._tasks:
            task.cancel()
        closing = [link.close() for link in self.links.values()]
        closing += [node.blobs.close() for node in {link.node for link in self.links.values()}]
        await asyncio.gather(*self._tasks, *closing, return_exceptions=True)
        if self._checkpoints is not None:
            await asyncio.to_thread(shutil.rmtree, self._checkpoints, ignore_errors=True)

    # --- dispatch's orders --------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        """Execute actions in order; actions that result from one of them run after the rest."""
        # Sending may fail a call, which leads to more actions: nested, they would overtake those already decided.
        self._actions.extend(actions)
        if self._performing or self._closed:
            return
        self._performing = True
        try:
            while self._actions:
                action = self._actions.popleft()
                link = self.links.get(action.worker)
                match action:
                    case GiveUp():
                        if (call := self.calls.unfinished.get(action.call.id)) is not None:
                            reason, unpaid = self._unpaid
                            error = given_up(call, action, link, unpaid=unpaid if action.reason == reason else None)
                            self._complete(call, RawOutcome(error=error))
                    case _ if link is None:
                        pass  # the worker has gone since the action was decided, and dispatch has moved its calls
                    case Send():
                        self._send(link, cast("Sequence[LiveCall]", action.calls))
                    case Revoke() | Cancel():
                        self._take_back(link, action)
                    case _:
                        assert_never(action)
        finally:
            self._performing = False

    def _send(self, link: WorkerLink, calls: Sequence[LiveCall]) -> None:
        ready: list[LiveCall] = []
        for call in calls:
            if call.worker != link.id:
                continue  # taken away by an action that an earlier call of this batch led to
            if isinstance(call.sink, RemoteFuture) and not call.sink.begin():
                self.end_calls([call], kill=False)  # settled here, without a message: it has no position yet
                continue
            if call.trace is not None:
                call.trace.sent(link.id)
            if call.checkpoint is not None and not call.checkpoint.is_on(link.node.handle):
                self._spawn(self._bring_checkpoint(link, call, call.checkpoint))
            elif not call.blobs or link.hold_present(call):
                ready.append(call)
            else:
                self._spawn(link.ship(call, self._fail))
        link.send_calls(ready)

    async def _bring_checkpoint(self, link: WorkerLink, call: LiveCall, checkpoint: Checkpoint) -> None:
        """Put a call's checkpoint onto the node of its next run; send the call, unless it was taken away meanwhile.

        If that fails while the node lives, as on a full disk, the call begins without it.
        """
        token = call.shipping = object()
        incarnation, rank = link.incarnation, link.id.node
        try:
            count = await checkpoint.move(link.node.handle)
            news = ev.Notice(f"{call.name} continues from its checkpoint on node {rank}") if count else None
        except (SkywardError, OSError) as error:
            lost = f"{call.name} begins without its checkpoint, which could not be put onto node {rank}: {error}"
            news = ev.Error(lost, link.node.handle.instance.id)
        if call.shipping is not token or link.incarnation != incarnation:
            return
        if news is not None:
            self._bus.publish(news)
        if not call.blobs or link.hold_present(call):
            call.shipping = None
            link.send_calls([call])
        else:
            await link.ship(call, self._fail)

    def _note_checkpoint(self, link: WorkerLink, item: messages.CheckpointWritten) -> None:
        """Have what a call has written into its folder of checkpoints copied here."""
        call = self.calls.unfinished.get(item.call_id)
        if call is None or call.worker != link.id or self._checkpoints is None:
            return
        checkpoint = call.checkpoint
        if checkpoint is None or checkpoint.name != item.name or not checkpoint.is_on(link.node.handle):
            report = partial(self._report_checkpoint, call.name, link)
            checkpoint = Checkpoint(item.name, link.node.handle, self._checkpoints, report=report)
            if (earlier := call.checkpoint) is not None:
                earlier.drop(stays_on_node=False)
            call.checkpoint = checkpoint
            call.header = replace(call.header or messages.CallHeader(), checkpoint=item.name)
        checkpoint.refresh()

    def _report_checkpoint(self, call: str, link: WorkerLink, reason: str) -> None:
        text = f"the checkpoint of {call} could not be copied here so far, and would be lost with its node: {reason}"
        self._bus.publish(ev.Error(text, link.node.handle.instance.id))

    def _fail(self, call: LiveCall, raw: RawOutcome) -> None:
        actions = self._dispatch.finished([(call.id, 0.0)], self._loop.time())
        self._complete(call, raw)
        self._perform(actions)

    def _give_back(self, call_ids: Sequence[int]) -> None:
        """Return calls that are on no worker to dispatch, which assigns them again."""
        for call_id in call_ids:
            if (call := self.calls.unfinished.get(call_id)) is not None:
                call.let_go()
        self._perform(self._dispatch.given_back(call_ids, self._loop.time()))

    def _restart(self, call_ids: Sequence[int], why: str) -> None:
        """Give calls back that need a fresh process; a call that used up several of them fails."""
        for call in filter(None, map(self.calls.unfinished.get, call_ids)):
            call.renewals += 1
            if call.renewals > _RENEWALS:
                self._fail(call, RawOutcome(error=used_up(call, why)))
        self._give_back(call_ids)

    def _take_back(self, link: WorkerLink, action: Revoke | Cancel) -> None:
        calls = filter(None, map(self._dispatch.call, action.call_ids))
        # Still on this side, waiting for blobs: the worker has never seen them.
        unsent = {call.id for call in calls if call.worker == link.id and not call.position}
        sent = [call_id for call_id in action.call_ids if call_id not in unsent]
        if unsent:
            self._give_back(list(unsent))
        if sent:
            link.send_item(messages.CancelCalls(sent) if isinstance(action, Cancel) else messages.RevokeCalls(sent))
        if sent and isinstance(action, Cancel):
            link.end_for(ev.CALL_CANCELLED, sent)
            self._loop.call_later(_CANCEL_PATIENCE_S, self._insist, link, sent, link.incarnation)

    def _insist(self, link: WorkerLink, call_ids: list[int], incarnation: str) -> None:
        """Have the supervisor kill a worker that still holds cancelled calls."""
        # A call that holds the interpreter's lock keeps its worker from reading the cancellation.
        held = any(self._dispatch.call(call_id) for call_id in call_ids)
        if held and link.incarnation == incarnation and link.alive and self._is_current(link):
            self._spawn(link.node.handle.kill_worker(link.id.worker, incarnation))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background, until :meth:`close` at the latest."""
        # The loop keeps weak references only: a task that nothing else refers to may be collected half-way.
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("in the background: %s", error)

    # --- nodes (FleetUser) --------------------------------------------------------------------------------------------

    def expect(self, ranks: Iterable[int]) -> None:
        """Announce nodes of these ranks, so that calls wait for their workers."""
        new = [worker_id for rank in ranks for worker_id in self._workers_of(rank)]
        for worker_id in new:
            self._dispatch.expect(worker_id)
        with self._placing:
            # Each of a thousand nodes is announced again when it has started: not worth a sort.
            if not all(map(self._has_place, new)):
                self.places = tuple(sorted({*self.places, *new}))

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        """Take nodes of these ranks out of use; only calls pinned to their workers are still done there.

        If they are replaced (``comes_back``), pinned calls that have not begun wait for the replacement.
        """
        self._leaving = self._leaving.union(ranks) if comes_back else self._leaving.difference(ranks)
        retired = [worker_id for rank in ranks for worker_id in self._workers_of(rank)]
        if not comes_back:
            self._take_places(retired)
        for worker_id in retired:
            self._perform(self._dispatch.drain(worker_id, comes_back=comes_back))
        self._perform(self._dispatch.finished((), self._loop.time()))  # calls of other workers may have become free

    async def attach(self, node: Node) -> None:
        """Dial a node's workers, and return when each of them has answered once.

        Raises:
            BootstrapError: a worker cannot start, or has not answered in time.
        """
        self._services.order(node)
        self.expect((node.rank,))  # workers of its predecessor may have been given up
        attached = AttachedNode(node, self._exchanges)
        links = [
            WorkerLink(worker_id, address, self._tls, self, attached)
            for worker_id, address in zip(self._workers_of(node.rank), node.lanes, strict=True)
        ]
        for link in links:
            self.links[link.id] = link
            link.start()

        def give_up() -> None:
            for link in links:
                link.give_up(f"{link} did not answer for {_FIRST_ANSWER_S:g} s; its log: {link.log_path}")

        patience = self._loop.call_later(_FIRST_ANSWER_S, give_up)
        try:
            await asyncio.gather(*(link.ready for link in links))
        finally:
            patience.cancel()
        if self.jobs is not None:
            self.jobs.look_soon()

    def detach(
        self, rank: int, reason: str, *, for_good: bool, preempted: bool = False, unpaid: BudgetError | None = None
    ) -> None:
        """Remove a node that is gone; its calls run elsewhere, pinned ones on its replacement."""
        if unpaid is not None:
            self._unpaid = reason, unpaid
        for exchange in self._exchanges.values():
            exchange.leave(rank)
        for link in [link for link in self.links.values() if link.id.node == rank]:
            link.give_up(reason)
            self._remove(link, reason, preempted=preempted)
            if self.jobs is not None:
                self.jobs.note_loss(link.node.handle.instance.id, preempted=preempted)
        self._leaving -= {rank}
        if for_good:
            workers, now = self._workers_of(rank), self._loop.time()
            planned = not any(map(self._has_place, workers))  # it was retired
            self._known.difference_update(workers)
            self._take_places(workers)
            for worker_id in workers:
                self._perform(self._dispatch.worker_gone(worker_id, reason, now, planned=planned))
            self._spawn(self._services.forget(worker_names(rank, self._workers_per_node)))

    def busy_for_s(self, rank: int) -> float:
        """Return the seconds until a node's calls end, as far as can be expected; infinite if unknown.

        The state of a service, and results of jobs that were not fetched, keep a node busy too.
        """
        if self._services.in_use or (self.jobs is not None and self.jobs.unfetched_on(rank)):
            return math.inf
        return self._dispatch.busy_for_s(rank, self._loop.time())

    async def drain(self, rank: int) -> None:
        """Wait until the workers of a retired node have nothing left to do, and services have moved their data."""

        def is_idle() -> bool:
            waiting = rank not in self._leaving  # otherwise its successor does the waiting calls
            if waiting and self.jobs is not None and self.jobs.unfetched_on(rank):
                return False
            return all(self._dispatch.drained(worker_id, waiting=waiting) for worker_id in self._workers_of(rank))

        await self._wait(is_idle, f"the calls on node {rank} to end")
        names = worker_names(rank, self._workers_per_node)
        await self._services.drain(rank, names)

    def separation(self) -> str:
        """Return which attached nodes reach each other if not all of them do; else empty. Thread-safe."""
        places, links = self.places, tuple(self.links.values())
        return separation({link.id.node: link.node.handle.instance.network for link in links if link.id in places})

    def handle(self, node: Node, message: Message | LinkDown | LinkUp) -> None:
        """Handle those messages of a node that concern its workers and services; ignore the others."""
        self._services.handle(node, message)
        match message:
            case WorkerExit():
                if (link := self.links.get(WorkerId(node.rank, message.worker))) is not None:
                    self._exited(link, message)
            case WorkerRunning():
                # Without the rest of the pause between attempts to dial it.
                if (link := self.links.get(WorkerId(node.rank, message.worker))) is not None and not link.linked:
                    link.nudge()
            case JobRunning():
                self._note_job(WorkerId(node.rank, message.worker), message)
            case _:
                pass

    def _note_job(self, worker_id: WorkerId, report: JobRunning) -> None:
        self._jobs[worker_id] = report.incarnation if report.job else ""
        link = self.links.get(worker_id)
        if link is not None and link.incarnation == report.incarnation:  # otherwise once it answers
            self._perform(self._dispatch.job_running(worker_id, self._loop.time(), runs=bool(report.job)))

    def _take_places(self, gone: Sequence[WorkerId]) -> None:
        with self._placing:
            self.places = tuple(place for place in self.places if place not in gone)

    def _has_place(self, worker_id: WorkerId) -> bool:
        index = bisect_left(self.places, worker_id)
        return self.places[index : index + 1] == (worker_id,)

    def _workers_of(self, rank: int) -> list[WorkerId]:
        return [WorkerId(rank, worker) for worker in range(self._workers_per_node)]

    async def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        async def probe() -> bool | None:
            return is_done() or None

        await wait_until(probe, deadline_s=math.inf, interval_s=_IDLE_CHECK_S, what=what)

    # --- processes of workers -----------------------------------------------------------------------------------------

    def _exited(self, link: WorkerLink, report: WorkerExit) -> None:
        """Record the end of a worker that its supervisor reports, and lose the worker once its link is down."""
        if link.incarnation != report.incarnation:
            if (hopeless := link.start_failed(report.reason, report.last_words)) is not None:
                self._give_up(link, hopeless)
            return
        link.exit_report = report
        link.exited.set()
        if link.linked:  # results may still arrive; but a forked child may hold the link open for ever
            self._loop.call_later(_EXIT_PATIENCE_S, link.drop_link, report.incarnation)
        else:
            self._lose_reported(link)

    async def _renew(self, link: WorkerLink, incarnation: str) -> None:
        """Replace a drained worker's process once it has no calls left."""

        def is_over() -> bool:
            drained = self._dispatch.drained(link.id) and link.id not in self._unsettled
            return link.incarnation != incarnation or drained

        await self._wait(is_over, f"the calls on {link} to end")

        async def killed() -> bool | None:
            """Kill the process again until it has gone: its supervisor may not have seen it start yet."""
            if link.incarnation != incarnation or not link.alive:
                return True
            link.end_for("a call needed a fresh process")
            await link.node.handle.kill_worker(link.id.worker, incarnation)
            return None

        await wait_until(killed, deadline_s=math.inf, interval_s=_KILL_AGAIN_S, what=f"{link} to be replaced")

    def _lose_reported(self, link: WorkerLink) -> None:
        """Lose a process that is reported to be gone; the next one keeps the link.

        Where its machine may have been taken back with it, that verdict comes first: it decides about retries.
        """
        spot = link.node.handle.instance.offer.spot
        if link.alive and link.was_killed and spot and link.id.node not in self._leaving:
            self._spawn(self._lose_unless_preempted(link, link.incarnation))
        else:
            self._lose(link)

    async def _lose_unless_preempted(self, link: WorkerLink, incarnation: str) -> None:
        def is_over() -> bool:
            return not link.alive or link.incarnation != incarnation

        await SYSTEM_CLOCK.sleep(_VERDICT_S)
        await self._wait(lambda: is_over() or link.node.handle.linked, f"the verdict on {link}")
        if not is_over():
            self._lose(link)

    def _lose(self, link: WorkerLink) -> None:
        """Move the calls of a process that is gone, and publish its last lines."""
        if not link.alive:
            return
        link.alive = False
        for line in self._crashes.once(link.last_lines()):
            self._bus.publish(line)
        preempted = link.was_killed and link.id.node in self._leaving
        reason = link.exit_report.reason if link.exit_report is not None else "its process is gone"
        reason += ", as its machine is preempted" if preempted else ""
        why_ended = link.why_ended(self._dispatch.call)
        self._move_calls(link, f"{why_ended} ({reason})" if why_ended else reason, why_ended, preempted=preempted)

    def _move_calls(self, link: WorkerLink, reason: str, why_ended: str = "", *, preempted: bool = False) -> None:
        self.calls.leave(link.id)
        leaving = link.id.node in self._leaving
        # otherwise the worker left as planned, and its end is no event
        is_event = (link.id in self.places and not leaving) or not self._dispatch.drained(link.id)
        ran = self._dispatch.begun_on(link.id, link.begun)
        losses = ran.losses if ran is not None else 0
        now = self._loop.time()
        overran = link.exit_report.overran if link.exit_report is not None else 0
        actions = self._dispatch.worker_lost(
            link.id, reason, now, begun=link.begun, preempted=preempted, overran=overran
        )
        if is_event:
            event = link.loss(reason, why_ended)
            if ran is not None and isinstance(event, ev.WorkerLost):
                failed = [action.call for action in actions if isinstance(action, GiveUp)]
                event = with_call(event, cast("LiveCall", ran), charged=ran.losses > losses, failed=ran in failed)
            self._bus.publish(event)
        self._perform(actions)

    def _remove(self, link: WorkerLink, reason: str, *, preempted: bool = False) -> None:
        """Close a link for good, and move the calls of its worker."""
        if link.alive:
            link.alive = False
            self._move_calls(link, reason, preempted=preempted)
        self.links.pop(link.id, None)
        self._spawn(link.close())

    def _give_up(self, link: WorkerLink, reason: str) -> None:
        self._remove(link, reason)
        self._take_places([link.id])
        self._perform(self._dispatch.worker_gone(link.id, reason, self._loop.time()))

    # --- reports of the links (LinkOwner) -----------------------------------------------------------------------------

    def lane_up(self, link: WorkerLink) -> None:
        """See :class:`~skyward.scheduling.worker_link.LinkOwner`."""
        if not self._is_current(link):
            return
        if link.id in self._known:
            self._bus.publish(ev.WorkerReplaced(link.id.node, link.id.worker, link.node.handle.instance.id))
        self._known.add(link.id)
        link.reset()
        retired, held = not self._has_place(link.id), link.id.node in self._leaving
        now, round_trip_s = self._loop.time(), link.round_trip_s
        if self._jobs.get(link.id) == link.incarnation:
            self._perform(self._dispatch.job_running(link.id, now, runs=True))
        self._perform(self._dispatch.worker_up(link.id, now, round_trip_s=round_trip_s, retired=retired, held=held))

    def lane_linked(self, link: WorkerLink, *, linked: bool) -> None:
        """See :class:`~skyward.scheduling.worker_link.LinkOwner`."""
        link.linked = linked
        if not linked and link.exit_report and self._is_current(link):
            self._lose_reported(link)

    async def lane_lost(self, link: WorkerLink) -> None:
        """See :class:`~skyward.scheduling.worker_link.LinkOwner`."""
        # The report of its end takes another connection than the answer of the next process. Without it all calls that
        # were sent count as begun, and the error has no cause. A control connection that is down must not keep the
        # next process waiting.
        if self._is_current(link):
            with suppress(TimeoutError):
                await asyncio.wait_for(link.exited.wait(), _EXIT_PATIENCE_S)
            self._lose(link)

    def lane_items(self, link: WorkerLink, items: Sequence[messages.Item]) -> None:
        """See :class:`~skyward.scheduling.worker_link.LinkOwner`."""
        if self.links.get(link.id) is not link:
            return  # its node is gone, and its calls run elsewhere
        if not link.alive:  # its calls run elsewhere by now; only printed lines are still of use
            items = [item for item in items if item[0] in _OUTPUT]
        finished: list[tuple[int, float]] = []
        foreign: int | None = None
        only_results = len(items) == 1 and items[0][0] == messages.SmallResults.CODE
        with nullcontext() if only_results else self._bus.together():
            for item in items:
                try:
                    # Answers count only from the worker that has the call: it runs user code, and may send anything.
                    if (foreign := self._dispatch.foreign(link.id, messages.answered_calls(item))) is not None:
                        break
                    self._handle_item(link, messages.to_client(item), finished)
                except Exception as error:  # items behind this one belong to other calls, which must not wait for ever
                    log.exception("an item of kind %s from worker %s could not be handled", item[0], link.id)
                    finished += self._spoil(item, error)
                    if item[0] in (messages.StreamItems.CODE, messages.StreamItem.CODE):
                        broken = filter(None, [self.calls.unfinished.get(item[1])])
                        self.end_calls(broken, kill=True, error=error)  # without that item the stream is another one
        if finished:  # together: dispatch assigns once for a message, not once for each of its calls
            now = self._loop.time()
            self._perform(self._dispatch.finished(finished, now))
            if not self.calls.unfinished:
                self._busy_waits.replied(now - self._busy_since)
        if foreign is not None:
            # The link goes, because items already on their way must not count either.
            reason = f"{link} answered for call {foreign}, which it does not have: it gets no more calls"
            self._bus.publish(ev.Error(reason, link.node.handle.instance.id))
            self._give_up(link, reason)

    def lane_failed(self, link: WorkerLink, why: str) -> None:
        """See :class:`~skyward.scheduling.worker_link.LinkOwner`."""
        self._bus.publish(ev.Error(why, link.node.handle.instance.id))

    def _is_current(self, link: WorkerLink) -> bool:
        return self.links.get(link.id) is link

    def _handle_item(self, link: WorkerLink, item: messages.ToClient, finished: list[tuple[int, float]]) -> None:
        """Handle an item; add the calls that it ends to ``finished``, with the seconds that each took."""
        unfinished = self.calls.unfinished
        match item:
            case messages.SmallResults():
                for call_id, seconds, data in zip(item.call_ids, item.seconds, item.pickles, strict=True):
                    if (call := unfinished.get(call_id)) is not None:
                        self.calls.complete(call, RawOutcome(data, seconds, link.id))
                    finished.append((call_id, seconds))
            case messages.CallResult(call_id, outcome):
                if (call := unfinished.get(call_id)) is not None:
                    if outcome.segment:
                        call.arriving().map_segment(outcome, link.results)
                    self._complete(call, call.arriving().outcome(outcome, link.id))
                elif outcome.segment:
                    link.results.give_back(outcome.segment)
                finished.append((call_id, float(outcome.seconds)))
            case messages.ResultChunk() | messages.StreamItems() | messages.StreamItem():
                self._take_part(link, item)
            case _:
                self._handle_notice(link, item)

    def _take_part(
        self, link: WorkerLink, item: messages.ResultChunk | messages.StreamItems | messages.StreamItem
    ) -> None:
        """Store a part of what a call that goes on returns."""
        call = self.calls.unfinished.get(item.call_id)
        match item:
            case messages.ResultChunk():
                if call is not None:
                    call.arriving().add_chunk(item)
            case messages.StreamItems():
                if call is not None and isinstance(call.sink, StreamBatch):
                    call.sink.add(call, item.pickles)
            case messages.StreamItem(_, outcome):
                if call is None and outcome.segment:
                    link.results.give_back(outcome.segment)
                if call is not None and isinstance(call.sink, StreamBatch):
                    if outcome.segment:
                        call.arriving().map_segment(outcome, link.results)
                    call.sink.add(call, [call.arriving().outcome(outcome, link.id)])

    def _handle_notice(
        self,
        link: WorkerLink,
        item: messages.PrintedLines
        | messages.EmittedEvent
        | messages.LoggedRecord
        | messages.RevokedCalls
        | messages.MissingBlobs
        | messages.GangAddress
        | messages.SpentProcess
        | messages.CheckpointWritten,
    ) -> None:
        match item:
            case messages.PrintedLines():
                link.log_end = max(link.log_end, item.log_end)
                self._publish(link, item)
            case messages.EmittedEvent() | messages.LoggedRecord():
                self._publish(link, item)
            case messages.RevokedCalls():
                self._give_back(item.call_ids)
            case messages.MissingBlobs():
                link.node.blobs.forget(item.blob_ids)
                self._give_back([item.call_id])
            case messages.GangAddress():
                self._collect_address(item)
            case messages.SpentProcess():
                self._perform(self._dispatch.drain(link.id, comes_back=True))
                self._spawn(self._renew(link, link.incarnation))
                self._restart(item.call_ids, item.why)
            case messages.CheckpointWritten():
                self._note_checkpoint(link, item)
            case _:
                assert_never(item)

    def _spoil(self, item: messages.Item, error: Exception) -> Iterator[tuple[int, float]]:
        """Fail the calls whose results cannot be decoded: no other answer will arrive for them."""
        for call_id in (
            messages.answered_calls(item) if item[0] in (messages.CallResult.CODE, messages.SmallResults.CODE) else ()
        ):
            if (call := self.calls.unfinished.get(call_id)) is not None:
                self._complete(call, RawOutcome(error=error))
                yield call.id, 0.0

    def _collect_address(self, item: messages.GangAddress) -> None:
        call = self.calls.unfinished.get(item.call_id)
        if call is None or call.gang is None or call.header is None:
            return
        texts = call.gang.add_address(call.header.rank, item.text)
        if texts is None:
            return
        if apart := self.separation():  # a node was added or replaced since the submission
            self.end_calls(call.gang.calls, kill=True, error=out_of_reach(call.label, apart))
            return
        for link, member in self._held(call.gang.calls):
            link.send_item(messages.GangAddresses(member.id, texts))

    def _publish(
        self, link: WorkerLink, item: messages.PrintedLines | messages.LoggedRecord | messages.EmittedEvent
    ) -> None:
        call = self.calls.unfinished.get(item.call_id)
        own = call is not None and call.worker == link.id
        incoming = call.arriving() if call is not None and own else Incoming()
        callbacks = call.callbacks if call is not None else ()
        # A dropped call that had begun runs on, and its lines have its name.
        named = call or self._dispatch.call(item.call_id)
        name = named.name if isinstance(named, LiveCall) else ""
        instance_id = link.node.handle.instance.id
        for event in incoming.events(item, worker=link.id, instance_id=instance_id, call=name):
            self._bus.publish(event, callbacks)
            if isinstance(item, messages.LoggedRecord) and isinstance(event, ev.LogLine):
                self._bus.run(partial(handle_record, item.values, event.place))
        incoming.shown = self._bus.delivery()

    # --- facts for displays and scaling -------------------------------------------------------------------------------

    def workload(self) -> Workload:
        """Return the work that waits and runs, and since when nodes have none."""
        load = self._dispatch.workload(self._loop.time())
        return load if self.jobs is None else self.jobs.added_to(load)

    def snapshot(self, base: PoolSnapshot) -> PoolSnapshot:
        """Return ``base`` with the calls, and with the present state of its nodes' workers."""
        now, calls = self._loop.time(), self.calls
        nodes = tuple(
            replace(
                node, workers=tuple(self._worker(WorkerId(node.node, worker.worker), now) for worker in node.workers)
            )
            for node in base.nodes
        )
        running = len(self._dispatch.running())
        return replace(
            base,
            nodes=nodes,
            queued=len(calls.unfinished) - running,
            running=running,
            done=calls.ended - calls.failed - calls.cancelled,
            failed=calls.failed,
            cancelled=calls.cancelled,
            last_failure=calls.last_failure,
            works=calls.progress(self._running_works()),
        )

    def _running_works(self) -> Iterator[WorkCount | None]:
        return (cast("LiveCall", call).work for call in self._dispatch.running())

    def _worker(self, worker_id: WorkerId, now: float) -> WorkerSnapshot:
        load = self._dispatch.load(worker_id)
        if load is None:
            return WorkerSnapshot(worker=worker_id.worker)
        if load.call is None:
            return WorkerSnapshot(worker=worker_id.worker, state="idle")
        return WorkerSnapshot(
            worker=worker_id.worker,
            state="running",
            call=cast("LiveCall", load.call).name,
            seconds=max(0.0, now - load.since),
            waiting=load.behind,
        )


def _limited(header: messages.CallHeader | None, limits: CallLimits) -> messages.CallHeader:
    memory_bytes = round((limits.memory_gib or 0) * _GIB)
    return replace(
        header or messages.CallHeader(),
        timeout_s=limits.timeout_s or 0.0,
        memory_bytes=memory_bytes,
        grace_s=limits.grace_s or 0.0,
    )
