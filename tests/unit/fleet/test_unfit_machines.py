"""A machine that cannot become a node is ended, its host avoided, and another bought: three for each rank."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import AuthenticationError, BootstrapError, CapacityError, HostKeyError, UnreachableError
from skyward.events import InstancePreempted, Notice
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider, Fate
from skyward.wire.control import Preempting
from support.clock import FakeClock
from support.fleets import FleetStage, StagedFleet, until
from support.nodes import FakeNode

OFFER = Offer(
    spec=InstanceSpec(name="big", cpu=4, memory_gib=8), region="here", price_per_hour=1.2, ready_within_s=300.0
)
SMALL = replace(OFFER.spec, cpu=2)
NEVER_RUNS = Fate(pending_s=math.inf)
OVER = (InstanceState.FAILED, InstanceState.GONE, InstanceState.STOPPING)


class Seller(FakeProvider):
    """Machines have fates by their number; orders are written down."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__([OFFER], clock=clock)
        self.by_number: dict[int, Fate] = {}
        self.preempts: set[int] = set()
        self.orders: list[LaunchOrder] = []
        self.alive_at_order: list[int] = []

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        self.orders.append(order)
        self.alive_at_order.append(len(self.alive))
        return await super().launch(offers, order)

    def _next_fate(self, order: LaunchOrder) -> Fate:
        return self.by_number.get(len(self.instances), Fate())

    def _make(self, offer: Offer, key: str, order: LaunchOrder) -> Instance:
        number = len(self.instances)
        made = super()._make(offer, key, order)
        if number in self.preempts:
            made = self.instances[made.id] = replace(made, preempted=True)
        return made


@dataclass(kw_only=True)
class Stage(FleetStage):
    provider: Seller = field(init=False)  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        self.sell(Seller(self.clock))

    def sell(self, provider: Seller) -> None:
        self.provider = provider
        self.nodes.hardware = lambda instance: self.provider.hardware(instance.id)

    def fleet(self, **request: Any) -> StagedFleet:
        return super().fleet(**{"timeout": 600} | request)

    def notices(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice) and event.instance_id]

    def be_small(self, *numbers: int) -> None:
        self.provider.by_number |= dict.fromkeys(numbers, Fate(hardware=SMALL))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


@pytest.mark.parametrize(
    ("fate", "says"),
    [
        (NEVER_RUNS, "did not run within 300 s of its launch (.*pending); it cost about $0.10"),
        (Fate(hardware=SMALL), "is smaller than bought: it has 2 of 4 cores"),
        *[(Fate(pending_s=0.1, becomes=state), f"did not run: it is {state.value}") for state in OVER],
    ],
)
async def test_another_machine_is_bought_while_the_pool_opens(stage: Stage, fate: Fate, says: str) -> None:
    stage.provider.by_number[1] = fate

    assert await stage.open_and_close() == ["fake-0", "fake-2"]
    (notice,) = stage.notices()
    head, _, tail = says.partition(".*")
    assert notice.startswith(f"machine fake-1 (big, here, host host-1) {head}")
    assert tail in notice
    assert notice.endswith("; another is bought (2 of 3)")
    assert stage.provider.orders[-1].avoid == {"host-1"}


class Slow(Seller):
    """Takes its time to end a machine."""

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        await asyncio.sleep(0.02)
        await super().terminate(instance_ids)


async def test_the_bad_machine_is_ended_before_the_next_is_bought(stage: Stage) -> None:
    stage.sell(Slow(stage.clock))
    stage.be_small(1, 2)

    assert await stage.open_and_close() == ["fake-0", "fake-3"]
    assert stage.provider.alive_at_order == [0, 1, 1]
    assert [len(order.avoid) for order in stage.provider.orders] == [0, 1, 2]


class Onlooker(Seller):
    """Notes the state of node 1 at each order."""

    fleet: StagedFleet

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.seen: list[tuple[str, str]] = []

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        node = self.fleet.status().nodes[1]
        self.seen.append((node.state, node.instance_id))
        return await super().launch(offers, order)


async def test_a_rank_has_no_machine_while_an_unfit_one_is_exchanged(stage: Stage) -> None:
    provider = Onlooker(stage.clock)
    stage.sell(provider)
    stage.be_small(1)
    fleet = provider.fleet = stage.fleet()
    try:
        await fleet.start()
    finally:
        await fleet.stop()
    assert provider.seen == [("launching", ""), ("launching", "")]


