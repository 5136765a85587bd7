"""Items of generators and results of calls: what the reader gets, how far ahead work is done, and what ends it."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import pytest

from skyward.api.streams import GeneratorStream, ResultStream, open_streams
from skyward.scheduling.calls import LiveCall, RawOutcome
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.streams import Arrivals, ResultLot, StreamBatch, most_unread
from skyward.shipping.function_cache import PackedFunction
from skyward.submission import ArgumentMemo, Invocation
from skyward.wire.messages import STREAM_BYTES, STREAM_ITEMS, Payload


class Generator:
    """A generator on a worker, as the scheduler sees it."""

    def __init__(self) -> None:
        function = PackedFunction(id="f", label="count", payload=Payload(data=b"f"))
        self.call = LiveCall(id=1, kind="f", label="count", function=function)
        self.granted: list[tuple[int, int]] = []
        self.stopped = 0
        self.batch = StreamBatch()
        self.batch.fill([self.call])

    def stream(self) -> GeneratorStream:
        return GeneratorStream(self.batch.inboxes[0], cast("Scheduler", self))

    def send(self, *items: Any) -> None:
        self.batch.add(self.call, [pickle.dumps(item) for item in items])

    def end(self, error: Exception | None = None) -> None:
        self.batch.deliver(0, RawOutcome(pickle.dumps(None), error=error))

    def grant(self, call: LiveCall, items: int, nbytes: int) -> None:
        assert call is self.call
        self.granted.append((items, nbytes))

    def stop_stream(self, call: LiveCall) -> None:
        assert call is self.call
        self.stopped += 1


def test_items_come_in_order_and_the_end_after_them() -> None:
    generator = Generator()
    stream = generator.stream()
    generator.send(1, 2)
    assert next(stream) == 1
    generator.send(3)
    generator.end()
    assert list(stream) == [2, 3]
    assert list(stream) == []
    assert not generator.stopped


def test_an_error_comes_after_the_items_before_it_and_once() -> None:
    generator = Generator()
    stream = generator.stream()
    generator.send(1)
    generator.end(LookupError("no"))
    assert next(stream) == 1
    with pytest.raises(LookupError, match="no"):
        next(stream)
    assert list(stream) == []


def test_the_error_stop_iteration_is_no_end() -> None:
    generator = Generator()
    generator.end(StopIteration(3))
    with pytest.raises(RuntimeError, match="the call raised StopIteration: 3"):
        next(generator.stream())


def test_a_reader_waits_for_an_item_of_another_thread() -> None:
    generator = Generator()
    stream = generator.stream()
    threading.Timer(0.02, generator.send, (7,)).start()
    assert next(stream) == 7


def test_async_readers_get_the_same() -> None:
    async def read() -> list[int]:
        generator = Generator()
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, generator.send, 1, 2)
        loop.call_later(0.02, generator.end)
        return [item async for item in generator.stream()]

    assert asyncio.run(read()) == [1, 2]


def test_a_cancelled_wait_loses_no_item() -> None:
    async def read() -> int:
        generator = Generator()
        stream = generator.stream()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        generator.send(5)
        return await anext(stream)

    assert asyncio.run(read()) == 5


def test_an_event_loop_that_was_closed_while_a_reader_waited_is_no_trouble() -> None:
    generator = Generator()
    stream = generator.stream()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)

    asyncio.run(give_up())
    generator.send(5)
    assert next(stream) == 5


def drop(stream: GeneratorStream) -> None:
    del stream


def leave(stream: GeneratorStream) -> None:
    with stream:
        next(stream)


@pytest.mark.parametrize("abandon", [GeneratorStream.close, leave, drop])
def test_an_abandoned_stream_stops_its_generator(abandon: Callable[[GeneratorStream], None]) -> None:
    generator = Generator()
    generator.send(1, 2)
    abandon(generator.stream())
    assert generator.stopped == 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_ctrl_c_while_a_generator_is_sent_leaves_none_without_a_reader(everywhere: bool) -> None:
    stopped: list[LiveCall] = []
    calls = [LiveCall(id=0, kind="f", label="count", function=FUNCTION) for _ in range(1 + everywhere)]

    class Interrupted:
        def submit(self, _calls: object, _memo: object, batch: StreamBatch) -> None:
            self.broadcast(None, batch)

        def broadcast(self, _call: object, batch: StreamBatch) -> None:
            batch.fill(calls)
            raise KeyboardInterrupt

        def stop_stream(self, call: LiveCall) -> None:
            stopped.append(call)

    with pytest.raises(KeyboardInterrupt):
        open_streams(cast("Scheduler", Interrupted()), Invocation(fn=print), everywhere=everywhere)
    assert stopped == calls


def test_a_closed_stream_is_over() -> None:
    generator = Generator()
    generator.send(1)
    stream = generator.stream()
    stream.close()
    stream.close()
    assert list(stream) == []
    assert generator.stopped == 1


def test_an_item_that_cannot_be_rebuilt_ends_the_stream() -> None:
    generator = Generator()
    stream = generator.stream()
    generator.batch.add(generator.call, [b"no pickle"])
    generator.send(2)
    with pytest.raises(pickle.UnpicklingError):
        next(stream)
    assert list(stream) == []
    assert generator.stopped == 1


def test_the_worker_is_told_of_a_quarter_of_its_lead_at_a_time() -> None:
    generator = Generator()
    stream = generator.stream()
    generator.send(*range(STREAM_ITEMS))
    nbytes = [len(pickle.dumps(item)) for item in range(STREAM_ITEMS)]
    for _ in range(STREAM_ITEMS // 2):
        next(stream)
    assert generator.granted == [(count, sum(nbytes[:count])) for count in (STREAM_ITEMS // 4, STREAM_ITEMS // 2)]


def test_large_items_count_by_their_size() -> None:
    generator = Generator()
    stream = generator.stream()
    size = STREAM_BYTES // 8
    large = RawOutcome(pickle.dumps(0), buffers=(bytearray(size),))
    generator.batch.add(generator.call, [large] * 4)
    for _ in range(4):
        next(stream)
    assert [items for items, _ in generator.granted] == [2, 4]


def test_a_generator_whose_items_have_arrived_runs_no_second_time() -> None:
    generator = Generator()
    assert not generator.call.final
    generator.send(1)
    assert generator.call.final


def test_what_arrives_between_two_looks_is_not_missed() -> None:
    arrivals, looks = Arrivals(), iter([False, True])
    assert arrivals.wait(lambda: next(looks))
    assert not Arrivals().wait(lambda: False, deadline_s=0.0)


# --- results of calls -------------------------------------------------------------------------------------------------

FUNCTION = PackedFunction(id="f", label="square", payload=Payload(data=b"f"))


class Workers:
    """A scheduler with two workers that does as it is told; a call of ``None`` cannot be sent."""

    places = (0, 1)

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.sent: list[tuple[ResultLot, int, Any]] = []
        self.lots: list[int] = []
        self.cancelled: list[tuple[int, bool]] = []

    def submit(self, calls: Sequence[Invocation], _: ArgumentMemo, lot: ResultLot) -> None:
        if any(call.args == (None,) for call in calls):
            raise TypeError("cannot be sent")
        lot.fill([LiveCall(id=1, kind="f", label="square", function=FUNCTION, data=bytes(self.size)) for _ in calls])
        self.sent += [(lot, index, call.args[0]) for index, call in enumerate(calls)]
        self.lots.append(len(calls))

    def cancel(self, calls: Sequence[LiveCall], *, kill: bool) -> None:
        self.cancelled.append((len(calls), kill))

    def answer(self, number: int, error: Exception | None = None) -> None:
        lot, index, argument = self.sent[number]
        lot.deliver(index, RawOutcome(pickle.dumps(argument), error=error))

    def results(self, arguments: Iterable[Any], *, ordered: bool = True, **options: Any) -> ResultStream:
        calls = (Invocation(fn=print, args=(argument,), label="square") for argument in arguments)
        return ResultStream(calls, cast("Scheduler", self), ordered=ordered, **options)


@pytest.mark.parametrize(("ordered", "order"), [(True, [0, 1, 2]), (False, [2, 0, 1])])
def test_results_come_in_the_order_of_the_calls_or_as_they_arrive(ordered: bool, order: list[int]) -> None:
    workers = Workers()
    results = workers.results(range(3), ordered=ordered)
    for number in (2, 0, 1):
        workers.answer(number)
    assert list(results) == order
    assert not workers.cancelled


def test_work_begins_before_a_result_is_asked_for() -> None:
    workers = Workers()
    stream = workers.results(range(3))
    assert len(workers.sent) == 3
    stream.close()


@pytest.mark.parametrize(
    ("capacity", "arrived", "mean_bytes", "most"),
    [
        (2, 0, 0, 4),  # what results take is not known
        (2, 100, 0, 204),
        (2, 1 << 20, 0, 1024),
        (5000, 1 << 20, 0, 20_000),
        (2, 1 << 20, 1 << 20, 256),
        (2, 1 << 20, 1 << 40, 4),  # no worker is idle
    ],
)
def test_how_many_results_may_be_unread(capacity: int, arrived: int, mean_bytes: float, most: int) -> None:
    assert most_unread(capacity, arrived=arrived, mean_bytes=mean_bytes) == most


def test_a_source_without_an_end_is_read_as_results_are_read() -> None:
    workers = Workers()
    results = workers.results(itertools.count())
    for number in range(20_000):
        while number >= len(workers.sent):
            assert results._has_news()  # pyright: ignore[reportPrivateUsage]
            results._submit_some()  # pyright: ignore[reportPrivateUsage]
        workers.answer(number)
        assert next(results) == number
        assert len(workers.sent) - number <= 1025
    assert max(workers.lots) >= 256, "together, as each submission wakes the loop"
    results.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_is_kept_of_results_that_were_read(ordered: bool) -> None:
    workers = Workers()
    results = workers.results(range(1000), ordered=ordered)
    for number in range(1000):
        while number >= len(workers.sent):
            results._submit_some()  # pyright: ignore[reportPrivateUsage]
        workers.answer(number)
        next(results)
    window = results._window  # pyright: ignore[reportPrivateUsage]
    assert not any([window.calls, window.results, results._arguments])  # pyright: ignore[reportPrivateUsage]
    results.close()


def test_an_elastic_pool_gets_calls_for_the_workers_that_it_may_have() -> None:
    workers = Workers()
    results = workers.results(itertools.count(), workers=8)
    assert len(workers.sent) == 16
    results.close()


def test_a_reader_that_stops_stops_the_calls() -> None:
    workers = Workers()
    results = workers.results(itertools.count())
    answered = 0
    while answered < len(workers.sent):
        workers.answer(answered)
        answered += 1
        if results._wants_more():  # pyright: ignore[reportPrivateUsage]
            results._submit_some()  # pyright: ignore[reportPrivateUsage]
    assert answered <= 1024
    results.close()


def test_a_failure_names_its_call_and_leaves_running_calls_alone() -> None:
    workers = Workers()
    results = workers.results(range(4))
    workers.answer(0)
    workers.answer(1, LookupError("no"))
    assert next(results) == 0
    with pytest.raises(LookupError) as caught:
        next(results)
    assert caught.value.__notes__ == ["in square#0, index 1: square(1)"]
    assert workers.cancelled == [(2, False)]
    assert list(results) == []


def test_failures_can_be_items() -> None:
    workers = Workers()
    results = workers.results(range(2), return_exceptions=True)
    workers.answer(0, LookupError("no"))
    workers.answer(1)
    first, second = results
    assert repr(first) == "LookupError('no')"
    assert second == 1


@pytest.mark.parametrize("ends_calls", [True, False])
def test_leaving_early_ends_the_calls(ends_calls: bool) -> None:
    workers = Workers()
    workers.results(range(3), ends_calls=ends_calls).close()
    assert workers.cancelled == [(3, ends_calls)]


def test_an_error_of_the_source_comes_after_the_results_before_it() -> None:
    def source() -> Iterator[int]:
        yield 0
        raise OSError("source")

    workers = Workers()
    results = workers.results(source())
    workers.answer(0)
    assert next(results) == 0
    with pytest.raises(OSError, match="source"):
        next(results)


def test_an_error_before_the_first_call_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        Workers().results(1 // number for number in (0, 1))


def test_calls_before_one_that_cannot_be_sent_run() -> None:
    workers = Workers()
    results = workers.results([0, 1, None, 3])
    workers.answer(0)
    workers.answer(1)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(TypeError, match="cannot be sent"):
        next(results)
    assert len(workers.sent) == 2


def test_a_slow_source_does_not_keep_a_result_waiting() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            read.append(number)
            yield number

    workers = Workers()
    results = workers.results(source())
    workers.answer(0)
    assert next(results) == 0
    assert len(read) < 3


def test_the_time_for_all_results_is_limited() -> None:
    results = Workers().results(range(3), deadline_s=time.monotonic())
    with pytest.raises(TimeoutError, match="in time"):
        next(results)
