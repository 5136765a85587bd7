"""Public bug reports of similar projects, each as a few lines with the value that its reporter expected.

A program: it opens one pool and prints, for every report that did not end as expected, one line. It runs as a script,
whose classes are those of ``__main__``, and as a module, whose source goes to the workers.
"""

from __future__ import annotations

import abc
import contextvars
import ctypes
import dataclasses
import enum
import functools
import logging
import multiprocessing
import operator
import os
import random
import signal
import sys
import tempfile
import threading
import time
import types
import typing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import joblib
import numpy as np

import skyward as sky

GITHUB = "https://github.com/"
Run = Callable[[sky.ComputePool], Any]
REPORTS: list[tuple[str, Run, Any]] = []


def report(issue: str, *, expected: Any) -> Callable[[Run], Run]:
    def remember(run: Run) -> Run:
        REPORTS.append((GITHUB + issue, run, expected))
        return run

    return remember


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except BaseException as error:
        return error


def submit(pool: sky.ComputePool, fn: Callable[..., Any], *args: Any) -> Any:
    return pool.submit(fn, *args).result(timeout=60)


def is_usable(pool: sky.ComputePool) -> bool:
    return submit(pool, operator.add, 1, 2) == 3


# --- classes ------------------------------------------------------------------------------------------------------


class TakesArguments:
    def __init_subclass__(cls, /, arg: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.arg = arg


class Child(TakesArguments, arg="hello"):
    pass


@report("cloudpipe/cloudpickle/issues/527", expected=["hello", "hello"])
def a_base_whose_init_subclass_takes_arguments(pool: sky.ComputePool) -> Any:
    return [submit(pool, lambda cls: cls.arg, Child), submit(pool, lambda child: child.arg, Child())]


class Registry:
    names: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        if cls.__name__ in Registry.names:
            raise ValueError(f"{cls.__name__} exists")
        Registry.names.append(cls.__name__)


class Registered(Registry):
    pass


@report("uqfoundation/dill/issues/381", expected=["Registered"])
def a_registry_of_subclasses(pool: sky.ComputePool) -> Any:
    return submit(pool, lambda registered: type(registered).names, Registered())


class OddMeta(type):
    def __new__(mcs, name: str, bases: Any = (), body: Any = None, *, flag: bool = False) -> Any:
        cls = super().__new__(mcs, name, bases, body or {})
        cls.flag = flag
        return cls

    def __init__(cls, name: str, bases: Any = (), body: Any = None, *, flag: bool = False) -> None:
        super().__init__(name, bases, body or {})


class MadeByOddMeta(metaclass=OddMeta, flag=True):
    pass


@report("sympy/sympy/issues/11692", expected=True)
def a_metaclass_with_arguments(pool: sky.ComputePool) -> Any:
    return submit(pool, lambda cls: cls.flag, MadeByOddMeta)


class Item(abc.ABC):  # noqa: B024 - as it was reported
    pass


@report("cloudpipe/cloudpickle/issues/302", expected=[False, False])
def caches_of_an_abstract_class(pool: sky.ComputePool) -> Any:
    seen = []
    for _ in range(2):
        seen.append(submit(pool, lambda item: isinstance({}.values(), type(item)), Item()))
        assert not isinstance({}.values(), Item)
    return seen


def make_abstract_class() -> type:
    class Model(abc.ABC):
        field: int

    return Model


@report("cloudpipe/cloudpickle/issues/572", expected=True)
def an_abstract_class_with_annotations(pool: sky.ComputePool) -> Any:
    return submit(pool, lambda cls: "field" in typing.get_type_hints(cls), make_abstract_class())


@report("cloudpipe/cloudpickle/issues/376", expected=2)
def a_call_leaves_the_closures_of_a_class_alone(pool: sky.ComputePool) -> Any:
    made = []

    class Foo:
        def __init__(self) -> None:
            made.append("foo")

    submit(pool, lambda foo: foo, Foo())
    Foo()
    return len(made)


@dataclasses.dataclass
class Range:
    start: int
    end: int = dataclasses.field(default=3, kw_only=True)
    step: typing.ClassVar[int] = 1
    init: dataclasses.InitVar[int] = 0


@report("cloudpipe/cloudpickle/issues/386", expected={"start": 1, "end": 3})
def a_dataclass_in_the_call(pool: sky.ComputePool) -> Any:
    return submit(pool, dataclasses.asdict, Range(1))


@report("cloudpipe/cloudpickle/issues/424", expected=["start", "end"])
def a_dataclass_after_the_call(pool: sky.ComputePool) -> Any:
    submit(pool, lambda value: value, Range(1))
    return [field.name for field in dataclasses.fields(Range)]


@report("cloudpipe/cloudpickle/issues/117", expected=True)
def the_type_of_a_lock(pool: sky.ComputePool) -> Any:
    return submit(pool, lambda cls: cls is type(threading.Lock()), type(threading.Lock()))


@report("cloudpipe/cloudpickle/issues/223", expected={"a": 1})
def a_mapping_proxy(pool: sky.ComputePool) -> Any:
    return dict(submit(pool, lambda proxy: proxy, types.MappingProxyType({"a": 1})))


@report("smallworld-re/smallworld/pull/154", expected=[1, 2])
def an_array_of_ctypes(pool: sky.ComputePool) -> Any:
    return submit(pool, list, (ctypes.c_int * 2)(1, 2))


class Color(enum.IntEnum):
    RED = 1


@report("cloudpipe/cloudpickle/issues/244", expected=[True, True])
def an_int_enum(pool: sky.ComputePool) -> Any:
    return [submit(pool, lambda cls: cls.RED == 1, Color), submit(pool, lambda: Color.RED) is Color.RED]


class Parent:
    version = 1


class Overriding(Parent):
    version = 1


@report("cloudpipe/cloudpickle/pull/600", expected=1)
def an_override_with_the_value_of_the_base(pool: sky.ComputePool) -> Any:
    def change(parent: type, child: type) -> int:
        parent.version = 2
        version = child.version
        parent.version = 1
        return version

    return submit(pool, change, Parent, Overriding)


_UNSET = object()


def is_unset(value: object = _UNSET) -> bool:
    return value is _UNSET


@report("google/flax/pull/3825", expected=True)
def a_sentinel(pool: sky.ComputePool) -> Any:
    return submit(pool, is_unset)


@report("facebookincubator/submitit/pull/30", expected="Local")
def a_result_of_a_local_class(pool: sky.ComputePool) -> Any:
    def make() -> Any:
        class Local:
            pass

        return Local()

    return type(submit(pool, make)).__name__


current = contextvars.ContextVar("current", default=1)


@report("cloudpipe/cloudpickle/issues/387", expected=[1, True])
def a_context_variable(pool: sky.ComputePool) -> Any:
    return [submit(pool, lambda: [current.get()])[0], submit(pool, lambda: current) is current]


# --- functions ----------------------------------------------------------------------------------------------------


def with_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args)

    return wrapper


