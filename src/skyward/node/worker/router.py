"""Stand-ins for a worker's ``sys.stdout`` and ``sys.stderr``, which send a call's text to its sink."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from skyward.wire.log_pieces import StreamName

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["OutputRouter", "Sink"]


class Sink(Protocol):
    """Takes what is written while a call runs."""

    def write(self, stream: StreamName, data: str | bytes) -> None:
        """Take text, from any thread."""
        ...


class OutputRouter(io.TextIOBase):
    """Stand-in for ``sys.stdout`` or ``sys.stderr``: a call's text goes to its sink, all else to the worker's log.

    In a process forked from this one everything goes to the original: the sinks' other ends are not there.

    Args:
        original: the stream that it replaces.
        stream: which of the two.
        current: the sink of the call that the calling thread belongs to; None for no sink.
        own: takes text that no sink takes; None for the original.
    """

    def __init__(
        self, original: TextIO, *, stream: StreamName, current: Callable[[], Sink | None], own: TextIO | None = None
    ) -> None:
        self._original = original
        self._stream: StreamName = stream
        self._current = current
        self._own = own if own is not None else original
        self._pid = os.getpid()
        self._bytes_side = _BytesSide(self)

    def write(self, text: str, /) -> int:
        """Hand on ``text``; return its length."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._pid:
            _write_to(self._original, text)
        elif (sink := self._current()) is None:
            _write_to(self._own, text)
        else:
            sink.write(self._stream, text)
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Hand on bytes that were written to :attr:`buffer`."""
        if os.getpid() != self._pid:
            _write_to(self._original, data.decode("utf-8", "backslashreplace"))
        elif (sink := self._current()) is None:
            _write_to(self._own, data.decode("utf-8", "backslashreplace"))
        else:
            sink.write(self._stream, data)

    def flush(self) -> None:
        """Flush the original. A call's lines are on their way as soon as they end."""
        self._original.flush()

    def close(self) -> None:
        """Stay open: the next call prints here, too."""

    def reconfigure(self, **_options: object) -> None:
        """Accepted and without effect."""

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """Return the original's: a worker captures output that is written there."""
        return self._original.fileno()

    @property
    def buffer(self) -> io.BufferedIOBase:
        """The same, for bytes."""
        return self._bytes_side

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the encoding in which text is sent."""
        return "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the handler of text that has no such form."""
        return "backslashreplace"

    @property
    def name(self) -> str:
        """As the interpreter's own streams are called."""
        return f"<{self._stream}>"

    @property
    def mode(self) -> str:
        """Write-only."""
        return "w"


class _BytesSide(io.BufferedIOBase):
    def __init__(self, router: OutputRouter) -> None:
        self._router = router

    def write(self, data: ReadableBuffer, /) -> int:
        content = bytes(data)
        self._router.write_bytes(content)
        return len(content)

    def flush(self) -> None:
        self._router.flush()

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._router.fileno()


def _write_to(stream: TextIO, text: str) -> None:
    if not text.isascii():  # the stream's own encoding and error handler may refuse it
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
