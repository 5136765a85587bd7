"""Lines of printed text: assembled and stamped on the worker, sent in pieces, and joined again on the client."""

from __future__ import annotations

import codecs
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["PIECE_CHARS", "LineAssembler", "LogPiece", "Reassembler", "StreamName"]

PIECE_CHARS = 256 * 1024
"""Length of the longest piece of a line, in characters."""

StreamName = Literal["stdout", "stderr"]

_PROGRESS_INTERVAL_S = 1.0
_LONGEST_SEQUENCE = 4096  # a longer one is no sequence: text must not be held back for its end
_MOST_ROWS = 200  # a block of a screen's height; a movement may name any number
_UP, _DOWN = "\x1bU", "\x1bD"
"""Cursor movements in text without any other control sequences except colours."""
_BREAKS = re.compile(r"\r\n|\n|\r|\x08+|(?:\x1bU)+|\x1bD")
_SUSPECT = re.compile(r"[\x1b\x80-\x9f]")
_SEQUENCES = re.compile(
    r"""
    (?:\x1b\[|\x9b)(?P<numbers>[0-?]*)[ -/]*(?P<final>[@-~])                    # colours, movements, erasures
    | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c|(?=[\r\n]))     # titles, links
    | \x1b[\ -/]*(?P<plain>[0-~])                                               # everything else of its kind
    | \x1b
    """,
    re.VERBOSE,
)
_CUT_SEQUENCE = re.compile(r"(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\x9c\r\n]*\x1b?|[ -/]*)|\x9b[0-?]*[ -/]*)\Z")
_COLOURS = re.compile(r"\x1b\[[\d;:]*m")
_CELLS = re.compile(r"\x1b\[[\d;:]*m|.", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece:
    """Printed line, or a piece of a very long one.

    Attributes:
        text: text without the line end; always encodable as UTF-8.
        partial: True if the line goes on in this stream's next piece.
        stream: stream to which it was printed.
        timestamp: time of its completion, in seconds since the epoch.
        writer: number of the call's thread that printed it, from 0.
        state: True for a state of a progress bar, in one line, that will be overwritten.
        task: name of the Dask task that printed it, if one did.
    """

    text: str
    partial: bool = False
    stream: StreamName = "stdout"
    timestamp: float
    writer: int = 0
    state: bool = False
    task: str = ""


class LineAssembler:
    r"""Assembler of lines from the text that one thread of a call writes to one stream. Pure; not thread-safe.

    ``\r\n`` is one line end. Text that is overwritten, after ``\r``, ``\b`` or a cursor movement, is a progress bar's
    state: at most one per second becomes a line, and so does the last one. A block of lines that is drawn repeatedly
    is a state as a whole. Colours (SGR) are kept, other control sequences are dropped. Bytes are read as UTF-8;
    invalid ones become escapes.

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
        self._carry = ""
        self._overwritten = False
        self._held_state = ""
        self._held_rows: list[str] = []
        self._rows_above = 0
        self._block_due = False
        self._in_block = False
        self._moving = False
        self._state_shown_at = float("-inf")

    def feed(self, data: str | bytes) -> list[LogPiece]:
        """Take written text or bytes; return the lines that they complete."""
        text = self._decoder.decode(data) if isinstance(data, bytes) else data
        text, self._carry = self._carry + text, ""
        if _SUSPECT.search(text):
            # A sequence may be cut between two writes: its beginning waits for the rest.
            if (cut := _CUT_SEQUENCE.search(text)) and len(cut[0]) < _LONGEST_SEQUENCE:
                text, self._carry = text[: cut.start()], cut[0]
            text = _SEQUENCES.sub(_meaning, text)
        if text.endswith("\r"):  # an overwritten state or a line end: the next character decides
            text, self._carry = text[:-1], "\r" + self._carry
        pieces: list[LogPiece] = []
        start = 0
        for found in _BREAKS.finditer(text):
            pieces += self._append(text[start : found.start()])
            pieces += self._break(found[0])
            start = found.end()
        return pieces + self._append(text[start:])

    def finish(self) -> list[LogPiece]:
        """Return the rest as a line. The assembler can be used again."""
        pieces = self._append(self._decoder.decode(b"", final=True))
        self._carry, self._rows_above = "", 0
        return pieces + (self._end_line() if self._parts or self._held_state or self._held_rows else [])

    def _break(self, how: str) -> list[LogPiece]:
        if how == "\r":
            return self._end_state()
        if how.startswith("\b"):
            return self._erase(len(how))
        if how.startswith(_UP):
            return self._move_up(len(how) // len(_UP))
        if self._rows_above:
            return self._end_row()
        return self._end_line() if how != _DOWN else []

    def _append(self, text: str) -> list[LogPiece]:
        if not text:
            return []
        self._moving = False
        self._parts.append(text)
        self._chars += len(text)
        if self._chars <= PIECE_CHARS:
            return []
        line = self._take()  # sent piece by piece: a line without an end must not fill the memory
        rest = (len(line) - 1) // PIECE_CHARS * PIECE_CHARS
        self._parts, self._chars, self._split = [line[rest:]], len(line) - rest, True
        return [self._piece(line[at : at + PIECE_CHARS], partial=True) for at in range(0, rest, PIECE_CHARS)]

    def _end_line(self) -> list[LogPiece]:
        rows = [self._piece(row) for row in self._held_rows]
        text, held, overwritten = self._take(), self._held_state, self._overwritten
        self._held_state, self._overwritten, self._split = "", False, False
        self._held_rows, self._block_due, self._in_block = [], False, False
        # A bar that was cleared at its end: its last state is the line, not the empty rest.
        if overwritten and not _COLOURS.sub("", text):
            return rows + ([self._piece(held)] if held else [])
        return [*rows, self._piece(text)]

    def _end_state(self) -> list[LogPiece]:
        if self._split:
            return self._end_line()
        self._overwritten = True
        text = self._take()
        if not _COLOURS.sub("", text).strip():
            return []
        # Of a block, the drawing that follows is shown as a whole, unless this line alone goes on.
        if not self._block_due and not self._is_due(drawings=2 if self._in_block else 1):
            self._held_state = text
            return []
        self._held_state, self._block_due = "", False
        return [self._piece(text, state=not self._in_block)]

    def _end_row(self) -> list[LogPiece]:
        """End a line of a block that is drawn again."""
        self._rows_above -= 1
        if self._split:
            return self._end_line()
        text, self._held_state = self._take(), ""
        if self._block_due:
            return [self._piece(text)]
        self._held_rows = [*self._held_rows[1 - _MOST_ROWS :], text]
        return []

    def _move_up(self, rows: int) -> list[LogPiece]:
        pieces = self._end_state()
        self._rows_above = min(self._rows_above + rows, _MOST_ROWS)
        if not self._moving:  # the first of several movements begins the next drawing
            self._moving, self._held_rows, self._held_state = True, [], ""
            self._in_block, self._block_due = True, self._is_due()
        return pieces

    def _erase(self, cells: int) -> list[LogPiece]:
        line = "".join(self._parts)
        pieces = self._end_state()
        found = _CELLS.findall(line)
        for at in range(len(found) - 1, -1, -1):
            if not cells:
                break
            if not found[at].startswith("\x1b"):
                del found[at]
                cells -= 1
        left = "".join(found)
        return pieces + self._append(left)

    def _is_due(self, drawings: int = 1) -> bool:
        """Return True if no state was shown for so many intervals; then count one as shown now."""
        now = self._clock()  # may be set back, which must not silence a bar
        due = not 0 <= now - self._state_shown_at < drawings * _PROGRESS_INTERVAL_S
        if due:
            self._state_shown_at = now
        return due

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts, self._chars = [], 0
        return text

    def _piece(self, text: str, *, partial: bool = False, state: bool = False) -> LogPiece:
        if not text.isascii():  # lone surrogates have no UTF-8 form
            text = text.encode("utf-8", "backslashreplace").decode()
        now, writer = self._clock(), self._writer
        return LogPiece(text=text, partial=partial, stream=self._stream, timestamp=now, writer=writer, state=state)


def _meaning(sequence: re.Match[str]) -> str:
    """Return the part of a control sequence that matters for lines: colours, movements in a simpler form."""
    numbers, final = sequence["numbers"], sequence["final"]
    count = min(int(numbers), _MOST_ROWS) if numbers and numbers.isdecimal() else 1
    match final or sequence["plain"]:
        case "m" if final and _COLOURS.fullmatch(f"\x1b[{numbers}m"):
            return f"\x1b[{numbers}m"
        case "A" | "F" if final:
            return _UP * count
        case "B" | "E" if final:
            return _DOWN * count
        case "D" if final:
            return "\b" * count
        case "G" | "H" if final:
            return "\r"
        case "M" if not final:
            return _UP
        case _:
            return ""


class Reassembler:
    """Joiner of pieces on the receiving side, one for each call. Not thread-safe."""

    def __init__(self) -> None:
        self._started: defaultdict[tuple[StreamName, int], list[str]] = defaultdict(list)

    def add(self, piece: LogPiece) -> LogPiece | None:
        """Return the whole line that the piece ends; None if the line goes on."""
        source = (piece.stream, piece.writer)
        if not piece.partial and source not in self._started:  # nearly all lines
            return piece
        parts = self._started[source]
        parts.append(piece.text)
        if piece.partial:
            return None
        del self._started[source]
        return replace(piece, text="".join(parts))

    def finish(self, timestamp: float) -> list[LogPiece]:
        """Return lines cut by the loss of their worker, stamped with ``timestamp``."""
        cut, self._started = self._started, defaultdict(list)
        return [
            LogPiece(text="".join(parts), stream=stream, timestamp=timestamp, writer=writer)
            for (stream, writer), parts in cut.items()
            if parts
        ]
