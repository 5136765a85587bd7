"""Lines made of printed text: put together and stamped on the worker, in pieces, and joined again on the client."""

from __future__ import annotations

import codecs
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["PIECE_CHARS", "LineAssembler", "LogPiece", "Reassembler", "StreamName"]

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
