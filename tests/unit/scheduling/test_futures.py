"""Batches of outcomes that one caller waits for."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from concurrent.futures import CancelledError, as_completed
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.scheduling.calls import CallBatch, LiveCall, RawOutcome, RemoteFuture
from skyward.shipping.function_cache import PackedFunction
from skyward.shipping.remote_exceptions import pack_error
from skyward.wire.messages import Payload

FAILED = RawOutcome(error=ValueError("no"))
DONE = RawOutcome(data=b"")


def calls(count: int) -> list[LiveCall]:
    function = PackedFunction(id="f", label="train", payload=Payload(data=b"f"))
    return [LiveCall(id=index, kind="train", label="train", function=function, number=index) for index in range(count)]


def test_a_batch_keeps_no_call_that_is_over_and_names_it_until_its_result_is_read() -> None:
    batch = CallBatch(some := calls(3))
    for call in some:
        call.sink = batch
    some[1].shipping = token = future()
    over = weakref.ref(token)
    batch.deliver(1, RawOutcome(data=pickle.dumps(4)))
    first, third = some[::2]
    del call, some, token
    assert over() is None
    assert batch.unfinished() == [first, third]
    assert batch.name(1) == "train#1"
    assert batch.result(1) == 4


def test_the_first_failure_ends_the_wait() -> None:
    batch = CallBatch(calls(3))
    assert not batch.wait(0)
    batch.deliver(1, FAILED)
    assert batch.wait(0)
    assert batch.failed == 1


def test_who_waits_on_after_failures_is_told_of_the_end() -> None:
    batch = CallBatch(calls(3))
    batch.deliver(0, FAILED)
    batch.deliver(1, FAILED)
    assert batch.wait(0)
    batch.rearm()
    assert not batch.wait(0.01) or batch.remaining
    threading.Timer(0.05, batch.deliver, (2, DONE)).start()
    while not batch.wait(10):
        pass
    assert batch.remaining == 0


def test_an_end_that_came_before_the_wait_goes_on_is_not_missed() -> None:
    batch = CallBatch(calls(2))
    batch.deliver(0, FAILED)
    batch.deliver(1, DONE)
    batch.rearm()
    assert batch.wait(0)


def test_a_batch_of_nothing_is_over() -> None:
    assert CallBatch().wait(0)


def future() -> RemoteFuture:
    return RemoteFuture(drop=lambda _: None, run_callback=lambda fn, future: fn(future))


def test_a_future_shows_state_call_duration_and_the_errors_last_line_in_a_notebook() -> None:
    waiting, done, failed = future(), future(), future()
    waiting.call = done.call = SimpleNamespace(name="train#3", number=3, label="fit.<locals>.train")
    done.deliver(0, RawOutcome(data=pickle.dumps(3), seconds=2.5))
    failed.deliver(0, RawOutcome(error=ValueError("first\nlast <line>")))

    assert waiting._repr_html_() == "<div><b>train#3</b> · queued</div>"
    assert done._repr_html_() == "<div><b>train#3</b> · finished · 2.5 s on its worker</div>"
    assert failed._repr_html_() == "<div><b>call</b> · failed · <code>ValueError: last &lt;line&gt;</code></div>"
    assert repr(done) == "<RemoteFuture train#3, finished, 2.5 s on its worker>"
    assert waiting.cancel()
    assert "cancelled" in waiting._repr_html_()


def test_an_error_about_a_missing_module_is_completed_where_it_is_raised() -> None:
    packed = pack_error(ModuleNotFoundError("No module named 'a'", name="a"))
    raw = RawOutcome(error=packed, complete=lambda error: ModuleNotFoundError(f"{error}, nor b", name=error.name))

    with pytest.raises(ModuleNotFoundError, match="No module named 'a', nor b"):
        raw.value()


def test_a_subscriber_that_a_result_waits_for_may_request_that_result() -> None:
    awaited, seen = future(), list[int]()
    own = threading.current_thread()

    def shown() -> None:
        if threading.current_thread() is own:
            subscriber = threading.Thread(target=lambda: seen.append(awaited.result(20)), daemon=True)
            subscriber.start()
            subscriber.join(5)

    awaited.deliver(0, RawOutcome(data=pickle.dumps(3), shown=shown))
    assert (awaited.result(20), seen) == (3, [3])


class Halt(StopIteration):
    """One of a user's own."""


