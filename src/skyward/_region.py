"""The bottom lines of a terminal that change, without harm to what the process prints meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, ParamSpec, TextIO, cast

__all__ = ["REDRAW_EVERY_S", "Region", "SafeStream"]

P = ParamSpec("P")

REDRAW_EVERY_S: Final = 0.1
"""How long a drawing stays."""

_logger = logging.getLogger("skyward")

_HIDE_CURSOR, _SHOW_CURSOR, _WIPE, _UP = "\x1b[?25l", "\x1b[?25h", "\r\x1b[2K", "\x1b[1A"


class Region:
    """The lines at the bottom of a terminal that change; what the process prints meanwhile goes above them.

    While somebody's line is unfinished the region is hidden, as it has no place to be in.
    """

    def __init__(self, stream: SafeStream, render: Callable[[int], list[str]]) -> None:
        self._stream = stream
        self._render = render
        self.lock = threading.RLock()
        self._height = 0
        self._unfinished = False
        self._prints: list[_Prints] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0

    @property
    def shown(self) -> bool:
        """Whether prints must go through the region; not so in a forked child, where nobody draws it."""
        return self._thread is not None and self._pid == os.getpid()

    def show(self) -> None:
        """Draw the region, now and ten times a second, unless another pool's is on this terminal."""
        with self.lock:
            if self._thread is None and not isinstance(sys.stderr, _Prints):
                self._begin()
            self._draw()

    def _begin(self) -> None:
        self._prints = [_Prints(name, self) for name in ("stdout", "stderr") if _is_terminal(getattr(sys, name))]
        for prints in self._prints:
            prints.begin()
        # As wide as the screen, this ends in the next line exactly if the cursor was not at a line's start.
        self._stream.write(f"{' ' * self._stream.size().columns}{_WIPE}{_HIDE_CURSOR}")
        self._unfinished = False
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="skyward-display", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave nothing of the region, and give back what it took. Idempotent."""
        thread = self._thread
        if thread is None:
            return
        self._ended.set()
        thread.join()
        with self.lock:
            self._thread = None
            self._stream.write(self._erasure() + _SHOW_CURSOR)
            self._stream.flush()
            for prints in self._prints:
                prints.end()

    def add_line(self, write: Callable[[], None]) -> None:
        """Have ``write`` write a whole line above the region that is on the terminal, be it this or another pool's."""
        region = sys.stderr.region if isinstance(sys.stderr, _Prints) else self
        region.add(lambda: write() or "\n", on_new_line=True)

    def add(self, write: Callable[[], str], *, on_new_line: bool = False) -> None:
        """Have ``write`` write above the region; it returns how what it wrote ends."""
        with self.lock:
            if self._height or (on_new_line and self._unfinished):
                self._stream.write(self._erasure() + ("\n" if on_new_line and self._unfinished else ""))
                self._stream.flush()
            self._unfinished = not write().endswith("\n")
            self._draw()

    def _keep_drawing(self) -> None:
        ended = self._ended
        while not ended.wait(REDRAW_EVERY_S):
            with self.lock:
                self._draw()

    def _draw(self) -> None:
        if self._thread is None or self._unfinished:
            return
        size = self._stream.size()
        lines = self._render(max(size.columns - 1, 1))[: max(size.lines - 1, 1)]
        self._stream.write(self._erasure() + "\n".join(lines))
        self._stream.flush()
        self._height = len(lines)

    def _erasure(self) -> str:
        height, self._height = self._height, 0
        return f"{_WIPE}{(_UP + _WIPE) * (height - 1)}" if height else ""


class _Prints:
    """Stands in for ``sys.stdout`` or ``sys.stderr`` while a region is shown; before and after it only passes on."""

    def __init__(self, name: Literal["stdout", "stderr"], region: Region) -> None:
        self._name = name
        self.region = region
        self._file: TextIO = getattr(sys, name)
        self._held = ""

    def begin(self) -> None:
        """Take the stream's place."""
        SafeStream(self._file).flush()
        setattr(sys, self._name, self)

    def end(self) -> None:
        """Give the stream its place back, unless somebody else has taken it."""
        held, self._held = self._held, ""
        SafeStream(self._file).write(held)
        self._step_back()

    def write(self, text: str) -> int:
        """Write ``text``, shown at the end of its line or when flushed, as terminals have it."""
        if not self.region.shown:
            self._step_back()
            return self._file.write(text)
        with self.region.lock:
            self._held += text
            at_once = not self.region.shown or getattr(self._file, "write_through", False)
            if at_once or "\n" in text or "\r" in text:
                self._emit()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Show what was written."""
        if self.region.shown:
            with self.region.lock:
                self._emit()
        self._file.flush()

    def _emit(self) -> None:
        held, self._held = self._held, ""
        if held:
            self.region.add(lambda: self._pass_on(held))

    def _pass_on(self, text: str) -> str:
        self._file.write(text)
        self._file.flush()
        return text

    def _step_back(self) -> None:
        # Later than the region's end if somebody had replaced this and has put it back since.
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SafeStream:
    """A text stream that takes any text in its encoding, and stops trying once the stream is closed or broken."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.unicode = self.encoding.lower().startswith("utf")
        self.rule = "│" if self.unicode else "|"

    def isatty(self) -> bool:
        """Whether it is a terminal that understands control sequences."""
        return os.environ.get("TERM") != "dumb" and _is_terminal(self._stream)

    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal, as it says; else as the environment says."""
        try:
            size = os.get_terminal_size(cast("TextIO", self._stream).fileno())
        except (OSError, ValueError, AttributeError):  # gone, or no real terminal
            return shutil.get_terminal_size()
        return size if size.columns and size.lines else shutil.get_terminal_size()

    def write(self, text: str) -> int:
        """Write ``text``; what the encoding lacks is written as an escape."""
        if self._stream is not None:
            self._attempt(self._stream.write, text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        if self._stream is not None:
            self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except (OSError, ValueError) as error:
            _logger.debug("the display's stream is gone: %s", error)
            self._stream = None


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # what a closed stream says
        return False