@with_wrapper
def increment(x: int) -> int:
    return x + 1


@report("joblib/joblib/issues/166", expected=2)
def a_decorated_function(pool: sky.ComputePool) -> Any:
    return submit(pool, increment, 1)


@report("cloudpipe/cloudpickle/issues/263", expected=[3, 6])
def keyword_only_defaults(pool: sky.ComputePool) -> Any:
    def add(a: int, *, b: int = 2) -> int:
        return a + b

    return [submit(pool, add, 1), submit(pool, functools.partial(add, b=5), 1)]


# --- exceptions ---------------------------------------------------------------------------------------------------


class KeywordOnlyError(Exception):
    def __init__(self, *, field: int) -> None:
        super().__init__()
        self.field = field


@report("python-attrs/attrs/issues/734", expected=[3, 3])
def an_exception_with_keywords_only(pool: sky.ComputePool) -> Any:
    def fail() -> None:
        raise KeywordOnlyError(field=3)

    return [outcome(lambda: submit(pool, fail)).field, submit(pool, lambda: KeywordOnlyError(field=3)).field]


class FirstError(Exception):
    pass


class SecondError(Exception):
    pass


def chain(*, explicitly: bool) -> None:
    try:
        raise FirstError("first")
    except FirstError as error:
        if explicitly:
            raise SecondError("second") from error
        raise SecondError("second")  # noqa: B904 - the implicit chain is what is tested


