"""Link to one worker: the stream to it, the last reported state of its process, and the shipping of calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
import socket
import ssl
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from signal import SIGTERM
from typing import Any, Final, Protocol

from skyward.base.descriptors import keep_from_forks
from skyward.base.waiting import SYSTEM_CLOCK, SystemClock, keep, wait_until
from skyward.errors import (
    BootstrapError,
    BudgetError,
    CallTimeoutError,
    ConfigurationError,
    UnreachableError,
    WorkerLostError,
)
from skyward.events import LogLine, WorkerLost, WorkerRestarting
from skyward.events.log_files import DEFAULT_LEVELS
from skyward.fleet.node import Node
from skyward.scheduling.calls import LiveCall, RawOutcome
from skyward.scheduling.dispatch_and_retries import GiveUp, WorkerId
from skyward.scheduling.mapped_results import MappedResults
from skyward.shipping.blobs import Exchange, NodeBlobs, Stored
from skyward.shipping.function_cache import PackedFunction, Recent
from skyward.shipping.project_modules import SentSources, SourceSet
from skyward.submission import CallLimits
from skyward.wire import messages
from skyward.wire.control import WorkerExit
from skyward.wire.lane import Connection, Link, Session, turn_to_dial
from skyward.wire.node_config import HANDSHAKE_S
from skyward.wire.printed_lines import LineAssembler

log = logging.getLogger("skyward.scheduling.lane")

# The supervisor starts a worker again by itself; after this many failures in a row its pool gives it up.
_FAILED_STARTS = 5
# Together 20 s, longer than it takes to detect a silent link: the verdict on the node comes first.
_PUT_ATTEMPTS, _PUT_PAUSE_S = 40, 0.5
# Functions kept in one worker. It drops those evicted here (FORGET): functions made in a loop are otherwise unbounded.
_FUNCTION_BYTES = 64 << 20
_FIRST_PAUSE_S = 0.05  # pauses grow from this; a supervisor's report of a started worker ends the present one
_MARK: Final = "skyward"
_OWN: Final = ("skyward", "distributed", "dask")
"""Loggers of the programs that run on nodes; their levels there are not the user's."""
_BEGINNING = "Fatal Python error: "
_VARYING = re.compile(r"0x[0-9a-f]+")  # ids of threads
_REMEMBERED = 64


class ConfiguredLevels:
    """Levels that this process has set: those of the root, as ``""``, and of named loggers."""

    def __init__(self) -> None:
        self._watched = logging.getLogger("skyward.levels")
        self._levels = DEFAULT_LEVELS

    def current(self) -> Mapping[str, int]:
        """Return the levels; the same object while no level has changed."""
        # 300 loggers cost 30 µs to look at, twice the price of a small call. setLevel() empties the caches of all
        # loggers, so a mark in one of them stays exactly as long as no level is set. Without caches it looks each time.
        cache: dict[Any, bool] = getattr(self._watched, "_cache", {})
        if _MARK in cache:
            return self._levels
        cache[_MARK] = True
        levels = {"": logging.root.level}
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if isinstance(logger, logging.Logger) and logger.level and name.partition(".")[0] not in _OWN:
                levels[name] = logger.level
        if levels != self._levels:
            self._levels = levels
        return self._levels


_LEVELS = ConfiguredLevels()


class _Pauses(SystemClock):
    """Clock whose pauses end early when :attr:`nudged` is set."""

    def __init__(self) -> None:
        self.nudged = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.nudged.wait()
        self.nudged.clear()


class LinkOwner(Protocol):
    """Receiver of a lane's events, on the event loop. Nothing here may block; nothing is retried."""

    def lane_up(self, link: WorkerLink) -> None:
        """Use a worker process that holds no calls: the first one, or a replacement."""
        ...

    def lane_linked(self, link: WorkerLink, *, linked: bool) -> None:
        """Record that the link is up, or down; all items received over it were delivered before."""
        ...

    async def lane_lost(self, link: WorkerLink) -> None:
        """Move the calls of a worker process that is gone; ``lane_up`` follows."""
        ...

    def lane_items(self, link: WorkerLink, items: Sequence[messages.Item]) -> None:
        """Handle received items, in order."""
        ...

    def lane_failed(self, link: WorkerLink, why: str) -> None:
        """Report that the lane's task failed unexpectedly, and was started again."""
        ...


