"""Records of :mod:`logging` made in calls: the client's levels for the workers, and the records for its handlers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from skyward.events import LogLine

__all__ = ["DEFAULT_LEVELS", "ConfiguredLevels", "handle_record", "has_handlers", "is_handled", "record_line"]

DEFAULT_LEVELS: Final[Mapping[str, int]] = {"": logging.WARNING}
"""Levels of a process that has configured none."""
_MARK: Final = "skyward"
_OWN: Final = ("skyward", "distributed", "dask")
"""Loggers of the programs that run on nodes; their levels there are not the user's."""


class ConfiguredLevels:
    """Levels that this process has set: those of the root, as ``""``, and of named loggers."""

    def __init__(self) -> None:
        self._watched = logging.getLogger("skyward.levels")
        self._levels = DEFAULT_LEVELS

    def current(self) -> Mapping[str, int]:
        """Return the levels; the same object while no level has changed."""
        # 300 loggers cost 30 µs to look at, twice the price of a small call. setLevel() empties the caches of all
        # loggers, so a mark in one of them stays exactly as long as no level is set. Without caches it looks each time.
        cache: dict[Any, bool] = getattr(self._watched, "_cache", {})
        if _MARK in cache:
            return self._levels
        cache[_MARK] = True
        levels = {"": logging.root.level}
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if isinstance(logger, logging.Logger) and logger.level and name.partition(".")[0] not in _OWN:
                levels[name] = logger.level
        if levels != self._levels:
            self._levels = levels
        return self._levels


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
