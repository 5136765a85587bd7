"""Events as values, callbacks in force, and the bus that carries a pool's events."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from typing import get_args

import pytest

from skyward import events
from skyward.events import (
    BootstrapProgress,
    Callback,
    CostFinal,
    Error,
    GpuMetrics,
    InfraCreated,
    InfraCreating,
    InstanceProvisioned,
    LogLine,
    Metrics,
    PoolStarted,
    PoolStopping,
    SkywardEvent,
    WorkerLost,
    compose,
    current_callbacks,
    emit,
    use_callback,
)
from skyward.events.bus import EventBus


def line(text: str) -> LogLine:
    return LogLine(0, "i-1", text, 0.0)


class Recorder:
    """A callback that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[SkywardEvent] = []

    def __call__(self, event: SkywardEvent) -> None:
        self.heard.append(event)


def failing(event: SkywardEvent) -> None:
    raise LookupError("callback is broken")


class TestEmittedEvents:
    """``emit`` in this process reaches open pools; their buses stand for them here."""

    @pytest.fixture
    def buses(self) -> Iterator[tuple[EventBus, EventBus]]:
        buses = EventBus(), EventBus()
        stops = [events.forward_emitted(bus.publish_emitted) for bus in buses]
        yield buses
        for bus, stop in zip(buses, stops, strict=True):
            stop()
            bus.close(5)

    def test_reach_every_open_pool(self, buses: tuple[EventBus, EventBus]) -> None:
        recorders = [Recorder() for _ in buses]
        for bus, recorder in zip(buses, recorders, strict=True):
            bus.subscribe(LogLine, recorder)

        emit(line("here"))
        emit(PoolStopping())
        for bus in buses:
            bus.close(5)

        assert [recorder.heard for recorder in recorders] == [[line("here")], [line("here")]]

    def test_reach_a_callback_once_that_is_in_force_here_and_in_a_pool(self, buses: tuple[EventBus, EventBus]) -> None:
        recorder = Recorder()
        buses[0].subscribe(None, recorder)

        with use_callback(recorder):
            emit(line("once"))
        buses[0].close(5)

        assert recorder.heard == [line("once")]

    def test_of_callbacks_that_answer_each_other_come_to_an_end(self, buses: tuple[EventBus, EventBus]) -> None:
        ends = [threading.Event(), threading.Event()]
        counts = [0, 0]

        def answer(index: int, _: SkywardEvent) -> None:
            counts[index] += 1
            emit(line("again"))
            if counts[index] == 33:
                ends[index].set()

        for index, bus in enumerate(buses):
            bus.subscribe(None, partial(answer, index))
        emit(line("first"))
        assert all(end.wait(10) for end in ends)
        for bus in buses:
            bus.close(5)

        assert counts == [33, 33]

    def test_of_a_callback_that_is_behind_come_to_an_end_too(self) -> None:
        bus = EventBus(patience_s=0.01)
        stop = events.forward_emitted(bus.publish_emitted)
        arrived, ended = [threading.Event() for _ in range(200)], threading.Event()
        numbers: list[int] = []

        def answer(event: LogLine) -> None:
            number = int(event.line)
            numbers.append(number)
            emit(line(str(number + 1)))
            if number < 20:  # it is behind: another thread has handled the answer by now, except for this callback
                assert arrived[number + 1].wait(20)
            if number == 32:
                ended.set()

        bus.subscribe(LogLine, answer)
        bus.subscribe(LogLine, lambda event: arrived[int(event.line)].set())
        try:
            bus.publish(line("0"))
            assert ended.wait(20)
        finally:
            stop()
            bus.close(20)

        assert numbers == list(range(33))

    def test_no_longer_reach_a_pool_that_has_closed(self) -> None:
        heard: list[object] = []
        stop = events.forward_emitted(lambda event, _: heard.append(event))
        stop()
        stop()

        emit(line("late"))

        assert heard == []


@pytest.fixture
def bus() -> Iterator[EventBus]:
    bus = EventBus()
    yield bus
    bus.close(5)


# Values


