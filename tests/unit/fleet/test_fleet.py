"""A fleet comes up as a whole or leaves nothing; what it created it ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.environment.image import Image
from skyward.errors import (
    BootstrapError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstanceProvisioned,
    InstanceStopping,
    Notice,
    SkywardEvent,
)
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider
from skyward.wire.node_config import NodeConfig
from support.fleets import FleetStage, StagedFleet
from support.nodes import Phase


class Stage(FleetStage):
    """For fleets of four."""

    def fleet(self, **request: Any) -> StagedFleet:
        return super().fleet(**{"nodes": 4, "timeout": 600} | request)

    def kinds(self) -> list[type[SkywardEvent]]:
        return [type(event) for event in self.events]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(ledger=Ledger(tmp_path / "ledger.db"))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_every_node_is_prepared_started_and_told_of_the_head(stage: Stage) -> None:
    fleet = stage.fleet()
    run(fleet.start)

    assert [node.rank for node in fleet.nodes] == [0, 1, 2, 3]
    assert set(map(tuple, stage.nodes.logs().values())) == {("prepare", "start", "join")}
    assert {node.head_addr for node in stage.nodes.opened} == {"127.0.0.1"}


def test_nodes_that_reach_the_head_are_told_of_it_and_each_other_one_is_its_own(stage: Stage) -> None:
    stage.provider.networks = ("a", "b", "a", "")
    run(stage.fleet().start)

    own = [node.address for node in stage.nodes.opened]
    assert [node.head_addr for node in stage.nodes.opened] == [own[0], own[1], own[0], own[3]]


def test_where_all_offers_are_islands_nodes_that_have_to_reach_each_other_are_not_bought(stage: Stage) -> None:
    stage.provider = FakeProvider([Offer(spec=InstanceSpec(name="fake", cpu=2, memory_gib=4), island=True)])
    stage.one_network = True

    with pytest.raises(
        ConfigurationError, match=r"none of the machines on offer reaches another.*nodes=1.*ComputePool"
    ):
        run(stage.fleet().start)
    assert stage.provider.instances == {}
    run(stage.fleet(nodes=1).start)


def test_a_program_that_imports_gangs_is_told_of_islands_before_they_are_bought(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "skyward.distributed", object())
    stage.provider = FakeProvider([Offer(spec=InstanceSpec(name="fake", cpu=2, memory_gib=4), island=True)])
    run(stage.fleet(nodes=2).start)

    note, launch, *_ = [event for event in stage.events if isinstance(event, Notice | InstanceLaunching)]
    assert isinstance(note, Notice)
    assert isinstance(launch, InstanceLaunching)
    assert "nodes of fake cannot reach each other" in note.message


def test_machines_that_turn_out_not_to_reach_each_other_are_ended_before_one_starts(stage: Stage) -> None:
    stage.provider.networks = ("a", "b")
    stage.one_network = True

    with pytest.raises(ConfigurationError, match="nodes 1, 2, 3 reach each other, node 0 reaches no other"):
        run(stage.fleet().start)
    assert stage.provider.alive == []
    assert all("start" not in node.log for node in stage.nodes.opened)
    assert any("prepare" not in node.log for node in stage.nodes.opened), "it is seen before they are prepared"


def test_a_node_is_configured_as_the_pool_asks(stage: Stage) -> None:
    image = Image(env={"A": "image", "B": "image"})
    run(stage.fleet(nodes=2, concurrency=3, image=image, env={"B": "pool"}).start)

    configs = {node.rank: node.config for node in stage.nodes.opened}
    assert isinstance(configs[1], NodeConfig)
    assert (configs[1].total_nodes, configs[1].workers, configs[1].timeout_s) == (2, 3, 600)
    assert dict(configs[1].env) == {"A": "image", "B": "pool"}
    assert [bool(config and config.head) for config in configs.values()] == [True, False]
    assert configs[1].tls_key == "key"


def test_events_tell_the_story_in_order(stage: Stage) -> None:
    asyncio.run(stage.open_and_close(nodes=1))
    assert stage.kinds() == [
        InfraCreating,
        InfraCreated,
        InstanceLaunching,
        InstanceProvisioned,
        BootstrapStarting,
        BootstrapProgress,
        BootstrapCompleted,
        InstanceStopping,
    ]


def test_stopping_ends_supervisors_before_machines_and_closes_the_ledger(stage: Stage) -> None:
    async def scenario() -> None:
        fleet = stage.fleet()
        await fleet.start()
        await fleet.stop()
        await fleet.stop()

    run(scenario)
    assert all(log[-1] == "stop" for log in stage.nodes.logs().values())
    assert stage.provider.alive == []
    assert stage.provider.calls.count("terminate") == 1
    assert stage.ledger.open_entries() == ()


def test_the_ledger_has_an_entry_before_the_machine_and_its_id_after(stage: Stage) -> None:
    before: list[str | None] = []

    class Watching(FakeProvider):
        async def launch(self, *args: Any) -> Any:
            before.extend(entry.instance_id for entry in stage.ledger.open_entries(pool_id="pool"))
            return await super().launch(*args)

    stage.provider = Watching()
    run(stage.fleet().start)

    assert before == [None] * 4
    assert {entry.instance_id for entry in stage.ledger.open_entries()} == {"fake-0", "fake-1", "fake-2", "fake-3"}


@pytest.mark.parametrize("phase", ["prepare", "start", "join"])
@pytest.mark.parametrize("error", [BootstrapError("no", node=2, step="deps"), KeyboardInterrupt()])
def test_a_failure_of_the_third_node_ends_all_four(stage: Stage, phase: Phase, error: BaseException) -> None:
    stage.nodes.fail(2, phase, error)

    with pytest.raises(type(error)):
        run(stage.fleet().start)

    assert stage.provider.alive == []
    assert len(stage.provider.instances) == 4
    assert stage.ledger.open_entries() == ()
    assert stage.kinds().count(InstanceStopping) == 4


@pytest.mark.parametrize("phase", ["prepare", "start"])
def test_cancelling_while_the_third_node_hangs_ends_all_four(stage: Stage, phase: Phase) -> None:
    stage.nodes.hang(2, phase)

    async def scenario() -> None:
        starting = asyncio.create_task(stage.fleet().start())
        await stage.nodes.hanging.wait()
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    run(scenario)
    assert len(stage.provider.instances) == 4
    assert stage.provider.alive == []
    assert stage.ledger.open_entries() == ()


def test_a_node_cancelled_from_inside_is_a_failure_too(stage: Stage) -> None:
    stage.nodes.fail(2, "start", asyncio.CancelledError())

    with pytest.raises(SkywardError, match=r"nodes \[2\] were cancelled"):
        run(stage.fleet().start)

    assert stage.provider.alive == []


@pytest.mark.parametrize("verb", ["offers", "launch"])
@pytest.mark.parametrize("error", [QuotaError("no"), KeyboardInterrupt()])
def test_a_failure_before_anything_exists_leaves_nothing(stage: Stage, verb: Any, error: BaseException) -> None:
    stage.provider.fail(verb, error)

    with pytest.raises(type(error)):
        run(stage.fleet().start)

    assert stage.provider.instances == {}


def test_a_refused_launch_closes_its_ledger_entries_and_an_unclear_one_does_not(stage: Stage) -> None:
    stage.provider.fail("launch", QuotaError("no"))
    with pytest.raises(QuotaError):
        run(stage.fleet().start)
    assert stage.ledger.open_entries() == ()

    stage.provider.fail("launch", UnreachableError("no answer"))
    with pytest.raises(UnreachableError):
        run(stage.fleet().start)
    assert len(stage.ledger.open_entries()) == 4


def test_cancelling_during_the_launch_ends_what_the_launch_still_creates(stage: Stage) -> None:
    launching, go_on = asyncio.Event(), asyncio.Event()

    class Slow(FakeProvider):
        async def launch(self, *args: Any) -> Any:
            launching.set()
            await go_on.wait()
            return await super().launch(*args)

    stage.provider = Slow()

    async def scenario() -> None:
        starting = asyncio.create_task(stage.fleet().start())
        await launching.wait()
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()
        go_on.set()
        await asyncio.wait([starting])
        assert starting.cancelled()

    run(scenario)
    assert len(stage.provider.instances) == 4
    assert stage.provider.alive == []
    assert stage.ledger.open_entries() == ()


def test_cancelling_a_stop_waits_for_its_end(stage: Stage) -> None:
    async def scenario() -> None:
        fleet = stage.fleet()
        await fleet.start()
        stopping = asyncio.create_task(fleet.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()

    run(scenario)
    assert stage.provider.alive == []


def test_half_a_launch_is_ended_and_blamed_on_the_provider(stage: Stage) -> None:
    stage.provider.launch_limit = 2

    with pytest.raises(SkywardError, match="fake launched 2 of 4 machines"):
        run(stage.fleet().start)

    assert len(stage.provider.instances) == 2
    assert stage.provider.alive == []
    assert [entry.instance_id for entry in stage.ledger.open_entries()] == [None, None]


def test_when_every_offer_is_refused_the_error_names_them(stage: Stage) -> None:
    stage.provider.fail("create", CapacityError("sold out"), times=4)

    with pytest.raises(CapacityError, match=r"none of its offers available now: fake \(on-demand\); last: sold out"):
        run(stage.fleet().start)


@pytest.mark.parametrize("market", [True, False])
def test_a_refusal_of_ones_own_hosts_names_no_market(stage: Stage, *, market: bool) -> None:
    class Hosts(FakeProvider):
        own_machines = not market

    stage.provider = Hosts()
    stage.provider.fail("launch", CapacityError("name more hosts"))

    with pytest.raises(CapacityError, match="name more hosts") as caught:
        run(stage.fleet().start)
    assert ("another accelerator" in str(caught.value)) is market


def test_terminating_is_repeated_until_it_works(stage: Stage) -> None:
    stage.provider.fail("terminate", RateLimitError("500"), times=3)

    asyncio.run(stage.open_and_close())
    assert stage.provider.alive == []
    assert stage.ledger.open_entries() == ()


def test_machines_that_cannot_be_ended_are_named_and_stay_in_the_ledger(stage: Stage) -> None:
    stage.provider.fail("terminate", RateLimitError("500"), times=99)

    async def scenario() -> None:
        fleet = stage.fleet()
        await fleet.start()
        with pytest.raises(TerminationError, match="may still cost money") as raised:
            await fleet.stop()
        assert sorted(raised.value.instance_ids) == ["fake-0", "fake-1", "fake-2", "fake-3"]

    run(scenario)
    assert len(stage.ledger.open_entries()) == 4


def test_machines_that_ended_are_closed_even_if_others_did_not(stage: Stage) -> None:
    stage.provider.fail("terminate", TerminationError("one is left", instance_ids=["fake-1"]), times=99)

    with pytest.raises(TerminationError):
        asyncio.run(stage.open_and_close())
    assert [entry.instance_id for entry in stage.ledger.open_entries()] == ["fake-1"]


def test_a_termination_that_fails_after_a_failed_start_says_both(stage: Stage) -> None:
    stage.nodes.fail(2, "start", BootstrapError("no", node=2, step="server"))
    stage.provider.fail("terminate", RateLimitError("500"), times=99)

    with pytest.raises(TerminationError, match="fake-2") as raised:
        run(stage.fleet().start)

    assert raised.value.__notes__ == ["this was to clean up after BootstrapError: no"]


def test_a_provider_that_only_claims_to_have_terminated_is_not_believed(stage: Stage) -> None:
    class Lying(FakeProvider):
        async def terminate(self, *args: Any) -> None:
            self.calls.append("terminate")

    stage.provider = Lying()

    with pytest.raises(TerminationError):
        asyncio.run(stage.open_and_close())
    assert stage.provider.calls.count("terminate") == 6


def test_a_supervisor_that_does_not_stop_is_terminated_with_its_machine(stage: Stage) -> None:
    stage.nodes.fail(1, "stop", UnreachableError("silent"))

    asyncio.run(stage.open_and_close())
    assert stage.provider.alive == []


def test_errors_of_several_nodes_are_one_error_with_notes(stage: Stage) -> None:
    for rank in (1, 2):
        stage.nodes.fail(rank, "prepare", BootstrapError(f"node {rank}", node=rank, step="deps"))

    with pytest.raises(BootstrapError) as raised:
        run(stage.fleet().start)

    assert raised.value.__notes__ == ["at the same time: BootstrapError: node 2"]


def test_a_node_that_cannot_join_is_an_error_while_another_still_waits_to(stage: Stage) -> None:
    stage.nodes.fail(3, "join", UnreachableError("gone"))
    stage.nodes.hang(2, "start")
    with pytest.raises(UnreachableError, match="gone"):
        run(stage.fleet().start)
    assert stage.provider.alive == []


def test_launch_says_where_on_which_market_for_how_much_and_with_what_room(stage: Stage) -> None:
    asyncio.run(stage.open_and_close(cpu=1, memory="1GB", concurrency=2))
    offer = next(iter(stage.provider.instances.values())).offer
    (launching,) = [event for event in stage.events if isinstance(event, InstanceLaunching)]
    assert (launching.count, launching.workers_per_node) == (4, 2)
    bought = offer.region, offer.spot, offer.price_per_hour
    assert (launching.region, launching.spot, launching.price_per_hour) == bought
    assert (launching.cpu_per_worker, launching.memory_gib_per_worker) == (1, 1.0)


class BusyProvider(FakeProvider):
    """Ends single machines only, once it has refused six times to end several."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self.asked_for_one, self.is_free = asyncio.Event(), asyncio.Event()

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        if len(instance_ids) == 1:
            self.asked_for_one.set()
            await self.is_free.wait()
            return await super().terminate(instance_ids)
        self.refused += 1
        if self.refused == 6:
            self.is_free.set()
        raise UnreachableError("busy")


class SlowlyEnding(FakeProvider):
    """Ends machines once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        self.asked.set()
        await self.may.wait()
        await super().terminate(instance_ids)


async def test_a_node_whose_machine_is_being_ended_is_not_used_any_more(stage: Stage) -> None:
    stage.provider = provider = SlowlyEnding()
    async with stage.kept(nodes=2) as fleet:
        scaling = asyncio.ensure_future(fleet.scale(1, {1}))
        await provider.asked.wait()
        used, states = [node.rank for node in fleet.ready_nodes()], [node.state for node in fleet.status().nodes]
        provider.may.set()
        await scaling
    assert (used, states) == ([0], ["ready", "ending"])


async def test_a_machine_that_ended_after_all_while_the_fleet_stopped_is_not_named_as_left(stage: Stage) -> None:
    stage.provider = provider = BusyProvider()
    fleet = stage.fleet(nodes=2)
    await fleet.start()
    scaling = asyncio.ensure_future(fleet.scale(1, {1}))
    await provider.asked_for_one.wait()

    await fleet.stop()

    assert provider.refused == 6
    assert provider.alive == []
    assert stage.ledger.open_entries() == ()
    await asyncio.gather(scaling, return_exceptions=True)
