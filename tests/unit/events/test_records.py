"""Records of logging made elsewhere: for the handlers here, once, and with the levels set here."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from skyward.events import LogLine
from skyward.events.log_files import handle_record, is_handled, record_line
from skyward.scheduling.worker_link import ConfiguredLevels

VALUES = {"name": "app.part", "levelno": 20, "levelname": "INFO", "msg": "100 % of %s", "created": 5.0, "step": 3}


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("app")
    logger.propagate = False
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_record_reaches_the_handlers_of_the_logger_of_its_name(logger: logging.Logger) -> None:
    kept = Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    handle_record(VALUES | {"exc_text": "Traceback: it failed"}, "0/1 train#3")
    (record,) = kept.records
    assert (record.name, record.levelname, record.getMessage(), record.created) == (
        "app.part",
        "INFO",
        "100 % of %s",
        5,
    )
    assert vars(record)["step"] == 3
    assert logging.Formatter("%(skyward)s %(message)s").format(record) == (
        "0/1 train#3 100 % of %s\nTraceback: it failed"
    )


def test_levels_and_missing_handlers_here_keep_it_away(logger: logging.Logger) -> None:
    kept = Kept()
    logger.handlers.clear()  # pytest's, which it adds to loggers that do not propagate
    handle_record(VALUES, "")
    logger.addHandler(logging.NullHandler())
    line = record_line(VALUES, 0, 1, "i", "train#3")
    assert line == LogLine(0, "i", "100 % of %s", 5.0, 1, "train#3", level="INFO", logger="app.part")
    assert not is_handled(line)
    logger.addHandler(kept)
    logger.setLevel(logging.WARNING)
    handle_record(VALUES, "")
    assert kept.records == []
    assert is_handled(line)
    assert not is_handled(LogLine(0, "i", "printed", 5.0))


def test_levels_are_read_again_when_one_was_set(logger: logging.Logger) -> None:
    levels = ConfiguredLevels()
    before = levels.current()
    assert before[""] == logging.root.level
    assert "app" not in before
    assert levels.current() is before
    logger.setLevel(logging.DEBUG)
    logging.getLogger("skyward.node").setLevel(logging.DEBUG)
    try:
        assert levels.current() == before | {"app": logging.DEBUG}
        assert levels.current() is levels.current()
    finally:
        logging.getLogger("skyward.node").setLevel(logging.NOTSET)
    logger.setLevel(logging.NOTSET)
    assert levels.current() == before