REFERENCE = {
    "InfraCreating": "",
    "InfraCreated": "region",
    "InstanceLaunching": "count instance_type provider",
    "InstanceProvisioned": "instance_id node spot provider ip instance_type price_on_demand price_spot",
    "BootstrapStarting": "instance_id",
    "BootstrapProgress": "instance_id step",
    "BootstrapCompleted": "instance_id",
    "LogLine": "node instance_id line timestamp",
    "InstanceStopping": "instance_id",
    "PoolStopping": "",
    "CostUpdate": "elapsed_seconds accumulated_cost hourly_rate spot_count ondemand_count",
    "CostFinal": "total_cost total_seconds hourly_rate spot_count ondemand_count savings_vs_ondemand",
    "Error": "message instance_id",
}
IN_ADDITION = {
    "InstanceLaunching": "region spot price_per_hour workers_per_node cpu_per_worker memory_gib_per_worker "
    "accelerator accelerators accelerators_asked at_most",
    "LogLine": "worker call stream level logger state",
    "CostUpdate": "cost_by_provider",
    "CostFinal": "cost_by_provider",
}


@pytest.mark.parametrize("name", REFERENCE)
def test_fields_are_those_of_the_reference(name: str) -> None:
    names = [field.name for field in dataclasses.fields(getattr(events, name))]
    assert names == [*REFERENCE[name].split(), *IN_ADDITION.get(name, "").split()]


def test_metrics_have_the_fields_of_the_reference_and_then_each_gpu() -> None:
    assert [field.name for field in dataclasses.fields(Metrics)] == [
        *["instance_id", "node", "cpu_percent", "memory_percent", "memory_used_mb", "memory_total_mb"],
        *["gpu_utilization", "gpu_memory_used_mb", "gpu_memory_total_mb", "gpu_temperature", "gpus"],
    ]


def test_metrics_match_by_their_short_names() -> None:
    gpu = GpuMetrics(0, "H100", 75.0, 1024.0, 81920.0)
    match Metrics("i-1", 0, 50.0, 25.0, 1000.0, 4000.0, 75.0, gpus=(gpu,)):
        case Metrics(cpu=cpu, memory=memory, gpu=gpu_busy):
            assert (cpu, memory, gpu_busy) == (50.0, 25.0, 75.0)


def test_unknown_values_may_be_left_out() -> None:
    assert InstanceProvisioned("i-1", 0, False, "local").ip is None
    assert Error("it broke").instance_id is None
    assert Metrics("i-1", 0, 1.0, 1.0, 1.0, 1.0).gpu is None


@pytest.mark.parametrize(
    "event", [line("x"), WorkerLost(1, 0, "i-1", "SIGKILL"), CostFinal(1, 2, 3, 4, 5, 6, {"aws": 1})]
)
def test_events_survive_pickling_and_can_be_in_sets(event: SkywardEvent) -> None:
    assert pickle.loads(pickle.dumps(event)) == event
    assert isinstance(hash(event), int)


def test_every_event_is_frozen_and_exported() -> None:
    for kind in get_args(SkywardEvent):
        assert kind.__dataclass_params__.frozen
        assert kind.__name__ in events.__all__


def test_vars_of_an_event_are_its_fields() -> None:
    assert vars(BootstrapProgress("i-1", "uv")) == {"instance_id": "i-1", "step": "uv"}


# Callbacks


def test_emit_without_callbacks_does_nothing() -> None:
    emit(line("nobody listens"))


def test_callbacks_add_to_the_outer_ones_and_end_with_their_block() -> None:
    outer, inner = Recorder(), Recorder()
    with use_callback(outer):
        with use_callback(inner):
            assert current_callbacks() == (outer, inner)
            emit(line("both"))
        emit(line("outer"))
    emit(line("nobody"))
    assert outer.heard == [line("both"), line("outer")]
    assert inner.heard == [line("both")]


def test_callback_ends_with_its_block_when_the_block_raises() -> None:
    def emit_and_fail() -> None:
        with use_callback(Recorder()):
            raise LookupError

    with pytest.raises(LookupError):
        emit_and_fail()
    assert current_callbacks() == ()


def test_broken_callback_is_logged_and_hides_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    with caplog.at_level(logging.ERROR, logger="skyward"), use_callback(failing), use_callback(recorder):
        emit(line("x"))
    assert recorder.heard == [line("x")]
    assert "callback is broken" in caplog.text
    assert "LogLine" in caplog.text


