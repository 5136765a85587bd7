"""Calls of a pool: their records, gangs, partial results and counts, and the receivers of their outcomes."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pickle import UnpicklingError
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol

from skyward.base.platform import allocate_memory
from skyward.errors import PoolStateError, SerializationError, WorkerLostError
from skyward.events import Callback, Error, LogLine, Progress, SkywardEvent
from skyward.events.log_files import record_line
from skyward.hidden_frames import hide_frames, is_explained
from skyward.scheduling.dispatch_and_retries import CallState, WorkerId
from skyward.scheduling.mapped_results import MappedResults
from skyward.shipping.blobs import Blob, Stored
from skyward.shipping.function_cache import FunctionCache, PackedFunction, seal
from skyward.shipping.pickling import LARGE_BYTES, add_note, pack, pack_arguments, unpack
from skyward.shipping.project_modules import SourceSet
from skyward.shipping.remote_exceptions import unpack_error
from skyward.submission import ArgumentMemo, CallFuture, CallLimits, Invocation, bearable, named
from skyward.wire import messages
from skyward.wire.printed_lines import Reassembler

if TYPE_CHECKING:  # what copies checkpoints needs all of a node: opening a pool loads that in time
    from skyward.scheduling.checkpoints import Checkpoint

_FAILURE_CHARACTERS: Final = 200
_SHOWN_AFTER_S: Final = 0.5  # only work that lasts longer publishes progress
_AGAIN_AFTER_S: Final = 1.0  # unchanged progress is published again, so that displays show its age


@dataclass(slots=True, eq=False)
class RawOutcome:
    """End of a call, still pickled.

    Attributes:
        data: the result's pickle; meaningless if there was an error.
        seconds: duration on the worker in seconds; None if no worker ran the call to its end.
        worker: id of the worker; None if the call ran on none.
        buffers: the pickle's out-of-band buffers, writable.
        error: the exception as the worker sent it, or one of the client's own.
        shown: waits until the call's lines were delivered to the subscribers; None if it has printed nothing.
        complete: returns an error about a missing module with all that are missing; None if nothing can.
        label: label of the call, from its batch.
        number: number of the call among those of its label, from its batch.
    """

    # Not frozen, as that doubles the price of an instance, and it is paid for every call.

    data: bytes | memoryview = b""
    seconds: float | None = None
    worker: WorkerId | None = None
    buffers: tuple[Any, ...] = ()
    error: messages.PackedError | Exception | None = field(default=None)
    shown: Callable[[], None] | None = None
    complete: Callable[[ModuleNotFoundError], ModuleNotFoundError] | None = None
    label: str = ""
    number: int = 0

    def show(self) -> None:
        """Wait once until the call's lines were delivered."""
        if (shown := self.shown) is not None:
            shown()
            self.shown = None

    def value(self) -> Any:
        """Return the unpickled result, or raise the exception; the call's lines are delivered before."""
        if self.shown is not None:
            self.show()
        match self.error:
            case None:
                try:
                    return unpack(self.data, self.buffers)
                except (KeyboardInterrupt, Exception) as error:  # from the user's own classes, so of any type
                    if isinstance(error, StopIteration | CancelledError):
                        raise UnpicklingError(f"{self._rebuilding} ended with {named(error)}") from error
                    add_note(error, f"while {self._rebuilding}")
                    raise
                except BaseException as error:
                    raise UnpicklingError(f"{self._rebuilding} ended with {named(error)}") from error
            case messages.PackedError() as packed:
                error = unpack_error(packed, where=self._where)
                if self.complete is not None and isinstance(error, ModuleNotFoundError):
                    error = self.complete(error)
                raise error
            case error:
                raise error

    @property
    def _rebuilding(self) -> str:
        return f"rebuilding the result of a call that ran on {self._where}"

    @property
    def _where(self) -> str:
        return f"node {self.worker.node}, worker {self.worker.worker}" if self.worker else "no worker"


