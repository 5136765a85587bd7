"""Runner of a worker's calls: in order, in the main thread; results of short calls are sent together."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import GeneratorType, ModuleType
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import psutil

from skyward.base.platform import keep_freed_memory, return_freed_memory
from skyward.base.waiting import BusyWaits
from skyward.distributed.grace import CallGrace, limit_passed
from skyward.distributed.runtime import CallContext, FreshProcessNeeded, enter_call
from skyward.errors import ConfigurationError, TimeLimit
from skyward.events import SkywardEvent, use_callback
from skyward.hidden_frames import related
from skyward.node.gpu.health import DOUBT_S, is_doubtful
from skyward.node.jobs.store import Claim
from skyward.node.worker.call_mark import HEEDS, JOB, RUNNING, WATCHED, Mark, arm, blank_mark, disarm, paused
from skyward.node.worker.child_processes import call_in_this_process
from skyward.node.worker.item_stream import ItemStream
from skyward.node.worker.job_runs import WorkerJobs
from skyward.node.worker.mapped_blobs import MappedBlobs
from skyward.node.worker.output import CallOutput
from skyward.node.worker.shared_results import SharedResults
from skyward.shipping.definitions import enter_main
from skyward.shipping.job_file import JobCall
from skyward.shipping.pickling import (
    LARGE_BYTES,
    LARGE_HERE_BYTES,
    Packed,
    add_note,
    pack_result,
    unpack_call_with_main,
)
from skyward.shipping.received_modules import take_sources
from skyward.shipping.remote_exceptions import pack_error, text_of
from skyward.wire.lane import CHUNK_BYTES
from skyward.wire.messages import (
    CallHeader,
    CallResult,
    CheckpointWritten,
    EmittedEvent,
    GangAddress,
    LogPiece,
    MissingBlobs,
    ModuleSource,
    Outcome,
    PackedError,
    Payload,
    ResultChunk,
    SmallResults,
    SpentProcess,
    StreamItem,
    StreamItems,
    ToClient,
)
from skyward.wire.node_config import CHECKPOINTS

log = logging.getLogger("skyward.node.worker.call_runner")

_ALONE = CallContext()
_NO_MORE: Final = object()
_GIB = 1 << 30
_SHARED_LIMIT = 0.9
"""Part of its memory limit up to which a worker copies a result for the client to map."""
# Bytes that the client has not acknowledged: no call begins above the first bound, no large result is copied on above
# the second. Without them a worker grows while its client is away (docs/decisions/002).
_KEPT_BYTES_BOUND = 256 << 20
_COPIED_BYTES_BOUND = 64 << 20
_RESULTS_PER_ITEM = 1024
_TURN_S = 1.0
"""Longest wait for calls between two of jobs, if the client has said that calls wait."""
_PAUSE_S = 0.05
"""Seconds between two looks at a bound, or at kept mappings."""
# Calls use freed memory again. By glibc's defaults the kernel took it back and cleared it for the next one: 14,000 page
# faults for a forest of 500 trees instead of 150, and 4 to 6 % more processor time; 18 % more for a search whose blocks
# have 133 MB (docs/benchmarks.md). A share of the worker's memory, as a heap of large blocks has large gaps.
_KEPT_BLOCKS_BYTES = (32 << 20, 192 << 20)
_KEPT_BLOCK_SHARE = 64
_IDLE_S = 1.0
"""Seconds without a call after which freed memory goes back to the machine."""


@dataclass(slots=True, eq=False)
class SentFunction:
    """Function that calls name by its id. Queued calls keep it, even after :attr:`CallRunner.functions` lost it.

    Attributes:
        label: its name, for messages.
        payload: its pickle; empty once it was loaded.
        loaded: the function; None until its first call.
        main: the module of what it has from the client's ``__main__``; None if it has nothing from there.
    """

    label: str
    payload: Payload
    loaded: Callable[..., Any] | None = None
    main: ModuleType | None = None

    def load(self, load: Callable[[Payload], tuple[Any, ModuleType | None]]) -> Callable[..., Any]:
        """Return the function, unpickled by ``load`` at the first use."""
        loaded = self.loaded
        if loaded is None:
            loaded, self.main = load(self.payload)
            self.loaded = loaded
            self.payload = Payload()  # the pickle would be held twice: up to 64 MiB of functions are kept
        return loaded


@dataclass(slots=True, eq=False)
class ReceivedCall:
    """Call in this worker's queue.

    Attributes:
        id: unique in the pool.
        function: the function that it calls.
        position: number among the calls sent to this worker's place.
        final: True if it may not run again: its result must leave this process before another call ends it.
        data: pickle of the arguments, unless there is a ``payload``.
        payload: the arguments, if they are large.
        header: see :class:`CallHeader`.
        job: the content of a job's call, whose ``id`` is negative; None for the client's calls.
    """

    id: int
    function: SentFunction
    position: int
    final: bool
    data: bytes
    payload: Payload | None = None
    header: CallHeader | None = None
    job: JobCall | None = None


@dataclass(slots=True, eq=False)
class ReceivedSources:
    """Sources of modules in this worker's queue, for the calls after them."""

    sources: Sequence[ModuleSource]
    id: int = 0


