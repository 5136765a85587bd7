"""Printed text as a terminal shows it: colours kept on request, edits of the line applied, the rest dropped."""

from __future__ import annotations

from typing import Final

from skyward.wire.terminal import Control, Row, cut_off, parse

__all__ = ["cleaned", "harmless"]

_RESET: Final = "\x1b[0m"
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