def call_name(label: str, number: int) -> str:
    """Return the name of a call, such as ``"train#3"``: the end of its label, and its number."""
    return f"{short_label(label)}#{number}"


def short_label(label: str) -> str:
    """Return the end of a label, without the number of tasks in a batch of joblib's."""
    return label.partition(" (")[0].rpartition(".")[2]


class CallSink(Protocol):
    """Receiver of the outcomes of calls that are submitted together.

    Attributes:
        work: counts of the calls.
    """

    work: WorkCount

    def fill(self, calls: Sequence[LiveCall]) -> None:
        """Take in the calls, before any of them is queued."""
        ...

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """Store the outcome of call number ``index``. On the event loop."""
        ...


class CallBatch:
    """Outcomes of calls that one caller waits for.

    Attributes:
        entries: each call until it is over, then its outcome until that is read. Calls refer to their batch: were they
            kept, a hundred thousand would stay until the garbage collector finds the cycle.
        remaining: number of unfinished calls.
        failed: index of the first call that failed; None if none has.
        work: counts of the calls.
    """

    def __init__(self, calls: Sequence[Any] = ()) -> None:
        self.work = WorkCount()
        self.fill(calls)
        self.failed: int | None = None
        self._over = False
        self._signals: SimpleQueue[None] = SimpleQueue()  # an Event costs several times as much to set and wait for

    def __len__(self) -> int:
        return len(self.entries)

    def fill(self, calls: Sequence[Any]) -> None:
        """Take in the calls of the batch, before any of them is queued."""
        self.entries: list[Any] = [*calls]
        self.remaining = len(calls)

    def unfinished(self) -> list[LiveCall]:
        """Return the calls that are not over, for cancelling them."""
        return [entry for entry in self.entries if isinstance(entry, LiveCall)]

    def name(self, index: int) -> str:
        """Return the name of call number ``index``, until its outcome is read."""
        return call_name(self.entries[index].label, self.entries[index].number)

    def deliver(self, index: int, raw: RawOutcome) -> None:
        """Store the outcome of call number ``index``. On the event loop."""
        call = self.entries[index]
        raw.label, raw.number = call.label, call.number
        self.entries[index] = raw
        self.remaining -= 1
        if raw.error is not None and self.failed is None:
            self.failed = index
        if not self._over and (not self.remaining or raw.error is not None):
            self._over = True
            self._signals.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all calls are over or one has failed; return True if so. May return early."""
        if self.remaining and not self._over:
            with suppress(Empty):
                self._signals.get(timeout=timeout_s)
        return self._over or not self.remaining

    def rearm(self) -> None:
        """Reset the wait after a failure, so that :meth:`wait` covers the other calls."""
        self._over = False

    def result(self, index: int) -> Any:
        """Return the result of a finished call, once, or raise its exception."""
        # Dropped here, so that the pickle and the rebuilt result are not both kept until the whole batch is read.
        raw, self.entries[index] = self.entries[index], None
        return raw.value()


class _Failed(Exception):
    """Placeholder exception of a failed future; the real one is unpickled on request."""


class RemoteFuture(CallFuture[Any]):
    """Future of one call. The result is unpickled once, in the first thread that requests it.

    Attributes:
        call: the call, for cancelling it; None once it is over, so that no cycle keeps the result alive.
        work: the piece of work that the call counts for; None counts it with others of its label.
    """

    work: WorkCount | None = None

    def __init__(self, drop: Callable[[Any], None], run_callback: Callable[..., None]) -> None:
        super().__init__()
        self.call: Any = None
        self._named: tuple[str, int] | None = None
        self._drop = drop
        self._run_callback = run_callback
        self._decoding = threading.Lock()
        self._begun: bool | None = None
        self._raw: RawOutcome | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def name(self) -> str:
        """See :attr:`~skyward.submission.CallFuture.name`."""
        call = self.call
        if call is not None:
            return call.name
        return call_name(*self._named) if self._named else ""

    def begin(self) -> bool:
        """Mark the call as started; return False if it was cancelled and must not be sent."""
        if self._begun is None:
            self._begun = self.set_running_or_notify_cancel()
        return self._begun

    def deliver(self, index: int, raw: RawOutcome) -> None:  # noqa: ARG002 - a sink of one call
        """Store the outcome of the call. On the event loop."""
        if isinstance(raw.error, CancelledError) and self._begun is None:
            super().cancel()
        if self.begin():
            self._raw = raw
            self.worker_seconds = raw.seconds
            if raw.error is None:
                super().set_result(None)
            else:
                super().set_exception(_Failed())
        if (call := self.call) is not None:
            self._named, self.call = (call.label, call.number), None  # worded on request: that takes 1 µs

    def cancel(self) -> bool:
        """Cancel the call while it waits in the queue; see :meth:`concurrent.futures.Future.cancel`."""
        call = self.call
        cancelled = super().cancel()
        if cancelled and call is not None:
            self._drop(call)
        return cancelled

    def result(self, timeout: float | None = None) -> Any:
        """Return the call's result, or raise its exception; see :meth:`concurrent.futures.Future.result`."""
        error = self._outcome(timeout)
        if error is None:
            return self._value
        try:
            raise error.with_traceback(None)  # each reader's own, or the frames of all of them would add up
        except BaseException as raised:
            if is_explained(raised):
                hide_frames(raised)
            raise
        finally:
            error = None  # otherwise its traceback refers to this frame, and this frame to it: a cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the call's exception, None if it returned; see :meth:`concurrent.futures.Future.exception`."""
        return bearable(self._outcome(timeout))

    def _outcome(self, timeout: float | None) -> BaseException | None:
        super().exception(timeout)
        if (raw := self._raw) is not None:
            raw.show()  # without the lock: the subscriber that this waits for may request the result too
            del raw
        with self._decoding:
            if self._raw is not None:
                try:
                    self._value = self._raw.value()
                except Exception as error:
                    self._error = error.with_traceback(None)
                self._raw = None  # the pickle is not kept next to the result
        return self._error

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Add a callback that never runs on the event loop; see :meth:`concurrent.futures.Future.add_done_callback`."""
        super().add_done_callback(lambda future: self._run_callback(fn, future))


class CallTrace(Protocol):
    """Receiver of what happens to one call. On the loop; must not block or raise."""

    def sent(self, worker: WorkerId) -> None:
        """Take note that the call goes to a worker, the first time or again."""
        ...

    def ended(self, call: LiveCall, raw: RawOutcome) -> None:
        """Take note of the end of the call."""
        ...


class CallObserver(Protocol):
    """Receiver of the calls of a pool."""

    def begin(self, call: LiveCall) -> None:
        """Take note of a new call in the thread that submits it; may set its ``trace`` and ``header``."""
        ...


class CallGang:
    """Calls of one broadcast that begin and fail together, by rank. Belongs to the event loop.

    None of them runs again alone, because the others have already exchanged data with its first run.

    Attributes:
        calls: the calls.
        failed: True once one of them, and so all, have failed.
        raised: ids of the calls that raised; the cause may be the loss of another one.
    """

    def __init__(self, calls: Sequence[LiveCall]) -> None:
        self.calls = tuple(calls)
        self.failed = False
        self.raised: set[int] = set()
        self._addresses: dict[int, str] = {}
        for call in self.calls:
            call.gang = self

    def add_address(self, rank: int, text: str) -> list[str] | None:
        """Store the address of one rank; return all of them, by rank, once the last one has arrived."""
        # Overwrites: a rank that begins again in a fresh process sends the address of that one.
        self._addresses[rank] = text
        if len(self._addresses) < len(self.calls):
            return None
        addresses, self._addresses = self._addresses, {}
        return [addresses[rank] for rank in range(len(self.calls))]

    def fail(self) -> bool:
        """Mark the gang as failed; return True the first time."""
        first, self.failed = not self.failed, True
        return first


@dataclass(slots=True, kw_only=True)
class Incoming:
    """Chunks and lines of one call, until its outcome.

    Attributes:
        shown: see :class:`~skyward.scheduling.calls.RawOutcome`.
    """

    shown: Callable[[], None] | None = None
    _parts: dict[int, memoryview] = field(default_factory=dict[int, memoryview])
    _lines: Reassembler = field(default_factory=Reassembler)
    _no_memory: OSError | MemoryError | None = None

    def add_chunk(self, chunk: messages.ResultChunk) -> None:
        """Store a piece of a large result; without memory for the result, drop it and all later pieces."""
        if self._no_memory is not None:
            return
        part = self._parts.get(chunk.part)
        try:
            if part is None:
                part = self._parts[chunk.part] = _own_memory(chunk.part_bytes)
        except (OSError, MemoryError) as error:
            self._parts.clear()  # their memory is free at once: this result can no longer be completed
            self._no_memory = error
            return
        part[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def map_segment(self, outcome: messages.Outcome, results: MappedResults) -> None:
        """Map the parts of a large result that this machine's worker shares; without room for it, drop it."""
        try:
            self._parts = dict(enumerate(results.open(outcome.segment, outcome.part_bytes)))
        except OSError as error:
            self._no_memory = error

    def outcome(self, outcome: messages.Outcome, worker: WorkerId) -> RawOutcome:
        """Return the outcome of the call, with the parts that have arrived."""
        if outcome.error is not None:
            return RawOutcome(error=outcome.error, seconds=outcome.seconds, worker=worker)
        if self._no_memory is not None:
            error = _not_received(sum(outcome.part_bytes), worker, self._no_memory)
            return RawOutcome(error=error, seconds=outcome.seconds, worker=worker)
        parts = [self._parts.pop(index) for index in range(len(outcome.part_bytes))]  # the caller drops the call later
        data = outcome.data or parts.pop(0)
        return RawOutcome(data=data, buffers=tuple(parts), seconds=outcome.seconds, worker=worker)

    def events(
        self,
        item: messages.PrintedLines | messages.LoggedRecord | messages.EmittedEvent,
        *,
        worker: WorkerId,
        instance_id: str,
        call: str = "",
    ) -> Iterator[SkywardEvent]:
        """Yield the events in an item of printed lines, a record's, or the one that user code emitted.

        Args:
            item: the item.
            worker: the worker that sent it.
            instance_id: the machine of that worker.
            call: name of the call; empty for none.
        """
        if isinstance(item, messages.EmittedEvent):
            yield _event(item.data, instance_id)
            return
        if isinstance(item, messages.LoggedRecord):
            yield record_line(item.values, worker.node, worker.worker, instance_id, call or item.task)
            return
        for piece in item.pieces:
            line = self._lines.add(piece)
            if line is not None:
                place = worker.node, instance_id, line.text, line.timestamp, worker.worker
                yield LogLine(*place, call or line.task, line.stream, state=line.state)


