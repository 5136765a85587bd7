"""A generator on a worker: its items go out in order, as far as the client has room for them, until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node.worker.call_runner import CallRunner, ReceivedCall, SentFunction
from skyward.node.worker.item_stream import ItemStream
from skyward.node.worker.output import CallOutput
from skyward.shipping.pickling import LARGE_BYTES, pack, unpack
from skyward.wire.messages import (
    STREAM_BYTES,
    STREAM_ITEMS,
    CallHeader,
    CallResult,
    Payload,
    ResultChunk,
    SmallResults,
    StreamItem,
    StreamItems,
    ToClient,
)

NO_ARGUMENTS = pack(((), {}), what="no arguments").data


class Client:
    """Keeps what is sent, in order, and answers when the worker waits."""

    def __init__(self, *answers: Callable[[CallRunner], object]) -> None:
        self.items: list[ToClient] = []
        self.bulk: list[bool] = []
        self.kept_bytes = 0
        self._answers = list(answers)
        self.runner = CallRunner(self, CallOutput(lambda *_: None), ())

    def push(self, item: ToClient, *, bulk: bool = False) -> None:
        self.items.append(item)
        self.bulk.append(bulk)

    def flush(self) -> None: ...

    def flush_soon(self) -> None: ...

    def flush_later(self) -> None: ...

    def wait(self, timeout_s: float | None, *, eager: bool = False) -> None:
        del timeout_s, eager
        (self._answers.pop(0) if self._answers else CallRunner.close)(self.runner)

    def wake(self) -> None: ...

    def run(self, generator: Callable[[], Iterator[Any]]) -> list[Any]:
        """Run a generator to its end; return what the client gets to see, one after the other."""
        function = SentFunction("it", Payload(data=pack(generator, what="it").data))
        self.runner.add([ReceivedCall(1, function, 1, False, NO_ARGUMENTS, header=CallHeader(streams=True))])
        self.runner.work()
        return [seen for item in self.items for seen in shown(item)]


def shown(item: ToClient) -> list[Any]:
    match item:
        case StreamItems():
            return [unpack(data) for data in item.pickles]
        case StreamItem():
            return ["large"]
        case ResultChunk():
            return ["chunk"]
        case SmallResults():
            return ["end"]
        case CallResult():
            return [item.outcome.error.message if item.outcome.error else "large end"]
        case _:
            return []


def read_all(runner: CallRunner) -> None:
    runner.grant(1, 1 << 60, 1 << 60)


def stop(runner: CallRunner) -> None:
    runner.stop_stream(1)


def test_the_end_comes_after_all_items() -> None:
    assert Client().run(lambda: iter([1, 2, 3])) == [1, 2, 3, "end"]


def test_an_error_comes_after_the_items_before_it() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise ValueError("no")

    assert Client().run(fails) == [1, "no"]


def test_an_item_that_cannot_be_pickled_is_named_and_closes_the_generator(tmp_path: Path) -> None:
    def odd() -> Iterator[Any]:
        try:
            yield 1
            yield (character for character in "ab")
        finally:
            (tmp_path / "closed").touch()

    first, error = Client().run(odd)
    assert first == 1
    assert "item 1 of it" in error
    assert (tmp_path / "closed").exists()


def test_large_items_keep_their_place_among_small_ones() -> None:
    client = Client()
    assert client.run(lambda: iter([1, bytes(LARGE_BYTES), 2])) == [1, "chunk", "large", 2, "end"]
    assert not any(client.bulk)


@pytest.mark.parametrize(("item", "most"), [(1, STREAM_ITEMS), (bytes(STREAM_BYTES // 8), 8)])
def test_a_generator_waits_for_its_reader(tmp_path: Path, item: object, most: int) -> None:
    def endless() -> Iterator[object]:
        try:
            while True:
                yield item
        finally:
            (tmp_path / "closed").touch()

    client = Client(stop)
    client.run(endless)
    made = [seen for sent in client.items for seen in shown(sent) if seen not in ("chunk", "end")]
    assert len(made) == most
    assert (tmp_path / "closed").exists()


def test_a_generator_goes_on_once_its_items_were_read() -> None:
    assert len(Client(read_all).run(lambda: iter(range(STREAM_ITEMS + 7)))) == STREAM_ITEMS + 8


def test_a_stopped_generator_makes_no_further_item() -> None:
    client = Client()

    def stops_itself() -> Iterator[int]:
        yield 1
        client.runner.stop_stream(1)
        yield 2
        raise AssertionError

    function = SentFunction("it", Payload(), loaded=stops_itself)
    client.runner.add([ReceivedCall(1, function, 1, False, NO_ARGUMENTS, header=CallHeader(streams=True))])
    client.runner.work()
    assert [seen for item in client.items for seen in shown(item)] == [1, 2, "end"]


def test_a_generator_of_a_client_that_is_gone_sends_nothing_to_the_next() -> None:
    client = Client(CallRunner.reset)
    client.run(lambda: iter(range(STREAM_ITEMS + 1)))
    *_, last = client.items
    assert isinstance(last, StreamItems)
    assert sum(len(item.pickles) for item in client.items if isinstance(item, StreamItems)) == STREAM_ITEMS


def test_the_mark_of_a_stopped_call_is_not_the_next_clients() -> None:
    client = Client()
    client.runner.stop_stream(1)
    client.runner.reset()
    assert client.run(lambda: iter([1])) == [1, "end"]


def test_what_is_read_counts_in_total_so_that_late_news_do_no_harm() -> None:
    stream = ItemStream(1)
    for _ in range(STREAM_ITEMS):
        stream.count(1)
    assert not stream.has_room
    stream.grant(1, 1)
    stream.grant(1, 1)
    stream.count(1)
    assert not stream.has_room
