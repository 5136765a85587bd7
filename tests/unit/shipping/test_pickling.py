from __future__ import annotations

import copyreg
import importlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tblib.pickling_support

from skyward.errors import RemoteError, RemoteTraceback, SerializationError
from skyward.shipping.pickling import LARGE_BYTES, pack, unpack
from skyward.shipping.remote_exceptions import pack_error, unpack_error


class FinickyError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class ExitingError(Exception):
    def __init__(self, code: int = 3) -> None:
        if not isinstance(code, int):
            sys.exit(code)
        super().__init__(f"code {code}")

    def __str__(self) -> str:
        raise SystemExit(4)


class UnbuildableError(Exception):
    def __setstate__(self, _: object) -> None:
        raise ValueError("no state")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_large_arrays_stay_out_of_the_pickle_and_come_back_writable() -> None:
    array = np.arange(LARGE_BYTES, dtype="u1")
    packed = pack({"x": array, "small": np.zeros(3)}, what="it")
    assert [buffer.nbytes for buffer in packed.buffers] == [LARGE_BYTES]
    assert len(packed.data) < 2000
    back = unpack(packed.data, [bytearray(buffer) for buffer in packed.buffers])
    back["x"][0] = 7
    assert back["x"][1:].tolist() == array[1:].tolist()


def test_an_array_that_is_not_contiguous_arrives_whole() -> None:
    array = np.arange(4 * LARGE_BYTES, dtype="u1").reshape(2048, -1)[:, ::3]
    packed = pack(array, what="it")
    assert (unpack(packed.data, packed.buffers) == array).all()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"model": [1, threading.Lock()]}, r"argument 0\['model'\]\[1\] cannot be pickled"),
        ((n for n in range(3)), "argument 0 cannot be pickled: cannot pickle 'generator' object"),
    ],
)
def test_what_cannot_be_pickled_is_named(value: object, named: str) -> None:
    with pytest.raises(SerializationError, match=named):
        pack(value, what="argument 0")


def test_an_unpicklable_variable_of_a_function_is_named() -> None:
    lock = threading.Lock()

    def guarded() -> object:
        return lock

    with pytest.raises(SerializationError, match="function guarded → its variable 'lock'"):
        pack(guarded, what="the function guarded")


def test_an_exception_comes_back_as_itself_with_its_remote_traceback() -> None:
    error = unpack_error(pack_error(raised(KeyError("x"))), where="node 1, worker 0")
    assert type(error) is KeyError
    assert error.args == ("x",)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in raised" in str(error.__cause__)
    assert error.__notes__ == ["raised on node 1, worker 0"]


def test_an_exception_that_exits_when_it_is_rebuilt_or_shown_ends_nobody() -> None:
    packed = pack_error(raised(ExitingError()))
    assert packed.message == "<its __str__ raised SystemExit>"
    assert type(unpack_error(packed, where="node 0, worker 0")) is ExitingError


@pytest.mark.parametrize(
    "error",
    [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), SyntaxError("bad", ("f.py", 1, 2, "x"))],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_keeps_its_text_where_dask_pickles_exceptions(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tblibs = cast("Any", tblib.pickling_support).pickle_exception
    monkeypatch.setitem(copyreg.dispatch_table, type(error), tblibs)
    assert str(unpack_error(pack_error(raised(error)), where="node 0, worker 0")).startswith(str(error))


def test_an_exception_that_cannot_be_rebuilt_becomes_a_remote_error_with_its_text() -> None:
    error = unpack_error(pack_error(raised(UnbuildableError("no way to send this"))), where="node 0, worker 0")
    assert type(error) is RemoteError
    assert error.type_name.endswith("UnbuildableError")
    assert "no way to send this" in str(error)
    assert "UnbuildableError" in error.remote_traceback


def test_an_exception_comes_back_without_what_cannot_be_pickled() -> None:
    error = FinickyError(code=3)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.args = ("code 3", threading.Lock())
    back = unpack_error(pack_error(raised(error)), where="node 0, worker 0")
    assert (type(back), back.code, back.args[0]) == (FinickyError, 3, "code 3")  # type: ignore[attr-defined]
    for part in (back.lock, back.args[1]):  # type: ignore[attr-defined]
        with pytest.raises(SerializationError, match=r"of the exception FinickyError was left out.*thread.lock"):
            part.acquire()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_client_becomes_a_remote_error(error: BaseException) -> None:
    assert type(unpack_error(pack_error(raised(error)), where="node 0, worker 0")) is RemoteError


def test_a_module_that_was_used_before_it_could_be_imported_travels_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sky_made_later.py"
    path.write_text("FACTOR = 4\ndef scale(x):\n    return FACTOR * x\n")
    spec = importlib.util.spec_from_file_location("sky_made_later", path)
    assert spec is not None
    assert spec.loader is not None
    early = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(early)
    pack(early.scale, what="it")

    monkeypatch.syspath_prepend(tmp_path)
    later = importlib.import_module("sky_made_later")
    packed = pack(later.scale, what="it")
    del sys.modules["sky_made_later"]
    path.unlink()
    importlib.invalidate_caches()
    assert unpack(packed.data)(5) == 20


def test_functions_keep_the_name_of_their_file_by_which_tracebacks_find_lines() -> None:
    def outer() -> Callable[[], str]:
        def inner() -> str:
            return "inner"

        return inner

    rebuilt = unpack(pack(outer, what="a function").data)

    assert rebuilt.__code__.co_filename == rebuilt().__code__.co_filename == __file__


def test_installed_modules_travel_by_reference() -> None:
    assert len(pack(np.linalg.norm, what="it").data) < 100


WITHOUT_IT = """
import sys, warnings
sys.modules["urllib3"] = None
from skyward.shipping.pickling import unpack
(entry,) = unpack(sys.stdin.buffer.read())
warnings.simplefilter(entry[0], entry[2])
print(entry[2].__qualname__, issubclass(entry[2], Warning))
"""


def test_warnings_of_packages_that_the_node_lacks_get_a_stand_in_there() -> None:
    category = importlib.import_module("urllib3.exceptions").InsecureRequestWarning
    packed = pack([("always", None, category, None, 0)], what="filters").data

    assert unpack(packed)[0][2] is category
    there = subprocess.run(
        [sys.executable, "-c", WITHOUT_IT], input=packed, capture_output=True, check=True, timeout=60
    )
    assert there.stdout.split() == [b"InsecureRequestWarning", b"True"]


def test_the_users_own_warnings_travel_whole() -> None:
    class OwnWarning(UserWarning):
        level = 3

    assert unpack(pack(OwnWarning, what="it").data).level == 3