def _own_memory(size: int) -> memoryview:
    """Return private memory for a part of a result."""
    return memoryview(allocate_memory(size))


def _not_received(size: int, worker: WorkerId, cause: OSError | MemoryError) -> WorkerLostError | MemoryError:
    if isinstance(cause, FileNotFoundError):
        reason = "its file in the node's folder in memory was removed, by a call or with its node"
        message = f"the result of a call that ran on node {worker.node}, worker {worker.worker} is lost: {reason}"
        return WorkerLostError(message, node=worker.node, worker=worker.worker, reason=reason)
    return MemoryError(
        f"the result of a call that ran on node {worker.node}, worker {worker.worker} has {size / 1e6:,.0f} MB, "
        f"and this process has no memory for it ({cause}): raise its memory limit, drop earlier results, or have "
        "the call return less, for example by writing to a volume"
    )


def _event(data: bytes, instance_id: str) -> SkywardEvent:
    try:
        return pickle.loads(data)
    except BaseException as error:  # a class may be missing here, or raise SystemExit when it is rebuilt
        return Error(
            f"an event that a call emitted cannot be rebuilt here: {type(error).__name__}: {error}", instance_id
        )


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall(CallState):
    """Unfinished call, with its pickles and the receiver of its outcome.

    Attributes:
        label: name for errors and progress.
        function: the function.
        data: the pickle of ``(args, kwargs)``, if it is small and needs no blobs.
        arguments: the payload of ``(args, kwargs)`` otherwise.
        sources: the sources that a worker needs before it unpickles the arguments; None if there are none.
        blobs: the blobs that must lie on the node before.
        limits: limits of a run; None if there are none.
        tasks: number of the user's items in the call.
        work_label: label of the progress that a front-end publishes for the call; empty leaves that to the pool.
        sink: the receiver of the outcome.
        index: number of the call in the sink.
        number: number of the call among those of its label in the pool, from 0.
        header: facts about the call for user code; None outside of broadcasts and telemetry.
        callbacks: callbacks in force where the call was made; they receive its lines and events.
        incoming: the parts received so far; None before the first.
        gang: the gang of the call, if it has one.
        renewals: number of processes replaced because the call could not begin in them.
        held: blobs held on the worker's node for the call.
        shipping: token of the shipment under way; None if there is none.
        work: the piece of work that it counts for; None while it has not come in.
        trace: receiver of what happens to the call; None without telemetry.
        checkpoint: copy of its checkpoints; None while it has none.
    """

    label: str
    function: PackedFunction
    data: bytes = b""
    arguments: messages.Payload | None = None
    sources: SourceSet | None = None
    blobs: tuple[Blob, ...] = ()
    limits: CallLimits | None = None
    tasks: int = 1
    work_label: str = ""
    sink: CallSink | RemoteFuture = field(init=False)
    index: int = 0
    number: int = 0
    header: messages.CallHeader | None = None
    callbacks: tuple[Callback, ...] = ()
    incoming: Incoming | None = None
    gang: CallGang | None = None
    renewals: int = 0
    held: Sequence[Stored] = ()
    shipping: object = None
    work: WorkCount | None = None
    trace: CallTrace | None = None
    checkpoint: Checkpoint | None = None

    @property
    def name(self) -> str:
        """Name of the call, unique in its pool, such as ``"train#3"``: end of its label, and its number."""
        return call_name(self.label, self.number)

    def arriving(self) -> Incoming:
        """Return the store of received parts; make it if there is none yet."""
        if self.incoming is None:
            self.incoming = Incoming()
        return self.incoming

    def let_go(self) -> None:
        """Release the call's blobs, and void its shipment: it is on no worker now."""
        if self.held:
            for stored in self.held:
                stored.users -= 1
            self.held = ()
        self.shipping = None


