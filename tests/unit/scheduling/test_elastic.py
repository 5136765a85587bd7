"""An elastic pool's fleet follows its work: on a cloud's double, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from benchmarks.elastic_day import Burst, Machine, TimedCalls, simulate_day

from skyward.errors import CapacityError
from skyward.events import Notice
from skyward.fleet.fleet import Fleet
from skyward.fleet.node import Node
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import NodeRange
from skyward.scheduling.dispatch_and_retries import GiveUp, WorkerId
from skyward.scheduling.elastic import ElasticSize
from skyward.testing.provider import FakeProvider, Fate
from support.fleets import FleetStage, until
from support.simulation import SimulatedClock, simulate

MACHINE = Machine(workers=2, boot_s=90, ending_s=5, price_per_hour=2.0)
OFFER = Offer(spec=InstanceSpec(name="fake", cpu=2, memory_gib=4), price_per_hour=MACHINE.price_per_hour)


class Engine:
    """Uses a fleet's nodes for timed calls, as a scheduler does for real ones."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.calls = TimedCalls(now=loop.time, call_later=loop.call_later)
        self.dispatch = self.calls.dispatch
        self.given_up: list[GiveUp] = []
        self._now = loop.time
        self._retired: set[int] = set()

    def expect(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._retired.discard(rank)
            for worker in workers(rank):
                self.dispatch.expect(worker)

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None:
        for rank in ranks:
            self._retired.add(rank)
            for worker in workers(rank):
                self.calls.perform(self.dispatch.drain(worker, comes_back=comes_back))

    async def attach(self, node: Node) -> None:
        for worker in workers(node.rank):
            self.calls.perform(self.dispatch.worker_up(worker, self._now()))

    async def drain(self, rank: int) -> None:
        while not all(map(self.dispatch.drained, workers(rank))):  # noqa: ASYNC110 - as a scheduler does
            await asyncio.sleep(1)

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None:
        for worker in workers(rank):
            planned = rank in self._retired
            lose = self.dispatch.worker_lost(worker, reason, self._now(), preempted=preempted)
            gone = self.dispatch.worker_gone(worker, reason, self._now(), planned=planned) if for_good else []
            self.given_up += [action for action in [*lose, *gone] if isinstance(action, GiveUp)]
            self.calls.perform([*lose, *gone])


def workers(rank: int) -> list[WorkerId]:
    return [WorkerId(rank, worker) for worker in range(MACHINE.workers)]


@pytest.fixture
def stage(tmp_path: Path) -> FleetStage:
    provider = FakeProvider([OFFER])
    provider.fate = Fate(pending_s=MACHINE.boot_s, ending_s=MACHINE.ending_s)
    return FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider, clock=SimulatedClock())  # type: ignore[arg-type]


@asynccontextmanager
async def elastic(
    stage: FleetStage, size: NodeRange, *, serves: Callable[[], bool] = lambda: False
) -> AsyncGenerator[tuple[Fleet, Engine]]:
    engine = Engine()
    fleet = stage.fleet(nodes=(size.minimum, size.maximum), idle=size.idle_s, concurrency=MACHINE.workers)
    policy = ElasticSize(
        fleet,
        size,
        workload=lambda: engine.dispatch.workload(asyncio.get_running_loop().time()),
        per_node=MACHINE.workers,
        serves=serves,
        publish=stage.events.append,
        clock=stage.clock,
    )
    try:
        await fleet.start(engine)
        policy.begin()
        yield fleet, engine
    finally:
        policy.close()
        await fleet.stop()
    assert stage.provider.alive == []


async def wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


def notices(stage: FleetStage) -> list[str]:
    return [event.message for event in stage.events if isinstance(event, Notice) and "→" in event.message]


SCRIPT = [
    Burst(600, 120, 20.0, "a"),
    Burst(900, 1, 10.0, "look"),
    Burst(2400, 40, 60.0, "b"),
    Burst(2460, 40, 60.0, "b"),
    Burst(3600, 1, 10.0, "look"),
    Burst(5400, 1, 10.0, "look"),
    Burst(5500, 300, 5.0, "c"),
    Burst(9000, 400, 30.0, "a"),
    Burst(9100, 1, 10.0, "look"),
]