class AttachedNode:
    """Node whose workers take calls.

    Args:
        handle: the node.
        exchanges: the blobs of all nodes of a network, by its name; makes those of a new one.
    """

    def __init__(self, handle: Node, exchanges: defaultdict[str, Exchange]) -> None:
        self.handle = handle
        # To a node of this machine the client copies a file, which is cheaper than TLS between nodes (decision 011).
        network = "" if handle.access.on_this_machine else handle.instance.network
        # By the network's name, never by trying: islands that bind to loopback have addresses in common.
        self.blobs = exchanges[network].join(handle) if network else NodeBlobs(handle)
        # Where there is no memory for it, the folder is the one on disk, and results would wait for that.
        in_memory = handle.ready.blob_dir != handle.ready.blob_dir_disk
        self.shared_folder = handle.ready.blob_dir if handle.access.on_this_machine and in_memory else ""
        self.call_ports = itertools.cycle(handle.ready.call_ports)


class WorkerLink:
    """Link to the worker at one fixed address, and the last reported state of the process there.

    A dropped connection is redialled and the session resumed. Only a worker without the session counts as a new one.

    Attributes:
        id: id of the worker.
        node: the worker's node.
        incarnation: identity of the worker process, empty before the first contact.
        functions: ids of the functions in this worker process; those evicted here are dropped there as well.
        sources: the sources of modules in this worker process.
        results: memory of large results that this worker process shares.
        round_trip_s: round trip in seconds, measured when the connection was made.
        ready: done when the worker has answered for the first time; fails when it cannot start.
        linked: True while the worker is connected.
        alive: False once the process that holds the link's calls is reported or found to be gone.
        ended_for: reason for ending the process on purpose; empty otherwise.
        ended_with: ids of the cancelled calls to end it with; once all of them are over, it lives on.
        log_end: offset in the worker's log up to which captured output has arrived.
        exit_report: the supervisor's report of the end of the process; None before.
        exited: set once there is an exit report.
    """

    def __init__(
        self, worker_id: WorkerId, address: str, tls: ssl.SSLContext, owner: LinkOwner, node: AttachedNode
    ) -> None:
        self.id = worker_id
        self.node = node
        self.incarnation = ""
        self.functions: Recent[str, bool] = Recent(_FUNCTION_BYTES)
        self.sources = SentSources()
        self.round_trip_s = 0.0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.linked = False
        self.alive = False
        self.ended_for = ""
        self.ended_with: set[int] = set()
        self.log_end = 0
        self.exit_report: WorkerExit | None = None
        self.exited = asyncio.Event()
        self._positions = itertools.count(1)  # never starts again: no position has two meanings
        self._failed_starts = 0
        self._levels = DEFAULT_LEVELS
        self._address = address
        self._tls = tls
        self._owner = owner
        self._session_id = uuid.uuid4().hex
        self._agreed = ("", "")  # session and incarnation that both ends have confirmed
        self._link = self._new_link()
        self.results = MappedResults("", self._link.send_soon)
        self._pauses = _Pauses()
        self._serving: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"worker {self.id.worker} of node {self.id.node}"

    # --- the stream ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Dial the worker, and serve the connections to it until :meth:`close`."""
        report = partial(self._owner.lane_failed, self)
        self._serving = asyncio.ensure_future(keep(self._serve, what=f"the lane to {self._address}", report=report))

    def push(self, item: messages.ToWorker) -> None:
        """Queue an item for the worker, to travel with the calls that are sent next."""
        self._link.session.push(item, item.nbytes)

    def send_item(self, item: messages.ToWorker) -> None:
        """Send an item at once."""
        self.push(item)
        self._link.flush()

    def nudge(self) -> None:
        """Dial again at once instead of after the present pause: the worker is reported to listen."""
        self._pauses.nudged.set()

    def cut(self) -> None:
        """Drop the link, as a network failure would; the lane dials again."""
        self._link.abort()

    def drop_link(self, incarnation: str) -> None:
        """Drop the link to a process that is gone, unless another one has answered since; the lane dials again."""
        if self.incarnation == incarnation:
            self.cut()

    async def close(self) -> None:
        """End the connection and dial no more. Idempotent."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    def _new_link(self) -> Link:
        return Link(Session(), partial(self._owner.lane_items, self))

    async def _serve(self) -> None:
        """Dial and carry items until cancelled."""
        while True:
            connection = await wait_until(
                self._dial,
                deadline_s=math.inf,
                interval_s=_FIRST_PAUSE_S,
                what=f"worker {self.id}",
                clock=self._pauses,
            )
            self._owner.lane_linked(self, linked=True)
            try:
                await self._link.run(connection)
            except Exception:  # a message made no sense; a lane that gave up would leave its calls waiting for ever
                log.exception(
                    "the lane to %s received a message that makes no sense, and starts a new session", self._address
                )
                self._session_id = uuid.uuid4().hex
            finally:
                self._owner.lane_linked(self, linked=False)

    async def _dial(self) -> Connection | None:
        try:
            connection = Connection(keep_from_forks(socket.socket()), self._tls)
        except OSError as error:  # no free descriptor (EMFILE): a passing lack must not end the lane
            log.warning("%s cannot be dialled yet: %s", self._address, error)
            return None
        try:
            async with turn_to_dial(self._tls), asyncio.timeout(HANDSHAKE_S):
                await connection.connect(self._address)
                await connection.handshake()
                await self._greet(connection)
        except OSError as error:
            log.debug("%s does not answer: %s", self._address, error)
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    async def _greet(self, connection: Connection) -> None:
        asked_s = time.perf_counter()
        await connection.exchange([self._session_id, self._link.session.seen, bool(self.node.shared_folder)])
        fresh, incarnation, seen = await connection.next_message()
        self.round_trip_s = time.perf_counter() - asked_s
        if fresh:
            if self.incarnation:
                await self._owner.lane_lost(self)
            self._link = self._new_link()
            self.functions.clear()
            self.sources = SentSources()
            self.results = MappedResults(self.node.shared_folder, self._link.send_soon)
            self.incarnation = incarnation
            self._agreed = self._session_id, incarnation
            self._owner.lane_up(self)
        # The worker has this session, but the answer that confirmed it was lost: resumed, a call could run twice.
        elif self._agreed != (self._session_id, incarnation):
            self._session_id = uuid.uuid4().hex
            raise ConnectionResetError(
                "the worker opened the session, but its answer was lost; dialling again with a new one"
            )
        self._link.session.resume(seen)

    # --- the process ----------------------------------------------------------------------------------------------

    @property
    def log_path(self) -> str:
        """Path of the worker's log on its node."""
        return f"{self.node.handle.access.workdir}/worker-{self.id.worker}.log"

    @property
    def was_killed(self) -> bool:
        """True if the process is reported to have been killed, neither on purpose nor for its memory."""
        report = self.exit_report
        ended = report is not None and (report.was_killed or report.signal == SIGTERM) and not report.ended_for
        return ended and not self.ended_for

    @property
    def begun(self) -> int | None:
        """Position of the last call that the ended process began; None without a report of it."""
        return self.exit_report.begun if self.exit_report is not None else None

    def reset(self) -> None:
        """Reset the state for a new process that has answered."""
        self.alive, self.ended_for, self._failed_starts = True, "", 0
        self.log_end, self.exit_report = 0, None
        self.exited.clear()
        self.ended_with.clear()
        self._levels = DEFAULT_LEVELS
        self._push_levels(_LEVELS.current())  # for Dask's tasks, too, before the first call
        if not self.ready.done():
            self.ready.set_result(None)

    def end_for(self, why: str, call_ids: Collection[int] = ()) -> None:
        """Record the reason for ending the process; with calls, it ends only if it still runs one of them."""
        self.ended_for = why
        self.ended_with = {*self.ended_with, *call_ids} if call_ids else set()

    def why_ended(self, unfinished: Callable[[int], object]) -> str:
        """Return the reason for ending the process on purpose; empty if it ended by itself.

        Args:
            unfinished: returns a true value for the id of an unfinished call.
        """
        report = self.exit_report
        # A crash or the memory limit outweighs a cancellation that came just before: the user has to learn of those.
        if report is not None and (report.ended_for or not report.was_killed):
            return report.ended_for
        lives_on = self.ended_with and not any(map(unfinished, self.ended_with))
        return "" if lives_on else self.ended_for

    def loss(self, reason: str, why_ended: str) -> WorkerLost | WorkerRestarting:
        """Return the event for the end of the process."""
        place = self.id.node, self.id.worker, self.node.handle.instance.id
        return WorkerRestarting(*place, why_ended) if why_ended else WorkerLost(*place, reason)

    def last_lines(self) -> Iterator[LogLine]:
        """Yield the last lines of an ended process that have not arrived over the lane."""
        ended = self.exit_report
        if ended is None:
            return
        text = ended.last_words[max(0, self.log_end - ended.last_words_at) :]
        assembler = LineAssembler("stdout", time.time)
        pieces = assembler.feed(text.encode("latin-1")) + assembler.finish()
        missing = min(ended.omitted_bytes, ended.last_words_at - self.log_end)
        if pieces and missing > 0:
            pieces = assembler.feed(f"… {missing} bytes before this are in its log only: {self.log_path}\n") + pieces
        for piece in pieces:
            instance_id = self.node.handle.instance.id
            yield LogLine(self.id.node, instance_id, piece.text, piece.timestamp, self.id.worker)

    def start_failed(self, reason: str, last_words: str = "") -> str | None:
        """Count a process that ended before it answered; return the final reason after several of them, else None.

        Args:
            reason: why it ended.
            last_words: the end of its output.
        """
        self._failed_starts += 1
        if self._failed_starts < _FAILED_STARTS:
            return None
        why = f"{self} does not start: {reason}; its log on the node: {self.log_path}"
        why += f"\nthe end of it:\n{last_words.strip()}" if last_words.strip() else ""
        self.give_up(why)
        return why

    def give_up(self, reason: str) -> None:
        """Fail :attr:`ready`: the worker will not come up."""
        if not self.ready.done():
            error = BootstrapError(reason, node=self.id.node, step="server", log_path=self.log_path)
            self.ready.set_exception(error)

    # --- calls ----------------------------------------------------------------------------------------------------

    def send_calls(self, calls: Iterable[LiveCall]) -> None:
        """Send calls whose blobs are on the node; consecutive calls of one function travel as one item."""
        # One item for many calls: 17 µs on the client per call of a gather instead of 75 (decision 006).
        if (levels := _LEVELS.current()) is not self._levels:
            self._push_levels(levels)
        run: messages.RunCalls | None = None
        ids: list[int] = []
        pickles: list[bytes] = []
        for call in calls:
            function, final = call.function, call.final
            plain = call.arguments is None and call.header is None
            position = call.position = next(self._positions)
            if run is None or not plain or run.final != final or run.function_id != function.id:
                if run is not None:
                    self.push(run)
                    run, ids, pickles = None, [], []
                if function.sources is not None or not self.functions.get(function.id):
                    self._introduce(function)
                if plain:
                    run = messages.RunCalls(function.id, position, final, ids, pickles)
            if call.sources is not None:
                self._bring(call.sources)
            if plain:
                ids.append(call.id)
                pickles.append(call.data)
            else:
                payload, header = (
                    call.arguments or messages.Payload(data=call.data),
                    call.header or messages.CallHeader(),
                )
                self.push(messages.RunSpecialCall(function.id, position, final, call.id, payload, header))
        if run is not None:
            self.push(run)
        self._link.flush()

    def _push_levels(self, levels: Mapping[str, int]) -> None:
        """Push the levels of the client's loggers, unless they equal those sent last."""
        if levels != self._levels:
            self.push(messages.SetLevels(levels))
        self._levels = levels

    def _bring(self, sources: SourceSet) -> None:
        """Push the sources that this worker process has not had in their present edition."""
        # One item for each project, whose files are bounded; those of all may be more than a message can carry.
        for _, project in groupby(self.sources.missing(sources), lambda source: source.name.partition(".")[0]):
            self.push(messages.StoreSources([*project]))

    def _introduce(self, function: PackedFunction) -> None:
        """Push what the worker lacks of a function: its sources and itself."""
        if function.sources is not None:
            self._bring(function.sources)
        if self.functions.get(function.id):
            return
        # Calls that wait on the worker keep the evicted functions: the stream is in order.
        if evicted := self.functions.put(function.id, True, function.nbytes):  # noqa: FBT003 - a value
            self.push(messages.ForgetFunctions(evicted))
        self.push(messages.StoreFunction(function.id, function.payload, function.label))

    def hold_present(self, call: LiveCall) -> bool:
        """Hold the call's blobs on the node until it is over; return False if one is not there yet."""
        held = self.node.blobs.hold_present(call.blobs)
        call.held = held or ()
        return held is not None

    async def ship(self, call: LiveCall, fail: Callable[[LiveCall, RawOutcome], None]) -> None:
        """Put the call's blobs onto the node, then send it, unless it was taken away meanwhile."""
        # A call may be taken away and assigned here again while this waits: the token distinguishes the two shipments.
        token = call.shipping = object()
        incarnation = self.incarnation
        try:
            held = await self._hold(call, token)
        except Exception as error:  # of any class: otherwise the call would wait for ever
            if call.shipping is token:
                fail(call, RawOutcome(error=error))
            return
        if call.shipping is not token or self.incarnation != incarnation:
            self.node.blobs.release(held)
            return
        call.held = held
        self.send_calls([call])

    async def _hold(self, call: LiveCall, token: object) -> Sequence[Stored]:
        """Put the call's blobs onto the node; retry while the node cannot be reached."""
        # An unreachable node may turn out to be lost. Its calls move then, and must not fail before.
        for attempt in itertools.count():
            try:
                return await self.node.blobs.hold(call.blobs)
            except Exception as error:
                unreachable = isinstance(error, UnreachableError) and attempt < _PUT_ATTEMPTS
                if self.node.handle.linked and not unreachable:
                    raise
            await SYSTEM_CLOCK.sleep(_PUT_PAUSE_S)
            await wait_until(
                lambda: self._settled(call, token),
                deadline_s=math.inf,
                interval_s=0.05,
                what=f"{self} to be back, or lost",
            )
            if call.shipping is not token:
                break
        return ()

    async def _settled(self, call: LiveCall, token: object) -> bool | None:
        return self.node.handle.linked or call.shipping is not token or None