def pack_calls(
    calls: Iterable[Invocation], memo: ArgumentMemo, known: FunctionCache, *, large_bytes: int = LARGE_BYTES
) -> list[LiveCall]:
    """Pickle calls, in the caller's thread; a function or an array that several share is pickled or hashed once.

    Raises:
        SerializationError: a function or an argument cannot be pickled; names it, and the part of it.
    """
    functions: dict[int, PackedFunction] = {}
    packed_calls: list[LiveCall] = []
    for call in calls:
        function = functions.get(id(call.fn))
        if function is None:
            function = functions[id(call.fn)] = known.packed(call.fn, memo)
        label = call.label or function.label
        try:
            packed = pack_arguments(call.args, call.kwargs, label, large_bytes=large_bytes)
        except SerializationError:  # once more, one by one, to name the argument: costs nothing where all is well
            for name, value in (*enumerate(call.args), *call.kwargs.items()):
                pack(value, what=f"argument {name!r} of {label}")
            raise
        data, arguments, blobs = packed.data, None, function.blobs
        if len(data) >= LARGE_BYTES or packed.buffers:
            arguments, own_blobs = seal(packed, memo)
            data, blobs = b"", blobs + own_blobs
        packed_calls.append(
            LiveCall(
                id=0,
                kind=function.id,
                retries=call.retries,
                together=call.gang,
                label=label,
                function=function,
                data=data,
                arguments=arguments,
                sources=packed.sources,
                blobs=blobs,
                limits=call.limits,
                tasks=call.tasks,
                work_label=call.work,
            )
        )
    return packed_calls


