"""Terminal control in printed text: the parser of control sequences, a row that they edit, and cleaned lines."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

Operation = Literal[
    "text",
    "colour",
    "newline",
    "column",
    "back",
    "forward",
    "up",
    "down",
    "save",
    "restore",
    "erase",
    "erase_below",
    "blank",
    "delete",
    "insert",
]
"""Effect of a :class:`Control`."""

CONTROLS: Final = re.compile(r"[\x1b\x80-\x9f\r\b]")
"""What text without any of these, line ends excepted, shows is the text itself."""
COLOURS: Final = re.compile(r"\x1b\[[\d;:]*m")
"""Colours and other attributes (SGR)."""

_CONTROL: Final = re.compile(
    r"""
    (?P<newline>\r?\n) | (?P<back>\x08+) | (?P<column>\r+(?!\n))
    | (?:\x1b\[|\x9b)(?P<numbers>[0-?]*)(?P<intermediate>[ -/]*)(?P<final>[@-~])    # colours, movements, erasures
    | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\r\n]*(?:\x07|\x1b\\|\x9c|(?=[\r\n]))     # titles, links
    | \x1b[\ -/]*(?P<plain>[0-~])                                                   # everything else of its kind
    | \x1b
    """,
    re.VERBOSE,
)
_CUT_OFF: Final = re.compile(
    r"(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\x80-\x9f\r\n]*\x1b?|[ -/]*)|\x9b[0-?]*[ -/]*"
    r"|[\x90\x98\x9d-\x9f][^\x07\x1b\x80-\x9f\r\n]*\x1b?)\Z"
)
_LONGEST_SEQUENCE: Final = 4096  # a longer one is no sequence: text must not be held back for its end
_MOST: Final = 1000
"""Largest number of columns or rows that one sequence moves, inserts or erases."""
_DIGITS: Final = 9
"""Digits of a number that count; Python refuses to convert more than 4,300."""
WIDEST: Final = 4096
"""Width in columns of the widest line that is edited; a cursor moves forward no further."""
_TAB: Final = 8
_RESET: Final = "\x1b[0m"
_STYLES_KEPT: Final = 8
"""Largest number of colour sequences, since the last reset, that a character keeps."""

_BY_FINAL: Final[dict[str, tuple[Operation, ...]]] = {
    "A": ("up",),
    "F": ("up", "column"),
    "B": ("down",),
    "E": ("down", "column"),
    "C": ("forward",),
    "a": ("forward",),
    "D": ("back",),
    "G": ("column",),
    "`": ("column",),
    "X": ("blank",),
    "P": ("delete",),
    "@": ("insert",),
    "s": ("save",),
    "u": ("restore",),
}
_BY_PLAIN: Final[dict[str, tuple[Operation, ...]]] = {
    "M": ("up",),
    "D": ("down",),
    "E": ("newline",),
    "7": ("save",),
    "8": ("restore",),
}


class Control(NamedTuple):
    """Part of printed text.

    Attributes:
        operation: what it does.
        number: columns or rows; for ``column`` the column from 0, for ``erase`` the sequence's number (0 to the end, 1
            to the beginning, 2 all).
        text: the characters of ``text``; the sequence of ``colour``.
    """

    operation: Operation
    number: int = 1
    text: str = ""


def cut_off(text: str) -> int:
    """Return where a control sequence begins whose end is still to come, else the length of the text."""
    found = _CUT_OFF.search(text)
    return found.start() if found and len(found[0]) < _LONGEST_SEQUENCE else len(text)


def parse(text: str) -> Iterator[Control]:
    """Yield text and what controls it, in order; sequences without an effect on lines are left out."""
    at = 0
    for match in _CONTROL.finditer(text):
        if match.start() > at:
            yield Control("text", text=text[at : match.start()])
        at = match.end()
        kind = match.lastgroup
        if kind == "newline":
            yield Control("newline")
        elif kind == "back":
            yield Control("back", at - match.start())
        elif kind == "column":
            yield Control("column", 0)
        elif kind == "final" and not match["intermediate"]:
            yield from _of_sequence(match["numbers"], match["final"])
        elif kind == "plain":
            yield from (Control(operation) for operation in _BY_PLAIN.get(match["plain"], ()))
    if at < len(text):
        yield Control("text", text=text[at:])


def _of_sequence(numbers: str, final: str) -> Iterator[Control]:
    if final == "m":
        if COLOURS.fullmatch(colour := f"\x1b[{numbers}m"):
            yield Control("colour", text=colour)
        return
    values = [int(number[:_DIGITS]) if number.isdecimal() else 0 for number in numbers.split(";")]
    if numbers and not numbers.replace(";", "").isdecimal():
        return  # private, such as the cursor's visibility
    first = min(values[0], _MOST)
    match final:
        case "K" if first in range(3):
            yield Control("erase", first)
        case "J" if first == 0:
            yield Control("erase_below")
        case "H" | "f":  # the row is not known: it counts from the screen's top
            yield Control("column", min(max([*values, 0][1], 1), _MOST) - 1)
        case _:
            count = max(first, 1)
            for operation in _BY_FINAL.get(final, ()):
                is_column = operation == "column"
                yield Control(operation, (count - 1 if final in "G`" else 0) if is_column else count)


class Row:
    """Row of a terminal, with a cursor. Later text overwrites earlier text; wide characters take two columns.

    Attributes:
        column: the cursor's column, from 0.
        styles: the colours in force, as sequences since the last reset.
    """

    __slots__ = ("_cells", "_plain", "_text", "column", "styles")

    def __init__(self) -> None:
        self.column = 0
        self.styles: tuple[str, ...] = ()
        # A character, with those of no width that follow it, and its colours; "" for its further columns.
        self._cells: list[tuple[str, str]] = []
        self._plain: str | None = ""
        self._text: str | None = ""

    @property
    def width(self) -> int:
        """Number of columns up to the last character."""
        return len(self._cells)

    @property
    def plain(self) -> str:
        """Text without colours, and without spaces at its end."""
        if self._plain is None:
            self._plain = "".join(char for char, _ in self._cells).rstrip(" ")
        return self._plain

    @property
    def text(self) -> str:
        """Text with colours; it ends with a reset if it has any."""
        if self._text is None:
            self._text = self.drawn(str, colours=True)
        return self._text

    def drawn(self, shown: Callable[[str], str], *, colours: bool) -> str:
        """Return the text, without spaces at its end, with ``shown`` applied to each character."""
        if not colours:
            return shown(self.plain)
        parts: list[str] = []
        before = ""
        for char, style in self._cells:
            if style != before and char:
                parts.append((_RESET if before else "") + style)
                before = style
            parts.append(shown(char))
        return "".join(parts).rstrip(" ") + (_RESET if before else "")

    def write(self, text: str) -> None:
        """Apply text with its control sequences; those that leave the row have no effect."""
        for control in parse(text):
            self.apply(control)

    def apply(self, control: Control) -> None:
        """Apply what concerns one row; the rest has no effect."""
        operation, count, text = control
        match operation:
            case "text":
                self._put(text)
            case "colour":
                self._colour(text)
            case "column":
                self.column = count
            case "back":
                self.column = max(self.column - count, 0)
            case "forward":
                self.column = max(self.column, min(self.column + count, WIDEST))
            case "erase" | "erase_below" | "blank" | "delete" | "insert":
                self._edit(operation, count)
            case "newline" | "up" | "down" | "save" | "restore":
                pass

    def _colour(self, sequence: str) -> None:
        resets = not sequence[2:-1].strip("0;") or sequence.startswith(("\x1b[0;", "\x1b[;"))
        is_plain = resets and not sequence[2:-1].strip("0;")
        self.styles = () if is_plain else (sequence,) if resets else (*self.styles[-_STYLES_KEPT:], sequence)

    def _edit(self, operation: Operation, count: int) -> None:
        at, end = self.column, self.column + count
        self._separate(at)
        if operation in ("blank", "delete"):
            self._separate(end)
        match operation:
            case "erase" if count == 1:
                self._separate(at + 1)
                self._cells[: at + 1] = [(" ", "")] * min(at + 1, len(self._cells))
            case "erase" | "erase_below":
                del self._cells[0 if operation == "erase" and count else at :]
            case "blank":
                self._cells[at:end] = [(" ", "")] * len(self._cells[at:end])
            case "delete":
                del self._cells[at:end]
            case _:
                self._cells[at:at] = [(" ", "")] * (count if at < len(self._cells) else 0)
        self._plain = self._text = None

    def _put(self, text: str) -> None:
        style = "".join(self.styles)
        at = self.column
        self._cells += [(" ", "")] * (at - len(self._cells))
        is_simple = text.isascii() and text.isprintable()
        cells = [(char, style) for char in text] if is_simple else self._spread(text, style)
        end = self.column = at + len(cells)
        self._separate(at)
        self._separate(end)
        self._cells[at:end] = cells
        self._plain = self._text = None

    def _spread(self, text: str, style: str) -> list[tuple[str, str]]:
        """Return the columns of the text; what has no width joins the character before it."""
        cells: list[tuple[str, str]] = []
        for char in text:
            width = _TAB - (self.column + len(cells)) % _TAB if char == "\t" else _width(char)
            if width:
                cells += [(char, style), *[("", style)] * (width - 1)]
            elif not (self._join(cells, len(cells), char) or self._join(self._cells, self.column, char)):
                cells.append((char, style))
        return cells

    def _join(self, cells: list[tuple[str, str]], end: int, char: str) -> bool:
        lead = next((at for at in range(end - 1, -1, -1) if cells[at][0]), None)
        if lead is not None:
            cells[lead] = (cells[lead][0] + char, cells[lead][1])
        return lead is not None

    def _separate(self, at: int) -> None:
        """Turn a character that has columns before and after ``at`` into spaces."""
        cells = self._cells
        if at >= len(cells) or cells[at][0]:
            return
        lead = next((before for before in range(at - 1, -1, -1) if cells[before][0]), 0)
        end = next((after for after in range(at, len(cells)) if cells[after][0]), len(cells))
        cells[lead:end] = [(" ", style) for _, style in cells[lead:end]]


def row_of(text: str) -> Row:
    """Return a row with the text; its cursor is at the end."""
    row = Row()
    row.write(text)
    return row


@lru_cache(maxsize=4096)
def _width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf", "Cc"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


_KEPT: Final = ("text", "colour", "newline", "save", "restore")
"""Operations that leave all text of a line as it is."""

_CONTROLS: Final = (*range(9), *range(10, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_DIRECTIONS: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE: Final = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *_DIRECTIONS)}


def harmless(text: str) -> str:
    """Return the text with control characters, tabs excepted, made visible."""
    return text if text.isprintable() else text.translate(_VISIBLE)


def cleaned(text: str, *, colours: bool) -> str:
    r"""Return one line as a terminal would show it.

    ``\b``, ``\r`` and movements within the line move the cursor, later text overwrites earlier text, erasures are
    applied. A movement to another line is a space. Other sequences are dropped; other control characters, tabs
    excepted, become visible.

    Args:
        text: the line.
        colours: whether to keep colours and other attributes (SGR). A line that has any then ends with a reset.
    """
    if text.isprintable():
        return text
    controls = [*parse(text[: cut_off(text)])]
    if all(control.operation in _KEPT for control in controls):
        parts = [_kept(control, colours=colours) for control in controls]
        return "".join(parts) + (_RESET if any(part.startswith("\x1b") for part in parts) else "")
    rows = [Row()]
    for control in controls:
        if control.operation in ("up", "down"):
            rows.append(Row())
            rows[-1].styles = rows[-2].styles
        rows[-1].apply(Control("text", text="\n") if control.operation == "newline" else control)
    return " ".join(filter(None, (row.drawn(harmless, colours=colours) for row in rows)))


def _kept(control: Control, *, colours: bool) -> str:
    if control.operation == "colour":
        return control.text if colours else ""
    return harmless("\n" if control.operation == "newline" else control.text)
