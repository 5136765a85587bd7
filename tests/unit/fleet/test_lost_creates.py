"""A create call without an answer, whose machine appears late or never: replaced, looked for, ended, written down."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, LedgerError, SkywardError, UnreachableError
from skyward.events import Notice
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, InstanceState
from skyward.testing.provider import Fate
from support.fleets import FleetStage
from support.simulation import SimulatedClock, simulate

NO_ANSWER = UnreachableError("POST /things: status 500")
LISTING_S = 10.0
"""Time after which the fake lists a machine for certain, as far as its adapter knows."""


@dataclass(kw_only=True)
class Stage(FleetStage):
    """Time jumps; one node."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def live(self, *, lasts_s: float) -> None:
        """Open a pool of one node, keep it for a time, and close it."""
        fleet = self.fleet(nodes=1)
        await fleet.start()
        (node,) = fleet.nodes
        await self.clock.sleep(lasts_s)
        assert self.provider.instances[node.instance.id].state is InstanceState.RUNNING
        await fleet.stop()
        assert self.provider.alive == []

    def notices(self) -> str:
        return "\n".join(event.message for event in self.events if isinstance(event, Notice))

    def span_s(self, instance_id: str) -> float:
        """Seconds for which a machine was billed."""
        return self.provider.billed(instance_id) * 3600


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


def test_a_create_without_effect_delays_the_opening_and_the_ledger_keeps_its_key_until_it_is_certain(
    stage: Stage,
) -> None:
    stage.provider.fail("create", NO_ANSWER)
    simulate(lambda: stage.live(lasts_s=60))

    assert "status 500), and lists no machine of it 10 s later: another is created" in stage.notices()
    assert len(stage.provider.instances) == 1
    (entry,) = stage.ledger.open_entries()
    assert entry.instance_id is None
    assert entry.key not in {each.key for each in stage.provider.instances.values()}


def test_a_pool_that_lasts_settles_that_key_itself(stage: Stage) -> None:
    stage.provider.fail("create", NO_ANSWER)
    simulate(lambda: stage.live(lasts_s=900))

    assert stage.ledger.open_entries() == ()


@pytest.mark.parametrize(
    ("appears_after_s", "lasts_s", "billed_s"),
    [
        pytest.param(4.0, 300, 300, id="in time: adopted"),
        pytest.param(40.0, 300, 71, id="late: ended while the pool is open"),
        pytest.param(200.0, 201, 217, id="later: ended with the pool"),
    ],
)
def test_a_machine_whose_create_had_no_answer_is_adopted_or_ended_whenever_it_appears(
    stage: Stage, appears_after_s: float, lasts_s: float, billed_s: float
) -> None:
    stage.provider.fail("create", NO_ANSWER, done=True)
    stage.provider.fates.append(Fate(unlisted_s=appears_after_s))
    simulate(lambda: stage.live(lasts_s=lasts_s))

    assert stage.ledger.open_entries() == ()
    assert stage.span_s("fake-0") == pytest.approx(billed_s, abs=31)
    assert ("fake-0 of a create call without an answer has appeared" in stage.notices()) == (
        appears_after_s > LISTING_S
    )


def test_a_machine_that_appears_late_has_cost_money_from_its_create_on(stage: Stage) -> None:
    stage.provider.fail("create", NO_ANSWER, done=True)
    stage.provider.fates.append(Fate(unlisted_s=40.0))

    async def scenario() -> float:
        fleet = stage.fleet(nodes=1)
        await fleet.start()
        await stage.clock.sleep(300)
        await fleet.stop()
        return fleet.cost(stage.clock.elapsed()).total

    cost = simulate(scenario)
    assert cost == pytest.approx(stage.provider.bill(), abs=0.001)
    assert stage.provider.billed("fake-0") > 0


@pytest.mark.parametrize("error", [AuthenticationError("the key was revoked"), UnreachableError("status 500")])
def test_an_order_that_fails_after_a_create_without_an_answer_keeps_that_key_for_a_sweep(
    stage: Stage, error: SkywardError
) -> None:
    """Its machine is listed still later than anybody promised."""
    stage.provider.fail("create", NO_ANSWER, done=True)
    stage.provider.fail("create", error, times=2)
    stage.provider.fates.append(Fate(unlisted_s=400.0))

    async def scenario() -> None:
        with pytest.raises(type(error)):
            await stage.fleet(nodes=1).start()

    simulate(scenario)
    (left,) = stage.provider.alive
    assert stage.provider.instances[left].key in {each.key for each in stage.ledger.open_entries()}


def test_a_list_that_cannot_be_read_leaves_the_key_to_a_sweep_and_the_error_says_so(stage: Stage) -> None:
    stage.provider.fail("create", NO_ANSWER, done=True)
    stage.provider.fail("find", UnreachableError("status 502"), times=99)
    stage.provider.fail("tagged", UnreachableError("status 502"), times=99)

    async def scenario() -> str:
        with pytest.raises(SkywardError) as caught:
            await stage.fleet(nodes=1).start()
        return str(caught.value)

    message = simulate(scenario)
    (entry,) = stage.ledger.open_entries()
    assert entry.key in message
    assert "skyward sweep" in message


def test_an_interruption_during_the_search_creates_no_other_machine(stage: Stage) -> None:
    stage.provider.fail("create", NO_ANSWER)

    async def scenario() -> None:
        opening = asyncio.ensure_future(stage.fleet(nodes=1).start())
        await stage.clock.sleep(LISTING_S / 2)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    simulate(scenario)
    assert stage.provider.calls.count("create") == 1
    assert stage.provider.instances == {}


def test_a_ledger_that_cannot_be_written_ends_no_search_for_machines(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage.provider.fail("create", NO_ANSWER, done=True)
    stage.provider.fates.append(Fate(unlisted_s=40.0))
    record = stage.ledger.record

    def refuse_late_ones(instances: Sequence[Instance]) -> None:
        if any(each.id == "fake-0" for each in instances):
            raise LedgerError("the disk is full")
        record(instances)

    monkeypatch.setattr(stage.ledger, "record", refuse_late_ones)
    simulate(lambda: stage.live(lasts_s=300))

    assert stage.span_s("fake-0") == pytest.approx(71, abs=31)
    assert "the disk is full" in caplog.text