class ShownCrashes:
    """Stacks of the workers of one pool that were shown."""

    def __init__(self) -> None:
        self._shown: deque[str] = deque(maxlen=_REMEMBERED)

    def once(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the last lines of a worker; of a stack that was shown before, the first line only."""
        lines = list(lines)
        start = next((index for index, line in enumerate(lines) if line.line.startswith(_BEGINNING)), len(lines))
        stack = lines[start:]
        text = _VARYING.sub("", "\n".join(line.line for line in stack))
        yield from lines[:start]
        if not stack or text not in self._shown:
            self._shown.append(text)
            yield from stack
            return
        yield replace(stack[0], line=f"{stack[0].line}, with the same stack as before")


def with_call(lost: WorkerLost, ran: LiveCall, *, charged: bool, failed: bool) -> WorkerLost:
    """Return the event of a lost worker with the call that it ran.

    Args:
        lost: the event.
        ran: the call.
        charged: whether the loss used up one of its retries.
        failed: whether it is given up.
    """
    runs_again = not (failed or ran.cancelled)
    retry = ran.losses if charged and runs_again else 0
    return replace(lost, call=ran.name, runs_again=runs_again, retry=retry, retries=ran.retries)


def given_up(
    call: LiveCall, action: GiveUp, link: WorkerLink | None, *, unpaid: BudgetError | None
) -> WorkerLostError | CallTimeoutError | BudgetError:
    """Return the error of a call that lost its worker too often, or for good (``link`` is None then).

    ``unpaid`` is the reason if there is no node because the pool may not spend more.
    """
    node, worker, losses = action.worker.node, action.worker.worker, action.call.losses
    log_path = link.log_path if link is not None else ""
    if action.overran and link is not None and link.exit_report is not None:
        return _overran(call, link, link.exit_report)
    if call.together and link is not None:
        message = (
            f"{_as_one_of_a_gang(call)} lost its worker on node {node}, worker {worker}: {action.reason}. "
            f"Its log on the node: {log_path}"
        )
    elif call.streams and losses > call.retries:
        message = (
            f"{call.label} lost its worker on node {node}, worker {worker}: {action.reason}. Some of its items may "
            f"have arrived, so it is not run again; call it again to begin at its first item. Its log on the node: "
            f"{log_path}"
        )
    elif losses > call.retries:
        times = f"{losses} times, the last one" if losses > 1 else "once,"
        message = (
            f"{call.label} lost its worker {times} on node {node}, worker {worker}: {action.reason}. It may "
            f"have begun there, and with retries={call.retries} is not run again; raise it if another run is safe."
        )
        message += f" Its log on the node: {log_path}" if log_path else ""
    else:
        message = f"{call.label} has nowhere left to run: {action.reason}"
        if unpaid is not None:
            return BudgetError(message, max_cost=unpaid.max_cost, cost=unpaid.cost)
    return WorkerLostError(message, node=node, worker=worker, reason=action.reason, log_path=log_path)


def _overran(call: LiveCall, link: WorkerLink, ended: WorkerExit) -> WorkerLostError | CallTimeoutError:
    """Return the error of a call for whose limits its worker was ended."""
    limits, place = call.limits or CallLimits(), f"node {link.id.node}, worker {link.id.worker}"
    log = f" Its log on the node: {link.log_path}"
    where = {"node": link.id.node, "worker": link.id.worker}
    if ended.overran_memory:
        message = (
            f"{call.name} added more than its memory of {limits.memory_gib or 0:.3g} GiB to its worker's, on {place}, "
            f"and was ended with it. It is not run again; raise memory=, or have it take less.{log}"
        )
        return WorkerLostError(message, reason=ended.ended_for, log_path=link.log_path, **where)
    message = (
        f"{call.name} ran longer than its timeout of {limits.timeout_s or 0:g} s on {place}, and was ended with its "
        f"worker. It is not run again; raise timeout= if it may take longer.{log}"
    )
    return CallTimeoutError(message, timeout_s=limits.timeout_s or 0.0, log_path=link.log_path, **where)


def _as_one_of_a_gang(call: LiveCall) -> str:
    header = call.header or messages.CallHeader()
    if header.world == 1:
        return f"{call.label}, which is not run again once it has begun,"
    return f"rank {header.rank} of the {header.world} that run {call.label} together, and were ended with it,"


def out_of_reach(label: str, apart: str) -> ConfigurationError:
    """Return the error of a call of a gang whose workers do not reach each other, on nodes that are ``apart`` so."""
    return ConfigurationError(
        f"{label} is decorated with skyward.distributed: its workers have to reach each other, but {apart}. "
        "Ask for nodes=1, use a provider whose machines share a network, or call it without skyward.distributed"
    )


def used_up(call: LiveCall, why: str) -> ConfigurationError:
    """Return the error of a call that needs a fresh process and uses up every one before it begins."""
    return ConfigurationError(
        f"{call.label} could not begin, in {call.renewals} processes one after the other: {why}. Its "
        "arguments, or the import of its module, use the framework before the function runs; move that use into it"
    )
