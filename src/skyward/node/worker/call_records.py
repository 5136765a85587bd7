"""Records of :mod:`logging` made in calls, on their way to the client's handlers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from skyward.events.lines import DEFAULT_LEVELS, has_handlers
from skyward.wire.log_pieces import PIECE_CHARS

_OWN: Final = "skyward"
_SIMPLE: Final = (str, int, float, bool, type(None))
_LEFT_OUT: Final = ("args", "msg", "exc_info", "exc_text", "stack_info", "message", "asctime")
_formatter: Final = logging.Formatter()


def install(take: Callable[[logging.LogRecord], bool]) -> None:
    """Offer records to ``take`` whose logger has no handler; those that it refuses go to the handlers of this process.

    A call that configures handlers itself keeps its records, which its handlers print.
    """
    # Neither they nor `take` are handlers of the root logger: logging.basicConfig() of user code would do nothing then.
    own, logging.root.handlers[:] = logging.root.handlers[:], []
    logging.getLogger(_OWN).setLevel(logging.root.level)
    logging.root.setLevel(DEFAULT_LEVELS[""])
    worker, usual = os.getpid(), logging.Logger.callHandlers

    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        if os.getpid() != worker or has_handlers(self):  # a forked child has no thread that sends
            usual(self, record)
        elif record.name.partition(".")[0] == _OWN or not take(record):
            for handler in own:
                handler.handle(record)

    logging.Logger.callHandlers = call_handlers


def record_values(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the simple attributes of a record, ``extra=`` included, with its message and its traceback as text."""
    simple = {name: value for name, value in vars(record).items() if name not in _LEFT_OUT and _is_simple(value)}
    values = {name: _text(value) if isinstance(value, str) else value for name, value in simple.items()}
    values |= {"name": _text(record.name), "levelname": _text(str(record.levelname)), "levelno": int(record.levelno)}
    values["msg"] = _text(_message(record))
    exc_text = record.exc_text or (_formatter.formatException(record.exc_info) if record.exc_info else None)
    values["exc_text"] = exc_text and _text(exc_text)
    values["stack_info"] = record.stack_info and _text(record.stack_info)
    return values


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # of any class: it calls __str__ of the user's own
        try:
            return f"{record.msg} (its arguments {record.args!r} do not fit: {error})"
        except Exception:  # the same: a record is no reason for a call to fail
            return f"(a message without text: {type(error).__name__})"


def _is_simple(value: object) -> bool:
    if isinstance(value, str):
        return len(value) < PIECE_CHARS
    return type(value) in _SIMPLE and not (isinstance(value, int) and abs(value) >> 63)


def _text(text: str) -> str:
    return text[:PIECE_CHARS].encode("utf-8", "backslashreplace").decode()  # lone surrogates have no UTF-8 form


class TakenLevels:
    """Levels of the client's loggers, taken along to this process. Levels that user code sets here stay."""

    def __init__(self) -> None:
        self._levels = DEFAULT_LEVELS

    def take(self, levels: Mapping[str, int]) -> None:
        """Set the levels that have changed since the last call."""
        before, self._levels = self._levels, levels
        for name in {**before, **levels}:
            level = levels.get(name, logging.NOTSET)
            if level != before.get(name, logging.NOTSET):
                logging.getLogger(name or None).setLevel(level)
