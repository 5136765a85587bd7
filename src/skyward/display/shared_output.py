"""Terminal, pipe or file that displays share with the process's own output."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TextIO, cast

from skyward.wire.terminal import cleaned

REDRAW_EVERY_S: Final = 0.1
"""Seconds between two drawings."""

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_BELOW, _WIPE, _RESET = "\r\x1b[J", "\r\x1b[2K", "\x1b[0m"
_LONGEST_HELD: Final = 8192
_joining: Final = threading.Lock()

Render = Callable[[int], list[str]]
"""Returns the lines of a drawing for a number of columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTag:
    """Features that distinguish a pool's lines from those of other open pools.

    Attributes:
        provider: the provider's name.
        made: serial number; greater for a pool that was made later.
        pool_id: name of the pool for commands such as ``skyward logs``; empty if it has none.
    """

    provider: str = "pool"
    made: int = 0
    pool_id: str = ""


class Surface:
    """Shared output of displays and of the process itself, which keeps their text on separate lines.

    It taps the process's streams with the same destination, to detect unfinished lines. On a terminal it shows
    changing drawings below all other text; they are hidden while a line is unfinished. Thread-safe. All displays of
    the process with the same destination share one surface: see :func:`join_surface`.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = SafeStream(stream)
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.source_width = 7
        self.is_terminal = self.stream.isatty()
        self.tags: set[PoolTag] = set()
        self.users = 0
        self._column_known = not self.is_terminal
        self._tail = ""  # text of the process's unfinished line
        self._broken = False  # the display has ended that line
        self._drawings: list[Render] = []
        self._height = 0
        self._drawn: list[str] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._taps = [] if stream is None else [_Tap(file, self) for file in streams_beside(stream)]

    def leave(self) -> None:
        """Unregister a display; the last one restores the streams."""
        with _joining, self.lock:
            self.users -= 1
            if not self.users:
                for tap in self._taps:
                    tap.end()

    def name_of(self, tag: PoolTag) -> str:
        """Return a name that distinguishes a pool from others of this surface; empty if there were no others."""
        if len(self.tags) == 1:
            return ""
        alike = sorted(other.made for other in self.tags if other.provider == tag.provider)
        return tag.provider if len(alike) == 1 else f"{tag.provider} {alike.index(tag.made) + 1}"

    # --- lines ------------------------------------------------------------------------------------------------------

    def add_line(self, text: str) -> None:
        """Write a whole line, above the drawings and apart from lines of the process."""
        with self.lock:
            for tap in self._taps:
                tap.flush_file()
            before = self._erasure() + self._start()
            after = ""
            if self._tail and self._is_movable():
                before, after = before + _RESET + _WIPE, self._tail
            elif self._tail:
                before, self._tail, self._broken = before + "\n", "", True
            self.stream.write(f"{before}{text}\n{after}")
            self._draw()
            self.stream.flush()

    def pass_on(self, text: str, tap: _Tap) -> None:
        """Write text of the process through its ``tap``."""
        with self.lock:
            if self._height:
                self.stream.write(self._erasure())
                self.stream.flush()
            if self._broken and text.startswith("\n"):
                text = text[1:]  # the display has ended this line already
            self._broken = False
            tap.write_file(text)
            self._note(text)
            if self.is_terminal:
                tap.flush_file()
                self._draw()
                self.stream.flush()

    def _note(self, text: str) -> None:
        line = (self._tail + text).rpartition("\n")[2]
        state = line.rstrip("\r")
        ended = len(line) > len(state)
        self._tail = state.rpartition("\r")[2] + "\r" * (ended and bool(state))
        self._column_known = self._column_known or "\n" in text or "\r" in text

    def _is_movable(self) -> bool:
        """Return True if the unfinished line can be rewritten below another one."""
        if not self.is_terminal:
            return False
        from rich.cells import cell_len

        shown = self._tail.removesuffix("\r")
        width = cell_len(cleaned(shown, colours=False).expandtabs())
        is_plain = cleaned(shown, colours=True).removesuffix(_RESET) == shown
        return is_plain and width < self.stream.size().columns

    def _start(self) -> str:
        """Return the text that moves the cursor to a line's start, from an unknown column too."""
        if self._column_known and (self._tail or not self._may_be_prompting()):
            return ""
        self._column_known = True
        if self._tail:
            self._tail, self._broken = "", True
            return "\n"
        # As wide as the screen: this wraps to the next line exactly if the cursor was not at a line's start.
        return f"{' ' * self.stream.size().columns}{_WIPE}"

    def _may_be_prompting(self) -> bool:
        """Return True if the interpreter may show prompts here. Prompts bypass the streams and their taps."""
        return self.is_terminal and hasattr(sys, "ps1")

    # --- drawings ---------------------------------------------------------------------------------------------------

    def show(self, render: Render) -> None:
        """Show the drawing of ``render`` below all other text, and refresh it ten times a second."""
        with self.lock:
            if render not in self._drawings:
                self._drawings.append(render)
            if self._thread is None:
                self.stream.write(self._start() + _HIDE_CURSOR)
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._keep_drawing, args=(self._ended,), name="skyward-display", daemon=True
                )
                self._thread.start()
            self._draw()
            self.stream.flush()

    def hide(self, render: Render) -> None:
        """Remove a drawing. Idempotent."""
        with self.lock:
            if render not in self._drawings:
                return
            self._drawings.remove(render)
            self._draw()
            thread = None if self._drawings else self._thread
            if thread is not None:
                self._thread = None
                self._ended.set()
                self.stream.write(self._erasure() + _SHOW_CURSOR)
            self.stream.flush()
        if thread is not None:
            thread.join()

    def _keep_drawing(self, ended: threading.Event) -> None:
        while not ended.wait(REDRAW_EVERY_S):
            with self.lock, suppress(Exception):  # one failure must not end the display
                if not ended.is_set():
                    self._draw()
                    self.stream.flush()

    def _draw(self) -> None:
        if not self._drawings or self._tail:
            return
        size = self.stream.size()
        lines = [line for render in self._drawings for line in render(max(size.columns - 1, 1))]
        lines = lines[: max(size.lines - 1, 1)]
        if lines == self._drawn:
            return
        erasure = self._erasure()
        # Leave the cursor at the drawing's start: text that bypasses the taps then stays intact above the next drawing.
        back = f"\r\x1b[{len(lines) - 1}A" if len(lines) > 1 else "\r"
        self.stream.write(erasure + "\n".join(lines) + (back if lines else ""))
        self._height, self._drawn = len(lines), lines

    def _erasure(self) -> str:
        height, self._height, self._drawn = self._height, 0, []
        return _ERASE_BELOW if height else ""


