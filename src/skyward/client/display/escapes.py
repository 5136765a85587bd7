"""Control sequences in printed text: colours kept on request, edits of the line applied, the rest dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

__all__ = ["cleaned", "harmless"]

_SEQUENCE: Final = re.compile(
    r"""
    (?:\x1b\[|\x9b)(?P<parameters>[0-?]*)[\ -/]*(?P<final>[@-~])                 # colours, cursor movements, erasures
    | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$) # titles, links, device strings
    | (?:\x1b\[|\x9b)[0-?]*[\ -/]*$                                              # cut off by the end of the line
    | \x1b[\ -/]*(?:[0-~]|$)                                                     # everything else
    """,
    re.VERBOSE,
)
_COLOUR: Final = re.compile(r"\x1b\[[\d;:]*m")
_RESET: Final = "\x1b[0m"
_ERASE_REST, _ERASE_ALL = ("\x1b[K", "\x1b[0K"), "\x1b[2K"
_STYLES_KEPT: Final = 8
"""Largest number of colour sequences, since the last reset, that a character keeps."""

_CONTROLS: Final = (*range(9), *range(10, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_DIRECTIONS: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE: Final = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *_DIRECTIONS)}


def harmless(text: str) -> str:
    """Return the text with control characters, tabs excepted, made visible."""
    return text if text.isprintable() else text.translate(_VISIBLE)


def cleaned(text: str, *, colours: bool) -> str:
    r"""Return one line as a terminal would show it.

    ``\b`` and ``\r`` move the cursor, later text overwrites earlier text, erasures within the line are applied. Other
    sequences are dropped; other control characters, tabs excepted, become visible.

    Args:
        text: the line.
        colours: whether to keep colours and other attributes (SGR). A line that has any then ends with a reset.
    """
    if text.isprintable():
        return text
    tokens = _tokens(text)
    if "\b" in text or "\r" in text:
        return _drawn(_edited(tokens), colours=colours)
    if not colours:
        return "".join(harmless(token) for token in tokens if not token.startswith("\x1b"))
    parts = [token if _COLOUR.fullmatch(token) else harmless(token) for token in tokens if not _erases(token)]
    return "".join(parts) + (_RESET if any(part.startswith("\x1b") for part in parts) else "")


def _erases(token: str) -> bool:
    return token in _ERASE_REST or token == _ERASE_ALL


def _tokens(text: str) -> Iterator[str]:
    """Yield plain text, colours and erasures, in order; no text begins with an escape."""
    at = 0
    for match in _SEQUENCE.finditer(text):
        yield text[at : match.start()]
        at = match.end()
        sequence = f"\x1b[{match['parameters']}{match['final']}"
        if _COLOUR.fullmatch(sequence) or _erases(sequence):
            yield sequence
    yield text[at:]


def _edited(tokens: Iterator[str]) -> list[tuple[str, str]]:
    """Return the line's characters after all edits, each with the colours in force when it was written."""
    cells: list[tuple[str, str]] = []
    column, styles = 0, list[str]()
    for token in tokens:
        if _COLOUR.fullmatch(token):
            resets = not token[2:-1].strip("0;") or token.startswith(("\x1b[0;", "\x1b[;"))
            styles = [token] if resets else [*styles[-_STYLES_KEPT:], token]
        elif _erases(token):
            del cells[0 if token == _ERASE_ALL else column :]
        else:
            style = "".join(styles)
            for char in token:
                if char in "\b\r":
                    column = 0 if char == "\r" else max(column - 1, 0)
                    continue
                cells += [(" ", "")] * (column - len(cells))
                cells[column : column + 1] = [(char, style)]
                column += 1
    return cells


def _drawn(cells: list[tuple[str, str]], *, colours: bool) -> str:
    written: list[str] = []
    before = ""
    for char, style in cells:
        if colours and style != before:
            written.append((_RESET if before else "") + style)
            before = style
        written.append(harmless(char))
    return "".join(written).rstrip(" ") + (_RESET if before else "")