async def test_three_unfit_machines_end_the_opening_and_the_error_lists_them(stage: Stage) -> None:
    stage.be_small(1, 2, 3)

    with pytest.raises(CapacityError, match=r"node 1 has no sound machine.*\(1\) machine fake-1.*\(3\)") as raised:
        await stage.open_and_close()

    assert [attempt.split()[1] for attempt in raised.value.attempts] == ["fake-1", "fake-2", "fake-3"]
    assert len(stage.provider.instances) == 4
    assert stage.provider.alive == []
    assert stage.ledger.open_entries() == ()
    assert [notice.rpartition("; ")[2] for notice in stage.notices()] == [
        "another is bought (2 of 3)",
        "another is bought (3 of 3)",
        "no other is bought",
    ]


async def test_a_refusal_to_sell_the_next_names_what_was_bought_before(stage: Stage) -> None:
    stage.be_small(1)
    launch = stage.provider.launch

    async def launch_and_sell_out(offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        made = await launch(offers, order)
        stage.provider.sold_out = {OFFER}
        return made

    stage.provider.launch = launch_and_sell_out  # type: ignore[method-assign]
    with pytest.raises(CapacityError, match="sold out") as raised:
        await stage.open_and_close()
    assert any("before that: machine fake-1" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    "error",
    [BootstrapError("exit code 1", node=1, step="deps"), AuthenticationError("who are you?")],
)
@pytest.mark.parametrize("fresh", [True, False])
async def test_what_is_not_the_machines_fault_buys_no_other(
    stage: Stage, error: Exception, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNode, "fresh", fresh)
    stage.nodes.fail(1, "prepare", error)

    with pytest.raises(type(error)):
        await stage.open_and_close()
    assert len(stage.provider.instances) == 2


async def test_a_machine_that_does_not_answer_is_unfit(stage: Stage) -> None:
    stage.nodes.fail(1, "reach", UnreachableError("connection refused"))

    with pytest.raises(CapacityError, match=r"machine fake-3 .* did not answer \(connection refused\)"):
        await stage.open_and_close()
    assert len(stage.provider.instances) == 4


@pytest.mark.parametrize("kind", [AuthenticationError, HostKeyError])
@pytest.mark.parametrize(("fresh", "bought"), [(True, 4), (False, 2)])
async def test_a_refused_login_and_a_wrong_host_key_are_the_fault_of_a_machine_made_for_the_pool_only(
    stage: Stage, fresh: bool, bought: int, kind: type[AuthenticationError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNode, "fresh", fresh)
    stage.nodes.fail(1, "reach", kind("who are you?"))

    with pytest.raises(CapacityError if fresh else AuthenticationError, match="who are you"):
        await stage.open_and_close()
    assert len(stage.provider.instances) == bought


async def test_a_machine_that_ends_while_it_is_prepared_is_exchanged(stage: Stage) -> None:
    """Whatever the failure of its preparation looked like."""
    stage.nodes.fail(1, "prepare", BootstrapError("the link dropped", node=1, step="deps"))
    fleet = stage.fleet()

    def opened(instance: Instance) -> InstanceSpec:
        if instance.id == "fake-1":
            stage.provider.set_state(instance.id, InstanceState.GONE)
        elif instance.id == "fake-2":
            stage.nodes.heal(1, "prepare")
        return stage.provider.hardware(instance.id)

    stage.nodes.hardware = opened
    await fleet.start()
    assert [node.instance.id for node in fleet.nodes] == ["fake-0", "fake-2"]
    await fleet.stop()


async def test_a_machine_that_was_seen_to_run_a_moment_before_its_preparation_failed_is_looked_at_again(
    stage: Stage,
) -> None:
    class Killed(FakeNode):
        async def prepare(self, *arguments: Any) -> None:
            await super().prepare(*arguments)
            if self.instance.id == "fake-1":
                assert await self.machine_status() is None
                stage.provider.set_state("fake-1", InstanceState.GONE)
                raise BootstrapError("its processes got SIGTERM", node=self.rank, step="deps")

    fleet = stage.fleet()
    fleet._machines.make_node = partial(Killed, stage.nodes)
    await fleet.start()
    assert [node.instance.id for node in fleet.nodes] == ["fake-0", "fake-2"]
    await fleet.stop()


async def test_preempted_machines_do_not_count(stage: Stage) -> None:
    taken = range(1, 5)
    stage.provider.preempts.update(taken)
    stage.provider.by_number |= dict.fromkeys(taken, Fate(pending_s=0.1, becomes=InstanceState.GONE))

    assert await stage.open_and_close() == ["fake-0", "fake-5"]
    assert [event for event in stage.events if isinstance(event, InstancePreempted)] == [
        InstancePreempted(f"fake-{each}", 1, 0.0) for each in taken
    ]
    assert all(order.avoid == frozenset() for order in stage.provider.orders)
    assert {notice.rpartition("; ")[2] for notice in stage.notices()} == {"another is bought"}


async def test_preempted_machines_are_not_bought_for_ever(stage: Stage) -> None:
    stage.provider.preempts.update(range(1, 99))
    stage.provider.by_number |= dict.fromkeys(range(1, 99), Fate(pending_s=0.1, becomes=InstanceState.GONE))

    with pytest.raises(CapacityError, match="after 10"):
        await stage.open_and_close()


class Stubborn(Seller):
    """Confirms no end, until it is told to."""

    confirms = False

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        self.calls.append("terminate")
        if self.confirms:
            await super().terminate(instance_ids)


async def test_a_bad_machine_that_is_not_confirmed_gone_keeps_nobody_waiting(stage: Stage) -> None:
    stage.sell(Stubborn(stage.clock))
    stage.be_small(1)
    fleet = stage.fleet()
    await fleet.start()
    assert [node.instance.id for node in fleet.nodes] == ["fake-0", "fake-2"]
    assert set(stage.provider.alive) == {"fake-0", "fake-1", "fake-2"}
    stage.provider.confirms = True  # type: ignore[attr-defined]
    await fleet.stop()
    assert stage.provider.alive == []


async def test_a_bad_machine_that_does_not_end_keeps_nobody_waiting_when_its_rank_ends(stage: Stage) -> None:
    stage.sell(Stubborn(stage.clock))
    stage.be_small(1)
    fleet = stage.fleet()
    await fleet.start()
    asked: list[Sequence[str]] = []
    end_others = FakeProvider.terminate

    async def terminate(instance_ids: Sequence[str]) -> None:
        asked.append(instance_ids)
        await end_others(stage.provider, [each for each in instance_ids if each != "fake-1"])

    stage.provider.terminate = terminate  # type: ignore[method-assign]
    await fleet.scale(1, ())
    assert stage.provider.alive == ["fake-0", "fake-1"]
    assert ["fake-2"] in asked
    stage.provider.terminate = FakeProvider.terminate.__get__(stage.provider)  # type: ignore[method-assign]
    await fleet.stop()
    assert stage.provider.alive == []


# --- later ------------------------------------------------------------------------------------------------------------


async def test_a_replacement_that_is_unfit_is_exchanged_without_an_attempt_of_the_upkeep(stage: Stage) -> None:
    engine = stage.engine
    async with stage.kept():
        stage.be_small(2, 3)
        stage.lose(1)
        await until(lambda: len(engine.attached) == 3)
        assert engine.attached[-1].instance.id == "fake-4"
        assert [pause for pause in stage.clock.slept_s if pause > 1] == []


async def test_unfit_machines_are_counted_anew_for_each_replacement(stage: Stage) -> None:
    engine = stage.engine
    async with stage.kept():
        stage.be_small(2, 3, 5, 6)
        for nodes, sound in (3, "fake-4"), (4, "fake-7"):
            stage.lose(1)
            await until(lambda nodes=nodes: len(engine.attached) == nodes)  # type: ignore[misc]
            assert engine.attached[-1].instance.id == sound


async def test_a_rank_is_given_up_after_three_unfit_machines(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.be_small(*range(2, 99))
        stage.lose(1)
        await until(lambda: fleet.wanted == {0})
        assert len(stage.provider.instances) == 2 + 3


async def test_added_nodes_are_exchanged_too(stage: Stage) -> None:
    async with stage.kept() as fleet:
        stage.be_small(2)
        await fleet.scale(3, ())
        assert [each.instance.id for each in fleet.nodes] == ["fake-0", "fake-1", "fake-3"]


async def test_a_node_whose_machine_is_gone_before_its_workers_answer_is_exchanged(stage: Stage) -> None:
    def vanish() -> Exception:
        stage.provider.set_state("fake-1", InstanceState.GONE)
        return BootstrapError("worker 0 did not answer", node=1, step="server")

    stage.engine.refuses[1] = vanish
    assert await stage.open_and_close() == ["fake-0", "fake-2"]


async def test_workers_that_do_not_answer_on_a_machine_that_runs_are_not_its_fault(stage: Stage) -> None:
    stage.engine.refuses[1] = lambda: BootstrapError("worker 0 did not answer", node=1, step="server")
    with pytest.raises(BootstrapError):
        await stage.open_and_close()
    assert len(stage.provider.instances) == 2


async def test_a_spare_that_is_unfit_is_exchanged_before_it_is_needed(stage: Stage) -> None:
    engine = stage.engine
    async with stage.kept() as fleet:
        stage.be_small(2)
        stage.nodes.opened[1]._receive(Preempting(seconds_left=120))
        await until(lambda: len(engine.attached) == 3)
        assert [node.instance.id for node in fleet.nodes] == ["fake-0", "fake-3"]
        assert len(stage.provider.instances) == 4