class Outlet(Protocol):
    """Connection to the client. Thread-safe; only :meth:`wait` blocks."""

    @property
    def kept_bytes(self) -> int:
        """Number of bytes that the client has not acknowledged."""
        ...

    def push(self, item: ToClient, *, bulk: bool = False) -> None:
        """Enqueue an item."""
        ...

    def flush(self) -> None:
        """Send the queued items."""
        ...

    def flush_soon(self) -> None:
        """Have another thread call :meth:`CallRunner.hand_over_results` and send the queued items."""
        ...

    def flush_later(self) -> None:
        """As :meth:`flush_soon`, a millisecond later, with the results that follow meanwhile."""
        ...

    def wait(self, timeout_s: float | None, *, eager: bool = False) -> None:
        """Block until items have arrived and were handed over, or until :meth:`wake`; if ``eager``, busy-wait first."""
        ...

    def wake(self) -> None:
        """End the present :meth:`wait`, or the next one."""
        ...


class _MissingBlobsError(Exception):
    def __init__(self, blob_ids: Sequence[str]) -> None:
        super().__init__(*blob_ids)
        self.blob_ids = list(blob_ids)


def _ask_no_one() -> None:
    """Do nothing."""


class CallRunner:
    """Queue of one worker's calls, and their runner.

    Attributes:
        running: id of the call that runs; 0 while none does, negative for one of a job.
        functions: functions that calls may name, by id. The client decides which ones are here.
        memory_limit_bytes: memory that this process may use; 0 is no limit.
        shared_results: memory for large results that the client shares; None where it is on another machine.
        grace: what the running call is told of its end, and its checkpoints.
        jobs: the node's jobs, of which it runs calls while its queue is empty; None where there are none.
        calls_wait: True once the client has said that calls wait for the end of a job's.

    Args:
        outlet: connection to the client.
        output: collector of printed text.
        blob_dirs: folders of large arguments, by their content id.
        begun: mark of the last call begun, and of its limits: :mod:`skyward.node.worker.call_mark`.
        checkpoints: folder of the calls' checkpoints.
        ask_for_watch: called when calls begin to run while the supervisor looks at this process once a second only.
    """

    def __init__(
        self,
        outlet: Outlet,
        output: CallOutput,
        blob_dirs: Sequence[Path],
        begun: Mark | None = None,
        *,
        checkpoints: Path = Path(CHECKPOINTS),
        ask_for_watch: Callable[[], None] = _ask_no_one,
    ) -> None:
        self.running = 0
        self._current: ReceivedCall | None = None
        self._started = 0.0
        self.functions: dict[str, SentFunction] = {}
        self.memory_limit_bytes = 0
        self.shared_results: SharedResults | None = None
        self.jobs: WorkerJobs | None = None
        self.calls_wait = False
        self._jobs_wait = True
        self._jobs_begun = 0
        self._begun: Mark = blank_mark() if begun is None else begun
        self._ask_for_watch = ask_for_watch
        self.grace = CallGrace(
            checkpoints, running=lambda: self.running, report=self._report_checkpoint, heed=self._heed
        )
        self._outlet = outlet
        self._output = output
        self._blobs = MappedBlobs(blob_dirs)
        self._signals = Signals()
        self._lock = threading.Lock()
        self._queue: deque[ReceivedCall | ReceivedSources] = deque()
        self._results: list[tuple[int, float, bytes]] = []
        self._stream: ItemStream | None = None
        self._stopped = 0
        self._meetings: SimpleQueue[Sequence[str]] = SimpleQueue()
        self._clients = self._client = 0
        self._thread = 0
        self._waiting = False
        self._busy_waits = BusyWaits()
        self._keeps_memory = False
        self._closed = False

    def add(self, calls: Iterable[ReceivedCall | ReceivedSources]) -> None:
        """Enqueue calls, and the sources that those after them need."""
        with self._lock:
            self._queue.extend(calls)
        self.wake()

    def take_back(self, call_ids: Iterable[int]) -> list[int]:
        """Drop those of these calls that have not begun; return their ids."""
        unwanted = set(call_ids)
        with self._lock:
            dropped = [call.id for call in self._queue if call.id in unwanted]
            if dropped:
                self._queue = deque(call for call in self._queue if call.id not in unwanted)
        return dropped

    def end_process(self, call_id: int) -> None:
        """Kill this process if it runs this call. The next call cannot begin meanwhile."""
        with self._lock:
            if self.running == call_id:
                os.kill(os.getpid(), signal.SIGKILL)

    def met(self, call_id: int, texts: Sequence[str]) -> None:
        """Pass the texts of the whole gang to the call that waits for them in :meth:`_meet`."""
        if call_id == self.running:
            self._meetings.put(texts)

    def grant(self, call_id: int, items: int, nbytes: int) -> None:
        """Let the generator of this call run on: the client has read so many of its items, of that size, in total."""
        if (stream := self._stream) is not None and stream.call_id == call_id:
            stream.grant(items, nbytes)
            self.wake()

    def stop_stream(self, call_id: int) -> None:
        """Close the generator of this call at its next ``yield``, if it runs."""
        self._stopped = call_id
        self.wake()

    def reset(self) -> None:
        """Drop the calls and results of the last client, for a new one."""
        with self._lock:
            self._queue.clear()
            self._results.clear()
            self._stopped = 0
            self._clients += 1
        self.functions.clear()

    def wake(self) -> None:
        """Have :meth:`work` look at its queue again."""
        # A byte into a pipe costs a system call, so only where the thread sleeps, and never from the thread itself.
        if self._waiting and threading.get_ident() != self._thread:
            self._outlet.wake()

    def shown(self) -> str:
        """Return the running call and its duration, such as ``"train, 12 s"``; empty while none runs. Thread-safe."""
        call, started = self._current, self._started
        if not self.running or call is None:
            return ""
        home = str(getattr(call.function.loaded, "__module__", ""))
        label = "joblib" if home.startswith("skyward_joblib.") else call.function.label.rpartition(".")[2]
        return f"{label}, {max(time.perf_counter() - started, 0.0):.0f} s"

    def close(self) -> None:
        """End :meth:`work` after the call that runs. Idempotent."""
        with self._lock:
            self._closed = True
        self.wake()

    def work(self) -> None:
        """Run calls until :meth:`close`, in the calling thread; no other thread may."""
        self._thread = threading.get_ident()
        with _open_folder() as folder, self.grace, self._signals, enter_call(_ALONE), use_callback(self._emit):
            while not self._closed:
                call = self._next()
                claim = self._claim() if call is None and self._jobs_wait else None
                if call is None and claim is None:
                    self.hand_over_results()
                    self._outlet.flush()
                    self._wait()
                    continue
                if not self._keeps_memory:
                    keep_freed_memory(kept_block_bytes(self.memory_limit_bytes))
                    self._keeps_memory = True
                if self._results:  # the next call may take hours
                    self._outlet.flush_later()
                os.fchdir(folder)  # back from the folder of an earlier call, which may be gone; 0.3 µs
                if call is not None:
                    self._run(call)
                elif claim is not None:
                    self._run_job(claim)

    def _settle(self, call: ReceivedCall) -> None:
        """Send the result of a final call before the next call runs."""
        # The next call may end this process, and a final call may not run again (docs/decisions/014).
        if call.final:
            self.hand_over_results()
            self._outlet.flush()

    # --- jobs -------------------------------------------------------------------------------------------------------

    @property
    def runs_job(self) -> bool:
        """True while a call of a job runs."""
        return self.running < 0

    def look_for_jobs(self) -> None:
        """Look for calls of jobs once the queue is empty."""
        if self.jobs is not None:
            self.jobs.look_again()
        with self._lock:
            self._jobs_wait = True
        self.wake()

    def keep_lines(self, pieces: Sequence[LogPiece]) -> None:
        """Keep the lines that a job's call prints."""
        if self.jobs is not None:
            self.jobs.keep_lines(pieces)

    def keep_record(self, values: Mapping[str, Any]) -> None:
        """Keep the line of a record that a job's call logs."""
        if self.jobs is not None:
            self.jobs.keep_record(values)

    def _claim(self) -> Claim | None:
        """Claim a call of a job, unless the client's calls wait; they may for its results to be acknowledged."""
        if self.calls_wait:
            self.calls_wait = False
            self._let_calls_come()
        with self._lock:
            if self._queue:
                return None
            self._jobs_wait = False  # before the look: one that is added meanwhile is said to be
        claim = self.jobs.claim() if self.jobs is not None else None
        if claim is not None:
            self._jobs_wait = True
        return claim

    def _let_calls_come(self) -> None:
        """Wait a moment for calls: the client learns that the job's is over, and sends them."""
        until = time.monotonic() + _TURN_S
        while not (self._queue or self._closed) and (left_s := until - time.monotonic()) > 0:
            self._waiting = True
            self._outlet.wait(left_s)
            self._waiting = False

    def _run_job(self, claim: Claim) -> None:
        """Run a job's call and store its outcome.

        If that cannot be stored, the error ends this process, and the supervisor releases the claim.
        """
        assert self.jobs is not None
        self._started = time.perf_counter()
        self._jobs_begun -= 1
        call = ReceivedCall(self._jobs_begun, SentFunction(claim.job, Payload()), JOB, final=True, data=b"")
        with self._lock:
            self.running, self._current, self._client = call.id, call, self._clients
            self._leave_rest()
        self.jobs.begin(claim)
        try:
            call.job = self.jobs.read(claim)
            call.function.label = call.job.label
            # The same in every run, so that the next one on this node goes on from there; not the job's name, which
            # may be used again.
            call.header = replace(call.job.header, checkpoint=call.job.token)
            result: Packed | PackedError = self._execute(call)
        except FreshProcessNeeded as why:
            if self._begun[0] or call.id < -1:
                self.jobs.renew(claim, str(why))
            result = pack_error(why)  # this one is fresh: another one would not be better
        except BaseException as raised:  # a call that exits or is interrupted must not end its worker
            result = self._packed_error(raised)
        disarm(self._begun)
        self.jobs.end(claim, result, time.perf_counter() - self._started)
        self.grace.remove_checkpoint()

    def _emit(self, event: SkywardEvent) -> None:
        if self.runs_job:
            return  # nobody would receive it
        self._outlet.push(EmittedEvent(self.running, pack_result(event, what="the event").data))
        self._outlet.flush_soon()

    def _report_checkpoint(self, call_id: int, name: str) -> None:
        if call_id < 0:  # the client does not have the call
            return
        self._outlet.push(CheckpointWritten(call_id, name))
        self._outlet.flush_soon()

    def _heed(self, heeds: bool) -> None:  # noqa: FBT001 - a callback with one value
        self._begun[HEEDS] = heeds

    def _wait(self) -> None:
        with self._lock:
            if self._closed or self._may_run() or (self._jobs_wait and not self._queue):
                return
            self._waiting = True
            limit_s = _PAUSE_S if self._queue or self._blobs.holds_any else _IDLE_S if self._keeps_memory else None
        began = time.perf_counter()
        self._outlet.wait(limit_s, eager=self._busy_waits.due)
        self._waiting = False
        self._output.collect()  # written between calls: it belongs to none
        # One short call after the other: busy-waiting took a round trip from 610 to 400 µs (docs/decisions/007).
        waited_s = time.perf_counter() - began
        self._busy_waits.replied(waited_s if len(self._queue) == 1 else math.inf)
        if not self._queue:
            self._blobs.let_go()
            if self._keeps_memory and waited_s >= _IDLE_S:
                return_freed_memory()
                self._keeps_memory = False

    def hand_over_results(self) -> None:
        """Enqueue the small results that have gathered, as one item, and before them those of a generator."""
        with self._lock:
            self._hand_over_items()
            results, self._results = self._results, []
            if results:
                call_ids, seconds, pickles = zip(*results, strict=True)
                self._outlet.push(SmallResults(call_ids, seconds, pickles))

    @property
    def _large_bytes(self) -> int:
        return LARGE_BYTES if self.shared_results is None else LARGE_HERE_BYTES

    def _may_run(self) -> bool:
        """Return whether a call is queued and the client keeps up with the results."""
        return bool(self._queue) and self._outlet.kept_bytes <= _KEPT_BYTES_BOUND

    def _next(self) -> ReceivedCall | None:
        with self._lock:
            if not self._may_run():
                self.running = self._begun[RUNNING] = 0
                return None
            call = self._queue.popleft()
            if not isinstance(call, ReceivedSources):
                if not self.running:
                    self._leave_rest()
                self.running, self._current, self._client = call.id, call, self._clients
                # Before it runs: the supervisor reads the mark after a crash, and calls after this one move for free.
                self._begun[0] = call.position
                return call
        try:
            take_sources(call.sources)
        except Exception:  # the next process would fail at it, too; the calls that need them say what is missing
            log.exception("sources of the client's modules could not be taken")
        return self._next()

    def _leave_rest(self) -> None:
        """Note that calls run, and see to it that the supervisor looks at their limits."""
        self._begun[RUNNING] = 1
        if not self._begun[WATCHED]:
            self._begun[WATCHED] = 1  # a supervisor that is stopped must not be asked again and again
            self._ask_for_watch()

    def _run(self, call: ReceivedCall) -> None:
        """Run a call and enqueue its answer. Never raises: the thread is needed for the next call."""
        self._started = started = time.perf_counter()
        try:
            self._run_and_answer(call, started)
            self._settle(call)
        except BaseException as broken:  # such as too little memory for the answer; one without a pickle needs little
            log.exception("the answer of call %d could not be sent", call.id)
            message = f"the call's result or exception could not be sent: {type(broken).__name__}: {text_of(broken)}"
            type_name = f"{type(broken).__module__}.{type(broken).__qualname__}"
            error = PackedError(type_name=type_name, message=message, traceback="", pickled=b"")
            outcome = Outcome(seconds=time.perf_counter() - started, error=error)
            with suppress(Exception):  # the loop is closed: the process ends
                self._outlet.push(CallResult(call.id, outcome))
                self._outlet.flush_soon()
        finally:
            disarm(self._begun)  # not before: an exception's or a value's own code may never end
            if self.grace.left is not None:
                self.grace.remove_checkpoint()

    def _run_and_answer(self, call: ReceivedCall, started: float) -> None:
        try:
            result = self._execute(call)
        except _MissingBlobsError as missing:
            self._answer(MissingBlobs(call.id, missing.blob_ids))
            return
        except FreshProcessNeeded as why:
            self._answer(SpentProcess([call.id], str(why)))
            return
        except BaseException as raised:  # a call that exits or is interrupted must not end its worker
            packed = self._packed_error(raised)
            outcome = Outcome(seconds=time.perf_counter() - started, error=packed)
            self._answer(CallResult(call.id, outcome))
            if call.header is not None and call.header.gang and call.header.world > 1:
                self._answer(SpentProcess([], ""))  # its connections to other ranks still exist
            return
        self._send(call.id, result, time.perf_counter() - started)

    def _packed_error(self, raised: BaseException) -> PackedError:
        if isinstance(raised, TimeLimit) and self._current is not None:
            raised = limit_passed(raised, self._current.function.label)
        add_hints(raised)
        packed = pack_error(raised)
        if is_doubtful(packed.type_name, packed.message):
            disarm(self._begun)
            # The driver reports a failed GPU up to 3 s later. If it does, the node ends meanwhile, and the call
            # moves to another node instead of failing.
            threading.Event().wait(DOUBT_S)
        return packed

    def _answer(self, item: ToClient) -> None:
        """Send the answer of the running call, unless the client that sent the call is gone."""
        with self._lock:
            if self._client == self._clients:
                self._outlet.push(item)
        self._outlet.flush_soon()

    def _execute(self, call: ReceivedCall) -> Packed:
        header = call.header
        with self._output.of_call(call.id):
            try:
                if header is None:  # the common case; a null context would cost it half a microsecond
                    return self._call_function(call)
                with self._within(call, header), _trace_context(header.trace) if header.trace else nullcontext():
                    return self._call_function(call)
            finally:
                if self.grace.in_use:
                    self.grace.end()

    def _call_function(self, call: ReceivedCall) -> Packed:
        sent = call.function
        if (job := call.job) is not None:
            self._blobs.let_go()
            take_sources(job.sources)
            function = sent.load(lambda _: unpack_call_with_main(job.function.data, job.function.buffers))
            (args, kwargs), main = unpack_call_with_main(job.arguments.data, job.arguments.buffers)
            return self._call_loaded(sent, function, args, kwargs, main)
        function = sent.load(self._load)
        if call.payload is None:
            self._blobs.let_go()
            (args, kwargs), main = unpack_call_with_main(call.data)
        else:
            (args, kwargs), main = self._load(call.payload)
        if call.header is not None and call.header.streams:
            function = partial(self._run_generator, call, function)
        return self._call_loaded(sent, function, args, kwargs, main)

    def _call_loaded(
        self,
        sent: SentFunction,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        main: ModuleType | None,
    ) -> Packed:
        enter_main(sent.main, main)
        if self.grace.in_use:
            self.grace.enter()
        try:
            value = call_in_this_process(function, args, kwargs)
        finally:
            if self.grace.in_use:
                self.grace.leave()
            self._signals.restore()
        return pack_result(value, what=f"the result of {sent.label}", large_bytes=self._large_bytes)

    def _run_generator(self, call: ReceivedCall, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Send the items of a generator as they come, and wait where the client has not read them."""
        client, stream = self._client, ItemStream(call.id)
        self._stream = stream

        def is_stopped() -> bool:
            return self._stopped == call.id or self._clients != client or self._closed

        source = iter(function(*args, **kwargs))
        try:
            with closing(source) if hasattr(source, "close") else nullcontext():
                while not is_stopped():
                    item = self._next_item(source)
                    if item is _NO_MORE:
                        return
                    what = f"item {stream.items} of {call.function.label}"
                    self._send_item(stream, pack_result(item, what=what, large_bytes=self._large_bytes))
                    if not stream.has_room:
                        self._wait_for_room(stream, is_stopped)
        finally:
            with self._lock:
                self._hand_over_items()
                self._stream = None

    def _next_item(self, source: Iterator[Any]) -> Any:
        """Run a generator to its next ``yield``; return what it yields, ``_NO_MORE`` at its end."""
        # Not by a for loop: a child that the generator forks ends at its next item, and sends none.
        if not self.grace.in_use:
            return call_in_this_process(next, (source, _NO_MORE), {})
        resume = partial(next, source, _NO_MORE)
        try:
            self.grace.enter(source.gi_frame if isinstance(source, GeneratorType) else None)
        except TimeLimit as limit:  # due while its last item was sent: it is raised where the generator can handle it
            resume = partial(source.throw, limit) if isinstance(source, Generator) else resume
        try:
            return call_in_this_process(resume, (), {})
        except StopIteration:
            return _NO_MORE
        finally:
            self.grace.leave()

    def _send_item(self, stream: ItemStream, item: Packed) -> None:
        parts = sum(part.nbytes for part in item.buffers)
        stream.count(len(item.data) + parts)
        if parts or len(item.data) >= self._large_bytes:
            with self._lock:
                self._hand_over_items()
            with paused(self._begun), self.grace.paused():  # the client may be away
                # Not as bulk items, which small ones would overtake.
                self._send_large(stream.call_id, item, 0.0, StreamItem, bulk=False)
            return
        with self._lock:
            stream.pending.append(item.data)
        if stream.is_due():
            self.hand_over_results()
            self._outlet.flush()
        else:
            self._outlet.flush_later()

    def _hand_over_items(self) -> None:
        """Enqueue the generator's items that have gathered; the caller holds the lock."""
        stream = self._stream
        if stream is not None and stream.pending:
            pending, stream.pending = stream.pending, []
            if self._client == self._clients:
                self._outlet.push(StreamItems(stream.call_id, pending))

    def _wait_for_room(self, stream: ItemStream, is_stopped: Callable[[], bool]) -> None:
        self.hand_over_results()
        self._outlet.flush()
        with paused(self._begun), self.grace.paused():  # the time is its reader's
            self._waiting = True
            while not (stream.has_room or is_stopped()):
                self._outlet.wait(None)
            self._waiting = False

    @contextmanager
    def _within(self, call: ReceivedCall, header: CallHeader) -> Generator[None]:
        """Give the running call its context, and enforce its limits from now until its answer is sent."""
        if 0 < self.memory_limit_bytes < header.memory_bytes:
            raise ConfigurationError(
                f"memory of {call.function.label} must be at most the {self.memory_limit_bytes / _GIB:.1f} GiB that "
                f"its worker may use, got {header.memory_bytes / _GIB:.1f} GiB: ask for less, or for larger machines "
                "by ComputePool(memory=…)"
            )
        if header.timeout_s or header.memory_bytes:
            arm(
                self._begun,
                timeout_s=header.timeout_s,
                memory_bytes=header.memory_bytes,
                of_job=call.job is not None,
            )
        if header.timeout_s or header.checkpoint:
            self.grace.begin(timeout_s=header.timeout_s, grace_s=header.grace_s, checkpoint=header.checkpoint)
        with enter_call(_context_of(header, partial(self._meet, call.id))):
            yield

    def _meet(self, call_id: int, text: str) -> Sequence[str]:
        """Send this call's text to its gang and wait for those of all others."""
        # Without a time limit: if one of them fails, the client ends this process.
        self._outlet.push(GangAddress(call_id, text))
        self._outlet.flush_soon()
        return self._meetings.get()

    def _send(self, call_id: int, result: Packed, seconds: float) -> None:
        large = len(result.data) >= self._large_bytes
        if large or result.buffers:
            disarm(self._begun)  # the client may be away, and its time is not the call's
            self._send_large(call_id, result, seconds, CallResult, bulk=True)
            return
        with self._lock:
            if self._client == self._clients:
                self._results.append((call_id, seconds, result.data))
            more = bool(self._queue)
        if len(self._results) >= _RESULTS_PER_ITEM:
            self.hand_over_results()
        if more:
            self._outlet.flush_later()

    def _send_large(
        self,
        call_id: int,
        result: Packed,
        seconds: float,
        record: Callable[[int, Outcome], CallResult | StreamItem],
        *,
        bulk: bool,
    ) -> None:
        client = self._client
        large = len(result.data) >= self._large_bytes
        parts = ([memoryview(result.data)] if large else []) + list(result.buffers)
        data = b"" if large else result.data
        outcome = Outcome(seconds=seconds, data=data, part_bytes=tuple(part.nbytes for part in parts))
        if segment := self._share(parts):
            self._answer_shared(record(call_id, replace(outcome, segment=segment)), client)
            return
        for index, part in enumerate(parts):
            for offset in range(0, part.nbytes, CHUNK_BYTES):
                # A copy: the memory may be the user's own, and the next call may write to it before this is sent.
                if self._clients != client:  # another client has connected: the result has no receiver
                    return
                piece = bytes(part[offset : offset + CHUNK_BYTES])
                self._outlet.push(ResultChunk(call_id, index, part.nbytes, offset, piece), bulk=bulk)
                self._outlet.flush()
                while self._outlet.kept_bytes > _COPIED_BYTES_BOUND and not self._closed:
                    self._outlet.wait(_PAUSE_S)
        if self._clients == client:
            self._outlet.push(record(call_id, outcome), bulk=bulk)
        self._outlet.flush_soon()

    def _share(self, parts: Sequence[memoryview]) -> str:
        """Copy a result into memory that the client shares; return its name, empty if it has to be sent."""
        if self.shared_results is None:
            return ""
        room = _SHARED_LIMIT * self.memory_limit_bytes - sum(part.nbytes for part in parts)
        if self.memory_limit_bytes and psutil.Process().memory_info().rss > room:  # the copy counts as this worker's
            return ""
        return self.shared_results.store(parts, self.memory_limit_bytes)

    def _answer_shared(self, item: CallResult | StreamItem, client: int) -> None:
        with self._lock:
            has_receiver = self._clients == client
            if has_receiver:
                self._outlet.push(item)
        if not has_receiver and self.shared_results is not None:  # the last client's segments may be removed already
            self.shared_results.release([item.outcome.segment], reusable=False)
        self._outlet.flush_soon()

    def _load(self, payload: Payload) -> tuple[Any, ModuleType | None]:
        if missing := self._blobs.missing(payload.blobs):
            raise _MissingBlobsError(missing)
        try:
            views = self._blobs.map(payload.blobs)
        except FileNotFoundError as gone:
            raise _MissingBlobsError([str(gone)]) from None
        data = views.pop(0) if payload.data_blob else payload.data
        return unpack_call_with_main(data, views)


def kept_block_bytes(memory_limit_bytes: int) -> int:
    """Return the size of the largest freed blocks that a worker with this limit keeps for its next calls; 0 is none."""
    least, most = _KEPT_BLOCKS_BYTES
    return min(max(least, memory_limit_bytes // _KEPT_BLOCK_SHARE), most)


@contextmanager
def _open_folder() -> Generator[int]:
    folder = os.open(".", os.O_RDONLY)
    try:
        yield folder
    finally:
        os.close(folder)


def _context_of(header: CallHeader, meet: Callable[[str], Sequence[str]]) -> CallContext:
    return CallContext(
        world=header.world,
        rank=header.rank,
        seed=header.seed,
        head_port=header.head_port,
        nodes=header.nodes,
        local_rank=header.local_rank,
        meet=meet if header.gang else None,
    )


@contextmanager
def _trace_context(carrier: Mapping[str, str]) -> Generator[None]:
    """Attach the context in ``carrier``; do nothing without OpenTelemetry on this node, where no span can be made."""
    try:
        from opentelemetry import context, propagate
    except ImportError:
        yield
        return
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


P = ParamSpec("P")
R = TypeVar("R")

_HANDLED: Final = tuple(
    int(getattr(signal, name))
    for name in (
        *("SIGALRM", "SIGHUP", "SIGINT", "SIGPROF", "SIGQUIT"),
        *("SIGTERM", "SIGURG", "SIGUSR1", "SIGUSR2", "SIGVTALRM"),
    )
    if hasattr(signal, name)
)
"""Signals that programs handle. Not SIGCHLD: libraries set its handler once and rely on it, as torch's DataLoader."""


class Signals:
    """Context of the thread that runs calls, whose handlers are restored after each call, if it is the main thread.

    Inside, :mod:`signal` notes that a call uses it: to ask for nine handlers after each call would take 5 µs.
    """

    def __init__(self) -> None:
        self._handlers: list[Any] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._in_use = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handlers = self._present()
            self._functions = {name: getattr(signal, name) for name in ("alarm", "setitimer", "signal")}
            for name, function in self._functions.items():
                setattr(signal, name, self._noted(function))

    def __exit__(self, *_error: object) -> None:
        for name, function in self._functions.items():
            setattr(signal, name, function)

    def restore(self) -> None:
        """Stop timers and put the handlers back."""
        if not self._in_use:
            return
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm after its call would interrupt another one
        for number, before, now in zip(_HANDLED, self._handlers, self._present(), strict=True):
            if now is not before:
                signal.signal(number, signal.SIG_DFL if before is None else before)  # None: C code has set it
        self._in_use = False

    def _noted(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def note(*args: P.args, **kwargs: P.kwargs) -> R:
            self._in_use = True
            return function(*args, **kwargs)

        return note

    @staticmethod
    def _present() -> list[Any]:
        return [*map(signal.getsignal, _HANDLED)]


_NO_FILE = re.compile(r"no such file or directory|unable to (?:synchronously )?open file|file not found", re.IGNORECASE)


def add_hints(error: BaseException) -> None:
    """Add a note to an error of a call about a file that is missing."""
    note = next((note for each in related(error) if (note := _folder_hint(each))), "")
    if note and not _is_of_a_program(error):
        add_note(error, note)


def _folder_hint(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    if isinstance(name, str | bytes):
        if not isinstance(error, FileNotFoundError) or os.path.isabs(name):
            return ""
        subject = repr(os.fsdecode(name))
    elif isinstance(error, FileNotFoundError) or _NO_FILE.search(_text(error)):
        subject = "a relative path"
    else:
        return ""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return ""
    return (
        f"{subject} was looked up in {folder} on the node, the working folder of the pool's calls, not in your "
        "program's: send files along with Image(includes=[…]), or give an absolute path that exists there"
    )


def _is_of_a_program(error: BaseException) -> bool:
    """Return True if the missing file is a program, which is looked up elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.basename(frames[-1].filename) == "subprocess.py"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # user code may do anything here
        return ""
