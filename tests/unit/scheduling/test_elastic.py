"""An elastic pool follows its work: the real fleet and scheduler on a cloud's double, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from benchmarks.elastic_day import Burst, Machine, simulate_day

from skyward.errors import BudgetError, CapacityError, PoolStateError
from skyward.events import Notice
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import NodeRange
from skyward.submission import Invocation
from skyward.testing.provider import Fate
from support.pools import Call, SimulatedPool, simulated_time
from support.simulation import simulate

MACHINE = Machine(workers=2, boot_s=90, ending_s=5, price_per_hour=2.0)
OFFER = Offer(spec=InstanceSpec(name="fake", cpu=2, memory_gib=4), price_per_hour=MACHINE.price_per_hour)
ZERO_TO_FOUR = NodeRange(minimum=0, maximum=4, idle_s=60)


@pytest.fixture(autouse=True)
def in_simulated_time() -> Iterator[None]:
    with simulated_time():
        yield


class Day:
    """An open pool, and how long its calls waited until they began."""

    def __init__(self, ledger: Ledger, size: NodeRange, *, max_cost: float | None = None) -> None:
        self.waits_s: list[float] = []
        self._submitted_s: list[float] = []
        self.pool = SimulatedPool(
            ledger,
            nodes=(size.minimum, size.maximum),
            idle=size.idle_s,
            workers=MACHINE.workers,
            latency_s=0.01,
            on_begin=lambda ticket, worker: self.waits_s.append(now() - self._submitted_s[ticket.number]),
            offers=[OFFER],
            max_cost=max_cost,
        )
        self.pool.provider.fate = Fate(pending_s=MACHINE.boot_s, ending_s=MACHINE.ending_s)

    def submit(self, calls: int, seconds: float) -> None:
        for _ in range(calls):
            self._submitted_s.append(now())
            self.pool.submit(Call(seconds=seconds))

    @property
    def nodes(self) -> int:
        return len(self.pool.fleet.wanted)

    @property
    def changes(self) -> list[str]:
        return [event.message for event in self.pool.events if isinstance(event, Notice) and "→" in event.message]


def now() -> float:
    return asyncio.get_running_loop().time()


async def wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


Story = Callable[[Day], Coroutine[Any, Any, None]]


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., None]:
    """Open a pool, have a story happen, and see that nothing is left of it."""

    def run(story: Story, size: NodeRange = ZERO_TO_FOUR, *, max_cost: float | None = None) -> None:
        async def life() -> None:
            day = Day(Ledger(tmp_path / "ledger.db"), size, max_cost=max_cost)
            try:
                await day.pool.open()
                await story(day)
                await day.pool.close()
                assert day.pool.provider.alive == []
            finally:
                await day.pool.destroy()

        simulate(life)

    return run


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
def test_a_scripted_day_costs_and_waits_as_the_simulation_says(live: Callable[..., None], size: NodeRange) -> None:
    until_s = 4 * 3600.0
    expected = simulate_day(SCRIPT, size, MACHINE, until_s=until_s)

    async def story(day: Day) -> None:
        for burst in SCRIPT:
            await wait(burst.at_s - now())
            day.submit(burst.calls, burst.seconds)
        await wait(until_s - now())
        assert all(ticket.future.result(0) == ticket.number for ticket in day.pool.tickets)
        assert len(day.waits_s) == sum(burst.calls for burst in SCRIPT), "each ran once"
        assert sum(day.waits_s) / len(day.waits_s) == pytest.approx(expected.mean_wait_s, rel=0.1)
        await day.pool.fleet.stop()
        assert day.pool.provider.bill() == pytest.approx(expected.cost, rel=0.1)

    live(story, size)


def test_a_pool_goes_to_zero_and_back_and_keeps_its_calls(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        for turn in range(1, 13):
            day.submit(3, 5.0)
            await wait(300)
            assert day.nodes == 0
            day.submit(1, 5.0)
            await until_left(day)
            await wait(0.75 * turn)  # the node leaves, or ends, or has just ended
            day.submit(2, 5.0)
            await wait(300)
        assert day.nodes == 0
        assert [ticket.future.result(0) for ticket in day.pool.tickets] == [*range(12 * 6)]
        assert len(day.waits_s) == 12 * 6, "each ran once"
        assert max(day.waits_s) < 2 * MACHINE.boot_s

    live(story)


async def until_left(day: Day) -> None:
    """Return once there are nodes no more, after there were some."""
    for is_there in (False, True):
        while bool(day.nodes) is is_there:
            await wait(0.1)


def test_calls_that_come_while_the_last_node_leaves_wait_for_the_next_one(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        day.submit(1, 5.0)
        await wait(120)
        leaving = day.pool.fleet.scale(0, ())
        day.submit(2, 5.0)
        await leaving
        await wait(200)
        assert [ticket.future.result(0) for ticket in day.pool.tickets] == [0, 1, 2]

    live(story)


def test_node_0_stays_until_the_others_have_finished_their_calls(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        await day.pool.fleet.scale(2, ())
        for seconds in (5.0, 5.0, 5.0, 1000.0):
            day.submit(1, seconds)
        await wait(500)
        assert day.pool.fleet.wanted == {0}
        day.submit(1, 5.0)
        await wait(10)
        assert day.waits_s[-1] < 1
        await wait(1500)
        assert day.nodes == 0

    live(story)


def test_a_broadcast_takes_the_nodes_that_there_are(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        with pytest.raises(PoolStateError, match="every node of the pool is gone"):
            day.pool.scheduler.broadcast(Invocation(fn=abs, args=(1,)))
        await day.pool.fleet.scale(2, ())
        assert len(day.pool.scheduler.broadcast(Invocation(fn=abs, args=(1,)))) == 2 * MACHINE.workers

    live(story)


def test_a_change_of_the_size_is_told_with_its_reason(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        day.submit(100, 20.0)
        await wait(1000)
        first, *grown, last = day.changes
        assert first == "nodes: 0 → 1 (calls: 100, about 0 s of work)"
        assert grown[0].startswith("nodes: 1 → ")
        assert last.endswith("without work for 60 s)")

    live(story)


def test_calls_that_get_no_first_node_fail_with_the_reason_and_later_ones_try_again(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        day.pool.provider.fail("launch", CapacityError("sold out"))
        day.submit(3, 5.0)
        futures: list[Future[Any]] = [ticket.future for ticket in day.pool.tickets]
        await wait(60)
        assert all("sold out" in str(future.exception(0)) for future in futures)
        assert day.nodes == 0
        day.submit(3, 5.0)
        await wait(300)
        assert [ticket.future.result(0) for ticket in day.pool.tickets[3:]] == [3, 4, 5]

    live(story)


def test_call_whose_first_node_cannot_be_paid_says_that_the_budget_is_the_reason(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        day.submit(1, 5.0)
        await wait(1000)
        assert day.nodes == 0
        day.submit(1, 5.0)
        await wait(60)
        first, second = (ticket.future for ticket in day.pool.tickets)
        assert first.result(0) == 0
        error = second.exception(0)
        assert isinstance(error, BudgetError)
        assert "nowhere left to run: node 0 could not be added: max_cost=$0.12 leaves" in str(error)
        assert (error.max_cost, 0 < error.cost < 0.12) == (0.12, True)

    live(story, max_cost=0.12)


def test_a_node_that_cannot_be_added_is_tried_again_after_ever_longer_pauses(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        day.pool.provider.fail("launch", CapacityError("sold out"), times=1000)
        day.submit(1000, 60.0)
        await wait(3600)
        assert day.nodes == 1
        assert day.pool.provider.calls.count("launch") < 60

    live(story, NodeRange(minimum=1, maximum=4, idle_s=60))


def test_of_machines_of_which_a_few_are_left_those_are_had(live: Callable[..., None]) -> None:
    """A provider sells all machines of an order or none; from none, the first one is an order by itself."""

    async def story(day: Day) -> None:
        provider = day.pool.provider
        day.submit(4, 100.0)
        await until_left(day)
        create = provider._create

        async def create_up_to_three(order: LaunchOrder, offer: Offer, key: str) -> Instance:
            if len(provider.alive) >= 3:
                raise CapacityError("sold out")
            return await create(order, offer, key)

        provider._create = create_up_to_three  # type: ignore[method-assign]
        day.submit(100, 100.0)
        await wait(600)
        assert day.nodes == 3
        await wait(3000)
        assert [ticket.future.result(0) for ticket in day.pool.tickets] == [*range(104)]

    live(story, NodeRange(minimum=0, maximum=8, idle_s=60))


def test_with_a_service_the_front_end_removes_nodes(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        day.pool.serves = True
        day.submit(100, 20.0)
        await wait(3000)
        assert day.nodes == 4

    live(story)


def test_a_node_that_reached_its_timeout_is_bought_again_for_a_call_only(live: Callable[..., None]) -> None:
    async def story(day: Day) -> None:
        (node,) = day.pool.nodes.simulated
        node.say_farewell("its timeout is over", timed_out=True)
        await wait(600)
        assert day.nodes == 0
        day.submit(1, 5.0)
        await wait(300)
        assert day.pool.tickets[0].future.result(0) == 0

    live(story, NodeRange(minimum=1, maximum=4, idle_s=60))


def test_a_node_all_of_whose_workers_were_given_up_leaves_and_the_next_call_gets_another(
    live: Callable[..., None],
) -> None:
    async def story(day: Day) -> None:
        day.submit(1, 5.0)
        await wait(120)
        for link in list(day.pool.scheduler.links.values()):
            day.pool.scheduler._give_up(link, "it does not start")
        await wait(10)
        assert day.nodes == 0
        day.submit(1, 5.0)
        await wait(300)
        assert day.pool.tickets[1].future.result(0) == 1

    live(story, NodeRange(minimum=0, maximum=4, idle_s=1e6))
