"""Exceptions arrive as they are: raised, as values and in groups, whatever their constructor takes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from skyward.errors import RemoteTraceback
from skyward.shipping.pickling import add_note, pack, pack_result, unpack
from skyward.shipping.remote_exceptions import pack_error, unpack_error


class TwoError(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class KeywordError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class FormattingError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"bad {code}")
        self.code = code


class ListingError(Exception):
    def __init__(self, *names: str) -> None:
        super().__init__("missing:", *names)
        self.code = 7

    def __str__(self) -> str:
        return "some are missing"


class SlottedError(Exception):
    __slots__ = ("code", "unset")

    def __init__(self) -> None:
        self.code = 7


class PropertyError(ValueError):
    def __init__(self, code: int) -> None:
        self._code = code

    @property
    def code(self) -> int:
        return self._code


class PathError(OSError):
    def __init__(self, path: str, code: int) -> None:
        super().__init__(2, "gone", path)
        self.code = code


class PluginError(ImportError):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"no plugin {name}", name=name)
        self.code = code


class NewError(Exception):
    def __new__(cls, code: int, _: object) -> Any:
        made = super().__new__(cls, code)
        made.code = code
        return made

    def __init__(self, *_: object) -> None: ...


class FrozenError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        object.__setattr__(self, "code", code)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is frozen")


@dataclasses.dataclass(frozen=True)
class FrozenRecordError(Exception):
    code: int
    why: str = "no"


class OwnWayError(Exception):
    def __init__(self, code: int, extra: Any = None) -> None:
        super().__init__("text")
        self.code, self.extra = code, extra or threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnWayError, (self.code, "rebuilt")


class CodedGroup(ExceptionGroup[Exception]):
    def __new__(cls, message: str, errors: Any, code: int) -> Any:
        made = super().__new__(cls, message, errors)
        made.code = code
        return made

    def derive(self, excs: Any) -> Any:
        return CodedGroup(self.message, excs, self.code)  # type: ignore[attr-defined]


def local() -> Exception:
    class LocalError(Exception):
        def __init__(self, a: int, b: int) -> None:
            self.code = a + b

    return LocalError(3, 4)


MAKE: dict[str, Callable[[], Exception]] = {
    "own init": lambda: TwoError("m", 7),
    "keywords": lambda: KeywordError(code=7),
    "an init that formats its argument": lambda: FormattingError(7),
    "an init that adds an argument": lambda: ListingError("a"),
    "slots": SlottedError,
    "property": lambda: PropertyError(7),
    "OSError": lambda: PathError("a.csv", 7),
    "ImportError": lambda: PluginError("x", 7),
    "own new": lambda: NewError(7, 0),
    "frozen": lambda: FrozenError(7),
    "frozen dataclass": lambda: FrozenRecordError(7),
    "own reduce": lambda: OwnWayError(7),
    "local class": local,
}
FIELDS: dict[str, tuple[Callable[[], Exception], tuple[str, ...]]] = {
    "OSError": (lambda: PathError("a.csv", 7), ("errno", "strerror", "filename")),
    "ImportError": (lambda: PluginError("x", 7), ("name", "path", "msg")),
    "two files": (lambda: OSError(2, "no", "a", None, "b"), ("filename", "filename2")),
    "decoding": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ("object", "start", "end", "reason")),
    "syntax": (lambda: SyntaxError("bad", ("f.py", 3, 2, "a b")), ("filename", "lineno", "offset", "text")),
    "stop": (lambda: StopIteration(4), ("value",)),
    "attribute": (lambda: AttributeError("no", name="x"), ("name",)),
    "key": (lambda: KeyError("a"), ("args",)),
    "json": (lambda: json.JSONDecodeError("no", "{", 1), ("pos", "doc", "lineno")),
    "program": (lambda: subprocess.CalledProcessError(3, ["x"], b"out"), ("returncode", "cmd", "stdout")),
}


def as_argument(error: Any) -> Any:
    return unpack(pack([error], what="it").data)[0]


def as_result(error: Any) -> Any:
    return unpack(pack_result({"a": error}, what="it").data)["a"]


def as_raised(error: Any) -> Any:
    return unpack_error(pack_error(error), where="node 0")


def as_a_member(error: Any) -> Any:
    group = ExceptionGroup("outer", [ValueError(1), ExceptionGroup("inner", [error])])
    return as_raised(group).exceptions[1].exceptions[0]


WAYS = pytest.mark.parametrize("way", [as_argument, as_result, as_raised, as_a_member])


@WAYS
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_an_exception_arrives_with_its_attributes(make: Callable[[], Any], way: Callable[[Any], Any]) -> None:
    error = make()
    add_note(error, "seen")
    back = way(error)
    assert (type(back).__qualname__, back.code, str(back), back.args) == (
        type(error).__qualname__,
        7,
        str(error),
        error.args,
    )
    if not isinstance(error, OwnWayError):
        assert back.__notes__[0] == "seen"


@WAYS
@pytest.mark.parametrize(("make", "fields"), FIELDS.values(), ids=FIELDS)
def test_fields_of_builtin_classes_arrive(make: Callable[[], Any], fields: Any, way: Callable[[Any], Any]) -> None:
    error = make()
    assert [getattr(way(error), name) for name in fields] == [getattr(error, name) for name in fields]


@pytest.mark.parametrize("way", [as_argument, as_result, as_a_member])
def test_a_value_keeps_its_cause_and_context(way: Callable[[Any], Any]) -> None:
    try:
        try:
            raise TwoError("inner", 1)
        except TwoError as inner:
            raise KeywordError(code=7) from inner
    except KeywordError as caught:
        back = way(caught)
    assert (type(back.__cause__), back.__cause__.code) == (TwoError, 1)
    assert back.__context__ is back.__cause__
    assert back.__suppress_context__


@pytest.mark.parametrize("way", [as_argument, as_result])
def test_a_cause_that_cannot_be_pickled_is_left_out(way: Callable[[Any], Any]) -> None:
    error, error.__cause__ = TwoError("m", 7), ValueError(threading.Lock())
    back = way(error)
    assert (back.code, back.__cause__) == (7, None)


@pytest.mark.parametrize("way", [as_argument, as_result, as_raised])
def test_a_group_of_an_own_class_is_split_by_the_classes_of_its_members(way: Callable[[Any], Any]) -> None:
    try:
        raise way(CodedGroup("g", [TwoError("m", 7), ExceptionGroup("i", [TwoError("n", 8), ValueError()])], 9))
    except* TwoError as caught:
        found = caught
    except* ValueError:
        pass
    assert found.code == 9  # type: ignore[attr-defined]
    assert [found.exceptions[0].code, found.exceptions[1].exceptions[0].code] == [7, 8]  # type: ignore[union-attr]


def test_what_steers_the_interpreter_is_a_value_like_any_other() -> None:
    group = as_argument(BaseExceptionGroup("b", [KeyboardInterrupt(), SystemExit(3)]))
    assert [type(each) for each in group.exceptions] == [KeyboardInterrupt, SystemExit]
    assert group.exceptions[1].code == 3


def test_the_cause_of_a_raised_exception_is_its_traceback() -> None:
    error, error.__cause__ = TwoError("m", 7), ValueError("inner")
    assert isinstance(as_raised(error).__cause__, RemoteTraceback)
