"""Capture of a worker's descriptors 1 and 2: they lead to its log, from which the worker reads foreign output back.

A file instead of a pipe: its writers never block, so C code that prints while it holds the GIL cannot lock up the
process, and the last words of a process that crashed are still there (docs/decisions/015).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from skyward.node.worker.call_mark import ARRIVED, Mark

LAST_WORDS_BYTES = 8 << 10
"""Longest report of last words, in bytes."""
# In JSON six times as long (control characters), and must stay below asyncio's limit of a line, 64 KiB.

_PIECE_BYTES = 256 << 10
_LINE_BUFFERED = 1  # _IOLBF


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """Output that a worker had not delivered when it ended.

    Attributes:
        data: the bytes, the last :data:`LAST_WORDS_BYTES` of them.
        at: their offset in the worker's log.
        omitted: number of bytes before them that are left out.
    """

    data: bytes
    at: int
    omitted: int = 0


class WorkerLog:
    """Log file of a worker: what arrives through descriptors 1 and 2 of it or of the processes that it starts.

    The worker's own messages go to the supervisor's log, like those of the node's other processes.

    Attributes:
        lock: held while captured output is handed over. No holder waits for another thread.
        position: offset up to which captured output was handed over.
        whole: the same, up to the last whole line.
        own: text stream for the worker's own messages, unbuffered: where descriptor 2 leads before :meth:`redirect`.

    Args:
        path: the log; created if missing, appended to otherwise.
        mark: the worker's mark, with an offset in the log: nothing before it counts as last words.
    """

    def __init__(self, path: Path, mark: Mark) -> None:
        self.lock = threading.RLock()  # a finalizer that prints may run while its thread holds it
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
            # An empty log could be any empty file: is_quiet would not know, and each call would check its descriptors.
            file.write(f"the worker runs as process {os.getpid()}\n")
        self._reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._mark = mark
        self._path = path
        self._feeding = False
        self._standard: int | None = None
        self.position = self.whole = self.size
        self.mark(self.whole)
        # Without a buffer, which would have a lock that a forked child might find held.
        raw = cast("io.BufferedWriter", io.FileIO(os.dup(2), "w"))
        self.own: TextIO = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)

    @property
    def size(self) -> int:
        """Return the log's present size in bytes."""
        return os.lseek(self._reading, 0, os.SEEK_END)

    @property
    def has_more(self) -> bool:
        """Return True if the log has output that was not handed over. Takes half a microsecond."""
        return self.size != self.position

    @property
    def is_quiet(self) -> bool:
        """Return True if descriptors 1 and 2 lead to the log still, and all output in it was handed over.

        Takes a microsecond. Another file of the same size would pass, unless it is empty.
        """
        try:
            return 0 != os.lseek(1, 0, os.SEEK_END) == self.position == os.lseek(2, 0, os.SEEK_END)
        except OSError:  # a pipe, or closed
            return False

    def restore_descriptors(self) -> None:
        """Have descriptors 1 and 2 lead to the log again if anything has made them lead elsewhere."""
        if self._standard is None:
            return
        for descriptor in (1, 2):
            with suppress(OSError):
                if os.path.sameopenfile(descriptor, self._standard):
                    continue
            os.dup2(self._standard, descriptor)

    def redirect(self) -> None:
        """Redirect descriptors 1 and 2 to the log, but not this process's messages."""
        self._standard = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.dup2(self._standard, 1)
        os.dup2(self._standard, 2)
        _have_handlers_write_to(self.own)
        for stream in (sys.__stdout__, sys.__stderr__):
            if isinstance(stream, io.TextIOWrapper):  # forked children print through these; unflushed lines are lost
                stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        # A crash's traceback becomes part of the last words, which have room for one thread's.
        faulthandler.enable(2, all_threads=False)
        if sys.platform == "linux":  # the buffer of C's stdout would keep lines back until it is full
            libc = ctypes.CDLL(None)
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)

    def hand_on(self, feed: Callable[[bytes, int], None]) -> bool:
        """Hand over the next piece of captured output; return whether there is more.

        Args:
            feed: receives bytes, and the offset up to which they, and all before them, are whole lines.
        """
        with self.lock:
            # The lock is reentrant: a finalizer that prints may run in this thread, in the middle of this method.
            if self._feeding:
                return False
            self._feeding = True
            try:
                self._hand_on(feed)
            finally:
                self._feeding = False
        return self.has_more

    def end_line(self) -> None:
        """Count an unfinished line as whole: it was sent at the end of its call."""
        self.whole = self.position

    def mark(self, until: int) -> None:
        """Record that all captured output up to an offset has arrived, and is no part of the last words."""
        self._mark[ARRIVED] = until

    @property
    def is_marked(self) -> bool:
        """Return True if all whole lines that were handed over are marked."""
        return self._mark[ARRIVED] == self.whole

    def close(self) -> None:
        """Close the files, except for descriptors 1 and 2."""
        self.own.close()
        for descriptor in (self._reading, self._standard):
            if descriptor is not None:
                os.close(descriptor)

    def _hand_on(self, feed: Callable[[bytes, int], None]) -> None:
        data = os.pread(self._reading, _PIECE_BYTES, self.position)
        end = self.position + len(data) if data else self.size  # no data, another size: the file was truncated
        line_end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))
        whole = self.position + line_end if line_end else self.whole
        if data:
            feed(data, whole)
        self.whole = whole  # only after feed(): another thread may mark it as arrived meanwhile
        self.position = end


def take_last_words(log: Path, mark: Mark) -> LastWords:
    """Return the output that a worker had not delivered when it ended, once: its mark moves to the end."""
    if not (begin := mark[ARRIVED]):  # it never opened its log
        return LastWords(data=b"", at=0)
    with suppress(OSError), log.open("rb") as reading:
        end = mark[ARRIVED] = reading.seek(0, os.SEEK_END)
        start = max(begin, end - LAST_WORDS_BYTES)
        reading.seek(start)
        return LastWords(data=reading.read(max(0, end - start)), at=start, omitted=start - begin)
    return LastWords(data=b"", at=0)


def _have_handlers_write_to(stream: TextIO) -> None:
    """Replace the interpreter's streams in the handlers that were made before it was redirected."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler):
                handler = cast("logging.StreamHandler[TextIO]", handler)
                if handler.stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                    handler.setStream(stream)
