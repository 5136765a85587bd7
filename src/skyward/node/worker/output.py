"""Output of a worker's calls: text from Python, records of :mod:`logging`, and output of descriptors 1 and 2."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from skyward.distributed.runtime import current_task
from skyward.events.log_files import DEFAULT_LEVELS, has_handlers
from skyward.node.worker.descriptor_capture import WorkerLog
from skyward.wire.messages import LogPiece, StreamName
from skyward.wire.printed_lines import PIECE_CHARS, LineAssembler

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_logger = logging.getLogger("skyward.node.worker.output")

_CAPTURED = 0
"""Writer that stands for descriptors 1 and 2; no thread has this identifier."""


Deliver = Callable[[int, Sequence[LogPiece], int], None]
"""Receiver of a call's next pieces, in order, in the thread that writes or hands over. Must not block.

It takes the call's id, 0 for none; the pieces; and the offset in the worker's log before which all captured output was
delivered, 0 if they are not captured.
"""


def _never_wait() -> None:
    return None


class CallOutput:
    """Collector of printed text, as lines, by call. Made on the thread of the lane's event loop.

    Captured output belongs to the running call, or to none between calls. It is handed over before any text that is
    printed later in Python, and at the latest when its call ends.

    Attributes:
        lock: lock of all sinks and the log; reentrant, since a finalizer that prints may run in a thread that holds it.
        running: sinks of the running calls.
        between_calls: True from the first call to :meth:`end`.
        guest_thread: thread of a service's guest, whose own messages go to the worker's log.

    Args:
        deliver: receiver of the pieces.
        clock: returns seconds since the epoch.
        log: the worker's log, with captured output; None where nothing is captured.
        keep_pace: called before text is collected; blocks while the client is behind.
        deliver_record: receiver of the call's id, a service's task and a record's attributes; must not block.
    """

    def __init__(
        self,
        deliver: Deliver,
        clock: Callable[[], float] = time.time,
        *,
        log: WorkerLog | None = None,
        keep_pace: Callable[[], None] = _never_wait,
        deliver_record: Callable[[int, str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.deliver = deliver
        self.clock = clock
        self.log = log
        self.keep_pace = keep_pace
        self.deliver_record = deliver_record
        self.lock = log.lock if log is not None else threading.RLock()
        self.running: list[_CallSink] = []
        self.between_calls = False
        self._no_call = _CallSink(0, self)
        self._lane_thread = threading.get_ident()
        self.guest_thread: int | None = None
        self._routers: tuple[OutputRouter, OutputRouter] | None = None
        self._stdin: TextIO | None = None

    def of_call(self, call_id: int) -> AbstractContextManager[object]:
        """Collect the text printed inside, and by threads of no call; at the end hand over text without a line end."""
        return _CallSink(call_id, self)

    def current(self) -> _CallSink | None:
        """Return the sink of this thread's call, of no call in a service's task, else of the running call.

        Between calls it is None for the lane's thread, and the sink of no call for all others, which calls may have
        started. It is always None in a guest's thread, and in all before the first call and after :meth:`end`.
        """
        sink = _sink.get()
        # A thread that outlives its call has the sink in its context still; its text belongs to the next call.
        if sink and not sink.finished:
            return sink
        if current_task() is not None:
            return self._no_call
        if threading.get_ident() == self.guest_thread:
            return None
        own = not self.between_calls or threading.get_ident() == self._lane_thread
        return next(reversed(self.running), None if own else self._no_call)

    def end(self) -> None:
        """Hand over unfinished lines of no call; from now on the worker's log takes text from outside of calls."""
        self.between_calls = False
        self._no_call.finish()

    def take_record(self, record: logging.LogRecord) -> bool:
        """Deliver a record after the output before it; return False if it is of no call, or cannot be sent."""
        sink = self.current()
        if sink is None or self.deliver_record is None:
            return False
        sink.record(record_values(record), self.deliver_record)
        return True

    def install(self) -> None:
        """Replace ``sys.stdout`` and ``sys.stderr``, and take the records of :mod:`logging`."""
        take_log_records(self.take_record)
        own = self.log.own if self.log is not None else None
        stdout = OutputRouter(_stream_for(1), stream="stdout", current=self.current, own=own)
        stderr = OutputRouter(_stream_for(2), stream="stderr", current=self.current, own=own)
        self._routers = (stdout, stderr)
        self._stdin = sys.stdin
        self.restore_streams()

    def restore_streams(self) -> None:
        """Undo what calls have done to the streams of :mod:`sys` and to :func:`logging.disable`.

        Calls replace, close and patch them, or leave a thread behind that does, and the next call would print nothing.
        """
        if self._routers is None:
            return
        stdout, stderr = self._routers
        namespace = vars(sys)  # a call may have deleted a name
        if namespace.get("stdout") is not stdout:
            sys.stdout = stdout
        if namespace.get("stderr") is not stderr:
            sys.stderr = stderr
        if namespace.get("stdin") is not self._stdin:
            sys.stdin = self._stdin
        stdout.drop_patches()
        stderr.drop_patches()
        if logging.root.manager.disable:
            logging.disable(logging.NOTSET)

    def collect(self) -> None:
        """Hand over the output captured until now. Costs half a microsecond if there is none."""
        try:
            if self.log is not None and self.log.has_more:
                end = self.log.size  # a process that writes without a pause must not keep this thread here for ever
                while self.log.hand_on(self._feed) and self.log.position < end:
                    self.keep_pace()
        except OSError:  # a full or failing disk may recover, and is no failure of the call
            _logger.exception("captured output could not be read")

    @property
    def has_captured(self) -> bool:
        """True if captured output was not handed over yet. Takes half a microsecond."""
        return self.log is not None and self.log.has_more

    def collect_piece(self) -> bool:
        """Hand over at most one piece of captured output; return True if there is more. Never blocks."""
        return self.log is not None and self.log.has_more and self.log.hand_on(self._feed)

    def mark(self, has_arrived: Callable[[], bool]) -> None:
        """Record that captured output was delivered, if ``has_arrived`` returns True."""
        if self.log is None or self.log.is_marked:
            return
        until = self.log.whole  # read before the question: more may be handed over meanwhile
        if has_arrived():
            self.log.mark(until)

    def _feed(self, data: bytes, whole: int) -> None:
        sink = self.running[-1] if self.running else self._no_call
        sink.take("stdout", data, writer=_CAPTURED, log_end=whole)


