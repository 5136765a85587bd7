"""Lines of calls: records of :mod:`logging` as lines, and lines kept in files as they arrive.

Of two files the older one is deleted when the newer one is full.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from skyward.events import LogLine

DEFAULT_LEVELS: Final[Mapping[str, int]] = {"": logging.WARNING}
"""Levels of a process that has configured none."""


def has_handlers(logger: logging.Logger) -> bool:
    """Return True if a handler receives the logger's records; a library's ``NullHandler`` does not count."""
    current: logging.Logger | None = logger
    while current is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


def is_handled(line: LogLine) -> bool:
    """Return True for a record that this process's own handlers receive, which need not be displayed."""
    return bool(line.level) and has_handlers(logging.getLogger(line.logger))


def handle_record(values: Mapping[str, Any], place: str) -> None:
    """Pass a record of a call to the logger of its name here, if it has a handler.

    Args:
        values: the record's attributes.
        place: node, worker and call, for the record's attribute ``skyward``.
    """
    record = logging.makeLogRecord({**values, "args": None, "skyward": place})
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno) and has_handlers(logger):
        logger.handle(record)


def record_line(values: Mapping[str, Any], node: int, worker: int, instance_id: str, call: str) -> LogLine:
    """Return the line of a record: its message, and its traceback if it has one."""
    text = "\n".join(str(values[part]) for part in ("msg", "exc_text", "stack_info") if values.get(part))
    level, logger = str(values["levelname"]), str(values["name"])
    return LogLine(node, instance_id, text, float(values["created"]), worker, call, level=level, logger=logger)


_logger = logging.getLogger("skyward")

