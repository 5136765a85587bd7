"""Lines of printed text: assembled and stamped on the worker, sent in pieces, and joined again on the client."""

from __future__ import annotations

import codecs
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from skyward.wire.messages import LogPiece, StreamName
from skyward.wire.terminal import COLOURS, CONTROLS, WIDEST, Control, Row, cut_off, parse, row_of

PIECE_CHARS = 256 * 1024
"""Length of the longest piece of a line, in characters."""

_STATES_INTERVAL_S = 1.0
_MOST_ROWS = 200  # a block of a screen's height; a movement may name any number
_ADDING = ("text", "colour")
_IDLE_AT_END = ("down", "erase_below", "blank", "delete", "insert")
_IDLE_AT_START = ("back", "erase")
_ERASE_ALL = Control("erase", 2)


class LineAssembler:
    r"""Assembler of lines from the text that one thread of a call writes to one stream. Pure; not thread-safe.

    It follows the cursor as a terminal does: ``\b``, ``\r``, movements and erasures edit the present line, and those
    before it. What a line shows when it ends is sent. What an earlier write showed and this one overwrites is a state
    of a progress bar: states are sent at most once a second, and so is the last state of a bar that is wiped. Colours
    (SGR) are kept, other control sequences are dropped. Bytes are read as UTF-8; invalid ones become escapes.

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
        self._carry = ""
        self._states_sent_at = float("-inf")
        # The present line, as long as text was only added to it.
        self._parts: list[str] = []
        self._chars = 0
        self._split = False
        # Once it is edited: rows, of which it is the last one, and the index of the cursor's row.
        self._rows: list[_EditedRow] = []
        self._at = 0
        self._ended: deque[str] = deque(maxlen=_MOST_ROWS)  # the lines before it, which a cursor may go back to
        self._ended_count = 0
        self._saved = (0, 0)

    def feed(self, data: str | bytes) -> list[LogPiece]:
        """Take written text or bytes; return the lines that they complete."""
        text = self._decoder.decode(data) if isinstance(data, bytes) else data
        text, self._carry = self._carry + text, ""
        if not self._rows and not (CONTROLS.search(text) and CONTROLS.search(COLOURS.sub("", text))):
            return self._feed_plain(text)
        # A sequence may be cut between two writes, and the end of a line, too: its beginning waits for the rest.
        end = cut_off(text)
        if text.endswith("\r", 0, end):
            end -= 1
        text, self._carry = text[:end], text[end:]
        return self._feed_controlled(text)

    def finish(self) -> list[LogPiece]:
        """Return the rest as a line. The assembler can be used again."""
        pieces = self.feed(self._decoder.decode(b"", final=True))
        self._carry = ""
        if self._parts or self._rows:
            pieces += self._end_line(is_cut=True)
        self._ended.clear()
        return pieces

    def _feed_plain(self, text: str) -> list[LogPiece]:
        *lines, rest = text.split("\n")
        pieces: list[LogPiece] = []
        for line in lines:
            pieces += self._append(line)
            pieces += self._end_line()
        return pieces + self._append(rest)

    def _feed_controlled(self, text: str) -> list[LogPiece]:
        pieces: list[LogPiece] = []
        shown = [(row, row.plain, row.text) for row in self._rows if row.plain not in ("", row.sent)]
        parts_before = len(self._parts)
        for control in parse(text):
            if control.operation == "newline":
                pieces += self._send_states(shown)
                if self._at >= len(self._rows) - 1:
                    shown, parts_before = [], 0
                pieces += self._end_row()
            elif not self._rows and (control.operation in _ADDING or self._is_idle(control)):
                pieces += self._append(control.text)
            else:
                if not self._rows:
                    before = row_of("".join(self._parts[:parts_before]))
                    pieces += self._begin_editing()
                    shown = [(self._rows[0], before.plain, before.text)] if before.plain else []
                ended = self._edit(control)
                pieces += [*self._send_states(shown), *ended] if ended else []
        return pieces + self._send_states(shown)

    def _is_idle(self, control: Control) -> bool:
        """Return True if a control has no effect on a line to which text was only added."""
        operation, number, _ = control
        if self._chars or self._split:
            return operation in _IDLE_AT_END or (operation, number) == ("erase", 0)
        return operation in _IDLE_AT_END or operation in _IDLE_AT_START or (operation, number) == ("column", 0)

    def _append(self, text: str) -> list[LogPiece]:
        if not text:
            return []
        self._parts.append(text)
        self._chars += len(text)
        if self._chars <= PIECE_CHARS:
            return []
        line = self._take()  # sent piece by piece: a line without an end must not fill the memory
        rest = (len(line) - 1) // PIECE_CHARS * PIECE_CHARS
        self._parts, self._chars, self._split = [line[rest:]], len(line) - rest, True
        return [self._piece(line[at : at + PIECE_CHARS], partial=True) for at in range(0, rest, PIECE_CHARS)]

    def _begin_editing(self) -> list[LogPiece]:
        pieces = self._end_line() if self._split else []  # its beginning was sent
        self._rows, self._at = [_EditedRow(self._take())], 0
        return pieces

    def _edit(self, control: Control) -> list[LogPiece]:
        row = self._rows[self._at]
        match control.operation:
            case "up":
                self._go_to(self._at - control.number)
            case "down":
                self._go_to(self._at + control.number)
            case "save":
                self._saved = (self._ended_count - len(self._rows) + self._at, row.column)
            case "restore":
                line, column = self._saved
                self._go_to(line - self._ended_count + len(self._rows))
                self._rows[self._at].column = column
            case "text":
                return self._overwrite(control.text)
            case _:
                row.apply(control)
                if control.operation == "erase_below":
                    for below in self._rows[self._at + 1 :]:
                        below.apply(_ERASE_ALL)
        return []

    def _overwrite(self, text: str) -> list[LogPiece]:
        row = self._rows[self._at]
        row.apply(Control("text", text=text[:WIDEST]))
        row.was_written = True
        rest = text[WIDEST:]
        if row.width <= WIDEST:
            return self._overwrite(rest) if rest else []
        if self._at < len(self._rows) - 1:
            return self._end_line() + self._append(rest)
        pieces = self._send_rows(self._rows[:-1])  # no bar is that wide
        self._rows = []
        return pieces + self._append(row.text) + self._append(rest)

    def _go_to(self, at: int) -> None:
        before = self._rows[self._at]
        lines = [self._ended.pop() for _ in range(min(len(self._ended), max(0, -at)))]
        self._rows[:0] = [_EditedRow(line, is_sent=True) for line in reversed(lines)]
        self._at = min(max(at + len(lines), 0), len(self._rows) - 1)
        row = self._rows[self._at]
        row.column, row.styles = before.column, before.styles

    def _end_row(self) -> list[LogPiece]:
        if self._at >= len(self._rows) - 1:
            return self._end_line()
        self._go_to(self._at + 1)
        self._rows[self._at].column = 0
        return []

    def _end_line(self, *, is_cut: bool = False) -> list[LogPiece]:
        """End the present line, and with it the changes of those before it."""
        self._ended_count += 1
        if not self._rows:
            text, self._split = self._take(), False
            self._ended.append(text[:WIDEST])
            return [self._piece(text)]
        if is_cut and not self._rows[-1].was_written:
            self._rows.pop()
        pieces, self._rows, self._at = self._send_rows(self._rows), [], 0
        return pieces

    def _send_rows(self, rows: Sequence[_EditedRow]) -> list[LogPiece]:
        self._ended.extend(row.text for row in rows)
        return [self._piece(text) for row in rows if (text := row.unsent_text()) is not None]

    def _send_states(self, shown: list[tuple[_EditedRow, str, str]]) -> list[LogPiece]:
        """Send what earlier writes showed if it is overwritten now, unless other states were sent a moment ago."""
        if all(row.plain.startswith(plain) for row, plain, _ in shown):
            return []
        is_due, is_state = self._is_due(), len(self._rows) == 1
        for row, plain, text in shown:
            row.held = "" if is_due else text
            row.sent = plain if is_due else row.sent
        pieces = [self._piece(text, state=is_state) for _, _, text in shown] if is_due else []
        shown.clear()
        return pieces

    def _is_due(self) -> bool:
        now = self._clock()  # may be set back, which must not silence a bar
        is_due = not 0 <= now - self._states_sent_at < _STATES_INTERVAL_S
        if is_due:
            self._states_sent_at = now
        return is_due

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts, self._chars = [], 0
        return text

    def _piece(self, text: str, *, partial: bool = False, state: bool = False) -> LogPiece:
        if not text.isascii():  # lone surrogates have no UTF-8 form
            text = text.encode("utf-8", "backslashreplace").decode()
        now, writer = self._clock(), self._writer
        return LogPiece(text=text, partial=partial, stream=self._stream, timestamp=now, writer=writer, state=state)


class _EditedRow(Row):
    """Row, and what was sent of it.

    Args:
        text: its text.
        is_sent: True if that was sent.

    Attributes:
        sent: its plain text as sent last; None if none was.
        held: the last state that was not sent, with its colours.
        was_written: False for a row that never had any text.
    """

    __slots__ = ("held", "sent", "was_written")

    def __init__(self, text: str, *, is_sent: bool = False) -> None:
        super().__init__()
        self.write(text)
        self.sent = self.plain if is_sent else None
        self.held = ""
        self.was_written = is_sent or bool(text)

    def unsent_text(self) -> str | None:
        """Return what is to be sent at its end; of a bar that was wiped the last state. None if nothing is."""
        if self.plain:
            return self.text if self.plain != self.sent else None
        return self.held or (None if self.was_written else "")


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