class _CallSink:
    """Sink of one call's text, and a context manager around the call."""

    # Entered for every call, so it is a class: a generator would cost twice as much.

    def __init__(self, call_id: int, output: CallOutput) -> None:
        self.finished = False
        self._call_id = call_id
        self._output = output
        # One for each thread and stream: print() writes a line and its end separately, and threads would mix lines.
        self._assemblers: dict[tuple[StreamName, int], LineAssembler] = {}
        self._writers: dict[int, int] = {}

    def __enter__(self) -> None:
        self._output.restore_streams()
        self._token = _sink.set(self)
        self._output.running.append(self)
        self._output.between_calls = True

    def __exit__(self, *_error: object) -> None:
        if (log := self._output.log) is not None and not log.is_quiet:
            log.restore_descriptors()
            self._output.collect()
        self._output.running.remove(self)
        _sink.reset(self._token)
        self.finish()

    def write(self, stream: StreamName, data: str | bytes) -> None:
        """Accept text from Python, after the output that was captured before."""
        self._output.keep_pace()
        self._output.collect()
        self.take(stream, data, writer=threading.get_ident())

    def record(self, values: Mapping[str, Any], deliver: Callable[[int, str, Mapping[str, Any]], None]) -> None:
        """Deliver a record, after the output that was captured before."""
        self._output.keep_pace()
        self._output.collect()
        deliver(self._call_id, "" if self._call_id else current_task() or "", values)

    def take(self, stream: StreamName, data: str | bytes, *, writer: int, log_end: int = 0) -> None:
        """Split ``data`` into lines and deliver them."""
        with self._output.lock:
            number = self._writers.setdefault(writer, len(self._writers))
            assembler = self._assemblers.get((stream, number))
            if assembler is None:
                assembler = self._assemblers[stream, number] = LineAssembler(stream, self._output.clock, number)
            pieces = assembler.feed(data) + (assembler.finish() if self.finished else [])
            if pieces and not self._call_id and writer != _CAPTURED and (task := current_task()):
                pieces = [replace(piece, task=task) for piece in pieces]
            if pieces:
                self._output.deliver(self._call_id, pieces, log_end)

    def finish(self) -> None:
        """Hand over unfinished lines; later text is delivered at once."""
        self.finished = True  # set before the rest is read: a thread that writes meanwhile ends its line itself
        if not self._assemblers:
            return
        with self._output.lock:
            pieces = [piece for assembler in self._assemblers.values() for piece in assembler.finish()]
            if pieces:
                log = self._output.log if _CAPTURED in self._writers else None
                self._output.deliver(self._call_id, pieces, log.position if log is not None else 0)
                if log is not None:
                    log.end_line()


