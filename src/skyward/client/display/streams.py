"""Output stream of a display, and the search for the process's streams with the same destination."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import ParamSpec, TextIO, cast

__all__ = ["SafeStream", "is_terminal", "streams_beside"]

P = ParamSpec("P")

_logger = logging.getLogger("skyward")


class SafeStream:
    """Text stream that escapes characters that its encoding lacks, and ignores writes once it is closed or broken.

    It keeps the stream's original methods, so that later replacements of them are bypassed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._write: Callable[[str], object] | None = getattr(stream, "write", None)
        self._flush: Callable[[], object] | None = getattr(stream, "flush", None)
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.unicode = self.encoding.lower().startswith("utf")
        self.rule = "│" if self.unicode else "|"

    def isatty(self) -> bool:
        """Return True if it is a terminal that supports control sequences."""
        return os.environ.get("TERM") != "dumb" and is_terminal(self._stream)

    def size(self) -> os.terminal_size:
        """Return columns and lines of the terminal; if it reports none, those of the environment."""
        try:
            size = os.get_terminal_size(cast("TextIO", self._stream).fileno())
        except (OSError, ValueError, AttributeError):  # closed, or no real terminal
            return shutil.get_terminal_size()
        return size if size.columns and size.lines else shutil.get_terminal_size()

    def write(self, text: str) -> int:
        """Write ``text``, with escapes for characters that the encoding lacks."""
        if self._write is not None:
            self._attempt(self._write, text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if self._flush is not None:
            self._attempt(self._flush)

    def _attempt(self, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except (OSError, ValueError) as error:
            _logger.debug("the display's stream failed: %s", error)
            self._write = self._flush = None


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if the stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # the stream is closed
        return False


def streams_beside(stream: TextIO) -> list[TextIO]:
    """Return the standard streams with the same destination as ``stream``, itself included.

    Streams that are neither files nor terminals, such as those of a notebook, are omitted.
    """
    candidates = {id(each): each for each in (stream, sys.stdout, sys.stderr) if each is not None}  # pyright: ignore[reportUnnecessaryComparison]
    return [each for each in candidates.values() if _is_plain(each) and (each is stream or _is_same(each, stream))]


def _is_plain(stream: TextIO) -> bool:
    return isinstance(stream, io.TextIOWrapper | io.StringIO) or is_terminal(stream)


def _is_same(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
