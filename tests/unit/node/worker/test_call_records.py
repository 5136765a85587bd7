"""Records of logging made in calls: as values for the wire, and with the client's levels."""

from __future__ import annotations

import logging
import os

import msgpack
import pytest

from skyward.node.worker.output import TakenLevels, record_values, take_log_records


def record(message: str, *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("app", logging.INFO, "file.py", 7, message, args, error and (type(error), error, None))
    vars(made).update(extra)
    return made


def test_a_record_travels_with_its_message_traceback_and_simple_extras() -> None:
    values = record_values(record("loss %.1f", 0.25, error=ValueError("no"), step=3, model=object(), huge=1 << 70))
    assert (values["name"], values["levelname"], values["lineno"]) == ("app", "INFO", 7)
    assert values["msg"] == "loss 0.2"
    assert values["exc_text"] == "ValueError: no"
    assert values["step"] == 3
    assert {"model", "huge", "args", "exc_info"} & set(values) == set()
    assert msgpack.unpackb(msgpack.packb(values)) == values


def test_text_that_is_no_text_and_arguments_that_do_not_fit_lose_no_record() -> None:
    assert record_values(record("cut \udc80"))["msg"] == "cut \\udc80"
    message = record_values(record("loss %d", "x"))["msg"]
    assert message.startswith("loss %d (its arguments ('x',) do not fit: ")


class _Unwilling:
    def __str__(self) -> str:
        raise LookupError

    __repr__ = __str__


def test_names_and_extras_in_any_script_travel_and_no_message_fails_its_call() -> None:
    values = record_values(record("%s", _Unwilling(), name="größe", levelname="ÜBER", user="Zoë"))
    assert (values["name"], values["levelname"], values["user"]) == ("größe", "ÜBER", "Zoë")
    assert values["msg"] == "(a message without text: LookupError)"
    assert msgpack.unpackb(msgpack.packb(values)) == values


def test_only_levels_that_change_are_set() -> None:
    own, app = logging.getLogger("taken.own"), logging.getLogger("taken.app")
    levels = TakenLevels()
    own.setLevel(logging.ERROR)
    root = logging.root.level
    levels.take({"": logging.WARNING, "taken.app": logging.DEBUG})
    assert (app.level, own.level, logging.root.level) == (logging.DEBUG, logging.ERROR, root)
    levels.take({"": logging.WARNING})
    assert (app.level, own.level) == (logging.NOTSET, logging.ERROR)
    own.setLevel(logging.NOTSET)


def test_records_go_to_the_client_unless_they_are_skywards_own_are_refused_or_are_of_a_forked_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, taken = list[str](), list[str]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: own.append(record.getMessage()))
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(logging.Logger, "callHandlers", logging.Logger.callHandlers)
    levels = {logger: logger.level for logger in (logging.root, logging.getLogger("skyward"))}

    def take(record: logging.LogRecord) -> bool:
        taken.append(record.getMessage())
        return record.getMessage() != "refused"

    try:
        take_log_records(take)
        app = logging.getLogger("taken.app")
        app.warning("sent")
        app.warning("refused")
        logging.getLogger("skyward.part").warning("of Skyward")
        child = os.fork()
        if not child:
            app.warning("of a child")
            os._exit(len(taken))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
    assert (taken, own) == (["sent", "refused"], ["refused", "of Skyward"])
