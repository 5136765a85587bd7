"""Items of a generator: what the reader gets, what the worker is told, and what ends the work."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from skyward.api.streams import GeneratorStream
from skyward.scheduling.calls import LiveCall, RawOutcome
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.streams import Arrivals, StreamBatch
from skyward.shipping.function_cache import PackedFunction
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