class _Tap:
    """Replacement for ``write`` and ``flush`` of one stream while displays share its destination.

    The stream object stays the same, so that earlier references to it, such as in a logging handler, are covered too.
    """

    def __init__(self, file: TextIO, surface: Surface) -> None:
        self.surface = surface
        self._file = file
        self.write_file, self._flush_file = file.write, file.flush
        self._held = ""
        # IPython, for example, replaces `write` of a terminal's streams in the same way.
        self._replaced = {
            name: vars(file)[name] for name in ("write", "flush") if name in getattr(file, "__dict__", ())
        }
        with suppress(OSError, ValueError):
            self._flush_file()
        with suppress(AttributeError):  # streams without writable attributes stay as they are
            for name, method in (("write", self.write), ("flush", self.flush)):
                setattr(file, name, method)

    def end(self) -> None:
        """Restore the stream's methods, and write the held text."""
        self._step_back()
        held, self._held = self._held, ""
        with suppress(OSError, ValueError):
            self.write_file(held)

    def write(self, text: str) -> int:
        """Write ``text``; it appears at the end of its line or on a flush, as with line-buffered streams."""
        if self._is_forked() or not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return self.write_file(text)
        with self.surface.lock:
            self._held += text
            self._pass_on(self._ready_length())
        return len(text)

    def _pass_on(self, length: int) -> None:
        ready, self._held = self._held[:length], self._held[length:]
        if ready:
            self.surface.pass_on(ready, self)

    def _is_forked(self) -> bool:
        """Return True in a forked child, where the parent draws; restore the stream's methods there."""
        forked = self.surface.pid != os.getpid()
        if forked:
            self._step_back()
        return forked

    def _ready_length(self) -> int:
        """Return the length of the held text that the stream itself would write now."""
        if getattr(self._file, "write_through", False) or len(self._held) > _LONGEST_HELD:
            return len(self._held)
        ends = max(self._held.rfind("\n"), self._held.rfind("\r")) + 1
        return len(self._held) if ends and getattr(self._file, "line_buffering", False) else ends

    def flush(self) -> None:
        """Write the held text, and flush the stream."""
        if not self._is_forked():
            with self.surface.lock:
                self._pass_on(len(self._held))
        self._flush_file()

    def flush_file(self) -> None:
        """Flush the stream itself."""
        with suppress(OSError, ValueError):
            self._flush_file()

    def _step_back(self) -> None:
        for name in ("write", "flush"):
            if getattr(self._file.__dict__.get(name), "__self__", None) is not self:
                continue
            if name in self._replaced:
                setattr(self._file, name, self._replaced[name])
            else:
                delattr(self._file, name)


def join_surface(stream: TextIO | None, tag: PoolTag) -> Surface:
    """Return the surface for the destination of ``stream``, shared with other displays, and enter it."""
    with _joining:
        tap = getattr(getattr(stream, "write", None), "__self__", None)
        surface = tap.surface if isinstance(tap, _Tap) and tap.surface.pid == os.getpid() else Surface(stream)
        with surface.lock:
            surface.users += 1
            surface.tags.add(tag)
    return surface


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

    def write(self, text: str) -> None:
        """Write ``text``, with escapes for characters that the encoding lacks."""
        if self._write is not None:
            self._attempt(partial(self._write, text.encode(self.encoding, "backslashreplace").decode(self.encoding)))

    def flush(self) -> None:
        """Flush the stream."""
        if self._flush is not None:
            self._attempt(self._flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
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
    files = {id(file): file for file in (stream, sys.stdout, sys.stderr) if file is not None}  # pyright: ignore[reportUnnecessaryComparison]
    return [file for file in files.values() if _is_plain(file) and (file is stream or _is_same(file, stream))]


def _is_plain(stream: TextIO) -> bool:
    return isinstance(stream, io.TextIOWrapper | io.StringIO) or is_terminal(stream)


def _is_same(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
