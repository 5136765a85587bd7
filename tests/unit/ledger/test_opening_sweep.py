"""A pool that opens ends what dead owners left at its provider, where machines cannot end their own bill."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import CapacityError, TerminationError
from skyward.events import Notice, SkywardEvent
from skyward.ledger import sweep as opening_sweep
from skyward.ledger.fleet_record import new_pool_id
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Owner
from skyward.ledger.sweep import OpeningSweep, opening_sweeps, settle_sweeps
from skyward.providers.base import Instance, LaunchOrder, MachineSecret, Offer
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider
from support.simulation import simulate

ALIVE = Owner.this_process()
DEAD = replace(ALIVE, started="long ago")
ELSEWHERE = replace(DEAD, host="another machine")
STARTED = 1_000_000.0
PURCHASE = Purchase(pool_id="old", provider="fake", ends_itself=False)


class Stage:
    """A ledger, a provider, and what earlier programs left there."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.provider = FakeProvider()
        self.provider.ends_itself = False
        self.events: list[SkywardEvent] = []

    def leave(self, owner: Owner, *, recorded: bool = True) -> str:
        key = f"key-{len(self.provider.instances)}"
        self.ledger.reserve({key: 0}, PURCHASE, owner=owner)

        async def launch() -> Sequence[Instance]:
            offers = await self.provider.offers(parse_request())
            return await self.provider.launch(offers, LaunchOrder(pool_id="old", keys=(key,), timeout_s=60.0))

        (instance,) = asyncio.run(launch())
        if recorded:
            self.ledger.record([instance])
        return instance.id

    def sweep(self) -> None:
        async def scenario() -> None:
            sweep = OpeningSweep(self.provider, self.ledger, publish=self.events.append)
            sweep.begin()
            await sweep.settle()

        self.provider.calls.clear()
        asyncio.run(scenario())

    def notices(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(Ledger(tmp_path / "ledger.db", now=lambda: STARTED))


def test_unrecorded_machines_of_a_fleet_of_the_same_name_are_named_in_a_notice_and_live_on(stage: Stage) -> None:
    lost, own, other = new_pool_id("llm"), new_pool_id("llm"), new_pool_id("other")

    async def scenario() -> None:
        offers = await stage.provider.offers(parse_request())
        for pool_id in (lost, own, other):
            order = LaunchOrder(pool_id=pool_id, keys=(f"{pool_id}-0-aaaaaaaa",), timeout_s=60.0)
            await stage.provider.launch(offers, order)
        for fleet in ("llm", ""):
            sweep = OpeningSweep(stage.provider, stage.ledger, publish=stage.events.append, pool_id=own, fleet=fleet)
            sweep.begin()
            await sweep.settle()

    asyncio.run(scenario())

    (told,) = stage.notices()
    (machine, *_) = stage.provider.alive
    assert f"fake has machines of another fleet 'llm': {machine}. " in told
    assert f"`skyward down {lost} --provider fake` ends them" in told
    assert len(stage.provider.alive) == 3


def test_a_dead_owners_machine_is_ended_and_named_with_its_cost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, unrecorded, kept = stage.leave(DEAD), stage.leave(DEAD, recorded=False), stage.leave(ALIVE)
    monkeypatch.setattr(opening_sweep.time, "time", lambda: STARTED + 7200)
    stage.sweep()

    assert stage.provider.alive == [kept]
    (told,) = stage.notices()
    assert f"{ended} (fake of pool old, it cost about $2.00)" in told
    assert unrecorded in told
    assert [entry.instance_id for entry in stage.ledger.open_entries()] == [kept]


def test_the_machines_of_one_name_are_ended_once_for_all_of_its_providers(stage: Stage) -> None:
    ended = stage.leave(DEAD)
    idle = FakeProvider()

    async def scenario() -> None:
        sweeps = opening_sweeps([stage.provider, idle], stage.ledger, publish=stage.events.append, pool_id="", fleet="")
        for sweep in sweeps:
            sweep.begin()
        await settle_sweeps(sweeps)

    stage.provider.calls.clear()
    asyncio.run(scenario())
    assert stage.provider.calls.count("terminate") + idle.calls.count("terminate") == 1
    (told,) = stage.notices()
    assert ended in told


def test_providers_that_hang_delay_the_close_together(stage: Stage) -> None:
    class Hanging(FakeProvider):
        async def tagged(self) -> Sequence[Instance]:
            await asyncio.Event().wait()
            return ()

    async def scenario() -> float:
        providers = [Hanging(name=name) for name in "abcde"]
        sweeps = opening_sweeps(providers, stage.ledger, publish=stage.events.append, pool_id="", fleet="llm")
        for sweep in sweeps:
            sweep.begin()
        began = asyncio.get_running_loop().time()
        await settle_sweeps(sweeps)
        return asyncio.get_running_loop().time() - began

    assert simulate(scenario) == 30.0


@pytest.mark.parametrize("owner", [ALIVE, ELSEWHERE])
def test_a_machine_whose_owner_is_not_certainly_dead_is_left_alone(stage: Stage, owner: Owner) -> None:
    left = stage.leave(owner)
    stage.sweep()

    assert (stage.provider.alive, stage.provider.calls, stage.notices()) == ([left], [], [])


def test_machines_that_end_themselves_are_left_to_do_so(stage: Stage) -> None:
    stage.provider.ends_itself = True
    left = stage.leave(DEAD)
    stage.sweep()

    assert (stage.provider.alive, stage.provider.calls) == ([left], [])


class Entrusting(FakeProvider):
    """Whose machines end themselves once they have received a secret."""

    async def secret(self, instance: Instance) -> MachineSecret | None:
        return MachineSecret(command=("true",), value="secret")


def test_machines_that_end_themselves_by_a_secret_may_never_have_got_it_and_are_ended(stage: Stage) -> None:
    stage.provider = Entrusting()
    stage.leave(DEAD)
    kept = stage.leave(ALIVE)
    stage.sweep()

    assert stage.provider.alive == [kept]


def test_machines_of_other_providers_are_left_to_their_own_pools(stage: Stage) -> None:
    stage.ledger.reserve({"k": 0}, replace(PURCHASE, provider="other"), owner=DEAD)
    stage.sweep()

    assert (stage.provider.calls, len(stage.ledger.open_entries())) == ([], 1)


def test_a_machine_that_does_not_end_is_named_and_stays_in_the_ledger(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end_in_vain(provider: object, instance_ids: Sequence[str]) -> None:
        raise TerminationError("it does not answer", instance_ids=tuple(instance_ids))

    monkeypatch.setattr("skyward.ledger.sweep.end_instances", end_in_vain)
    left = stage.leave(DEAD)
    stage.sweep()

    (told,) = stage.notices()
    assert f"{left}: it does not answer" in told
    assert "run `skyward sweep`" in told
    assert len(stage.ledger.open_entries()) == 1


def test_a_ledger_that_cannot_be_read_is_a_notice(stage: Stage) -> None:
    stage.ledger.path.write_bytes(b"no ledger" * 1000)
    stage.sweep()

    assert "could not look for machines" in stage.notices()[0]


def test_a_sweep_that_takes_too_long_is_waited_for_no_longer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(provider: object, instance_ids: Sequence[str]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("skyward.ledger.sweep.end_instances", hang)
    monkeypatch.setattr(opening_sweep, "_SETTLE_S", 0.01)
    left = stage.leave(DEAD)
    stage.sweep()

    assert (stage.provider.alive, len(stage.ledger.open_entries())) == ([left], 1)


# --- a pool -----------------------------------------------------------------------------------------------------------


def test_a_pool_sweeps_while_it_opens_and_waits_for_it_when_it_closes() -> None:
    stage = Stage(Ledger.of_user())
    stage.leave(DEAD)
    kept = stage.leave(ALIVE)
    stage.provider.fail("launch", CapacityError("sold out"))
    pool = sky.ComputePool(provider=stage.provider, spot="never", display="quiet", on_event=stage.events.append)
    try:
        with pytest.raises(CapacityError, match="sold out"), pool:
            raise AssertionError("it is not open")
        alive = stage.provider.alive
    finally:
        stage.ledger.close([entry.key for entry in stage.ledger.open_entries(pool_id="old")])

    assert alive == [kept]
    assert any("ended machines that programs had left at fake" in told for told in stage.notices())


class Rented(sky.Local):
    """This machine, as if it were rented, and could not end its bill."""

    own_machines = False

    @property
    def name(self) -> str:
        return "rented"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        return [replace(each, price_per_hour=1.0) for each in await super().offers(request)]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        return [replace(each, ends_itself=False) for each in await super().launch(offers, order)]


def test_an_open_pool_has_ended_a_dead_owners_machine_and_left_a_living_owners_alone() -> None:
    provider, ledger, told = Rented(), Ledger.of_user(), queue.Queue[str]()

    def leave(key: str, owner: Owner) -> str:
        ledger.reserve({key: 0}, replace(PURCHASE, provider="rented"), owner=owner)
        order = LaunchOrder(pool_id="old", keys=(key,), timeout_s=60.0)
        (instance,) = asyncio.run(provider.launch(asyncio.run(provider.offers(parse_request())), order))
        ledger.record([instance])
        return instance.id

    def listed() -> set[str]:
        return {each.id for each in asyncio.run(provider.tagged())}

    def hear(event: SkywardEvent) -> None:
        if isinstance(event, Notice) and "when they died" in event.message:
            told.put(event.message)

    dead, alive = leave("dead", DEAD), leave("alive", ALIVE)
    try:
        with sky.ComputePool(provider=provider, display="quiet", on_event=hear) as pool:
            assert dead in told.get(timeout=30)
            assert pool.submit(len, "four").result(60) == 4
            assert listed() >= {alive}
            assert dead not in listed()
    finally:
        asyncio.run(provider.terminate([dead, alive]))
        ledger.close(["dead", "alive"])

    assert told.empty()
