"""What a pool once did not live through, in simulated time: each was found by the properties beside this file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from skyward.errors import PoolStateError, TerminationError
from skyward.ledger.ledger import Ledger
from support.faults import Fault
from support.pools import Call, SimulatedPool, simulated_time
from support.simulation import simulate

HANGS = Fault(hangs=True)

Story = Callable[[SimulatedPool], Awaitable[None]]


@pytest.fixture(autouse=True)
def in_simulated_time() -> Iterator[None]:
    with simulated_time():
        yield


@pytest.fixture
def live(tmp_path: Path) -> Callable[[Story], None]:
    """Open a pool of two nodes with a worker each, have something befall it, and end what is left."""

    async def life(story: Story) -> None:
        pool = SimulatedPool(Ledger(tmp_path / "ledger.db"), nodes=2, latency_s=0.05)
        try:
            await pool.open()
            await story(pool)
            pool.heal()
            await pool.close()
        finally:
            await pool.destroy()

    return lambda story: simulate(lambda: life(story))


@pytest.mark.parametrize("verb", ["terminate", "describe"])
def test_an_answer_that_never_comes_is_asked_for_again(live: Callable[[Story], None], verb: str) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.provider.plan_faults({verb: [HANGS]})  # type: ignore[dict-item]
        await pool.fleet.stop()
        assert pool.provider.alive == []

    live(story)


def test_a_provider_that_never_answers_keeps_nobody_for_ever(live: Callable[[Story], None]) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.provider.plan_faults({"terminate": [HANGS] * 99})
        async with asyncio.timeout(3000):
            with pytest.raises(TerminationError) as left:
                await pool.fleet.stop()
        assert left.value.instance_ids == ("fake-0", "fake-1")

    live(story)


@pytest.mark.parametrize("lost_answers", [1, 3])
def test_a_worker_whose_answer_to_the_greeting_is_lost_is_a_new_one_all_the_same(
    live: Callable[[Story], None], lost_answers: int
) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.network.lost_greetings = lost_answers
        pool.submit(Call(kills=1))
        await asyncio.sleep(10)
        (ticket,) = pool.tickets
        assert ticket.future.result(0) == 0
        assert [worker.alive for worker in ticket.ran_on] == [False, True]
        assert all(link.alive for link in pool.scheduler.links.values())

    live(story)


def test_a_first_answer_that_is_lost_does_not_keep_a_worker_out(live: Callable[[Story], None]) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.network.lost_greetings = 1
        async with asyncio.timeout(10):
            await pool.fleet.scale(3, ())

    live(story)


def test_a_node_that_is_lost_after_the_head_was_given_up_is_replaced_and_does_calls(
    live: Callable[[Story], None],
) -> None:
    async def story(pool: SimulatedPool) -> None:
        head, other = pool.nodes.simulated
        head.say_farewell("its timeout is over", timed_out=True)
        await asyncio.sleep(1)
        other.crash()
        await asyncio.sleep(30)
        assert len(pool.fleet.wanted) == 1
        with pytest.raises(PoolStateError, match="node 0, where the scheduler runs, is gone for good"):
            pool.fleet.head()
        pool.submit(Call())
        await asyncio.sleep(10)
        assert pool.tickets[0].future.result(0) == 0

    live(story)


def test_a_node_that_is_not_ready_when_the_head_is_given_up_does_not_wait_for_it(live: Callable[[Story], None]) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.nodes.trouble({"prepare": [Fault(done=None, delay_s=20)]})
        growing = asyncio.ensure_future(pool.fleet.scale(3, ()))
        await asyncio.sleep(1)
        pool.nodes.simulated[0].say_farewell("its timeout is over", timed_out=True)
        async with asyncio.timeout(60):
            await growing
        assert [node.rank for node in pool.fleet.nodes] == [1, 2]
        assert all(node.head_addr == node.address for node in pool.nodes.simulated[1:])

    live(story)


def test_a_machine_that_is_not_confirmed_gone_is_no_node_any_more(live: Callable[[Story], None]) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.provider.stubborn.add("fake-1")
        with pytest.raises(TerminationError):
            await pool.fleet.scale(1, ())
        assert [node.rank for node in pool.fleet.nodes] == [0]

    live(story)


def test_an_order_to_kill_a_worker_that_is_due_after_the_end_is_no_error(live: Callable[[Story], None]) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.submit(Call(held=True))
        await asyncio.sleep(1)
        for node in pool.nodes.simulated:
            pool.network.part(node.instance.id, silently=True)
        pool.cancel(pool.tickets, kill=True)
        await pool.close()
        await asyncio.sleep(10)

    live(story)


def test_a_result_that_comes_after_its_worker_was_found_dead_keeps_no_worker_busy(
    live: Callable[[Story], None],
) -> None:
    async def story(pool: SimulatedPool) -> None:
        pool.submit(Call(held=True))
        pool.submit(Call(held=True))
        await asyncio.sleep(1)
        pool.released.set()
        for node in pool.nodes.simulated:
            pool.network.cut(node.lanes[0])
        await asyncio.sleep(0.07)  # dialled again, they have answered and sent the results: both are on their way
        for node in pool.nodes.simulated:
            node.kill_process(0)
        await asyncio.sleep(10)
        assert [ticket.future.result(0) for ticket in pool.tickets] == [0, 1]
        async with asyncio.timeout(10):
            await pool.fleet.scale(1, ())

    live(story)


def test_a_call_that_was_refused_does_not_run_when_there_are_nodes_again(live: Callable[[Story], None]) -> None:
    async def story(pool: SimulatedPool) -> None:
        for node in pool.nodes.simulated:
            node.say_farewell("its timeout is over", timed_out=True)
        await asyncio.sleep(1)
        pool.submit(Call())
        await asyncio.sleep(1)
        await pool.fleet.scale(1, ())
        await asyncio.sleep(1)
        (ticket,) = pool.tickets
        assert isinstance(ticket.future.exception(0), PoolStateError)
        assert ticket.ran_on == []

    live(story)
