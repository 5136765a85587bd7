"""Lazy calls and their operators."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import wrapt

from skyward.api.calls import ComputeFunction, PendingBatch, PendingCompute, compute, gather, invocation_of
from skyward.errors import ConfigurationError, SerializationError
from skyward.shipping.pickling import pack, unpack
from skyward.testing.in_process import InProcessSubmitter


class FakePool:
    """Runs calls at once, in this process, and remembers how it was asked."""

    def __init__(self, workers: int = 2) -> None:
        self.workers = workers
        self.asked: list[str] = []

    def run(self, pending: PendingCompute[Any]) -> Any:
        self.asked.append("run")
        return done(pending)

    def run_batch(self, batch: PendingBatch[Any]) -> Any:
        self.asked.append("run_batch")
        return tuple(done(call) for call in batch)

    def broadcast(self, pending: PendingCompute[Any]) -> Any:
        self.asked.append("broadcast")
        return tuple(done(pending) for _ in range(self.workers))


def done(pending: PendingCompute[Any]) -> Any:
    call = pending.invocation()
    return call.fn(*call.args, **call.kwargs)


@compute
def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


@compute
def countdown(number: int) -> list[int]:
    return [number, *countdown.local(number - 1)] if number else []


@compute(retries=0)
def fragile() -> str:
    return "fragile"


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @compute
    def times(self, number: int) -> int:
        return self.factor * number

    @staticmethod
    @compute
    def unit() -> int:
        return 1

    @classmethod
    @compute
    def name(cls) -> str:
        return cls.__name__


class TestDecorated:
    def test_calling_it_runs_nothing(self) -> None:
        ran: list[int] = []
        pending = compute(ran.append)(1)
        assert isinstance(pending, PendingCompute)
        assert ran == []

    def test_looks_like_the_function(self) -> None:
        assert isinstance(add, ComputeFunction)
        assert (add.__name__, add.__qualname__, add.__module__) == ("add", "add", __name__)
        assert add.__doc__ == "Add two numbers."
        assert inspect.signature(add) == inspect.signature(add.local)
        assert inspect.unwrap(add) is add.local
        assert repr(add) == f"<compute function {__name__}.add>"

    def test_local_is_the_function_itself(self) -> None:
        def plain() -> int:
            return 3

        assert compute(plain).local is plain
        assert plain.__qualname__.endswith("<locals>.plain")

    def test_takes_any_callable(self) -> None:
        assert done(compute(len)("four")) == 4

    @pytest.mark.parametrize("value", [3, "name", None])
    def test_takes_nothing_else(self, value: object) -> None:
        with pytest.raises(ConfigurationError, match=r"compute decorates a function, got (int|str|NoneType)"):
            compute()(value)  # type: ignore[arg-type]

    def test_keywords_of_any_value(self) -> None:
        @compute
        def collect(*args: object, **kwargs: object) -> object:
            return args, kwargs

        assert done(collect([1], fn={"a": [2]}, args=3)) == (([1],), {"fn": {"a": [2]}, "args": 3})

    def test_a_method_takes_its_object_along(self) -> None:
        assert done(Scale(3).times(4)) == 12
        assert Scale.times.local(Scale(3), 5) == 15

    def test_static_and_class_methods(self) -> None:
        assert done(Scale(1).unit()) == 1
        assert done(Scale.name()) == "Scale"

    def test_a_pool_is_no_argument(self) -> None:
        with pytest.raises(ConfigurationError, match=r"an argument of add\(\) is a pool.*add\(\.\.\.\) >> pool"):
            add(FakePool(), 1)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="is a pool"):
            add(1, right=FakePool())  # type: ignore[arg-type]


class TestOptions:
    def test_retries_reach_the_invocation(self) -> None:
        assert fragile().invocation().retries == 0
        assert add(1).invocation().retries == 3

    @pytest.mark.parametrize("retries", [-1, 1.5, True, "3"])
    def test_retries_must_be_a_whole_number(self, retries: Any) -> None:
        with pytest.raises(ConfigurationError, match="retries must be a whole number ≥ 0, got"):
            compute(retries=retries)

    @pytest.mark.parametrize("retry", [OSError, [OSError], (KeyboardInterrupt,), ("OSError",), (OSError("x"),)])
    def test_retry_must_be_exception_classes(self, retry: Any) -> None:
        with pytest.raises(
            ConfigurationError, match=r"retry must be a tuple of exception classes such as \(OSError,\)"
        ):
            compute(retry=retry)

    def test_a_number_in_the_place_of_exceptions_is_pointed_to_retries(self) -> None:
        with pytest.raises(ConfigurationError, match=r"\(retries= is the number of retries\), got 1$"):
            compute(retry=1)  # type: ignore[call-overload]

    def test_a_listed_exception_is_retried_on_the_node(self) -> None:
        flaky = Flaky(failures=2)
        assert done(compute(retries=2, retry=(OSError,))(flaky)()) == "ok"
        assert flaky.calls == 3

    def test_the_last_failure_is_raised(self) -> None:
        flaky = Flaky(failures=5)
        with pytest.raises(OSError, match="attempt 3"):
            done(compute(retries=2, retry=(OSError,))(flaky)())

    def test_another_exception_is_raised_at_once(self) -> None:
        flaky = Flaky(failures=1)
        with pytest.raises(OSError, match="attempt 1"):
            done(compute(retries=2, retry=(ValueError,))(flaky)())

    def test_no_exception_is_retried_unless_asked(self) -> None:
        flaky = Flaky(failures=1)
        with pytest.raises(OSError, match="attempt 1"):
            done(compute(retries=2)(flaky)())

    @pytest.fixture(autouse=True)
    def no_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=lambda _seconds: None))


class Flaky:
    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(f"attempt {self.calls}")
        return "ok"


class TestOperators:
    def test_one_call_runs_on_one_worker(self) -> None:
        pool = FakePool()
        assert add(1, 2) >> pool == 3
        assert pool.asked == ["run"]

    def test_at_runs_on_every_worker(self) -> None:
        pool = FakePool(workers=3)
        assert add(1, 2) @ pool == (3, 3, 3)
        assert pool.asked == ["broadcast"]

    def test_and_runs_in_parallel_in_order(self) -> None:
        pool = FakePool()
        assert (add(1) & fragile() & add(3)) >> pool == (2, "fragile", 4)
        assert pool.asked == ["run_batch"]

    def test_and_is_associative(self) -> None:
        one, two, three, four = (add(number) for number in range(4))
        assert list((one & two) & (three & four)) == list(one & (two & (three & four))) == [one, two, three, four]

    def test_pending_is_immutable(self) -> None:
        pending = add(1)
        with pytest.raises(FrozenInstanceError):
            pending.args = ()  # type: ignore[misc]


class TestGather:
    def test_results_are_in_order(self) -> None:
        assert gather(*(add(number) for number in range(5))) >> FakePool() == (1, 2, 3, 4, 5)

    def test_of_nothing_is_empty(self) -> None:
        assert gather() >> FakePool() == ()

    def test_has_a_length_and_iterates(self) -> None:
        calls = [add(1), add(2)]
        batch = gather(*calls)
        assert len(batch) == 2
        assert list(batch) == calls

    def test_return_exceptions_survives_joining(self) -> None:
        assert not gather(add(1)).return_exceptions
        assert (gather(add(1), return_exceptions=True) & add(2)).return_exceptions
        assert (add(2) & gather(add(1), return_exceptions=True)).return_exceptions


class TestInvocationOf:
    def test_a_plain_function_goes_as_it_is(self) -> None:
        call = invocation_of(len, ("four",), {})
        assert (call.fn, call.args, call.label) == (len, ("four",), "len")

    def test_a_compute_function_keeps_its_options(self) -> None:
        call = invocation_of(fragile, (), {})
        assert (call.fn(), call.retries, call.label) == ("fragile", 0, "fragile")

    def test_a_compute_method_runs_on_the_worker(self) -> None:
        call = invocation_of(Scale(3).times, (4,), {})
        assert call.fn(*call.args) == 12

    def test_refuses_what_does_not_travel(self) -> None:
        with pytest.raises(ConfigurationError, match=r"an argument of len\(\) is a pool"):
            invocation_of(len, (FakePool(),), {})
        with pytest.raises(ConfigurationError, match="submit takes a function and its arguments, got int"):
            invocation_of(3, (), {})  # type: ignore[arg-type]


def nested() -> ComputeFunction[[int], int]:
    offset = 10

    @compute
    def shifted(number: int) -> int:
        return shifted.local(number - 1) + 1 if number else offset

    return shifted


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_wire(value: Any) -> Any:
    packed = pack(value, what="the value")
    return unpack(packed.data, [bytearray(buffer) for buffer in packed.buffers])


class TestPickling:
    @pytest.mark.parametrize("travel", [through_pickle, through_wire])
    @pytest.mark.parametrize("make", [lambda: add(1, right=2), lambda: nested()(3), lambda: Scale(3).times(4)])
    def test_a_pending_call(self, travel: Callable[[Any], Any], make: Callable[[], PendingCompute[int]]) -> None:
        assert done(travel(make())) == done(make())
        assert travel(make()).retries == make().retries

    def test_a_batch(self) -> None:
        batch = through_pickle(gather(add(1), nested()(3), return_exceptions=True))
        assert [done(call) for call in batch] == [2, 13]
        assert batch.return_exceptions

    @pytest.mark.parametrize("travel", [through_pickle, through_wire])
    def test_a_function_of_a_module(self, travel: Callable[[Any], Any]) -> None:
        copy = travel(add)
        assert done(copy(2)) == 3
        assert (copy.__name__, copy.local(2), inspect.signature(copy)) == ("add", 3, inspect.signature(add))

    @pytest.mark.parametrize("fn", [nested(), countdown])
    def test_a_function_that_calls_itself_goes_by_value(self, fn: ComputeFunction[[int], Any]) -> None:
        assert done(through_wire(fn)(2)) == done(fn(2))

    def test_a_function_keeps_its_retries(self) -> None:
        assert through_wire(compute(retries=7)(nested().local))(0).retries == 7

    def test_one_function_is_one_object_for_all_calls(self) -> None:
        assert add(1).invocation().fn is add(2).invocation().fn
        assert Scale(1).times(1).invocation().fn is Scale(2).times(2).invocation().fn

    def test_a_large_argument(self) -> None:
        copy = through_pickle(compute(len)(bytearray(3 << 20)))
        assert done(copy) == 3 << 20

    def test_what_cannot_travel_is_named(self) -> None:
        import threading

        with pytest.raises(SerializationError, match=r"lock"):
            pickle.dumps(add(threading.Lock()))  # type: ignore[arg-type]

    def test_an_installed_module_goes_by_reference(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "installed_tasks.py").write_text(
            "import threading, skyward\nlock = threading.Lock()\n"
            "@skyward.compute\ndef locked():\n    with lock:\n        return 'by reference'\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        import installed_tasks  # type: ignore[import-not-found]

        assert done(pickle.loads(cloudpickle.dumps(installed_tasks.locked))()) == "by reference"
        monkeypatch.delitem(sys.modules, "installed_tasks")

    def test_a_function_of_a_script_or_notebook(self) -> None:
        script = textwrap.dedent("""
            import cloudpickle, pickle, sys
            from skyward import compute

            @compute
            def twice(number):
                return 2 * helper.local(number)

            @compute
            def helper(number):
                return number + 1

            pickle.loads(pickle.dumps(twice(1)))
            pickle.loads(pickle.dumps(twice))
            sys.stdout.buffer.write(cloudpickle.dumps(twice(20).invocation().fn))
        """)
        fn = pickle.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
        assert fn(20) == 42


async def coroutine():
    return 1


def generator():
    yield 1


class AsyncCallable:
    async def __call__(self):
        return 1


async def async_generator():
    yield 1


@wrapt.decorator
def run_to_its_end(wrapped, instance, args, kwargs):
    return asyncio.run(wrapped(*args, **kwargs))


TAKERS = pytest.mark.parametrize(
    "take", [compute, lambda fn: invocation_of(fn, (), {})], ids=["decorated", "submitted"]
)


@TAKERS
def test_an_async_function_that_a_proxy_runs_is_a_function(take):
    assert take(run_to_its_end(coroutine))


@TAKERS
@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (coroutine, r"coroutine is async: call it inside one, with asyncio.run\(coroutine\(\.\.\.\)\)"),
        (partial(coroutine), "coroutine is async"),
        (AsyncCallable(), "AsyncCallable is async"),
        (async_generator, "async_generator is an async generator: write it with def and yield"),
    ],
)
def test_functions_whose_values_have_not_run_are_refused(take, fn, advice):
    with pytest.raises(ConfigurationError, match=f"plain functions; .*{advice}"):
        take(fn)


@dataclass
class Report:
    rows: object


@pytest.mark.parametrize(
    "wrap",
    [
        lambda call: call,
        lambda call: [[call]],
        lambda call: {"a": (call, 1)},
        lambda call: {call},
        lambda call: Report(rows=[call]),
        gather,
        lambda call: add(1) & call,
        lambda call: np.array([None, call], dtype=object),
        lambda call: partial(print, call),
        lambda call: iter([call]),
    ],
)
def test_a_pending_call_in_a_result_is_an_error_that_names_the_plain_function(wrap):
    def nested():
        return wrap(add(1))

    with InProcessSubmitter(1) as fleet:
        (future,) = fleet.submit_calls([invocation_of(nested, (), {})])
        with pytest.raises(ConfigurationError, match=r"the pending call add\(\.\.\.\), .* write add\.local\(\.\.\.\)"):
            future.result()


class Trainer:
    @compute
    def fit(self, x):
        return self.base + x

    base = 40

    @compute
    @classmethod
    def outside(cls, x):
        return cls.base + x

    @classmethod
    @compute
    def inside(cls, x):
        return cls.base + x

    @compute
    @staticmethod
    def still(x):
        return 40 + x

    @staticmethod
    @compute
    def quiet(x):
        return 40 + x


class Deeper(Trainer):
    base = 100

    def fit_twice(self, x):
        return super().fit(x)


@pytest.mark.parametrize("name", ["fit", "outside", "inside", "still", "quiet"])
def test_methods_of_every_kind_run_here_there_and_by_submission(name):
    for method in [getattr(Trainer(), name), *([getattr(Trainer, name)] if name != "fit" else [])]:
        if name != "inside" or sys.version_info < (3, 13):  # a classmethod binds no descriptor since then
            assert method.local(2) == 42
            assert method.local(x=2) == 42
        assert done(method(2)) == 42
        assert invocation_of(method, (2,), {}).args[-1] == 2
        assert done(through_wire(method)(2)) == 42
        assert list(inspect.signature(method).parameters) == ["x"]
        assert method.__name__ == name


def test_a_bound_method_is_that_of_its_object():
    one, other = Trainer(), Deeper()
    assert one.fit == one.fit
    assert len({one.fit, one.fit, other.fit, Trainer.fit}) == 3
    assert other.fit.local(1) == done(other.fit_twice(1)) == Deeper.outside.local(1) == 101
    assert one.fit.__self__ is one
    assert one.fit.__func__ is Trainer.fit
    assert repr(one.fit).startswith(f"<compute method {__name__}.Trainer.fit of <")
    with pytest.raises(TypeError, match=r"fit\(\) missing 1 required positional argument: 'x'"):
        one.fit()


def test_a_keyword_may_have_any_name():
    @compute(retry=(OSError,))
    def named(x, self=1, fn=2, args=3, kwargs=4, pool=5):  # noqa: PLR0917
        return x, self, fn, args, kwargs, pool

    assert done(named(0, self=7, fn=8, args=9, kwargs=10, pool=11)) == (0, 7, 8, 9, 10, 11)
    call = invocation_of(named, (0,), {"self": 7, "fn": 8, "kwargs": 9})
    assert call.fn(*call.args, **call.kwargs) == (0, 7, 8, 3, 9, 5)