class OutputRouter(io.TextIOBase):
    """Replacement of ``sys.stdout`` or ``sys.stderr``: a call's text goes to its sink, the rest to the worker's log.

    Args:
        original: the stream that it replaces.
        stream: name of that stream.
        current: returns the sink of the calling thread's call, or None.
        own: stream for text without a sink; None for the original.
    """

    def __init__(
        self,
        original: TextIO,
        *,
        stream: StreamName,
        current: Callable[[], _CallSink | None],
        own: TextIO | None = None,
    ) -> None:
        self._original = original
        self._stream: StreamName = stream
        self._current = current
        self._own = own if own is not None else original
        self._pid = os.getpid()
        self._bytes_side = _BytesSide(self)
        self._attributes = len(vars(self)) + 1

    def drop_patches(self) -> None:
        """Remove attributes that a call has set, such as its own ``write``."""
        attributes = vars(self)
        while len(attributes) > self._attributes:  # they come after this object's own
            attributes.popitem()

    def write(self, text: str, /) -> int:
        """Pass ``text`` to its sink; return its length."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        # A forked child has no thread that sends: its text goes to descriptor 1 or 2, which the worker captures.
        if os.getpid() != self._pid:
            _write_to(self._original, text)
        elif (sink := self._current()) is None:
            _write_to(self._own, text)
        else:
            sink.write(self._stream, text)
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Pass bytes that were written to :attr:`buffer` to their sink."""
        if os.getpid() != self._pid:
            _write_to(self._original, data.decode("utf-8", "backslashreplace"))
        elif (sink := self._current()) is None:
            _write_to(self._own, data.decode("utf-8", "backslashreplace"))
        else:
            sink.write(self._stream, data)

    def flush(self) -> None:
        """Flush the interpreter's stream; a call's lines are sent as soon as they end."""
        with suppress(ValueError):  # a call may have closed it
            getattr(sys, f"__{self._stream}__", self._original).flush()

    def close(self) -> None:
        """Do nothing: the next call prints to this stream, too."""

    def reconfigure(self, **_options: object) -> None:
        """Accept any options, without effect."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the original's descriptor, whose output the worker captures."""
        return self._original.fileno()

    @property
    def buffer(self) -> io.BufferedIOBase:
        """The same stream, for bytes."""
        return self._bytes_side

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the encoding in which text is sent."""
        return "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the error handler for text that the encoding cannot represent."""
        return "backslashreplace"

    @property
    def name(self) -> str:
        """The interpreter's name for this stream."""
        return f"<{self._stream}>"

    @property
    def mode(self) -> str:
        """Write-only."""
        return "w"