_FILE_BYTES: Final = 32 << 20
_FILES: Final = "calls-*.jsonl"
_CUT: Final = " [the rest of this line is not kept]"
_LONGEST_CHARACTER: Final = 6
"""Bytes of the longest character in a file: one that is escaped."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


class KeptLines:
    """Recorder that writes every line to a file. Thread-safe; a line costs the thread that publishes it about 2 µs.

    Args:
        folder: the folder of the files.
        later: runs an action soon, in another thread; the lines taken until then are written together.
        file_bytes: size of the largest file. A line that would make it larger begins the next one, and the file before
            the present one is deleted. A line that alone is larger is cut.
    """

    # Without a flush to the disk: the lines outlive this process, killed by any signal, not the machine's crash.

    def __init__(
        self, folder: Path, later: Callable[[Callable[[], object]], object], *, file_bytes: int = _FILE_BYTES
    ) -> None:
        self._folder = folder
        self._later = later
        self._file_bytes = file_bytes
        # Reentrant: where lines are written at once, a finalizer may print in the thread that holds it.
        self._lock = threading.RLock()
        self._waiting: list[str] = []
        self._number = max(_numbers(folder), default=0)  # a job's call has lines of its runs before
        self._file: BinaryIO | None = self._open()
        self._size = self._file.tell()

    def __call__(self, line: LogLine) -> None:
        """Take a line; it is written a little later."""
        if self._file is None:
            return
        text = _text(line)
        if len(text) > self._file_bytes // _LONGEST_CHARACTER:
            text = _cut(line, self._file_bytes)
        with self._lock:
            self._waiting.append(text)
            first = len(self._waiting) == 1
        if first:
            self._later(self.write)

    def write(self) -> None:
        """Write the lines taken so far. Failures are logged once, and end the keeping."""
        with self._lock:
            lines, self._waiting = self._waiting, []
            if not lines or self._file is None:
                return
            try:
                self._append(lines, self._file)
            except OSError as error:
                _logger.warning("output of calls is no longer kept in %s: %s", self._folder, error)
                self._close()

    def close(self) -> None:
        """Write the rest and close the file. Idempotent."""
        self.write()
        with self._lock:
            self._close()

    def _append(self, lines: Iterable[str], file: BinaryIO) -> None:
        for line in lines:
            data = line.encode("utf-8", "backslashreplace")  # a surrogate becomes an escape that JSON has too
            if self._size and self._size + len(data) > self._file_bytes:
                file = self._rotate()
            self._size += file.write(data)
        file.flush()

    def _open(self) -> BinaryIO:
        return open(_path(self._folder, self._number), "ab", opener=partial(os.open, mode=0o600))

    def _rotate(self) -> BinaryIO:
        _path(self._folder, self._number - 1).unlink(missing_ok=True)
        self._close()
        self._size = 0
        self._number += 1
        self._file = self._open()
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # text that could not be written is not written here either
                file.close()


class KeptReader:
    """Reader of kept lines, also while they are written. Lines that cannot be read are skipped.

    Args:
        folder: the folder of the files.
        seen: where to begin, as another reader's :attr:`seen`; None for the beginning.
    """

    def __init__(self, folder: Path, seen: Mapping[str, int] | None = None) -> None:
        self._folder = folder
        self._seen = {**(seen or {})}

    @property
    def seen(self) -> Mapping[str, int]:
        """Offset in each file up to which its lines were yielded; another reader may go on from there."""
        return self._seen

    def news(self) -> Iterator[LogLine]:
        """Yield the complete lines since the last call."""
        for path in sorted(self._folder.glob(_FILES)):
            with suppress(FileNotFoundError), path.open("rb") as file:  # it may be deleted meanwhile
                file.seek(self._seen.get(path.name, 0))
                for data in file:
                    if not data.endswith(b"\n"):
                        break
                    self._seen[path.name] = self._seen.get(path.name, 0) + len(data)
                    yield from _line(data)

    def backwards(self) -> Iterator[LogLine]:
        """Yield the complete lines, the last one first; :meth:`news` goes on with those that come later."""
        paths = sorted(self._folder.glob(_FILES))
        self._seen = {path.name: _content(path).rfind(b"\n") + 1 for path in paths}
        for path in reversed(paths):
            for data in lines_backwards(path, self._seen[path.name]):
                yield from _line(data)


def lines_backwards(path: Path, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, last one first, without line ends; nothing if the file no longer exists.

    Args:
        path: the file, which fits into memory.
        end: offset at which a line ends; None for the end of the file.
    """
    data = _content(path)[:end]
    at = len(data)
    while at:
        start = data.rfind(b"\n", 0, at - 1) + 1
        yield data[start:at].removesuffix(b"\n")
        at = start


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # deleted meanwhile
        return b""


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in folder.glob(_FILES)]


def _path(folder: Path, number: int) -> Path:
    return folder / f"calls-{number:06}.jsonl"


def _text(line: LogLine) -> str:
    # A list is a third of an object with names, and is read as it was written: LogLine(*list). In three parts, of which
    # lines of one call share the first and the last: 1.7 µs instead of 3.4.
    last = _last(line.worker, line.call, line.stream, line.level, line.logger, line.state)
    return f"{_first(line.node, line.instance_id)}{_encode(line.line)},{line.timestamp!r}{last}"


@lru_cache(maxsize=64)
def _first(node: int, instance_id: str) -> str:
    return f"[{node},{_encode(instance_id)},"


@lru_cache(maxsize=64)
def _last(*values: object) -> str:
    return f",{_encode(values)[1:]}\n"


def _line(data: bytes) -> Iterator[LogLine]:
    try:
        values: Any = json.loads(data)
        yield LogLine(*values)
    except (ValueError, TypeError):  # cut by a full disk, or of a later version
        return


def _cut(line: LogLine, file_bytes: int) -> str:
    """Return the text of a line that is too long, cut to what a file has room for."""
    room = file_bytes // _LONGEST_CHARACTER - len(_text(replace(line, line=""))) - len(_CUT)
    text = line.line
    return _text(replace(line, line=f"{text[: max(0, room)]}{_CUT}")) if len(text) > room else _text(line)
