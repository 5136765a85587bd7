"""What a worker does with printed text: each call's lines are put together, stamped and handed on, in order."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

from skyward.runtime import runs_dask_task

__all__ = [
    "PIECE_CHARS",
    "CallOutput",
    "LineAssembler",
    "LogPiece",
    "OutputRouter",
    "Reassembler",
    "Sink",
    "StreamName",
]

PIECE_CHARS = 256 * 1024
"""Longest piece of a line, in characters."""

StreamName = Literal["stdout", "stderr"]

_PROGRESS_INTERVAL_S = 1.0
_LINE_ENDS = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece:
    """A line that was printed, or a piece of a very long one.

    Attributes:
        text: without its end; always encodable as UTF-8.
        partial: whether the line goes on in this stream's next piece.
        stream: where it was printed.
        timestamp: when it was complete, in seconds since the epoch.
        writer: which of the call's threads printed it, counted from 0.
    """

    text: str
    partial: bool = False
    stream: StreamName = "stdout"
    timestamp: float
    writer: int = 0


class LineAssembler:
    r"""Makes lines of what one thread of a call writes to one stream. Pure; not thread-safe.

    ``\r\n`` is one line end. Text that ``\r`` overwrites is a progress bar's state: at most one per second becomes a
    line, and so does the last one. Bytes are read as UTF-8, what is not UTF-8 is shown as an escape.

    Args:
        stream: name for the pieces.
        clock: seconds since the epoch.
        writer: number for the pieces.
    """

    def __init__(self, stream: StreamName, clock: Callable[[], float], writer: int = 0) -> None:
        self._stream: StreamName = stream
        self._clock = clock
        self._writer = writer
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._parts: list[str] = []
        self._chars = 0
        self._split = False
        self._carriage = False
        self._overwritten = False
        self._held_state = ""
        self._state_shown_at = float("-inf")

    def feed(self, data: str | bytes) -> list[LogPiece]:
        """Take what was written; return the lines it completes."""
        text = self._decoder.decode(data) if isinstance(data, bytes) else data
        if self._carriage:  # only what follows tells an overwritten state from a line end
            text = "\r" + text
        self._carriage = text.endswith("\r")
        pieces: list[LogPiece] = []
        start = 0
        for end in _LINE_ENDS.finditer(text, 0, len(text) - self._carriage):
            pieces += self._append(text[start : end.start()])
            pieces += self._end_line() if "\n" in end[0] else self._end_state()
            start = end.end()
        pieces += self._append(text[start : len(text) - self._carriage])
        return pieces

    def finish(self) -> list[LogPiece]:
        """Return what is left, as if its line had ended here. The assembler can be used again."""
        pieces = self._append(self._decoder.decode(b"", final=True))
        self._carriage = False
        return pieces + (self._end_line() if self._parts or self._held_state else [])

    def _append(self, text: str) -> list[LogPiece]:
        if not text:
            return []
        self._parts.append(text)
        self._chars += len(text)
        if self._chars <= PIECE_CHARS:
            return []
        line = self._take()
        rest = (len(line) - 1) // PIECE_CHARS * PIECE_CHARS
        self._parts, self._chars, self._split = [line[rest:]], len(line) - rest, True
        return [self._piece(line[at : at + PIECE_CHARS], partial=True) for at in range(0, rest, PIECE_CHARS)]

    def _end_line(self) -> list[LogPiece]:
        text, held, overwritten = self._take(), self._held_state, self._overwritten
        self._held_state, self._overwritten, self._split = "", False, False
        if overwritten and not text:
            return [self._piece(held)] if held else []
        return [self._piece(text)]

    def _end_state(self) -> list[LogPiece]:
        if self._split:
            return self._end_line()
        self._overwritten = True
        text = self._take()
        if not text.strip():
            return []
        now = self._clock()
        if 0 <= now - self._state_shown_at < _PROGRESS_INTERVAL_S:
            self._held_state = text
            return []
        self._held_state, self._state_shown_at = "", now
        return [self._piece(text)]

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts, self._chars = [], 0
        return text

    def _piece(self, text: str, *, partial: bool = False) -> LogPiece:
        if not text.isascii():  # lone surrogates have no UTF-8 form
            text = text.encode("utf-8", "backslashreplace").decode()
        return LogPiece(text=text, partial=partial, stream=self._stream, timestamp=self._clock(), writer=self._writer)


class Reassembler:
    """Puts pieces together again, on the receiving side: one for each call. Not thread-safe."""

    def __init__(self) -> None:
        self._started: defaultdict[tuple[StreamName, int], list[str]] = defaultdict(list)

    def add(self, piece: LogPiece) -> LogPiece | None:
        """The whole line that the piece ends; None if the line goes on."""
        source = (piece.stream, piece.writer)
        parts = self._started[source]
        parts.append(piece.text)
        if piece.partial:
            return None
        del self._started[source]
        return replace(piece, text="".join(parts))

    def finish(self, timestamp: float) -> list[LogPiece]:
        """The lines whose end never came, as their worker was lost, stamped with ``timestamp``."""
        cut, self._started = self._started, defaultdict(list)
        return [
            LogPiece(text="".join(parts), stream=stream, timestamp=timestamp, writer=writer)
            for (stream, writer), parts in cut.items()
            if parts
        ]


class Sink(Protocol):
    """Takes what is written while a call runs."""

    def write(self, stream: StreamName, data: str | bytes) -> None:
        """From any thread."""
        ...


class CallOutput:
    """Collects what calls print, as lines, each by its call.

    Args:
        deliver: takes a call's id and its next pieces, in order; called in the thread that prints.
        clock: seconds since the epoch.
    """

    def __init__(
        self, deliver: Callable[[int, Sequence[LogPiece]], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._deliver = deliver
        self._clock = clock
        self._running: list[_CallSink] = []
        self._tasks = _CallSink(0, deliver, clock, [])

    def of_call(self, call_id: int) -> AbstractContextManager[object]:
        """Collect what is printed inside, and by threads that belong to no call; then hand on what has no line end."""
        return _CallSink(call_id, self._deliver, self._clock, self._running)

    def current(self) -> Sink | None:
        """Where this thread's text goes: its own call, no call if it is a task of Dask's, else the one that runs."""
        sink = _sink.get()
        if sink and not sink.finished:
            return sink
        return self._tasks if runs_dask_task() else next(reversed(self._running), None)

    def install(self) -> None:
        """Stand in for ``sys.stdout`` and ``sys.stderr`` from now on."""
        sys.stdout = OutputRouter(sys.stdout, stream="stdout", current=self.current)
        sys.stderr = OutputRouter(sys.stderr, stream="stderr", current=self.current)


class _CallSink:
    """Entered once for every call, so it is a class: a generator would cost twice as much."""

    def __init__(
        self,
        call_id: int,
        deliver: Callable[[int, Sequence[LogPiece]], None],
        clock: Callable[[], float],
        running: list[_CallSink],
    ) -> None:
        self.finished = False
        self._call_id = call_id
        self._deliver = deliver
        self._clock = clock
        self._all_running = running
        self._lock = threading.RLock()  # a finalizer that prints may run inside a print
        # One for each thread and stream: print() writes a line and its end one after the other.
        self._assemblers: dict[tuple[StreamName, int], LineAssembler] = {}
        self._writers: dict[int, int] = {}

    def __enter__(self) -> None:
        self._token = _sink.set(self)
        self._all_running.append(self)

    def __exit__(self, *_error: object) -> None:
        self._all_running.remove(self)
        _sink.reset(self._token)
        self.finish()

    def write(self, stream: StreamName, data: str | bytes) -> None:
        with self._lock:
            writer = self._writers.setdefault(threading.get_ident(), len(self._writers))
            assembler = self._assemblers.get((stream, writer))
            if assembler is None:
                assembler = self._assemblers[stream, writer] = LineAssembler(stream, self._clock, writer)
            self._hand_on(assembler.feed(data) + (assembler.finish() if self.finished else []))

    def finish(self) -> None:
        with self._lock:
            self.finished = True
            for assembler in self._assemblers.values():
                self._hand_on(assembler.finish())

    def _hand_on(self, pieces: Sequence[LogPiece]) -> None:
        if pieces:
            self._deliver(self._call_id, pieces)


_sink: ContextVar[_CallSink | None] = ContextVar("skyward_sink", default=None)


class OutputRouter(io.TextIOBase):
    """Stands in for ``sys.stdout`` or ``sys.stderr``: a call's text goes to its sink, all else to the original stream.

    In a process forked from this one everything goes to the original: the sinks' other ends are not there.

    Args:
        original: what it stands in for.
        stream: which of the two.
        current: the sink of the call that the calling thread belongs to; None for the original stream.
    """

    def __init__(self, original: TextIO, *, stream: StreamName, current: Callable[[], Sink | None]) -> None:
        self._original = original
        self._stream: StreamName = stream
        self._current = current
        self._pid = os.getpid()
        self._bytes_side = _BytesSide(self)

    def write(self, text: str, /) -> int:
        """Hand on ``text``; return its length."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        sink = self._sink()
        if sink is None:
            if not text.isascii():  # the original's own encoding and error handler may refuse it
                encoding = self._original.encoding or "utf-8"
                self._original.write(text.encode(encoding, "backslashreplace").decode(encoding))
            else:
                self._original.write(text)
        else:
            sink.write(self._stream, text)
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """What is written to :attr:`buffer`."""
        sink = self._sink()
        if sink is not None:
            sink.write(self._stream, data)
        else:
            self._original.write(data.decode("utf-8", "backslashreplace"))

    def _sink(self) -> Sink | None:
        return self._current() if os.getpid() == self._pid else None

    def flush(self) -> None:
        """Flush the original. A call's lines are on their way as soon as they end."""
        self._original.flush()

    def close(self) -> None:
        """Stay open: the next call prints here, too."""

    def reconfigure(self, **_options: object) -> None:
        """Accepted and without effect."""

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The original's: what is written there belongs to no call."""
        return self._original.fileno()

    @property
    def buffer(self) -> io.BufferedIOBase:
        """The same, for bytes."""
        return self._bytes_side

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What text is sent as."""
        return "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What becomes of text without such a form."""
        return "backslashreplace"

    @property
    def name(self) -> str:
        """As the interpreter's own streams are called."""
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