@pytest.mark.parametrize(
    "size", [NodeRange(minimum=0, maximum=8, idle_s=300), NodeRange(minimum=1, maximum=4, idle_s=120)]
)
def test_a_scripted_day_costs_and_waits_as_the_simulation_says(stage: FleetStage, size: NodeRange) -> None:
    until_s = 4 * 3600.0
    expected = simulate_day(SCRIPT, size, MACHINE, until_s=until_s)

    async def scenario() -> None:
        async with elastic(stage, size) as (_, engine):
            for burst in SCRIPT:
                asyncio.get_running_loop().call_later(burst.at_s, engine.calls.submit, burst)
            await wait(until_s)
            waits_s = engine.calls.waits_s
            assert (len(waits_s), engine.given_up) == (sum(burst.calls for burst in SCRIPT), [])
            assert sum(waits_s) / len(waits_s) == pytest.approx(expected.mean_wait_s, rel=0.1)
        assert stage.provider.bill() == pytest.approx(expected.cost, rel=0.1)

    simulate(scenario)


def test_a_pool_goes_to_zero_and_back_and_keeps_its_calls(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with elastic(stage, NodeRange(minimum=0, maximum=4, idle_s=60)) as (fleet, engine):
            submit, calls = engine.calls.submit, engine.calls.waits_s
            for turn in range(1, 13):  # also while the last node leaves, and while it ends
                submit(Burst(0, 3, 5.0, "f"))
                await wait(300)
                assert (len(calls), fleet.wanted) == (6 * turn - 3, frozenset())
                submit(Burst(0, 1, 5.0, "f"))
                await until_left(fleet)
                await wait(0.75 * turn)
                submit(Burst(0, 2, 5.0, "f"))
                await wait(300)
                assert (len(calls), engine.given_up, fleet.wanted) == (6 * turn, [], frozenset())
            assert max(calls) < 2 * MACHINE.boot_s

    simulate(scenario)


async def until_left(fleet: Fleet) -> None:
    """Return once there are nodes no more, after there were some."""
    while not fleet.wanted:
        await wait(0.1)
    while fleet.wanted:
        await wait(0.1)


def test_a_change_of_the_size_is_told_with_its_reason(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with elastic(stage, NodeRange(minimum=0, maximum=4, idle_s=60)) as (_, engine):
            engine.calls.submit(Burst(0, 100, 20.0, "f"))
            await wait(1000)
        first, *grown, last = notices(stage)
        assert first == "nodes: 0 → 1 (calls: 100, about 0 s of work)"
        assert grown[0].startswith("nodes: 1 → ")
        assert last.endswith("without work for 60 s)")

    simulate(scenario)


def test_calls_that_get_no_first_node_fail_with_the_reason_and_later_ones_try_again(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with elastic(stage, NodeRange(minimum=0, maximum=4, idle_s=300)) as (fleet, engine):
            stage.provider.fail("launch", CapacityError("sold out"))
            engine.calls.submit(Burst(0, 3, 5.0, "f"))
            await until(lambda: len(engine.given_up) == 3)
            assert "sold out" in engine.given_up[0].reason
            assert fleet.wanted == frozenset()
            engine.calls.submit(Burst(0, 3, 5.0, "f"))
            await wait(300)
            assert len(engine.calls.waits_s) == 3

    simulate(scenario)


def test_a_node_that_cannot_be_added_is_tried_again_after_ever_longer_pauses(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with elastic(stage, NodeRange(minimum=1, maximum=4, idle_s=300)) as (fleet, engine):
            stage.provider.fail("launch", CapacityError("sold out"), times=1000)
            engine.calls.submit(Burst(0, 1000, 60.0, "f"))
            await wait(3600)
            assert fleet.wanted == {0}
            assert stage.provider.calls.count("launch") < 60

    simulate(scenario)


def test_with_a_service_the_front_end_removes_nodes(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with elastic(stage, NodeRange(minimum=0, maximum=4, idle_s=60), serves=lambda: True) as (fleet, engine):
            engine.calls.submit(Burst(0, 100, 20.0, "f"))
            await wait(3000)
            assert len(fleet.wanted) == 4

    simulate(scenario)


def test_a_node_all_of_whose_workers_were_given_up_is_replaced_for_the_next_call(stage: FleetStage) -> None:
    async def scenario() -> None:
        async with elastic(stage, NodeRange(minimum=0, maximum=4, idle_s=1e6)) as (fleet, engine):
            engine.calls.submit(Burst(0, 1, 5.0, "f"))
            await wait(300)
            for worker in workers(0):
                engine.dispatch.worker_gone(worker, "it does not start", 300.0)
            await wait(60)
            assert fleet.wanted == frozenset()
            engine.calls.submit(Burst(0, 1, 5.0, "f"))
            await wait(300)
            assert len(engine.calls.waits_s) == 2

    simulate(scenario)