class CallNumbers(dict[str, "itertools.count[int]"]):
    """Counters of calls by label; labels with the same short form share one. Thread-safe."""

    def __missing__(self, label: str) -> itertools.count[int]:
        """Return the counter of a label that is new."""
        short = short_label(label)
        return self.setdefault(label, itertools.count() if short == label else self[short])


@dataclass(slots=True, eq=False)
class WorkCount:
    """Counts of one piece of work: a batch, or the submitted calls of a function until none of them is left.

    Attributes:
        label: label of its calls; ``"calls"`` if they have several.
        left: number of unfinished calls.
        total: number of all its calls.
        silent: True if a front-end publishes the progress itself, in its own units.
        began_s: time of its first call.
        failed: number of its calls that have failed.
        cancelled: number of its calls that were cancelled or dropped.
    """

    label: str = ""
    left: int = 0
    total: int = 0
    silent: bool = False
    began_s: float = 0.0
    failed: int = 0
    cancelled: int = 0

    def progress(self, label: str, running: int) -> Progress:
        """Return the progress, with ``running`` calls on workers."""
        done = self.total - self.left - self.failed - self.cancelled
        return Progress(label, done, self.total, self.failed, min(running, self.left), self.cancelled)


class CallTable:
    """Unfinished calls by id, and the pieces of work that they belong to. Belongs to the event loop.

    Completes each call exactly once, and publishes the :class:`~skyward.events.Progress` of work.

    Args:
        publish: receiver of progress events; must not block.

    Attributes:
        unfinished: the calls by id.
        ended: number of calls that have ended so far, failed and cancelled ones included.
        failed: number of calls that have failed.
        cancelled: number of calls that were cancelled or dropped, or were unfinished when the pool closed.
        last_failure: the latest failure, in words; empty for none.
    """

    def __init__(self, publish: Callable[[SkywardEvent], None]) -> None:
        self.ended = 0
        self.failed = 0
        self.cancelled = 0
        self.last_failure = ""
        self.unfinished: dict[int, LiveCall] = {}
        self._publish = publish
        self._current: dict[WorkCount, None] = {}
        # The work of calls that were submitted one by one, by their name and whether a front-end publishes it.
        self._streams: dict[tuple[str, bool], WorkCount] = {}
        self._silent: dict[str, int] = {}
        self._reported: dict[str, Progress] = {}  # by front-ends, of unfinished work
        self._shown: dict[WorkCount, tuple[Progress, float]] = {}  # the event, and its time

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(list(self.unfinished.values()))  # a copy, as completing a call removes it

    def add(self, calls: Iterable[LiveCall], now: float) -> None:
        """Add new calls; one without a piece of work joins the others of its label."""
        for call in calls:
            self.unfinished[call.id] = call
            label, work = call.work_label or call.label, call.work
            if work is None:
                key = label, bool(call.work_label)
                work = self._streams.get(key)
                if work is None:
                    work = self._streams[key] = WorkCount(silent=bool(call.work_label))
                call.work = work
            if not work.left:
                self._current[work] = None
            if not work.total:
                work.label, work.began_s = label, now
            elif label != work.label:
                work.label = "calls"
            work.total += call.tasks
            work.left += call.tasks

    def complete(self, call: LiveCall, raw: RawOutcome) -> None:
        """Remove a call and deliver its outcome; does nothing for a call that is over already."""
        if self.unfinished.pop(call.id, None) is not None:
            self.ended += 1
            if call.held or call.shipping is not None:
                call.let_go()
            if raw.error is not None:
                raw.complete = call.function.complete
                self._count_failure(call, raw.error)
            elif (work := call.work) is not None:  # here, as it is paid for every call
                work.left -= call.tasks
                if not work.left:
                    self._end_work(work)
            if call.incoming is not None:
                raw.shown = call.incoming.shown
            if call.trace is not None:
                call.trace.ended(call, raw)
            if call.checkpoint is not None:
                # Its worker has removed the folder, unless the call has ended in another way.
                call.checkpoint.drop(stays_on_node=raw.worker is None)
            call.sink.deliver(call.index, raw)

    def _count_failure(self, call: LiveCall, error: messages.PackedError | Exception) -> None:
        cancelled = isinstance(error, CancelledError | PoolStateError)
        self.cancelled += cancelled
        self.failed += not cancelled
        if not cancelled:
            self.last_failure = f"{call.name}: {_in_a_line(error)}"
        if (work := call.work) is not None:
            work.left -= call.tasks
            work.failed += 0 if cancelled else call.tasks
            work.cancelled += call.tasks if cancelled else 0
            if not work.left:
                self._end_work(work)

    def _end_work(self, work: WorkCount) -> None:
        """Remove a piece of work that has no calls left; publish its end if it was shown."""
        self._current.pop(work, None)
        key = work.label, work.silent
        if self._streams.get(key) is work:
            del self._streams[key]
        if (shown := self._shown.pop(work, None)) is not None:
            self._publish(work.progress(shown[0].label, 0))

    def leave(self, worker_id: WorkerId) -> None:
        """Drop the blobs held and the parts received for the calls of a worker that is gone."""
        for call in self.unfinished.values():
            if call.worker == worker_id:
                call.let_go()
                call.incoming = None  # half a result: the next run sends all of its own

    def publish_progress(self, now: float, running: Callable[[], Iterable[WorkCount | None]]) -> None:
        """Publish the progress of work that has taken 0.5 s, where it has changed. Called periodically.

        Args:
            now: the present time, by the clock of the calls.
            running: returns the work of each running call.
        """
        due = [work for work in self._current if now - work.began_s >= _SHOWN_AFTER_S]
        if not due:
            return
        counts = Counter(running())
        # Replaced, never changed: front-ends read it in other threads.
        self._silent = {work.label: counts[work] for work in due if work.silent}
        for work in (work for work in due if not work.silent):
            before, at_s = self._shown.get(work, (None, 0.0))
            event = work.progress(before.label if before else self._free_label(work.label), counts[work])
            if event != before or now - at_s >= _AGAIN_AFTER_S:
                self._shown[work] = event, now
                self._publish(event)

    def report(self, event: Progress) -> None:
        """Publish a front-end's progress, with the calls of its work that ran at the last look. Thread-safe."""
        event = self._completed(event)
        self._reported.pop(event.label, None)
        if not event.over:
            self._reported[event.label] = event
        self._publish(event)

    def _completed(self, event: Progress) -> Progress:
        # Events of Dask's tasks state themselves what runs.
        unfinished = None if event.total is None else event.total - event.ended
        running = self._silent.get(event.label, event.running)
        return replace(event, running=running if unfinished is None else min(running, unfinished))

    def progress(self, running: Iterable[WorkCount | None]) -> tuple[Progress, ...]:
        """Return the progress of all unfinished work."""
        counts = Counter(running)
        own = (
            work.progress(self._shown[work][0].label if work in self._shown else work.label, counts[work])
            for work in self._current
            if not work.silent
        )
        return *own, *map(self._completed, list(self._reported.values()))

    def _free_label(self, label: str) -> str:
        taken = {event.label for event, _ in self._shown.values()}
        names = itertools.chain([label], (f"{label} ({number})" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)


def _in_a_line(error: messages.PackedError | Exception) -> str:
    kind, text = (
        (error.type_name, error.message)
        if isinstance(error, messages.PackedError)
        else (type(error).__name__, str(error))
    )
    first = text.partition("\n")[0][:_FAILURE_CHARACTERS]
    return f"{kind.rpartition('.')[2]}: {first}" if first else kind