class Odd(BaseException):
    """One that is no Exception."""


def end_with(kind: type[BaseException]) -> None:
    raise kind("x")


class EndsRebuilding:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return end_with, (self.kind,)


def failed_with(kind: type[BaseException]) -> RawOutcome:
    try:
        raise kind("x")
    except BaseException as error:
        return RawOutcome(error=pack_error(error))


def rebuilt_with(kind: type[BaseException]) -> RawOutcome:
    return RawOutcome(data=pickle.dumps(EndsRebuilding(kind)))


async def awaited(waited: RemoteFuture) -> Any:
    return await waited


async def wrapped(waited: RemoteFuture) -> Any:
    return await asyncio.wrap_future(waited)


async def gathered(waited: RemoteFuture) -> Any:
    return await asyncio.gather(waited)


async def in_a_group(waited: RemoteFuture) -> Any:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(awaited(waited))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def first_of(waited: RemoteFuture) -> Any:
    return await next(asyncio.as_completed([asyncio.wrap_future(waited)]))


KINDS = (
    StopIteration,
    Halt,
    StopAsyncIteration,
    GeneratorExit,
    CancelledError,
    asyncio.CancelledError,
    SystemExit,
    Odd,
)
OUTCOMES = [*((failed_with, kind) for kind in (*KINDS, KeyboardInterrupt)), *((rebuilt_with, kind) for kind in KINDS)]


@pytest.mark.parametrize(("outcome", "kind"), OUTCOMES)
@pytest.mark.parametrize("wait", [awaited, wrapped, gathered, in_a_group, first_of])
@pytest.mark.parametrize("is_done", [True, False])
async def test_every_error_arrives_at_a_coroutine_as_an_exception(outcome, kind, wait, is_done) -> None:
    waited = future()
    if is_done:
        waited.deliver(0, outcome(kind))
    else:
        asyncio.get_running_loop().call_later(0, waited.deliver, 0, outcome(kind))
    async with asyncio.timeout(10):
        with pytest.raises(Exception, match=kind.__name__ if kind is not StopAsyncIteration else "x|Stop") as caught:
            await wait(waited)
    assert not isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("kind", [StopIteration, Halt, StopAsyncIteration, CancelledError, TimeoutError])
def test_outside_of_coroutines_exceptions_that_steer_iterations_are_themselves(kind: type[Exception]) -> None:
    failed = future()
    failed.deliver(0, failed_with(kind))
    assert type(failed.exception(0)) is kind
    assert [type(each.exception()) for each in as_completed([failed])] == [kind]
    with pytest.raises(kind):
        failed.result(0)


async def test_in_coroutines_too_a_result_that_is_asked_for_raises_the_error_itself() -> None:
    failed = future()
    failed.deliver(0, failed_with(CancelledError))
    with pytest.raises(CancelledError):
        failed.result(0)


async def test_a_call_that_was_cancelled_cancels_who_awaits_it() -> None:
    cancelled = future()
    cancelled.deliver(0, RawOutcome(error=CancelledError()))
    with pytest.raises(asyncio.CancelledError):
        await cancelled


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_of_rebuilding_a_result_is_an_error_that_says_so(kind: type[BaseException]) -> None:
    with pytest.raises((UnpicklingError, StopAsyncIteration)) as caught:
        rebuilt_with(kind).value()
    assert kind.__name__ in str(caught.value) or "while rebuilding" in caught.value.__notes__[0]
