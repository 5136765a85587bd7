"""A fleet of several providers: who serves it, what the ledger says, and where replacements come from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, BudgetError, CapacityError, ConfigurationError, UnreachableError
from skyward.events import Error, InstanceLaunching, InstanceProvisioned, Notice
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.testing.provider import FakeProvider, Fate
from support.fleets import FleetStage, until

NEVER_RUNS = Fate(pending_s=math.inf)


def offer(price: float, *, region: str = "here", island: bool = True, name: str = "m", spot: bool = False) -> Offer:
    spec = InstanceSpec(name=name, cpu=2, memory_gib=4)
    return Offer(spec=spec, region=region, price_per_hour=price, island=island, ready_within_s=60.0, spot=spot)


def seller(name: str, *offers: Offer, networks: tuple[str, ...] = ("",)) -> FakeProvider:
    return FakeProvider(offers, name=name, networks=networks)


class Few(FakeProvider):
    """Has two machines."""

    def _make(self, offer: Offer, key: str, order: LaunchOrder) -> Instance:
        if len(self.alive) == 2:
            raise CapacityError("sold out")
        return super()._make(offer, key, order)


class Dwindling(FakeProvider):
    """Has so many machines for sale, and no others once these were bought."""

    stock = 2

    def _make(self, offer: Offer, key: str, order: LaunchOrder) -> Instance:
        if not self.stock:
            raise CapacityError("sold out")
        self.stock -= 1
        return super()._make(offer, key, order)


class SellsOutAt(FakeProvider):
    """Has so many machines, and any number after so many refusals."""

    def __init__(self, offers: Sequence[Offer], *, room: int, refusals: int) -> None:
        super().__init__(offers, networks=("",))
        self.room, self.refusals = room, refusals

    def _make(self, offer: Offer, key: str, order: LaunchOrder) -> Instance:
        if self.refusals and len(self.alive) == self.room:
            self.refusals -= 1
            raise CapacityError("sold out")
        return super()._make(offer, key, order)


class Blind(FakeProvider):
    """Lists no machines."""

    async def tagged(self) -> Sequence[Instance]:
        raise UnreachableError("down")


class OneKind(FakeProvider):
    """Has one kind of accelerator; refuses others."""

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        offers = await super().offers(request)
        if request.wish.shortfall(offers[0].spec):
            raise ConfigurationError(f"no {request.accelerator}")
        return offers


def one_kind(name: str, accelerator: str, count: int, price: float) -> FakeProvider:
    spec = InstanceSpec(name=accelerator, cpu=8, memory_gib=64, accelerator=accelerator, accelerator_count=count)
    return OneKind([Offer(spec=spec, price_per_hour=price, island=True)], name=name, networks=("",))


class Stage(FleetStage):
    def places(self) -> list[tuple[str, str]]:
        return [(each.purchase.provider, each.instance_id or "") for each in self.ledger.open_entries()]

    def notices(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """The first is cheap, the second dear."""
    ledger = Ledger(tmp_path / "ledger.db")
    return Stage(ledger=ledger, provider=seller("cheap", offer(1.0)), others=[seller("dear", offer(2.0))])


async def test_the_cheapest_serves_and_is_in_the_ledger_under_its_own_name(stage: Stage) -> None:
    async with stage.kept():
        assert stage.places() == [("cheap", "cheap-0"), ("cheap", "cheap-1")]
    launching = [event.provider for event in stage.events if isinstance(event, InstanceLaunching | InstanceProvisioned)]
    assert launching == ["cheap"] * 3


async def test_of_several_accelerators_the_cheapest_is_bought_anywhere_and_its_node_knows_which(tmp_path: Path) -> None:
    cheap, dear = one_kind("cheap", "L40S", 4, 2.0), one_kind("dear", "H100-SXM", 8, 9.0)
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=dear, others=[cheap])
    async with stage.kept(accelerator=["H100:2", "L40S:4", "T4"], spot="never"):
        assert stage.places() == [("cheap", "cheap-0"), ("cheap", "cheap-1")]
    cheap.fail("create", CapacityError("sold out"), times=9)
    async with stage.kept(accelerator=["H100:2", "L40S:4", "T4"], spot="never", nodes=1):
        assert stage.places() == [("dear", "dear-0")]

    configs = [node.config for node in stage.nodes.opened if node.config is not None]
    assert [config.accelerators for config in configs] == [("L40S",) * 4, ("L40S",) * 4, ("H100",) * 2]
    asked = [event.accelerators_asked for event in stage.events if isinstance(event, InstanceLaunching)]
    assert asked == [4, 4, 2]


async def test_own_machines_come_first_where_the_order_counts(stage: Stage) -> None:
    stage.provider, stage.others = stage.others[0], [stage.provider]
    async with stage.kept(prefer="order"):
        assert stage.places() == [("dear", "dear-0"), ("dear", "dear-1")]


async def test_sold_out_there_the_next_serves(stage: Stage) -> None:
    stage.provider.fail("create", CapacityError("sold out"), times=9)
    async with stage.kept():
        assert stage.places() == [("dear", "dear-0"), ("dear", "dear-1")]
    assert any(told.startswith("cheap refuses: cheap has none of its offers available") for told in stage.notices())
    assert [event.provider for event in stage.events if isinstance(event, InstanceLaunching)] == ["cheap", "dear"]


async def test_all_sold_out_is_one_error_with_every_refusal(stage: Stage) -> None:
    for provider in (stage.provider, *stage.others):
        provider.fail("create", CapacityError("sold out"), times=9)

    with pytest.raises(CapacityError, match=r"(?s)\n- cheap here: cheap has none .*\n- dear here: dear has none "):
        await stage.fleet().start()
    assert stage.ledger.open_entries() == ()


async def test_refused_machines_are_in_no_bill(stage: Stage) -> None:
    """One of two was made, and undone: it has cost something."""
    stage.provider, (dear,) = Dwindling([offer(1.0)], name="cheap"), stage.others
    stage.provider.stock = 1
    dear.fail("create", CapacityError("sold out"), times=999)
    with pytest.raises(CapacityError):
        await stage.fleet(wait_for_capacity="5m").start()

    (entry,) = stage.ledger.entries()
    assert (entry.purchase.provider, entry.closed_at is None) == ("cheap", False)


async def test_a_pool_that_ends_meanwhile_buys_nothing_elsewhere(stage: Stage) -> None:
    asked = asyncio.Event()

    class Slow(FakeProvider):
        async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
            asked.set()
            await asyncio.sleep(0.02)
            raise CapacityError("sold out")

    stage.provider = Slow([offer(1.0)], name="slow")
    opening = asyncio.ensure_future(stage.fleet(wait_for_capacity="1h").start())
    await asked.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert stage.others[0].calls == ["offers"]
    assert stage.ledger.open_entries() == ()


async def test_who_has_no_credentials_is_named_once(stage: Stage) -> None:
    stage.provider.fail("offers", AuthenticationError("no key"), times=9)
    async with stage.kept(nodes=1) as fleet:
        await fleet.scale(2, ())
        assert [name for name, _ in stage.places()] == ["dear", "dear"]
    told = [each for each in stage.notices() if "no key" in each]
    assert told == ["no offers from 1 of 2 providers: cheap: no key"]


async def test_machines_that_can_cost_more_than_announced_are_named_with_the_sum(tmp_path: Path) -> None:
    cheap, dear = offer(1.0, name="cheap"), offer(3.0, name="dear")
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=seller("east", cheap, dear))
    stage.provider.sold_out.add(cheap)
    async with stage.kept(nodes=2, timeout="2h"):
        pass
    assert [each for each in stage.notices() if each.endswith("; they can cost $12.00 until timeout")]


async def test_refusals_that_differ_by_an_id_are_one_notice(stage: Stage) -> None:
    for number in range(3):
        stage.provider.fail("launch", UnreachableError(f"ask {number} is gone"))
    async with stage.kept(nodes=3, spread=True):
        stage.clock.advance(3600)  # by then it is certain that nothing was made
    assert [each for each in stage.notices() if " refuses: " in each] == ["cheap refuses: ask 0 is gone"]


async def test_a_create_call_without_an_answer_is_settled_at_its_provider(stage: Stage) -> None:
    """Its machine appears late; by then the next provider serves."""
    stage.provider.fate = Fate(unlisted_s=60.0)
    stage.provider.fail("create", UnreachableError("no answer"), times=9, done=True)
    async with stage.kept(nodes=1) as fleet:
        await until(lambda: bool(stage.provider.instances) and not stage.provider.alive)
        assert [node.instance.offer.provider for node in fleet.nodes] == ["dear"]


async def test_a_provider_that_lists_nothing_hides_no_machine_of_another(stage: Stage) -> None:
    """Both lost a create call; one of them fails for as long as the pool lives."""
    stage.provider = cheap = Blind([offer(1.0)], name="cheap", networks=("",))
    stage.others = [dear := stage.others[0], seller("third", offer(3.0))]
    for provider in (cheap, dear):
        provider.fate = Fate(unlisted_s=60.0)
        provider.fail("create", UnreachableError("no answer"), times=9, done=True)
    fleet = stage.fleet(nodes=1)
    await fleet.start(stage.engine)
    assert (len(cheap.instances), len(dear.instances)) == (3, 3)
    await until(lambda: not dear.alive)
    stage.clock.advance(3600)
    await fleet.stop()

    left = {entry.purchase.provider for entry in stage.ledger.open_entries()}
    assert (left, len(cheap.alive)) == ({"cheap"}, 3)


async def test_a_machine_that_does_not_come_up_leads_to_another_provider(stage: Stage) -> None:
    stage.provider.fate = NEVER_RUNS
    async with stage.kept(nodes=1) as fleet:
        assert [node.instance.offer.provider for node in fleet.nodes] == ["dear"]
        await until(lambda: [name for name, _ in stage.places()] == ["dear"])


async def test_a_replacement_comes_from_where_one_can_be_had(stage: Stage) -> None:
    async with stage.kept(nodes=1) as fleet:
        stage.provider.sold_out.add(offer(1.0))
        stage.lose(0)
        await until(lambda: [node.instance.id for node in fleet.ready_nodes()] == ["dear-0"])


async def test_nodes_that_share_a_network_are_replaced_in_it(tmp_path: Path) -> None:
    here, there = offer(1.0, island=False), offer(0.5, island=False)
    east, west = seller("east", here, networks=("e",)), seller("west", there, networks=("w",))
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=east, others=[west])
    west.sold_out.add(there)
    async with stage.kept(nodes=2) as fleet:
        west.sold_out.clear()  # cheaper by now, and out of reach
        stage.lose(1)
        await until(lambda: sorted(node.instance.id for node in fleet.ready_nodes()) == ["east-0", "east-2"])


@pytest.mark.parametrize(
    ("stock", "ids"),
    [pytest.param(1, ["east-2"], id="one is left"), pytest.param(0, ["west-0", "west-1"], id="all are sold out")],
)
async def test_nodes_that_are_lost_together_stay_together(tmp_path: Path, stock: int, ids: list[str]) -> None:
    east = Dwindling([offer(1.0, island=False)], name="east", networks=("e",))
    west = seller("west", offer(2.0, island=False), networks=("w",))
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=east, others=[west])
    async with stage.kept(nodes=2) as fleet:
        east.stock = stock
        stage.lose(0)
        stage.lose(1)
        await until(lambda: len(fleet.wanted) == len(ids))
        await until(lambda: sorted(node.instance.id for node in fleet.ready_nodes()) == ids)
        assert [*west.instances] == [each for each in ids if each.startswith("west")]


async def test_nodes_may_be_spread_over_what_each_provider_has(stage: Stage) -> None:
    stage.provider = Few([offer(1.0)], name="few", networks=("",))
    async with stage.kept(nodes=5, spread=True, max_cost=50.0) as fleet:
        assert sorted(name for name, _ in stage.places()) == ["dear"] * 3 + ["few"] * 2
        assert {node.rank for node in fleet.nodes} == set(range(5))
    assert all(entry.closed_at is not None for entry in stage.ledger.entries())


async def test_without_spread_all_nodes_are_of_one_provider(stage: Stage) -> None:
    stage.provider = Few([offer(1.0)], name="few", networks=("",))
    async with stage.kept(nodes=3):
        assert [name for name, _ in stage.places()] == ["dear"] * 3


async def test_a_pool_waits_for_the_machine_that_appears(stage: Stage) -> None:
    for provider in (stage.provider, *stage.others):
        provider.fail("create", CapacityError("sold out"), times=3)
    async with stage.kept(nodes=1, wait_for_capacity="2h"):
        assert 30 <= stage.clock.elapsed() < 100
    told = stage.notices()
    assert any("\n- dear here: dear has none of its offers" in each for each in told)
    assert "waiting for capacity: minute 0 of 120" in told


async def test_the_wait_ends_with_every_refusal_and_a_line_a_minute(stage: Stage) -> None:
    for provider in (stage.provider, *stage.others):
        provider.fail("create", CapacityError("sold out"), times=999)

    with pytest.raises(CapacityError, match=r"(?s)in 5 min of wait_for_capacity: .*\n- cheap here: .*\n- dear here: "):
        await stage.fleet(nodes=1, wait_for_capacity="5m").start()
    lines = [each for each in stage.notices() if each.startswith("waiting for capacity: minute ")]
    assert lines == [f"waiting for capacity: minute {minute} of 5" for minute in range(5)]


async def test_what_a_spread_pool_has_bought_stays_while_the_missing_machine_is_waited_for(tmp_path: Path) -> None:
    provider = SellsOutAt([offer(1.0)], room=5, refusals=9)
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider)
    async with stage.kept(nodes=6, wait_for_capacity="1h", spread=True) as fleet:
        assert (len(provider.instances), len(provider.alive)) == (6, 6)
        waited_s = stage.clock.elapsed()
        assert 300 <= waited_s < 600
        assert min(node.ready_by for node in fleet.nodes) > waited_s  # no one has tried them meanwhile


async def test_a_pool_takes_more_time_with_each_attempt_that_costs(tmp_path: Path) -> None:
    provider = SellsOutAt([offer(1.0)], room=1, refusals=3)
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider)
    async with stage.kept(nodes=2, wait_for_capacity="2h"):
        assert stage.clock.elapsed() >= 300 + 600 + 1200
        assert len(provider.instances) == 3 + 2


async def test_a_pool_that_shrinks_while_it_waits_for_capacity_buys_only_what_it_still_needs(stage: Stage) -> None:
    stage.others = []
    async with stage.kept(nodes=1, wait_for_capacity="8h") as fleet:
        stage.provider.sold_out.add(offer(1.0))
        growing = asyncio.ensure_future(fleet.scale(4, ()))
        await until(lambda: "waiting for capacity: minute 0 of 480" in stage.notices())
        shrinking = asyncio.ensure_future(fleet.scale(2, ()))
        await until(lambda: [*fleet.members] == [0, 1])  # the others wait no longer
        assert not shrinking.done()
        stage.provider.sold_out.clear()
        await shrinking
        await asyncio.gather(growing, return_exceptions=True)
        assert len(stage.provider.instances) == 2


async def test_a_pool_that_shrinks_to_what_it_has_waits_for_nothing(stage: Stage) -> None:
    async with stage.kept(nodes=1, wait_for_capacity="2h") as fleet:
        for provider in (stage.provider, *stage.others):
            provider.fail("create", CapacityError("sold out"), times=9999)
        growing = asyncio.ensure_future(fleet.scale(4, ()))
        await until(lambda: "waiting for capacity: minute 0 of 120" in stage.notices())
        began = stage.clock.elapsed()
        await fleet.scale(1, ())
        assert stage.clock.elapsed() - began < 1800
        calls = len(stage.provider.calls)
        await asyncio.gather(growing, return_exceptions=True)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(stage.provider.calls) == calls


async def test_an_elastic_pool_with_nodes_orders_less_instead_of_waiting(tmp_path: Path) -> None:
    provider = SellsOutAt([offer(1.0)], room=3, refusals=9999)
    stage = Stage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider)
    async with stage.kept(nodes=(1, 8), wait_for_capacity="2h", timeout="1h", max_cost=99.0) as fleet:
        with pytest.raises(CapacityError):
            await fleet.scale(8, ())
        assert stage.clock.elapsed() < 60
        await fleet.scale(3, ())
        assert len(provider.alive) == 3


async def test_each_wait_is_reported(stage: Stage) -> None:
    stage.others = []
    stage.provider.fail("create", CapacityError("sold out"), times=3)
    async with stage.kept(nodes=1, wait_for_capacity="5m") as fleet:
        stage.clock.advance(600.0)
        stage.provider.fail("create", CapacityError("sold out"), times=3)
        stage.lose(0)
        await until(lambda: [node.instance.id for node in fleet.ready_nodes()] == ["cheap-1"])
    assert stage.notices().count("waiting for capacity: minute 0 of 5") == 2
    assert sum("has none of its offers available" in each for each in stage.notices()) == 2


async def test_nodes_that_wait_together_are_one_line_a_minute(stage: Stage) -> None:
    stage.others = []
    async with stage.kept(nodes=3, wait_for_capacity="5m") as fleet:
        stage.provider.fail("create", CapacityError("sold out"), times=999)
        for rank in (1, 2):
            stage.lose(rank)
        await until(lambda: [*fleet.wanted] == [0])
        assert len([each for each in stage.notices() if each.startswith("waiting for capacity")]) <= 7


async def test_a_pool_of_no_nodes_opens_although_all_is_sold_out_now(stage: Stage) -> None:
    stage.others = []
    stage.provider.fail("offers", CapacityError("sold out"), times=1)
    async with stage.kept(nodes=(0, 4), wait_for_capacity="1h", timeout="1h", max_cost=9.0):
        pass
    stage.provider.fail("offers", CapacityError("sold out"), times=1)
    with pytest.raises(CapacityError, match="sold out"):
        await stage.fleet(nodes=(0, 4), timeout="1h", max_cost=9.0).start()


async def test_the_question_about_an_elastic_pool_waits_for_offers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_CONFIRM_ABOVE", "1")
    stage.others = []
    stage.provider.fail("offers", CapacityError("sold out"), times=3)
    with pytest.raises(BudgetError, match="nobody can confirm it here"):
        await stage.fleet(nodes=(1, 4), wait_for_capacity="1h", max_cost=9.0).start()
    assert stage.clock.elapsed() >= 30


async def test_a_short_wait_is_told_in_seconds(stage: Stage) -> None:
    stage.others = []
    stage.provider.fail("create", CapacityError("sold out"), times=99)
    with pytest.raises(CapacityError, match="in 12 s of wait_for_capacity"):
        await stage.fleet(nodes=1, wait_for_capacity="12s").start()
    assert "waiting for capacity: second 0 of 12" in stage.notices()


async def test_a_replacement_that_was_waited_for_in_vain_is_given_up(stage: Stage) -> None:
    async with stage.kept(nodes=2, wait_for_capacity="5m") as fleet:
        for provider in (stage.provider, *stage.others):
            provider.fail("create", CapacityError("sold out"), times=999)
        began = stage.clock.elapsed()
        stage.lose(1)
        await until(lambda: [*fleet.wanted] == [0])
        assert 300 <= stage.clock.elapsed() - began < 600


async def test_a_price_above_the_limit_is_waited_for_too(stage: Stage) -> None:
    with pytest.raises(CapacityError, match=r"max_price_per_hour=0\.5 is below every offer"):
        await stage.fleet(max_price_per_hour=0.5, wait_for_capacity="1m").start()
    with pytest.raises(ConfigurationError, match=r"max_price_per_hour=0\.5 is below every offer"):
        await stage.fleet(max_price_per_hour=0.5).start()


@pytest.mark.parametrize("error", [ConfigurationError("wrong"), AuthenticationError("403")])
async def test_what_no_time_cures_is_not_waited_for(stage: Stage, error: Exception) -> None:
    stage.others = []
    stage.provider.fail("launch", error)
    with pytest.raises(type(error)):
        await stage.fleet(wait_for_capacity="1h").start()
    assert stage.clock.elapsed() == 0.0


async def test_the_end_of_machines_is_confirmed_by_each_provider(stage: Stage) -> None:
    stage.provider.fail("terminate", UnreachableError("500"), times=2)
    async with stage.kept(nodes=2, spread=True):
        pass
    assert not [event for event in stage.events if isinstance(event, Error)]


async def test_a_provider_that_is_slow_to_confirm_the_end_keeps_no_bill_of_another_open(stage: Stage) -> None:
    confirms = asyncio.Event()

    class SlowToEnd(FakeProvider):
        async def terminate(self, instance_ids: Sequence[str]) -> None:
            await confirms.wait()
            await super().terminate(instance_ids)

    stage.provider = Few([offer(1.0)], name="few", networks=("",))
    stage.others = [SlowToEnd([offer(2.0)], name="slow", networks=("",))]
    fleet = stage.fleet(nodes=3, spread=True)
    await fleet.start()
    ending = asyncio.ensure_future(fleet.stop())
    await until(lambda: [name for name, _ in stage.places()] == ["slow"])
    assert not ending.done()
    confirms.set()
    await ending


async def test_max_cost_counts_the_machines_of_all(stage: Stage) -> None:
    with pytest.raises((BudgetError, ConfigurationError), match="max_cost"):
        await stage.fleet(nodes=2, spread=True, max_cost=0.001).start()
    assert stage.provider.instances == {}
