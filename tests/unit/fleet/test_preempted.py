"""A machine that is taken back with notice: its calls come to an end, and another machine is there for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import BudgetError, CapacityError, WorkerLostError
from skyward.events import Error, InstancePreempted, Notice, WorkerLost
from skyward.ledger.ledger import Ledger
from skyward.market.spending import Spending
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import running
from skyward.wire.control import Preempting, PreemptionLikely
from support.faults import Fate, Fault
from support.nodes import open_node
from support.pools import Call, SimulatedPool, Ticket, simulated_time
from support.simulation import simulate
from support.supervisors import SimulatedNode
from support.workers import SimulatedWorker

SPEC = InstanceSpec(name="big", cpu=2, memory_gib=4)
SPOT = Offer(spec=SPEC, spot=True, price_per_hour=3.6, on_demand_price_per_hour=10.8, minimum_billed_s=60.0)
ON_DEMAND = Offer(spec=SPEC, price_per_hour=10.8, on_demand_price_per_hour=10.8, minimum_billed_s=60.0)


@pytest.fixture(autouse=True)
def in_simulated_time() -> Iterator[None]:
    with simulated_time():
        yield


class Stage:
    """A pool in simulated time, and when it ordered machines."""

    def __init__(self, ledger: Ledger, *, nodes: int = 2, workers: int = 1, **options: Any) -> None:
        self.ledger = ledger
        self.orders: list[tuple[float, str]] = []
        self.began: list[tuple[Ticket, SimulatedWorker]] = []
        self.pool = SimulatedPool(
            ledger,
            nodes=nodes,
            workers=workers,
            away_s=1800.0,
            on_order=self._note_order,
            on_begin=lambda ticket, worker: self.began.append((ticket, worker)),
            **{"offers": (SPOT, ON_DEMAND), "spot": "always"} | options,
        )

    def _note_order(self, order: LaunchOrder) -> None:
        self.orders += [(self.now, key) for key in order.keys]

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def node(self, rank: int) -> SimulatedNode:
        return [node for node in self.pool.nodes.simulated if node.rank == rank][-1]

    def alive(self) -> int:
        self.pool.provider.refresh()
        return len(self.pool.provider.alive)

    def hosts(self, ticket: Ticket) -> list[str]:
        return [worker.host for worker in ticket.ran_on]

    async def occupy(self, *, count: int = 2, **call: Any) -> None:
        """Submit so many such calls, and give them time to begin."""
        for _ in range(count):
            self.pool.submit(Call(**call))
        await asyncio.sleep(1)

    async def until_done(self) -> None:
        await self.until(lambda: all(ticket.future.done() for ticket in self.pool.tickets))

    async def until(self, is_true: Callable[[], bool], limit_s: float = 300.0) -> None:
        async with asyncio.timeout(limit_s):
            while not is_true():  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.01)


def live(tmp_path: Path, scenario: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
    """Live through it, and see that nothing is left."""

    async def life() -> None:
        stage = Stage(Ledger(tmp_path / "ledger.db"), **options)
        try:
            await stage.pool.open()
            await scenario(stage)
            await stage.pool.close()
            assert stage.alive() == 0
            assert stage.ledger.open_entries() == ()
        finally:
            await stage.pool.destroy()

    simulate(life)


def test_what_runs_goes_on_and_what_is_new_goes_elsewhere(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=60, retries=0)
        taken = stage.node(1)
        stage.pool.preempt(taken, 120)
        await asyncio.sleep(1)
        for _ in range(20):
            stage.pool.submit(Call(seconds=1, retries=0))
        await stage.until_done()

        ran_there = [ticket.number for ticket in stage.pool.tickets if taken.instance.id in stage.hosts(ticket)]
        assert ran_there in ([0], [1])
        assert {len(ticket.ran_on) for ticket in stage.pool.tickets} == {1}

    live(tmp_path, scenario)


def test_the_next_machine_is_ordered_at_once_and_starts_when_the_calls_are_done(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=60)
        stage.pool.provider.plan_faults({}, [Fate(pending_s=30.0)])
        told_at, taken = stage.now, stage.node(1)
        stage.pool.preempt(taken, 120)
        await stage.until(lambda: len(stage.orders) == 3)
        assert stage.now - told_at < 1
        assert taken.runs
        await stage.until(lambda: stage.node(1) is not taken)
        assert stage.now - told_at < 35, "it is prepared while the other still works"
        assert taken.runs
        await stage.until(lambda: not taken.runs)
        assert stage.now - told_at < 62, "it is ended as soon as it is idle"
        await stage.until(lambda: stage.node(1).runs)
        assert stage.now - told_at < 62, "the next one is ready to go"
        await stage.until(lambda: stage.alive() == 2)
        assert len(stage.orders) == 3
        assert [node.log for node in stage.pool.nodes.simulated[2:]] == [["prepare", "start", "join"]]
        assert [event for event in stage.pool.events if isinstance(event, Error | WorkerLost)] == []

    live(tmp_path, scenario)


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_done_in_time_runs_elsewhere_if_it_has_a_retry_left(
    tmp_path: Path, rank: int, retries: int
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=100, retries=retries)
        stage.pool.preempt(stage.node(rank), 10)
        await stage.until_done()

        errors = [ticket.future.exception(0) for ticket in stage.pool.tickets]
        assert sum(isinstance(error, WorkerLostError) for error in errors) == 1 - retries
        assert sorted(len(ticket.ran_on) for ticket in stage.pool.tickets) == [1, 1 + retries]

    live(tmp_path, scenario)


def test_what_has_not_begun_on_a_machine_that_is_taken_runs_elsewhere_for_free(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.pool.submit(Call(seconds=0.001))  # such calls are short: several of them share a worker
        await stage.until_done()
        for seconds in (100.0, *[0.001] * 9):
            stage.pool.submit(Call(seconds=seconds, retries=0))
        await asyncio.sleep(0.1)
        stage.pool.preempt(stage.node(0), 10)
        await stage.until_done()

        first, *others = stage.pool.tickets[1:]
        assert isinstance(first.future.exception(0), WorkerLostError)
        assert [ticket.future.result(0) for ticket in others] == list(range(2, 11))

    live(tmp_path, scenario, nodes=1)


def test_a_worker_that_dies_on_a_machine_that_is_taken_ends_what_it_ran_and_the_next_gets_no_calls(
    tmp_path: Path,
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=100, retries=0, count=4)
        taken = stage.node(1)
        stage.pool.provider.plan_faults({}, [Fate(pending_s=60.0)])
        stage.pool.preempt(taken, 120)
        await asyncio.sleep(1)
        for _ in range(4):
            stage.pool.submit(Call(seconds=1, retries=0))
        taken.kill_process(0)
        await stage.until_done()

        results = [ticket.future.exception(0) or ticket.future.result(0) for ticket in stage.pool.tickets]
        (lost,) = [result for result in results if isinstance(result, WorkerLostError)]
        assert [result for result in results if result is not lost] == [n for n in range(8) if n != results.index(lost)]
        assert len([worker for _, worker in stage.began if worker.host == taken.instance.id]) == 2

    live(tmp_path, scenario, workers=2)


def test_calls_of_its_rank_alone_wait_for_the_next_machine(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        taken = stage.node(1)
        await stage.occupy(seconds=50)
        stage.pool.preempt(taken, 120)
        await asyncio.sleep(1)
        stage.pool.broadcast(Call(seconds=1))
        await stage.until_done()

        assert [stage.hosts(ticket) for ticket in stage.pool.tickets[2:]] == [
            [stage.node(0).instance.id],
            [stage.node(1).instance.id],
        ]
        assert stage.node(1) is not taken

    live(tmp_path, scenario)


def test_the_head_is_replaced_like_the_others(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        taken = stage.node(0)
        await stage.occupy(seconds=5, retries=0)
        stage.pool.preempt(taken, 120)
        await stage.until(lambda: stage.node(0) is not taken and stage.node(0).runs)
        stage.pool.broadcast(Call())
        await stage.until_done()
        await stage.until(lambda: stage.node(1).head_addr == stage.node(0).address)

        assert [ticket.future.result(0) for ticket in stage.pool.tickets] == [0, 1, 2, 2]

    live(tmp_path, scenario)


def test_a_notice_that_is_repeated_after_a_lost_link_buys_one_machine(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=50)
        taken = stage.node(1)
        stage.pool.preempt(taken, 120)
        await asyncio.sleep(1)
        for _ in range(3):
            taken.cut_off(silently=False)
            await asyncio.sleep(1)
            taken.reconnect()
            await asyncio.sleep(1)
        await stage.until_done()
        await stage.until(lambda: stage.node(1) is not taken and stage.node(1).runs)
        assert len(stage.orders) == 3

    live(tmp_path, scenario)


def test_a_client_that_was_away_hears_of_the_notice_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        taken = stage.node(1)
        taken.cut_off(silently=False)
        await asyncio.sleep(1)
        stage.pool.preempt(taken, 120)
        await asyncio.sleep(10)
        assert len(stage.orders) == 2
        taken.reconnect()
        await stage.until(lambda: len(stage.orders) == 3)

    live(tmp_path, scenario)


def test_news_that_a_node_repeats_on_every_connection_is_passed_on_once() -> None:
    async def scenario() -> None:
        heard: list[object] = []
        instance = running(Instance(id="i-1", key="key", state=InstanceState.PENDING, offer=SPOT))
        node = open_node(instance, rank=1, on_message=lambda _, message: heard.append(message))
        for _ in range(3):
            node._receive(PreemptionLikely())
        for left_s in (120, 110):
            node._receive(Preempting(seconds_left=left_s))
        assert heard == [PreemptionLikely(), Preempting(seconds_left=120)]
        assert await node.wait_notice() == 110

    simulate(scenario)


def test_nothing_is_bought_for_a_node_that_goes_anyway(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=50)
        leaving = asyncio.ensure_future(stage.pool.fleet.scale(1, {1}))
        await asyncio.sleep(1)
        stage.pool.preempt(stage.node(1), 120)
        await leaving
        assert len(stage.orders) == 2

    live(tmp_path, scenario)


def test_a_pool_that_shrinks_meanwhile_ends_the_machine_that_was_to_be_the_next(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=50)
        stage.pool.preempt(stage.node(1), 120)
        await stage.until(lambda: len(stage.orders) == 3)
        stage.pool.broadcast(Call())
        await stage.pool.fleet.scale(1, {1})
        await stage.until(lambda: stage.alive() == 1)
        await stage.until_done()
        assert len(stage.orders) == 3

    live(tmp_path, scenario)


def test_what_waited_for_the_next_machine_runs_on_the_last_one_if_there_is_to_be_no_other(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=50, count=3)
        assert [worker.host for _, worker in stage.began].count(stage.node(1).instance.id) == 1, "the other is idle"
        stage.pool.preempt(stage.node(1), 120)
        await asyncio.sleep(1)
        stage.pool.broadcast(Call())
        await asyncio.sleep(1)
        waiting = [ticket for ticket in stage.pool.tickets[3:] if not ticket.future.done()]
        assert waiting
        shrinking = asyncio.ensure_future(stage.pool.fleet.scale(1, {1}))
        await asyncio.sleep(1)
        assert sum(ticket.future.done() for ticket in waiting) == 1, "whose worker is idle"
        await shrinking
        assert all(ticket.future.result(0) == 3 for ticket in waiting)

    live(tmp_path, scenario, workers=2)


@pytest.mark.parametrize("pending_s", [0.0, 1000.0])
@pytest.mark.parametrize("launching_s", [0.0, 100.0])
def test_a_pool_that_is_closed_meanwhile_ends_it_too(tmp_path: Path, pending_s: float, launching_s: float) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=500)
        stage.pool.provider.plan_faults(
            {"launch": [Fault(delay_s=launching_s, done=None)]}, [Fate(pending_s=pending_s)]
        )
        stage.pool.preempt(stage.node(1), 120)
        await stage.until(lambda: len(stage.orders) == 3)

    live(tmp_path, scenario)


def test_without_a_machine_in_advance_one_is_asked_for_when_the_node_is_gone(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        taken = stage.node(1)
        stage.pool.provider.plan_faults({"launch": [Fault(error=CapacityError("sold out"))] * 11})
        await stage.occupy(seconds=50)
        stage.pool.preempt(taken, 120)
        await stage.until(lambda: stage.node(1) is not taken and stage.node(1).runs)
        errors = [event.message for event in stage.pool.events if isinstance(event, Error)]
        assert len(errors) == 1
        assert errors[0].startswith("no machine could be launched in advance for node 1: for 10 s, ")

    live(tmp_path, scenario)


def test_capacity_is_waited_for_once_after_a_preemption(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.pool.provider.plan_faults({"launch": [Fault(error=CapacityError("sold out"))] * 9999})
        stage.pool.preempt(stage.node(1), 120)
        began = stage.now
        await stage.until(lambda: [*stage.pool.fleet.wanted] == [0], limit_s=1000.0)
        assert 300 <= stage.now - began < 500

    live(tmp_path, scenario, wait_for_capacity="5m")


def test_a_machine_that_cannot_be_prepared_in_advance_is_ended_and_another_takes_its_place(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        taken = stage.node(1)
        stage.pool.provider.plan_faults({}, [Fate(becomes=InstanceState.FAILED)])
        await stage.occupy(seconds=50)
        stage.pool.preempt(taken, 120)
        await stage.until(lambda: stage.node(1) is not taken and stage.node(1).runs)
        assert len(stage.orders) == 4
        await stage.until(lambda: stage.alive() == 2)

    live(tmp_path, scenario)


def test_a_machine_that_is_still_there_after_its_time_is_ended(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        taken = stage.node(1)
        await stage.occupy(seconds=500)
        taken.be_preempted(120)
        await asyncio.sleep(119)
        assert taken.runs
        await asyncio.sleep(30)
        assert not taken.runs
        assert stage.node(1).runs
        notices = [event.message for event in stage.pool.events if isinstance(event, Notice)]
        assert notices == ["node 1 is preempted: its provider takes its machine back; another takes its place"]

    live(tmp_path, scenario)


def test_a_machine_that_is_gone_without_notice_is_lost_by_its_providers_word(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=50)
        lost_at = stage.now
        stage.pool.provider.lose(stage.node(1).instance.id)
        await stage.until(lambda: len(stage.orders) == 3)
        assert stage.now - lost_at < 10
        (error,) = [event.message for event in stage.pool.events if isinstance(event, Error)]
        assert error == (
            "node 1 is lost: it cannot be reached, and fake reports that it is gone; another takes its place"
        )

    live(tmp_path, scenario)


@pytest.mark.parametrize("orderly", [False, True])
def test_machines_that_are_taken_back_without_notice_are_replaced_at_once_however_many(
    tmp_path: Path, orderly: bool
) -> None:
    """``orderly``: the node's processes are ended by the machine's own shutdown, and its supervisor reports that."""

    async def scenario(stage: Stage) -> None:
        provider, taken = stage.pool.provider, list[str]()
        await stage.occupy(seconds=10_000, retries=1)
        await stage.occupy(count=1, seconds=1, retries=0)
        for number in range(8):
            node = stage.node(1)
            taken.append(node.instance.id)
            provider.instances[taken[-1]] = replace(provider.instances[taken[-1]], preempted=True)
            if orderly:
                provider.set_state(taken[-1], InstanceState.STOPPING)
                node.say_farewell("it received SIGTERM")
            provider.lose(taken[-1])
            lost_at = stage.now
            await stage.until(lambda number=number: len(stage.orders) == 3 + number)
            assert stage.now - lost_at < 10
            await stage.until(lambda node=node: stage.node(1) is not node and stage.node(1).runs)
            await asyncio.sleep(1)
        repeated = sorted(len(ticket.ran_on) for ticket in stage.pool.tickets)
        assert repeated == [0, 1, 9], "one call per worker, and one that never began"
        assert [ticket.future.done() for ticket in stage.pool.tickets] == [False] * 3, "no retry is charged"
        events = stage.pool.events
        assert [event for event in events if isinstance(event, InstancePreempted)] == [
            InstancePreempted(each, 1, 0.0) for each in taken
        ]
        notices = [event.message for event in events if isinstance(event, Notice)]
        assert [notice.partition(":")[0] for notice in notices] == ["node 1 is preempted"] * 8
        assert [event for event in events if isinstance(event, Error)] == []
        assert len(stage.pool.fleet.wanted) == 2

    live(tmp_path, scenario)


@pytest.mark.parametrize("preempted", [True, False])
def test_a_machine_that_ends_while_its_preparation_hangs_is_exchanged_within_seconds(
    tmp_path: Path, preempted: bool
) -> None:
    async def scenario(stage: Stage) -> None:
        provider = stage.pool.provider
        stage.pool.nodes.trouble({"prepare": [Fault(hangs=True)]})
        growing = asyncio.ensure_future(stage.pool.fleet.scale(3, ()))
        await asyncio.sleep(60)
        (provider.preempt if preempted else provider.lose)("fake-2")
        async with asyncio.timeout(20):
            await growing
        assert [event.instance_id for event in stage.pool.events if isinstance(event, InstancePreempted)] == [
            "fake-2"
        ] * preempted
        (notice,) = [event.message for event in stage.pool.events if isinstance(event, Notice)]
        assert "ended while its node started: fake reports that it is gone" in notice
        assert notice.endswith("another is bought" + ("" if preempted else " (2 of 3)"))

    live(tmp_path, scenario)


def test_one_of_four_is_taken_under_four_hundred_calls_and_the_cost_adds_up_to_the_second(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        began_at = stage.orders[0][0]
        for _ in range(400):
            stage.pool.submit(Call(seconds=1, retries=0))
        await asyncio.sleep(20.25)
        stage.pool.provider.plan_faults({}, [Fate(pending_s=30.0)])
        taken, told_at = stage.node(3), stage.now
        stage.pool.preempt(taken, 120)
        await stage.until_done()
        assert [ticket.future.result(0) for ticket in stage.pool.tickets] == list(range(400))
        assert {len(ticket.ran_on) for ticket in stage.pool.tickets} == {1}
        assert any(worker.host == stage.node(3).instance.id for _, worker in stage.began), "the next one joined"
        assert [event for event in stage.pool.events if isinstance(event, WorkerLost)] == []
        await asyncio.sleep(7)
        now = stage.now
        final = stage.pool.fleet.cost(now).final()

        machines = stage.pool.provider.instances
        assert (final.spot_count, final.ondemand_count) == (5, 0)
        assert final.hourly_rate == pytest.approx(5 * 3.6)
        report = stage.pool.fleet.cost(now)
        (ended,) = [usage for usage in report.usages if usage.ended_at is not None]
        assert told_at < (ended.ended_at or 0) < told_at + 5
        (late,) = [usage for usage in report.usages if usage.launched_at >= told_at]
        seconds = [_whole(now - began_at)] * 3 + [60.0, _whole(now - late.launched_at)]
        assert [instance.offer for instance in machines.values()] == [SPOT] * 5
        assert final.total_cost == pytest.approx(sum(seconds) * 3.6 / 3600, abs=1e-9)
        assert final.savings_vs_ondemand == pytest.approx(sum(seconds) * 7.2 / 3600, abs=1e-9)

    live(tmp_path, scenario, nodes=4)


def test_a_pool_that_grows_and_is_preempted_never_costs_more_than_it_may(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        spent: list[BudgetError] = []
        cost = stage.pool.fleet.cost
        watching = Spending(cost, max_cost=1.5, publish=lambda event: None, on_spent=spent.append)
        watching.watch()
        stage.pool.provider.plan_faults({}, [Fate(ending_s=5.0)] * 10)
        await stage.pool.fleet.scale(5, ())
        await asyncio.sleep(100)
        stage.pool.preempt(stage.node(3), 120)
        await stage.until(lambda: bool(spent), 10_000)
        await stage.pool.close()
        watching.close()
        stopped_at = stage.now
        assert len(stage.pool.provider.instances) == 6
        assert 1.2 < cost(stopped_at).total <= 1.5, "a minute of five machines is kept for their end"
        assert cost(stopped_at + 1000).total == cost(stopped_at).total

    live(tmp_path, scenario, max_cost=1.5)


def _whole(seconds: float) -> float:
    return float(-(-seconds // 1))


def test_a_machine_in_advance_that_comes_late_is_ended_when_its_node_is_neither_there_nor_wanted(
    tmp_path: Path,
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.occupy(seconds=500)
        stage.pool.provider.plan_faults({"launch": [Fault(delay_s=60, done=None)]}, [])
        stage.pool.preempt(stage.node(1), 120)
        await stage.until(lambda: len(stage.orders) == 3)
        shrinking = asyncio.ensure_future(stage.pool.fleet.scale(1, {1}))
        await asyncio.sleep(1)
        stage.node(1).crash()
        await shrinking
        await stage.until(lambda: stage.alive() == 1)

    live(tmp_path, scenario)