class _BytesSide(io.BufferedIOBase):
    def __init__(self, router: OutputRouter) -> None:
        self._router = router

    def write(self, data: ReadableBuffer, /) -> int:
        content = bytes(data)
        self._router.write_bytes(content)
        return len(content)

    def flush(self) -> None:
        self._router.flush()

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._router.fileno()


def _stream_for(descriptor: int) -> TextIO:
    """Return a stream for forked children, which no call can close, unlike those of :mod:`sys`."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _write_to(stream: TextIO, text: str) -> None:
    if not text.isascii():  # the stream's own encoding and error handler may raise, as with LANG=C and surrogates
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)


_sink: ContextVar[_CallSink | None] = ContextVar("skyward_sink", default=None)


_OWN: Final = "skyward"
_SIMPLE: Final = (str, int, float, bool, type(None))
_LEFT_OUT: Final = ("args", "msg", "exc_info", "exc_text", "stack_info", "message", "asctime")
_formatter: Final = logging.Formatter()


def take_log_records(take: Callable[[logging.LogRecord], bool]) -> None:
    """Offer records to ``take`` whose logger has no handler; those that it refuses go to the handlers of this process.

    A call that configures handlers itself keeps its records, which its handlers print.
    """
    # Neither they nor `take` are handlers of the root logger: logging.basicConfig() of user code would do nothing then.
    own, logging.root.handlers[:] = logging.root.handlers[:], []
    logging.getLogger(_OWN).setLevel(logging.root.level)
    logging.root.setLevel(DEFAULT_LEVELS[""])
    worker, usual = os.getpid(), logging.Logger.callHandlers

    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        if os.getpid() != worker or has_handlers(self):  # a forked child has no thread that sends
            usual(self, record)
        elif record.name.partition(".")[0] == _OWN or not take(record):
            for handler in own:
                handler.handle(record)

    logging.Logger.callHandlers = call_handlers


def record_values(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the simple attributes of a record, ``extra=`` included, with its message and its traceback as text."""
    simple = {name: value for name, value in vars(record).items() if name not in _LEFT_OUT and _is_simple(value)}
    values = {name: _text(value) if isinstance(value, str) else value for name, value in simple.items()}
    values |= {"name": _text(record.name), "levelname": _text(str(record.levelname)), "levelno": int(record.levelno)}
    values["msg"] = _text(_message(record))
    exc_text = record.exc_text or (_formatter.formatException(record.exc_info) if record.exc_info else None)
    values["exc_text"] = exc_text and _text(exc_text)
    values["stack_info"] = record.stack_info and _text(record.stack_info)
    return values


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # of any class: it calls __str__ of the user's own
        try:
            return f"{record.msg} (its arguments {record.args!r} do not fit: {error})"
        except Exception:  # the same: a record is no reason for a call to fail
            return f"(a message without text: {type(error).__name__})"


def _is_simple(value: object) -> bool:
    if isinstance(value, str):
        return len(value) < PIECE_CHARS
    return type(value) in _SIMPLE and not (isinstance(value, int) and abs(value) >> 63)


def _text(text: str) -> str:
    return text[:PIECE_CHARS].encode("utf-8", "backslashreplace").decode()  # lone surrogates have no UTF-8 form


class TakenLevels:
    """Levels of the client's loggers, taken along to this process. Levels that user code sets here stay."""

    def __init__(self) -> None:
        self._levels = DEFAULT_LEVELS

    def take(self, levels: Mapping[str, int]) -> None:
        """Set the levels that have changed since the last call."""
        before, self._levels = self._levels, levels
        for name in {**before, **levels}:
            level = levels.get(name, logging.NOTSET)
            if level != before.get(name, logging.NOTSET):
                logging.getLogger(name or None).setLevel(level)