def answer_infra(event: SkywardEvent) -> SkywardEvent | None:
    return line("derived") if isinstance(event, InfraCreating) else None


@pytest.mark.parametrize("composed", [False, True])
def test_returned_event_goes_to_every_callback(composed: bool) -> None:
    first, last = Recorder(), Recorder()
    callbacks: list[Callback] = [first, answer_infra, last]
    with use_callback(compose(*callbacks[:2]) if composed else answer_infra), use_callback(last):
        emit(InfraCreating())
    assert last.heard == [InfraCreating(), line("derived")]
    assert first.heard == (last.heard if composed else [])


def test_composed_callback_works_by_itself_and_nested(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    combined = compose(compose(failing, answer_infra), recorder)
    with caplog.at_level(logging.CRITICAL, logger="skyward"):
        assert combined(InfraCreating()) is None
    assert recorder.heard == [InfraCreating(), line("derived")]


def test_returning_the_same_event_emits_nothing() -> None:
    recorder = Recorder()
    with use_callback(recorder), use_callback(lambda event: event):
        emit(line("x"))
    assert recorder.heard == [line("x")]


def test_answer_that_is_no_event_is_ignored() -> None:
    recorder = Recorder()
    with use_callback(recorder), use_callback(lambda event: 7):  # type: ignore[arg-type, return-value]
        emit(line("x"))
    assert recorder.heard == [line("x")]


def test_endless_chain_of_answers_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    with (
        caplog.at_level(logging.WARNING, logger="skyward"),
        use_callback(recorder),
        use_callback(lambda event: line("again")),
    ):
        emit(InfraCreating())
    assert 2 <= len(recorder.heard) <= 100
    assert "keep answering" in caplog.text


# The bus


def test_subscriber_hears_its_kind_of_event_in_order(bus: EventBus) -> None:
    lines, everything = Recorder(), Recorder()
    bus.subscribe(LogLine, lines)
    bus.subscribe(None, everything)
    published = [PoolStarted(), line("a"), PoolStopping(), line("b")]
    for event in published:
        bus.publish(event)
    bus.close()
    assert everything.heard == published
    assert lines.heard == [line("a"), line("b")]


def test_order_within_each_publishing_thread_is_kept(bus: EventBus) -> None:
    recorder = Recorder()
    bus.subscribe(LogLine, recorder)

    def publish(node: int) -> None:
        for number in range(500):
            bus.publish(LogLine(node, "i-1", str(number), 0.0))

    threads = [threading.Thread(target=publish, args=(node,)) for node in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.close()
    for node in range(4):
        heard = [event.line for event in recorder.heard if isinstance(event, LogLine) and event.node == node]
        assert heard == [str(number) for number in range(500)]


def test_burst_is_delivered_whole_by_one_thread_of_the_bus(bus: EventBus) -> None:
    names: set[str] = set()
    heard: list[str] = []

    def note(event: LogLine) -> None:
        names.add(threading.current_thread().name)
        heard.append(event.line)

    bus.subscribe(LogLine, note)
    for number in range(10_000):
        bus.publish(line(str(number)))
    bus.close(30)
    assert heard == [str(number) for number in range(10_000)]
    assert names == {"skyward-events"}


def test_callbacks_of_the_publisher_hear_only_its_events(bus: EventBus) -> None:
    subscriber, own = Recorder(), Recorder()
    bus.subscribe(None, subscriber)
    bus.publish(line("mine"), also=(own,))
    bus.publish(line("other"))
    bus.close()
    assert own.heard == [line("mine")]
    assert subscriber.heard == [line("mine"), line("other")]


def test_unsubscribed_callback_hears_no_more(bus: EventBus) -> None:
    recorder, other = Recorder(), Recorder()
    unsubscribe = bus.subscribe(None, recorder)
    bus.subscribe(None, other)
    unsubscribe()
    unsubscribe()
    bus.publish(line("x"))
    bus.close()
    assert recorder.heard == []
    assert other.heard == [line("x")]


def test_one_subscription_of_two_equal_ones_ends_alone(bus: EventBus) -> None:
    recorder = Recorder()
    bus.subscribe(None, recorder)
    bus.subscribe(None, recorder)()
    bus.publish(line("x"))
    bus.close()
    assert recorder.heard == [line("x")]


@pytest.mark.parametrize("kind", [LookupError, SystemExit, KeyboardInterrupt])
def test_broken_subscriber_stops_nothing(
    bus: EventBus, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: SkywardEvent) -> None:
        raise kind("callback is broken")

    recorder = Recorder()
    bus.subscribe(None, fail)
    bus.subscribe(None, recorder)
    with caplog.at_level(logging.ERROR, logger="skyward"):
        bus.publish(line("a"))
        bus.publish(line("b"))
        bus.close()
    assert recorder.heard == [line("a"), line("b")]
    assert "callback is broken" in caplog.text


@pytest.mark.parametrize("composed", [False, True])
def test_answer_of_a_subscriber_reaches_subscribers_of_its_kind(bus: EventBus, composed: bool) -> None:
    lines, infra = Recorder(), Recorder()
    bus.subscribe(None, compose(answer_infra) if composed else answer_infra)
    bus.subscribe(LogLine, lines)
    bus.subscribe(InfraCreated, infra)
    bus.publish(InfraCreating())
    bus.close()
    assert lines.heard == [line("derived")]
    assert infra.heard == []


def test_blocked_subscriber_blocks_no_publisher_and_may_publish_and_subscribe(bus: EventBus) -> None:
    entered, release = threading.Event(), threading.Event()
    late = Recorder()

    def block(event: PoolStarted) -> None:
        entered.set()
        assert release.wait(5)
        bus.subscribe(LogLine, late)
        bus.publish(line("from a callback"))

    bus.subscribe(PoolStarted, block)
    bus.publish(PoolStarted())
    assert entered.wait(5)
    bus.publish(BootstrapProgress("i-1", "uv"))
    release.set()
    bus.subscribe(BootstrapProgress, lambda event: done.set())
    done = threading.Event()
    bus.publish(BootstrapProgress("i-1", "deps"))
    assert done.wait(5)
    bus.close()
    assert late.heard == [line("from a callback")]


def test_stuck_subscriber_delays_no_other_and_gets_its_events_in_order() -> None:
    bus = EventBus(patience_s=0.01)
    release, others = threading.Event(), SimpleQueue[SkywardEvent]()
    slow = Recorder()

    def block(event: LogLine) -> None:
        assert release.wait(20)
        slow(event)

    bus.subscribe(LogLine, block)
    bus.subscribe(LogLine, others.put)
    try:
        for text in "abcdefgh":
            bus.publish(line(text))
        assert [others.get(timeout=20) for _ in "bcdefgh"] == [line(text) for text in "bcdefgh"]
    finally:
        release.set()
        bus.close()
    assert others.get(timeout=20) == line("a")
    assert slow.heard == [line(text) for text in "abcdefgh"]


def test_thread_starts_with_the_first_event_and_ends_with_close() -> None:
    def threads() -> int:
        return sum(thread.name == "skyward-events" for thread in threading.enumerate())

    bus = EventBus()
    bus.subscribe(None, Recorder())
    assert threads() == 0
    bus.publish(PoolStarted())
    assert threads() == 1
    bus.close()
    bus.close()
    bus.publish(PoolStopping())
    assert threads() == 0


def test_close_before_any_event_starts_nothing() -> None:
    bus = EventBus()
    bus.close()
    bus.publish(PoolStarted())
    assert all(thread.name != "skyward-events" for thread in threading.enumerate())


def test_subscriber_may_close_its_own_bus(bus: EventBus) -> None:
    closed = threading.Event()

    def close(event: SkywardEvent) -> None:
        bus.close()
        closed.set()

    bus.subscribe(None, close)
    bus.publish(PoolStarted())
    assert closed.wait(5)


def test_close_leaves_a_busy_subscriber_behind_and_says_so(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    bus.subscribe(None, lambda event: None if release.wait(5) else event)
    bus.publish(PoolStarted())
    with caplog.at_level(logging.WARNING, logger="skyward"):
        bus.close(0.01)
    assert "still busy" in caplog.text
    release.set()


def test_message_about_a_subscriber_that_fails_names_the_function(
    bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    bus.subscribe(None, failing)
    bus.publish(line("x"))
    bus.close()
    assert "failing" in caplog.text
    assert "_Subscription" not in caplog.text
