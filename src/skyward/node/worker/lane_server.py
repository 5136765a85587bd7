"""Worker's end of a lane: handshake with the client, calls in, results and printed text out.

A dropped link loses nothing. Only a large result waits for the client, so that it is not held twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyward.base.descriptors import Descriptors
from skyward.base.waiting import SYSTEM_CLOCK, wait_until
from skyward.errors import UnreachableError
from skyward.events.log_files import DEFAULT_LEVELS
from skyward.node.worker.call_mark import Mark
from skyward.node.worker.call_runner import CallRunner, ReceivedCall, ReceivedSources, SentFunction
from skyward.node.worker.descriptor_capture import WorkerLog
from skyward.node.worker.output import CallOutput, TakenLevels
from skyward.node.worker.shared_results import SharedResults
from skyward.wire.lane import Connection, Link, Session
from skyward.wire.listening import Listener
from skyward.wire.messages import (
    CallsWait,
    CancelCalls,
    ForgetFunctions,
    GangAddresses,
    Item,
    LoggedRecord,
    LogPiece,
    PrintedLines,
    ReleaseSegments,
    RevokeCalls,
    RevokedCalls,
    RunCalls,
    RunSpecialCall,
    SetLevels,
    StopStream,
    StoreFunction,
    StoreSources,
    StreamCredit,
    ToClient,
    to_worker,
)
from skyward.wire.node_config import CHECKPOINTS, HANDSHAKE_S

log = logging.getLogger("skyward.node.worker.lane_server")

# Text in bytes that the client has not acknowledged. Above it a thread that prints waits, and the log is not read on
# (docs/decisions/015).
_KEPT_LINES_BOUND = 64 << 20
_COLLECT_S, _LONGEST_COLLECT_S = 0.1, 1.0
# At most 4 MiB of the log in one go: the loop has results to send, too.
_COLLECT_PIECES = 16
_PACE_S = 0.005
_LONGEST_PAUSE_S = 1.0
_PRINT_EVERY_S = 0.001
# Sent one by one, results of short calls woke the loop thread for nearly each: 19 µs of the node for a call became 11.
_GATHER_S = 0.001
_FAREWELL_S = 0.5
_STARVING_S = 30.0


class LaneServer:
    """Lane server for the one client of the pool, over one connection after the other. Made on its event loop.

    Attributes:
        output: replacement of the streams that calls print to.
        runner: the runner of the calls.

    Args:
        incarnation: identity of this process; the client resumes a session only with the same one.
        blob_dirs: folders of large arguments, by their content id.
        checkpoints: folder of the calls' checkpoints.
        log: the worker's log, from which captured output is read; None to capture none.
        begun: see :class:`~skyward.node.worker.call_runner.CallRunner`.
        ask_for_watch: see :class:`~skyward.node.worker.call_runner.CallRunner`.
        shared_results: memory for large results, if a client on this machine may share it.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        blob_dirs: Sequence[Path],
        checkpoints: Path = Path(CHECKPOINTS),
        log: WorkerLog | None = None,
        begun: Mark | None = None,
        ask_for_watch: Callable[[], None] = lambda: None,
        shared_results: SharedResults | None = None,
    ) -> None:
        self.output = CallOutput(
            self._send_printed, log=log, keep_pace=self._keep_pace, deliver_record=self._send_record
        )
        self.runner = CallRunner(
            self, self.output, blob_dirs, begun, checkpoints=checkpoints, ask_for_watch=ask_for_watch
        )
        self._log = log
        self._incarnation = incarnation
        self._shared_results = shared_results
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._client = ""
        self._link = Link(Session(), self._take)
        self._linked = False
        self._serving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._flush_due = self._later_flush_due = False
        self._dropped_lines = 0
        self._levels = TakenLevels()
        self._printed_at = 0.0
        self._woken, self._waker = os.pipe()
        self._own = Descriptors(self._woken, self._waker)
        self._starving_since = math.inf
        self._close_waker = weakref.finalize(self, _close, self._woken, self._waker)

    async def serve(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        """Accept connections until cancelled."""

        async def admit(sock: socket.socket) -> Connection:
            connection = Connection(sock, tls, server_side=True)
            await connection.handshake()
            return connection

        self._own = Descriptors(self._woken, self._waker, listening.fileno())
        await Listener(listening, admit=admit, serve=self._converse).run()

    async def watch_output(self) -> None:
        """Send captured output until cancelled. A call that ends sends its last lines itself.

        It is looked for ten times a second while there is some, and ever more rarely, down to once a second, without.
        """
        # Each look takes the interpreter's lock from the running call: 0.2 ms, and ten times a second is too often for
        # calls that print nothing.
        pause_s = _COLLECT_S
        while True:
            await SYSTEM_CLOCK.sleep(pause_s)
            if self._shared_results is not None:
                self._shared_results.trim()
            collected = False
            try:
                collected = self._collect_some()
            except OSError:  # a full or failing disk may recover; this task must not end before
                log.exception("captured output could not be read")
            pause_s = _COLLECT_S if collected else min(2 * pause_s, _LONGEST_COLLECT_S)

    def _collect_some(self) -> bool:
        """Send some captured output; return True if there was any."""
        if not self._linked and not self.runner.runs_job:  # the log holds it meanwhile, on disk instead of in memory
            return False
        self.output.mark(self._has_arrived)
        if not self.output.has_captured:
            return False
        pieces = _COLLECT_PIECES
        while pieces and self.kept_bytes <= _KEPT_LINES_BOUND and self.output.collect_piece():
            pieces -= 1
            self._link.flush()
        return True

    def _has_arrived(self) -> bool:
        self._link.flush()
        return not self.kept_bytes

    def trouble(self) -> str:
        """Return why the lane can carry nothing any more, through user code in this process; empty if it can."""
        if not (self._own.intact and self._link.intact):
            return "a call closed the connections of its worker"
        self._starving_since = min(self._starving_since, time.monotonic()) if self._starves() else math.inf
        if time.monotonic() - self._starving_since > _STARVING_S:
            return f"its calls left no descriptor for the client's connection for {_STARVING_S:g} s"
        return ""

    def _starves(self) -> bool:
        if self._linked:
            return False
        try:
            os.close(os.dup(self._woken))
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Close the connections, and end the thread that runs calls once its present call has ended. Idempotent."""
        self.runner.close()
        self.output.end()
        for task in self._tasks:
            task.cancel()

    # --- Outlet -----------------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        return self._link.session.kept_bytes

    def push(self, item: ToClient, *, bulk: bool = False) -> None:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        self._link.session.push(item, item.nbytes, bulk=bulk)

    def flush(self) -> None:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        self._link.flush()

    def flush_soon(self) -> None:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon_threadsafe(self._flush_now)

    def flush_later(self) -> None:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        if not self._later_flush_due:
            self._later_flush_due = True
            self._loop.call_soon_threadsafe(self._loop.call_later, _GATHER_S, self._flush_now)

    def wait(self, timeout_s: float | None, *, eager: bool = False) -> None:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        if self._link.read_in_turn(self._woken, timeout_s, eager=eager):
            os.read(self._woken, 1024)

    def wake(self) -> None:
        """See :class:`~skyward.node.worker.call_runner.Outlet`."""
        os.write(self._waker, b"!")

    def _flush_now(self) -> None:
        self._flush_due = self._later_flush_due = False
        self.runner.hand_over_results()
        self._link.flush()

    # --- the client -------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep_until_done(self._loop.create_task(work))

    def _keep_until_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, connection: Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep_until_done(task)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                client, seen, shares_memory = await connection.next_message()
                await self._end_last_connection()
                self._serving = task
                await self._greet(connection, client, seen, shares_memory=shares_memory)
            self._linked = True
            # The thread that runs calls waits on the connection that was lost; woken, it waits on this one.
            self._loop.call_soon(self.runner.wake)
            await self._link.run(connection, by_turns=True)
        except OSError as error:
            log.info("a connection was lost: %s", error)
        except Exception:  # the peer's session is another one: the next connection starts afresh
            log.exception("lane of client %s dropped", self._client)
            self._client = ""
        finally:
            connection.close()
            if self._serving is task:
                self._serving, self._linked = None, False

    async def _end_last_connection(self) -> None:
        # A client dials a second time when it has given the first connection up; here it may still look alive.
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _greet(self, connection: Connection, client: str, seen: int, *, shares_memory: bool) -> None:
        fresh = client != self._client
        if fresh:
            self._client = client
            self.runner.reset()
            if self._shared_results is not None:
                self._shared_results.clear()
                self.runner.shared_results = self._shared_results if shares_memory else None
            self._levels.take(DEFAULT_LEVELS)
            self._link = Link(Session(), self._take)
        # Items above the last number that the client has seen are sent again: nothing is lost, nothing runs twice.
        self._link.session.resume(seen)
        await connection.exchange([fresh, self._incarnation, self._link.session.seen])

    def _take(self, items: Sequence[Item]) -> None:
        calls: list[ReceivedCall | ReceivedSources] = []
        for item in map(to_worker, items):
            match item:
                case RunCalls():
                    function = self.runner.functions[item.function_id]
                    together = zip(item.call_ids, item.pickles, strict=True)
                    for position, (call_id, data) in enumerate(together, item.position):
                        calls.append(ReceivedCall(call_id, function, position, item.final, data))
                case RunSpecialCall():
                    function, how = self.runner.functions[item.function_id], (item.payload, item.header)
                    calls.append(ReceivedCall(item.call_id, function, item.position, item.final, b"", *how))
                case StoreSources():
                    calls.append(ReceivedSources(item.sources))
                case GangAddresses() | StreamCredit() | StopStream():
                    self._tell_running(item)
                case StoreFunction() | ForgetFunctions() | SetLevels() | ReleaseSegments() | CallsWait():
                    self._prepare(item)
                case CancelCalls() | RevokeCalls():
                    # The items are in order: the calls before a revocation must be in the queue when it is done.
                    self.runner.add(calls)
                    calls = []
                    self._take_back(item)
        self.runner.add(calls)

    def _tell_running(self, item: GangAddresses | StreamCredit | StopStream) -> None:
        match item:
            case GangAddresses():
                self.runner.met(item.call_id, item.texts)
            case StreamCredit():
                self.runner.grant(item.call_id, item.items, item.size)
            case StopStream():
                self.runner.stop_stream(item.call_id)

    def _prepare(self, item: StoreFunction | ForgetFunctions | SetLevels | ReleaseSegments | CallsWait) -> None:
        match item:
            case StoreFunction():
                self.runner.functions[item.function_id] = SentFunction(item.label, item.payload)
            case ForgetFunctions():
                for function_id in item.function_ids:
                    self.runner.functions.pop(function_id, None)
            case SetLevels():
                self._levels.take(item.levels)
            case ReleaseSegments():
                if self._shared_results is not None:
                    self._shared_results.release(item.names, reusable=item.reusable)
            case CallsWait():
                self.runner.calls_wait = True

    def _take_back(self, item: CancelCalls | RevokeCalls) -> None:
        if dropped := self.runner.take_back(item.call_ids):
            self.push(RevokedCalls(dropped))
            self.flush_soon()
        running = self.runner.running
        if isinstance(item, CancelCalls) and running in item.call_ids:
            self._loop.call_soon_threadsafe(self._begin_end, running)

    def _begin_end(self, call_id: int) -> None:
        self._spawn(self._end_worker(call_id))

    async def _end_worker(self, call_id: int) -> None:
        """End a running call by ending this process, once the client has the results of earlier calls."""
        # Python code cannot be stopped from outside by anything less than the end of its process.
        self._flush_now()
        with suppress(UnreachableError):
            await wait_until(self._all_seen, deadline_s=_FAREWELL_S, interval_s=0.005, what="the client to catch up")
        self.runner.end_process(call_id)

    async def _all_seen(self) -> bool | None:
        return self._link.session.drained or None

    def _keep_pace(self) -> None:
        """Make a thread that prints wait while the client is behind; never the event loop's, which sends."""
        # A second at most: a finalizer may print in a thread that holds a lock which the event loop waits for.
        if self.kept_bytes <= _KEPT_LINES_BOUND or threading.get_ident() == self._loop_thread:
            return
        until = time.monotonic() + _LONGEST_PAUSE_S
        while self._linked and self.kept_bytes > _KEPT_LINES_BOUND and time.monotonic() < until:
            threading.Event().wait(_PACE_S)

    def _send_printed(self, call_id: int, pieces: Sequence[LogPiece], log_end: int = 0, /) -> None:
        if call_id < 0:
            self.runner.keep_lines(pieces)
            if log_end and self._log is not None:  # it has arrived where the supervisor would write it, too
                self._log.mark(log_end)
            return
        if not self._linked and self.kept_bytes > _KEPT_LINES_BOUND:
            self._dropped_lines += len(pieces)  # text from Python is nowhere else: memory would grow without bound
            return
        if self._dropped_lines:
            note = f"… {self._dropped_lines} lines were dropped while the client was away"
            pieces = [LogPiece(text=note, stream="stderr", timestamp=time.time(), writer=-1), *pieces]
            self._dropped_lines = 0
        self._push_output(PrintedLines(call_id, pieces, log_end))

    def _send_record(self, call_id: int, task: str, values: Mapping[str, Any]) -> None:
        if call_id < 0:
            self.runner.keep_record(values)
            return
        if not self._linked and self.kept_bytes > _KEPT_LINES_BOUND:
            self._dropped_lines += 1
            return
        self._push_output(LoggedRecord(call_id, task, values))

    def _push_output(self, item: PrintedLines | LoggedRecord) -> None:
        self.push(item)
        # In this thread: another one would need the interpreter's lock, and the call may crash before it gets that.
        # Lines less than a millisecond apart go together, or each would cost an encryption and a system call.
        last, self._printed_at = self._printed_at, time.monotonic()
        if self._printed_at - last < _PRINT_EVERY_S or not self._link.flush(if_free=True):
            self.flush_soon()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