@report("dask/distributed/issues/2530", expected=(SecondError, True))
def the_cause_of_an_exception(pool: sky.ComputePool) -> Any:
    error = outcome(lambda: submit(pool, lambda: chain(explicitly=True)))
    return type(error), "FirstError: first" in str(error.__cause__)


@report("dask/distributed/issues/3976", expected=(SecondError, True))
def the_context_of_an_exception(pool: sky.ComputePool) -> Any:
    error = outcome(lambda: submit(pool, lambda: chain(explicitly=False)))
    return type(error), "FirstError: first" in str(error.__cause__)


class FailsToPickle:
    def __getstate__(self) -> Any:
        raise ValueError("no state")


@report("python/cpython/issues/74734", expected=("SerializationError", True))
def an_argument_that_fails_to_pickle(pool: sky.ComputePool) -> Any:
    return type(outcome(lambda: submit(pool, len, [FailsToPickle()]))).__name__, is_usable(pool)


def fail_unless(pid: int) -> Any:
    if os.getpid() != pid:
        raise ValueError("fails to load")


def fail_in(pid: int) -> Any:
    if os.getpid() == pid:
        raise ValueError("fails to load")


class FailsToLoad:
    def __init__(self, fail: Callable[[int], Any]) -> None:
        self.reduced = fail, (os.getpid(),)

    def __reduce__(self) -> Any:
        return self.reduced


@report("python/cpython/issues/75880", expected=(True, True))
def an_argument_that_fails_to_load(pool: sky.ComputePool) -> Any:
    error = outcome(lambda: submit(pool, len, [FailsToLoad(fail_unless)]))
    return "fails to load" in str(error), is_usable(pool)


@report("python/cpython/pull/4256", expected=(True, True))
def a_result_that_fails_to_load(pool: sky.ComputePool) -> Any:
    def make(pid: int) -> Any:
        made = FailsToLoad(fail_in)
        made.reduced = fail_in, (pid,)
        return made

    error = outcome(lambda: submit(pool, make, os.getpid()))
    return "fails to load" in str(error), is_usable(pool)


class ExitsWhenLoaded:
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


@report("noxdafox/pebble/issues/146", expected=(True, True))
def an_argument_that_exits_when_loaded(pool: sky.ComputePool) -> Any:
    error = outcome(lambda: submit(pool, len, [ExitsWhenLoaded()]))
    return isinstance(error, Exception) and not isinstance(error, TimeoutError), is_usable(pool)


@report("richardsheridan/trio-parallel/pull/102", expected=("SerializationError", True))
def a_result_that_cannot_be_pickled(pool: sky.ComputePool) -> Any:
    return type(outcome(lambda: submit(pool, threading.Lock))).__name__, is_usable(pool)


@report("GridTools/gt4py/pull/2698", expected=("RecursionError", True))
def endless_recursion(pool: sky.ComputePool) -> Any:
    def recurse(n: int) -> int:
        return recurse(n + 1)

    return type(outcome(lambda: submit(pool, recurse, 0))).__name__, is_usable(pool)


