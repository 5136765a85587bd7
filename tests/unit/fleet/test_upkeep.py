"""The fleet is kept at its wanted size: nodes are replaced, added, taken away, and given up."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    PoolStateError,
    TerminationError,
    UnreachableError,
)
from skyward.events import Error
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, LaunchOrder, Offer
from support.fleets import FleetStage, StagedFleet, until


class Stage(FleetStage):
    """For fleets of two."""

    def fleet(self, **request: Any) -> StagedFleet:
        self.present = super().fleet(**{"timeout": 600} | request)
        return self.present

    def ranks(self) -> list[int]:
        return [node.rank for node in self.present.nodes]

    def errors(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Error)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


async def test_a_lost_node_is_replaced_under_its_rank(stage: Stage) -> None:
    async with stage.kept():
        stage.lose(1)
        await until(lambda: stage.engine.of("attach") == [(0,), (1,), (1,)])
        assert stage.engine.of("detach") == [(1, "node 1 is lost: struck by lightning", False)]
        assert stage.errors() == ["node 1 is lost: struck by lightning; another takes its place"]
        await until(lambda: len(stage.provider.alive) == 2)
        assert stage.ranks() == [0, 1]


async def test_a_node_is_replaced_although_keeping_it_failed_once(stage: Stage) -> None:
    async with stage.kept():
        stage.engine.breaks.append(OSError(errno.EMFILE, "Too many open files"))
        stage.lose(1)
        await until(lambda: stage.engine.of("attach") == [(0,), (1,), (1,)])
        assert any("keeping node 1 failed and was started again" in error for error in stage.errors())
        await until(lambda: len(stage.provider.alive) == 2)


async def test_a_node_whose_keeping_fails_again_and_again_is_given_up_and_not_bought_for_ever(stage: Stage) -> None:
    async with stage.kept():
        stage.engine.cancels_itself.add(1)
        stage.lose(1)
        await until(lambda: stage.engine.of("detach")[-1:] != [] and stage.engine.of("detach")[-1][2])
        assert len([node for node in stage.nodes.opened if node.rank == 1]) <= 1 + 5
        await until(lambda: len(stage.provider.alive) == 1)


async def test_survivors_are_told_of_the_next_head(stage: Stage) -> None:
    async with stage.kept():
        survivor = stage.nodes.opened[1]
        assert survivor.head_addr == "127.0.0.1"
        stage.lose(0)
        await until(lambda: survivor.head_addr == "127.0.0.2")


async def test_a_node_whose_time_is_over_is_not_replaced(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.lose(1, reason="its timeout is over", timed_out=True)
        await until(lambda: fleet.wanted == {0})
        assert stage.engine.of("detach") == [(1, "node 1 is lost: its timeout is over", True)]
        assert len(stage.provider.instances) == 2


async def test_replacing_is_tried_again_after_growing_pauses(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.provider.fail("launch", CapacityError("sold out"), times=2)
        stage.lose(1)
        await until(lambda: stage.engine.of("attach").count((1,)) == 2)
        assert fleet.wanted == {0, 1}
        assert [pause for pause in stage.clock.slept_s if pause >= 1] == [4.0, 8.0]
        assert len(stage.errors()) == 3
        assert all("node 1 could not be replaced: " in error for error in stage.errors()[1:])


@pytest.mark.parametrize(
    ("error", "attempts"), [(CapacityError("sold out"), 4), (AuthenticationError("who are you?"), 1)]
)
async def test_what_cannot_be_replaced_is_given_up(stage: Stage, error: Exception, attempts: int) -> None:
    async with stage.kept() as fleet:
        launches = stage.provider.calls.count("launch")
        stage.provider.fail("launch", error, times=20)
        stage.lose(1)
        await until(lambda: fleet.wanted == {0})
        assert stage.provider.calls.count("launch") == launches + attempts
        rank, reason, for_good = stage.engine.of("detach")[-1]
        assert (rank, for_good) == (1, True)
        assert reason.startswith(f"node 1 is lost: struck by lightning, and could not be replaced: {error}")
        await until(lambda: stage.nodes.opened[0].total_nodes == 1)  # it is told by a task of its own


async def test_a_node_of_a_pool_that_was_ended_from_outside_is_not_replaced_and_the_reason_says_so(
    stage: Stage,
) -> None:
    async with stage.kept() as fleet:
        stage.ledger.end_pool("pool")
        stage.lose(1)
        await until(lambda: fleet.wanted == {0})
        assert "could not be replaced: pool pool was ended with `skyward down`" in stage.engine.of("detach")[-1][1]


async def test_a_node_that_never_lasts_is_not_bought_for_ever(stage: Stage) -> None:
    async with stage.kept() as fleet:
        for lives in range(2, 6):
            stage.lose(1)
            await until(lambda lives=lives: stage.engine.of("attach").count((1,)) == lives)
        stage.lose(1)
        await until(lambda: fleet.wanted == {0})
        assert len(stage.provider.instances) == 6
        assert stage.engine.of("detach")[-1][1].endswith("not be replaced: the nodes before it did not last either")


async def test_growing_adds_nodes_at_the_lowest_free_ranks(stage: Stage) -> None:
    async with stage.kept() as fleet:
        await fleet.scale(4, ())
        assert stage.ranks() == [0, 1, 2, 3]
        assert stage.engine.of("expect") == [(0, 1), (2, 3)]
        assert {node.total_nodes for node in stage.nodes.opened} == {4}
        await fleet.scale(3, {1})
        await fleet.scale(4, ())
        assert stage.engine.of("attach")[-1] == (1,)


async def test_what_cannot_be_added_is_an_error_and_the_rest_goes_on(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.provider.fail("launch", CapacityError("sold out"))
        with pytest.raises(CapacityError, match="sold out"):
            await fleet.scale(4, ())
        assert fleet.wanted == {0, 1}
        assert [entry[0] for entry in stage.engine.of("detach")] == [2, 3]
        assert len(stage.errors()) == 1
        await fleet.scale(3, ())
        assert stage.ranks() == [0, 1, 2]


async def test_a_new_node_whose_workers_do_not_answer_is_ended(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.engine.refuses[2] = lambda: CapacityError("no answer")
        with pytest.raises(CapacityError, match="no answer"):
            await fleet.scale(3, ())
        assert len(stage.provider.alive) == 2


async def test_shrinking_drains_before_it_ends_and_spares_the_head(stage: Stage) -> None:
    async with stage.kept(nodes=3) as fleet:
        stage.engine.busy[2] = asyncio.Event()
        shrinking = asyncio.ensure_future(fleet.scale(1, {0, 2}))
        await until(lambda: stage.ranks() == [0, 2])  # the idle one is gone, the busy one is not
        assert not shrinking.done()
        stage.engine.busy[2].set()
        await shrinking
        assert stage.ranks() == [0]
        verbs = [entry[0] for entry in stage.engine.log if entry[1] == 2]
        assert verbs == ["attach", "retire", "drain", "detach"]


async def test_those_not_yet_there_go_first_and_who_waits_for_them_is_told(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.nodes.hang(2, "prepare")
        growing = asyncio.ensure_future(fleet.scale(3, ()))
        await stage.nodes.hanging.wait()
        await fleet.scale(2, ())
        with pytest.raises(asyncio.CancelledError):
            await growing
        assert stage.ranks() == [0, 1]
        assert len(stage.provider.alive) == 2


async def test_a_node_that_is_lost_while_it_drains_is_not_replaced(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.engine.busy[1] = asyncio.Event()
        shrinking = asyncio.ensure_future(fleet.scale(1, ()))
        await until(lambda: stage.engine.of("drain") == [(1,)])
        stage.lose(1)
        await until(lambda: stage.engine.of("detach") != [])
        stage.engine.busy[1].set()
        await shrinking
        assert len(stage.provider.instances) == 2


async def test_a_closed_fleet_takes_nothing_more(stage: Stage) -> None:
    async with stage.kept() as fleet:
        fleet.close()
        with pytest.raises(PoolStateError, match="closed"):
            fleet.scale(3, ())


async def test_who_asks_for_a_size_while_a_node_is_replaced_waits_for_it(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.nodes.hang(1, "prepare")
        stage.lose(1)
        await stage.nodes.hanging.wait()
        waiting = asyncio.ensure_future(fleet.scale(2, ()))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await fleet.scale(1, ())
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert stage.ranks() == [0]


async def test_a_node_that_cannot_be_drained_is_ended_all_the_same(stage: Stage) -> None:
    async def refuse(rank: int) -> None:
        raise ValueError("no")

    async with stage.kept() as fleet:
        stage.engine.drain = refuse  # type: ignore[method-assign]
        await fleet.scale(1, ())
        assert stage.ranks() == [0]
        assert stage.errors() == ["node 1 could not be drained: no"]


class HeldUp:
    """A launch that is refused, but not before it is let go."""

    def __init__(self, stage: Stage) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self._launch = stage.provider.launch
        stage.provider.launch = self.launch  # type: ignore[method-assign]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        if self.go.is_set():
            return await self._launch(offers, order)
        self.begun.set()
        await self.go.wait()
        raise CapacityError("sold out")


@pytest.mark.parametrize("action", ["close", "shrink"])
async def test_a_refusal_that_comes_after_the_end_buys_nothing_more(stage: Stage, action: str) -> None:
    async with stage.kept() as fleet:
        held_up = HeldUp(stage)
        stage.lose(1)
        await held_up.begun.wait()
        ending = asyncio.ensure_future(fleet.stop() if action == "close" else fleet.scale(1, ()))
        await asyncio.sleep(0.01)
        held_up.go.set()
        async with asyncio.timeout(5):
            await ending
        assert len(stage.provider.instances) == 2


async def test_closing_while_cleaning_up_fails_still_closes(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.nodes.hang(1, "prepare")
        stage.lose(1)
        await stage.nodes.hanging.wait()
        await until(lambda: len(stage.provider.alive) == 2)
        stage.provider.fail("terminate", RuntimeError("500"), times=3)
        async with asyncio.timeout(5):
            await fleet.stop()
        assert len(stage.provider.instances) == 3


async def test_stopping_waits_for_no_launch_before_it_ends_healthy_machines_and_ends_the_late_one_too(
    stage: Stage,
) -> None:
    async with stage.kept() as fleet:
        launch, begun, go = stage.provider.launch, asyncio.Event(), asyncio.Event()

        async def launch_late(offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
            begun.set()
            await go.wait()
            return await launch(offers, order)

        stage.provider.launch = launch_late  # type: ignore[method-assign]
        stage.lose(1)
        await begun.wait()
        stopping = asyncio.ensure_future(fleet.stop())
        await until(lambda: stage.provider.alive == [])
        assert not stopping.done()
        go.set()
        await stopping
        assert len(stage.provider.instances) == 3
        assert stage.provider.alive == []


async def test_a_machine_that_does_not_end_is_tried_for_no_longer_than_once(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.nodes.hang(1, "prepare")
        stage.lose(1)
        await stage.nodes.hanging.wait()
        stubborn = Stubborn(stage, "fake-2")
        calls = stage.provider.calls.count("terminate")
        with pytest.raises(TerminationError):
            await fleet.stop()
        assert stage.provider.calls.count("terminate") <= calls + 7, "six attempts, beside the end of the lost node"
        stubborn.machines.clear()


class Stubborn:
    """A provider that does not end some machines for now."""

    def __init__(self, stage: Stage, *machines: str) -> None:
        self.machines = set(machines)
        self._terminate = stage.provider.terminate
        stage.provider.terminate = self.terminate  # type: ignore[method-assign]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        await self._terminate([each for each in instance_ids if each not in self.machines])


async def test_stopping_ends_lost_machines_even_where_others_cannot_be_ended(stage: Stage) -> None:
    async with stage.kept():
        stubborn = Stubborn(stage, "fake-0", "fake-1")
        stage.lose(1)
        await until(lambda: stage.engine.of("attach").count((1,)) == 2)
        stubborn.machines.discard("fake-1")
        with pytest.raises(TerminationError) as left:
            await stage.present.stop()
        assert left.value.instance_ids == ("fake-0",)
        assert stage.provider.alive == ["fake-0"]
        stubborn.machines.clear()


async def test_a_machine_that_cannot_be_ended_keeps_no_other_from_its_rank(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stubborn = Stubborn(stage, "fake-1")
        with pytest.raises(TerminationError):
            await fleet.scale(1, ())
        await fleet.scale(2, ())
        assert stage.ranks() == [0, 1]
        stubborn.machines.clear()


async def test_a_survivor_that_could_not_be_told_of_the_next_head_is_told_the_next_time(stage: Stage) -> None:
    async with stage.kept() as fleet:
        survivor = stage.nodes.opened[1]
        stage.nodes.fail(1, "join", UnreachableError("the link is down for a second"))
        stage.lose(0)
        await until(lambda: survivor.log.count("join") == 2)
        stage.nodes.heal(1, "join")
        await fleet.scale(3, ())
        assert survivor.head_addr == "127.0.0.2"


async def test_a_head_that_was_given_up_is_the_first_to_be_added_again(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.provider.fail("launch", AuthenticationError("expired"))
        stage.lose(0)
        await until(lambda: fleet.wanted == {1})
        await fleet.scale(2, ())
        assert stage.ranks() == [0, 1]


async def test_without_a_head_nodes_are_their_own_until_there_is_one_again(stage: Stage) -> None:
    async with stage.kept() as fleet:
        survivor = stage.nodes.opened[1]
        stage.provider.fail("launch", AuthenticationError("expired"))
        stage.lose(0)
        await until(lambda: survivor.head_addr == survivor.address)
        assert fleet.wanted == {1}
        await fleet.scale(2, ())
        await until(lambda: survivor.head_addr == "127.0.0.2")


async def test_nodes_that_do_not_reach_the_next_head_are_their_own(stage: Stage) -> None:
    stage.provider.networks = ("a", "a", "b")
    async with stage.kept():
        survivor = stage.nodes.opened[1]
        assert survivor.head_addr == "127.0.0.1"
        stage.lose(0)
        await until(lambda: survivor.head_addr == survivor.address)


@pytest.mark.parametrize("network", ["", "b"])
async def test_a_node_of_its_own_is_replaced_while_there_is_no_head(stage: Stage, network: str) -> None:
    stage.provider.networks = ("a", network)
    async with stage.kept():
        stage.nodes.hang(0, "prepare")
        stage.lose(0)
        await stage.nodes.hanging.wait()
        stage.lose(1)
        await until(lambda: stage.engine.of("attach") == [(0,), (1,), (1,)])


async def test_where_nodes_have_to_reach_each_other_none_is_added_that_does_not(stage: Stage) -> None:
    stage.provider.networks, stage.one_network = ("a", "a", "b"), True
    async with stage.kept() as fleet:
        with pytest.raises(ConfigurationError, match="nodes 0, 1 reach each other, node 2 reaches no other"):
            await fleet.scale(3, ())
        assert stage.ranks() == [0, 1]
        assert "start" not in stage.nodes.opened[2].log


async def test_what_can_never_be_added_is_not_bought_again_and_again(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.nodes.fail(2, "prepare", CapacityError("it never starts"))
        errors: list[str] = []
        for _ in range(20):  # as adaptive scaling asks while work waits
            with pytest.raises(CapacityError) as refused:
                await fleet.scale(3, ())
            errors.append(str(refused.value))
        assert len(stage.provider.instances) == 2 + 5
        assert "the last 5 times no node could be added; there will be no further attempt for 60 s" in errors[-1]
        stage.nodes.heal(2, "prepare")
        stage.clock.advance(61)
        await fleet.scale(3, ())
        assert stage.ranks() == [0, 1, 2]


async def test_a_machine_that_cannot_be_ended_is_tried_again_until_it_is_gone(stage: Stage) -> None:
    async with stage.kept():
        stubborn = Stubborn(stage, "fake-1")
        stage.lose(1)
        await until(lambda: any("may still cost money: fake-1" in error for error in stage.errors()))
        stubborn.machines.clear()
        await until(lambda: "fake-1" not in stage.provider.alive)
