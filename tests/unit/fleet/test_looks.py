"""Whoever waits for machines looks together: one call of the provider an interval, however many wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest

from skyward.errors import RateLimitError
from skyward.fleet.fleet import Member
from skyward.fleet.node import Node, SharedLooks
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, InstanceState
from skyward.testing.provider import FakeProvider, Fate
from support.fleets import FleetStage
from support.simulation import SimulatedClock, simulate

MACHINES = 64
BOOT_S = 300.0


class Watched(FakeProvider):
    """Writes down every look at its machines."""

    def __init__(self) -> None:
        super().__init__(clock=SimulatedClock())
        self.looks: list[tuple[float, tuple[str, ...]]] = []
        self.hangs = 0

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        self.looks.append((self.clock.elapsed(), tuple(instance_ids)))
        if self.hangs:
            self.hangs -= 1
            await asyncio.Event().wait()
        return await super().describe(instance_ids)

    @property
    def pauses_s(self) -> list[float]:
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.looks)]


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: Watched = field(default_factory=Watched)  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
    clock: SimulatedClock = field(default_factory=SimulatedClock)  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]


@pytest.mark.parametrize(("apart_s", "budget"), [(0.0, 40), (0.37, 320)])
def test_64_machines_that_are_slow_to_boot_cost_at_most_one_look_a_second(
    tmp_path: Path, apart_s: float, budget: int
) -> None:
    """``budget`` is for all machines together: each look for itself would be 64 times as many."""
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"))

    async def scenario() -> None:
        stage.provider.fates.extend(Fate(pending_s=BOOT_S - number) for number in range(MACHINES))
        fleet = stage.fleet(nodes=MACHINES)

        make_node = fleet._make_node

        async def make_node_later(member: Member, node: Node) -> None:
            await asyncio.sleep(member.rank * apart_s)
            await make_node(member, node)

        fleet._make_node = make_node_later  # type: ignore[method-assign]
        await fleet.start()
        assert len(fleet.nodes) == MACHINES
        assert min(stage.provider.pauses_s) >= 1.0
        assert len(stage.provider.looks) <= budget
        await fleet.stop()

    simulate(scenario)


def looking(provider: Watched) -> SharedLooks:
    provider.instances |= {each: replace(INSTANCE, id=each) for each in ("fake-1", "fake-2", "fake-3")}
    return SharedLooks(provider, clock=SimulatedClock())


INSTANCE = Instance(id="", key="", state=InstanceState.RUNNING, offer=FakeProvider()._offers[0])


def test_a_providers_own_pace_counts_where_it_is_slower() -> None:
    async def scenario() -> None:
        provider = Watched()
        provider.look_interval_s = 7.0
        looks = looking(provider)
        for _ in range(3):
            await asyncio.gather(*(looks.at(each) for each in ("fake-1", "fake-2", "fake-1")))
        assert provider.looks == [
            (0.0, ("fake-1", "fake-2")),
            (7.0, ("fake-1", "fake-2")),
            (14.0, ("fake-1", "fake-2")),
        ]

    simulate(scenario)


def test_an_error_reaches_all_who_wait_for_the_look_and_nobody_else() -> None:
    async def scenario() -> None:
        provider = Watched()
        looks = looking(provider)
        provider.fail("describe", RateLimitError("later"))
        failed = await asyncio.gather(*(looks.at(each) for each in ("fake-1", "fake-2")), return_exceptions=True)
        assert [type(each) for each in failed] == [RateLimitError] * 2
        assert (await looks.at("fake-1")).id == "fake-1"

    simulate(scenario)


def test_a_cancelled_caller_ends_no_look_that_others_wait_for() -> None:
    async def scenario() -> None:
        provider = Watched()
        looks = looking(provider)
        await looks.at("fake-3")
        first, second = (asyncio.ensure_future(looks.at(each)) for each in ("fake-1", "fake-2"))
        await asyncio.sleep(0.5)
        first.cancel()
        assert (await second).id == "fake-2"
        assert [at for at, _ in provider.looks] == [0.0, 1.0]

    simulate(scenario)


def test_a_look_that_hangs_holds_up_nobody_else_and_ends_with_its_last_caller() -> None:
    async def scenario() -> None:
        provider = Watched()
        looks = looking(provider)
        provider.hangs = 1
        held_up = asyncio.ensure_future(looks.at("fake-1"))
        await asyncio.sleep(0.5)
        assert (await looks.at("fake-2")).id == "fake-2"
        assert not held_up.done()
        held_up.cancel()
        await asyncio.wait([held_up])

    simulate(scenario)  # which finds what is left behind