@report("joblib/joblib/issues/812", expected=("WorkerLostError", True, True))
def a_worker_that_is_killed(pool: sky.ComputePool) -> Any:
    error = outcome(lambda: submit(pool, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    return type(error).__name__, "SIGKILL" in str(error), is_usable(pool)


# --- data ---------------------------------------------------------------------------------------------------------


@report("joblib/joblib/issues/1703", expected=[True, True])
def the_layout_of_a_mapped_array(pool: sky.ComputePool) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        np.arange(15.0).tofile(file.name)
        mapped = np.memmap(file.name, dtype=float, mode="r").reshape(5, 3)
        same = submit(pool, lambda array: bool((array == np.arange(15.0).reshape(5, 3)).all()), mapped)
        return [same, submit(pool, lambda array: array.flags.c_contiguous, mapped)]


@report("ray-project/ray/issues/9673", expected=[2.0, 1.0])
def an_argument_may_be_changed_in_the_call(pool: sky.ComputePool) -> Any:
    def add_one(array: Any) -> float:
        array += 1
        return float(array[0])

    mine = np.ones(1 << 19)
    return [submit(pool, add_one, mine), float(mine[0])]


@report("ray-project/ray/issues/369", expected=5.0)
def a_result_may_be_changed(pool: sky.ComputePool) -> Any:
    array = submit(pool, lambda: np.zeros(1 << 19))
    array[0] = 5
    return float(array[0])


ARRAYS = {
    "Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">i4"),
    "objects": np.array([1, "a", None], dtype=object),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(5),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
    "reversed": np.arange(10)[::-2],
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "large, Fortran": np.asfortranarray(np.ones((700, 700))),
    "large, every second row": np.ones((1400, 700))[::2],
}


@report("dask/distributed/pull/876", expected=[])
def arrays_of_every_kind(pool: sky.ComputePool) -> Any:
    returned = submit(pool, lambda arrays: arrays, ARRAYS)
    return [
        name
        for name, array in ARRAYS.items()
        if (type(array), array.dtype, array.shape) != (type(returned[name]), returned[name].dtype, returned[name].shape)
        or not np.array_equal(np.asarray(array), np.asarray(returned[name]))
        or not np.array_equal(np.ma.getmaskarray(array), np.ma.getmaskarray(returned[name]))
        or ("Fortran" in name and not returned[name].flags.f_contiguous)
    ]


@report("joblib/joblib/issues/36", expected=True)
def random_numbers_differ_between_workers(pool: sky.ComputePool) -> Any:
    draw = sky.compute(lambda: (random.random(), float(np.random.random()), os.urandom(4)))  # noqa: NPY002
    drawn = draw() @ pool
    return all(len(set(column)) == len(drawn) > 1 for column in zip(*drawn, strict=True))


# --- processes and state ------------------------------------------------------------------------------------------


@report("dask/distributed/issues/2142", expected=0)
def a_process_of_a_call(pool: sky.ComputePool) -> Any:
    def start() -> int | None:
        process = multiprocessing.Process(target=operator.add, args=(1, 3))
        process.start()
        process.join(60)
        return process.exitcode

    return submit(pool, start)


@report("AgnostiqHQ/covalent/issues/562", expected=[1, 2])
def an_executor_of_a_call(pool: sky.ComputePool) -> Any:
    def run() -> list[int]:
        with ProcessPoolExecutor(2) as executor:
            return list(executor.map(abs, [-1, -2]))

    return submit(pool, run)


@report("celery/celery/issues/6922", expected=[1, 2])
def joblib_in_a_call(pool: sky.ComputePool) -> Any:
    def run() -> Any:
        return joblib.Parallel(n_jobs=2)(joblib.delayed(increment)(i) for i in (0, 1))

    return submit(pool, run)


@report("ray-project/ray/issues/14739", expected=True)
def the_current_folder_is_that_of_the_node(pool: sky.ComputePool) -> Any:
    where = sky.compute(lambda: (sky.instance_info().node, os.getcwd()))() @ pool
    return len(set(where)) == len({node for node, _ in where})


@report("facebookincubator/submitit/issues/36", expected=True)
def a_call_leaves_the_program_alone(pool: sky.ComputePool) -> Any:
    before = sys.modules["__main__"], list(sys.argv), list(sys.path), list(sys.meta_path)
    is_usable(pool)
    return before == (sys.modules["__main__"], sys.argv, sys.path, sys.meta_path)


@report("joblib/joblib/issues/1591", expected=3)
def warnings_that_are_errors_here(pool: sky.ComputePool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return submit(pool, operator.add, 1, 2)


class Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@report("joblib/joblib/issues/1017", expected=["from a call"])
def records_of_logging_come_to_the_program(pool: sky.ComputePool) -> Any:
    logger, handler = logging.getLogger("reports"), Collecting()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    submit(pool, lambda: logging.getLogger("reports").info("from a call"))
    deadline = time.monotonic() + 10
    while not handler.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    logger.removeHandler(handler)
    return handler.messages


def main() -> int:
    failed = 0
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet") as pool:
        for address, run, expected in REPORTS:
            seen = outcome(functools.partial(run, pool))
            if seen != expected:
                failed += 1
                print(f"{address} ({run.__name__}): expected {expected!r}, seen {seen!r}")
    print(f"{len(REPORTS)} reports, {failed} failed")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
