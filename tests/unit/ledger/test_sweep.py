"""What a sweep ends, what it spares, and what it says about the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyward.errors import AuthenticationError, ConfigurationError, PoolStateError, UnreachableError
from skyward.ledger import termination
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Owner
from skyward.ledger.sweep import Sweep, SweepReport, attributed
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Provider
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider, Fate
from support.clock import FakeClock

DEAD = replace(Owner.this_process(), started="long ago")
ALIVE = Owner.this_process()
ELSEWHERE = replace(DEAD, host="another machine")
PURCHASE = Purchase(pool_id="pool", provider="fake", settings={"account": 1})


class Unlistable(FakeProvider):
    """The same machines, and no list of them."""

    tagged = Provider.tagged

    def __init__(self, provider: FakeProvider) -> None:
        super().__init__()
        self.instances = provider.instances
        self._lives = provider._lives


class Late(FakeProvider):
    """A provider that lists a new machine some seconds after its launch."""

    listing_s: ClassVar[float] = 15.0

    def __init__(self) -> None:
        self.clock: FakeClock = FakeClock()
        super().__init__(clock=self.clock)
        self.fate = Fate(unlisted_s=15.0)


class Stage:
    """A ledger, a provider, and the pools that used it."""

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path)
        self.provider = FakeProvider()
        self.made: list[tuple[str, Mapping[str, Any]]] = []

    def launch(
        self, *keys: str, owner: Owner = DEAD, recorded: bool = True, reserved: bool = True, pool_id: str = "pool"
    ) -> list[Instance]:
        if reserved:
            purchase = replace(PURCHASE, pool_id=pool_id)
            self.ledger.reserve({key: rank for rank, key in enumerate(keys)}, purchase, owner=owner)

        async def scenario() -> list[Instance]:
            (offer,) = await self.provider.offers(parse_request())
            return list(
                await self.provider.launch([offer], LaunchOrder(pool_id=pool_id, keys=tuple(keys), timeout_s=60.0))
            )

        launched = asyncio.run(scenario())
        if reserved and recorded:
            self.ledger.record(launched)
        return launched

    def make(self, name: str, settings: Mapping[str, Any]) -> Provider:
        self.made.append((name, settings))
        return self.provider

    def sweep(self, **options: Any) -> SweepReport:
        return asyncio.run(Sweep(self.ledger, make=self.make).run(**options))

    def down(self, pool_id: str = "pool") -> SweepReport:
        return asyncio.run(Sweep(self.ledger, make=self.make).end_pool(pool_id))

    @property
    def open_keys(self) -> Sequence[str]:
        return [entry.key for entry in self.ledger.open_entries()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(termination, "_ATTEMPTS", 2)
    return Stage(tmp_path / "ledger.db")


def test_machines_of_a_dead_owner_are_ended_confirmed_and_closed(stage: Stage) -> None:
    ids = [each.id for each in stage.launch("a", "b")]

    report = stage.sweep()

    assert sorted(each.instance_id for each in report.ended) == ids
    assert (report.clean, report.left, report.forgotten) == (True, [], [])
    assert (stage.provider.alive, stage.open_keys) == ([], [])
    assert stage.made == [("fake", {"account": 1})]


def test_a_second_sweep_finds_nothing(stage: Stage) -> None:
    stage.launch("a")
    stage.sweep()

    assert stage.sweep() == SweepReport()


@pytest.mark.parametrize("options", [{}, {"others": True}, {"unknown": True}])
def test_a_living_owners_machines_are_never_touched(stage: Stage, options: dict[str, Any]) -> None:
    (instance,) = stage.launch("a", owner=ALIVE)

    report = stage.sweep(**options)

    assert [entry.key for entry in report.spared] == ["a"]
    assert (stage.provider.alive, stage.open_keys, report.clean) == ([instance.id], ["a"], True)


def test_what_belongs_to_another_machine_is_ended_only_when_asked_for(stage: Stage) -> None:
    stage.launch("a", owner=ELSEWHERE)

    assert [entry.key for entry in stage.sweep().spared] == ["a"]
    assert [each.entry.key for each in stage.sweep(others=True).ended] == ["a"]
    assert stage.provider.alive == []


def test_what_is_gone_already_is_closed_and_counted_and_its_by_products_ended(stage: Stage) -> None:
    (instance,) = stage.launch("a")
    stage.provider.set_state(instance.id, InstanceState.GONE)

    report = stage.sweep()

    assert ([entry.key for entry in report.forgotten], report.ended, stage.open_keys) == (["a"], [], [])
    assert stage.provider.calls[-1] == "terminate"


def test_a_machine_that_ended_itself_ended_when_its_providers_record_says(stage: Stage) -> None:
    (machine,) = stage.launch("a")
    (entry,) = stage.ledger.entries()
    ended_at = entry.created_at + 0.001
    stage.provider.set_state(machine.id, InstanceState.GONE)
    stage.provider.instances[machine.id] = replace(stage.provider.instances[machine.id], ended_at=ended_at)
    stage.sweep()

    (entry,) = stage.ledger.entries()
    assert entry.closed_at == ended_at


def test_a_crash_during_the_create_call_is_looked_up_by_its_tag(stage: Stage) -> None:
    (instance,) = stage.launch("a", recorded=False)
    stage.ledger.reserve({"never made": 0}, PURCHASE, owner=DEAD)

    report = stage.sweep()

    assert [each.instance_id for each in report.ended] == [instance.id]
    assert [entry.key for entry in report.forgotten] == ["never made"]
    assert (stage.provider.alive, stage.open_keys) == ([], [])


def sweep_late(stage: Stage, **options: Any) -> tuple[SweepReport, list[float]]:
    """Sweep by the clock of a :class:`Late` provider; return the waits as well."""
    clock = stage.provider.clock
    assert isinstance(clock, FakeClock)
    return asyncio.run(Sweep(stage.ledger, make=stage.make, clock=clock).run(**options)), clock.slept_s


def test_a_lost_machine_that_is_listed_late_is_ended(stage: Stage) -> None:
    stage.provider = Late()
    (instance,) = stage.launch("a", recorded=False)

    report, waits = sweep_late(stage)

    assert [each.instance_id for each in report.ended] == [instance.id]
    assert (stage.provider.alive, stage.open_keys, waits) == ([], [], [15.0])


class Later(Late):
    """One that may take a minute."""

    unlisted_s: ClassVar[float] = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.fate = Fate(unlisted_s=55.0)


@pytest.mark.parametrize(("age_s", "waits_s"), [(0, 60), (40, 20), (1000, 15)])
def test_a_lost_machine_has_its_minute_from_its_entry_on(
    tmp_path: Path, age_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path / "ledger.db")
    stage.provider = later = Later()
    stage.ledger = Ledger(tmp_path / "ledger.db", now=lambda: time.time() - age_s)
    (lost,) = stage.launch("k0", recorded=False)
    later.clock.advance(age_s)
    monkeypatch.setattr(later, "tagged", later.tagged if age_s < 60 else _nothing)  # it has ended by then

    report, (waited_s,) = sweep_late(stage)

    assert waited_s == pytest.approx(waits_s, abs=1)
    assert [each.instance_id for each in report.ended] == ([lost.id] if age_s < 60 else [])
    assert stage.ledger.open_entries() == ()


def test_an_unknown_machine_that_is_listed_late_is_found(stage: Stage) -> None:
    stage.provider = Late()
    (stranger,) = stage.launch("stranger", reserved=False)

    report, _ = sweep_late(stage, also=[("fake", {"account": 1})])

    assert [each.instance_id for each in report.unknown] == [stranger.id]


def test_the_end_of_a_pool_waits_for_no_list_once_its_lost_machine_is_found(stage: Stage) -> None:
    stage.provider = late = Late()
    late.fate = Fate()
    stage.launch("a", recorded=False)

    report = asyncio.run(Sweep(stage.ledger, make=stage.make, clock=late.clock).end_pool("pool"))

    assert [each.entry.key for each in report.ended] == ["a"]
    assert late.clock.slept_s == []


def test_a_provider_that_refuses_is_reported_without_a_wait(stage: Stage) -> None:
    stage.provider = Late()
    stage.provider.fail("tagged", AuthenticationError("no key for it"))

    report, waits = sweep_late(stage, also=[("fake", {"account": 1})])

    assert (report.unasked, waits) == (["fake: no key for it"], [])


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("no key", "x-cloud: no key"),
        ("x-cloud: no key", "x-cloud: no key"),
        ("X-Cloud: no key", "X-Cloud: no key"),
        ("x-cloud eu-1: GET /v1 was refused: 401", "x-cloud eu-1: GET /v1 was refused: 401"),
        ("x-clouds: there are two", "x-cloud: x-clouds: there are two"),
    ],
)
def test_a_reason_names_its_provider_once(reason: str, shown: str) -> None:
    assert attributed("x-cloud", reason) == shown


def test_without_an_id_and_a_provider_that_answers_the_entry_is_kept(stage: Stage) -> None:
    stage.launch("a", recorded=False)
    stage.launch("b")
    stage.provider.fail("tagged", UnreachableError("host 7 is off"))

    report = stage.sweep()

    assert [(each.entry.key, each.reason) for each in report.left] == [
        ("a", "its create call was never answered, and it may exist. fake: host 7 is off")
    ]
    assert [each.entry.key for each in report.ended] == ["b"]
    assert (stage.open_keys, report.clean) == (["a"], False)


def test_a_provider_that_cannot_list_its_machines_can_still_end_those_with_an_id(stage: Stage) -> None:
    stage.launch("a")
    sweep = Sweep(stage.ledger, make=lambda *_: Unlistable(stage.provider))  # type: ignore[arg-type]

    report = asyncio.run(sweep.run())

    assert [each.entry.key for each in report.ended] == ["a"]
    assert report.unasked == ["fake: it cannot list its machines"]


def test_a_machine_that_does_not_end_is_left_named_and_keeps_no_other(stage: Stage) -> None:
    first, second = stage.launch("a", "b")
    terminate = stage.provider.terminate

    async def stuck(instance_ids: Sequence[str]) -> None:
        await terminate([each for each in instance_ids if each != first.id])

    stage.provider.terminate = stuck  # type: ignore[method-assign]
    report = stage.sweep()

    assert [(each.entry.key, first.id in each.reason) for each in report.left] == [("a", True)]
    assert [each.instance_id for each in report.ended] == [second.id]
    assert (stage.open_keys, report.clean) == (["a"], False)


def test_a_provider_that_cannot_be_made_again_keeps_its_entries_and_no_others(stage: Stage) -> None:
    stage.launch("a")
    stage.ledger.reserve({"b": 0}, Purchase(pool_id="pool", provider="another"), owner=DEAD)

    def make(name: str, settings: Mapping[str, Any]) -> Provider:
        if name == "another":
            raise ConfigurationError("key_path: there is no file")
        return stage.make(name, settings)

    report = asyncio.run(Sweep(stage.ledger, make=make).run())

    assert [(each.entry.key, each.reason) for each in report.left] == [("b", "key_path: there is no file")]
    assert [each.entry.key for each in report.ended] == ["a"]


class Broken(FakeProvider):
    """Another package's provider, with a bug."""

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        raise KeyError("status")

    async def tagged(self) -> Sequence[Instance]:
        raise KeyError("tags")


def test_a_bug_of_one_provider_is_named_and_keeps_no_other_from_being_swept(stage: Stage) -> None:
    stage.launch("sound")
    lost = replace(PURCHASE, settings={"account": 2})
    stage.ledger.reserve({"buggy": 0}, lost, owner=DEAD)
    broken = Broken()

    def make(name: str, settings: Mapping[str, Any]) -> Provider:
        return stage.provider if settings == {"account": 1} else broken

    report = asyncio.run(Sweep(stage.ledger, make=make).run())

    assert [each.entry.key for each in report.ended] == ["sound"]
    assert [each.entry.key for each in report.left] == ["buggy"]
    assert "KeyError: 'tags'" in report.left[0].reason
    assert stage.open_keys == ["buggy"]


def test_machines_that_the_ledger_does_not_know_are_listed_and_ended_only_when_asked_for(stage: Stage) -> None:
    (stranger,) = stage.launch("stranger", reserved=False)
    also = [("fake", {"account": 1})]

    listed = stage.sweep(also=also)
    assert [(each.instance_id, each.ended) for each in listed.unknown] == [(stranger.id, False)]
    assert (stage.provider.alive, listed.clean) == ([stranger.id], True)

    ended = stage.sweep(unknown=True, also=also)
    assert [(each.instance_id, each.ended) for each in ended.unknown] == [(stranger.id, True)]
    assert stage.provider.alive == []


def test_a_machine_that_only_the_first_of_two_lists_has_is_ended(stage: Stage) -> None:
    stage.provider = late = Late()
    late.fate = Fate()
    (instance,) = stage.launch("a", recorded=False)
    lists = iter([late.tagged, _nothing])

    async def lagging() -> Sequence[Instance]:
        return await next(lists)()

    late.tagged = lagging  # type: ignore[method-assign]
    report, _ = sweep_late(stage)

    assert [each.instance_id for each in report.ended] == [instance.id]
    assert late.alive == []


async def _nothing() -> Sequence[Instance]:
    return []


def twin(stage: Stage, instance: Instance) -> str:
    """Let the provider have a second machine with a machine's tag; return its id."""
    other = replace(instance, id=f"{instance.id}-twin")
    stage.provider.instances[other.id] = other
    return other.id


def test_every_machine_of_a_lost_entry_is_ended(stage: Stage) -> None:
    (instance,) = stage.launch("a", recorded=False)
    other = twin(stage, instance)

    report = stage.sweep()

    assert sorted(each.instance_id for each in report.ended) == sorted([instance.id, other])
    assert stage.provider.alive == []


def test_a_second_machine_with_the_tag_of_an_entry_is_unknown(stage: Stage) -> None:
    (instance,) = stage.launch("a", owner=ALIVE)
    other = twin(stage, instance)

    assert [each.instance_id for each in stage.sweep().unknown] == [other]
    assert stage.sweep(unknown=True).unknown[0].ended
    assert stage.provider.alive == [instance.id]


def test_a_machine_that_outlives_its_closed_entry_is_unknown(stage: Stage) -> None:
    (instance,) = stage.launch("a")
    stage.ledger.close(["a"])

    report = stage.sweep(also=[("fake", {"account": 1})])

    assert [each.instance_id for each in report.unknown] == [instance.id]


async def test_a_cancellation_from_inside_closes_no_entry(stage: Stage) -> None:
    await asyncio.to_thread(lambda: stage.launch("a"))

    async def cancelled(instance_ids: Sequence[str]) -> None:
        raise asyncio.CancelledError

    stage.provider.terminate = cancelled  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await Sweep(stage.ledger, make=stage.make).end_pool("pool")

    assert stage.open_keys == ["a"]


@pytest.mark.parametrize("unknown", [False, True])
def test_an_unknown_machine_that_cannot_be_described_keeps_no_other(stage: Stage, unknown: bool) -> None:
    first, second = stage.launch("a", "b", reserved=False)
    describe = stage.provider.describe

    async def partial(instance_ids: Sequence[str]) -> Sequence[Instance]:
        if first.id in instance_ids:
            raise UnreachableError("host 1 is off")
        return await describe(instance_ids)

    stage.provider.describe = partial  # type: ignore[method-assign]
    report = stage.sweep(unknown=unknown, also=[("fake", {"account": 1})])

    assert {each.instance_id: (each.ended, each.reason) for each in report.unknown} == {
        first.id: (False, "host 1 is off" if unknown else ""),
        second.id: (unknown, ""),
    }


class OwnHosts(FakeProvider):
    """Hosts of the user's own, which may be gone for good."""

    own_machines: ClassVar[bool] = True
    this_machine: ClassVar[bool] = False


def test_own_hosts_are_searched_only_while_an_entry_is_open_or_when_they_are_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.provider = OwnHosts()
    stage.launch("a", owner=ALIVE)
    stage.launch("stranger", reserved=False)
    found = [len(stage.sweep().unknown)]
    stage.ledger.close(["a"])

    found += [len(stage.sweep().unknown), len(stage.sweep(also=[("fake", {"account": 1})]).unknown)]
    monkeypatch.setattr(OwnHosts, "this_machine", True)
    found += [len(stage.sweep().unknown)]
    monkeypatch.undo()

    assert found == [1, 0, 2, 2]
    assert len(stage.sweep(unknown=True).unknown) == 2


@pytest.mark.parametrize("unknown", [False, True])
def test_a_machine_that_has_ended_since_it_was_listed_is_not_unknown(stage: Stage, unknown: bool) -> None:
    (stranger,) = stage.launch("a", reserved=False)
    listed = asyncio.run(stage.provider.tagged())

    async def lagging() -> Sequence[Instance]:
        return listed

    stage.provider.tagged = lagging  # type: ignore[method-assign]
    stage.provider.set_state(stranger.id, InstanceState.GONE)

    assert stage.sweep(unknown=unknown, also=[("fake", {"account": 1})]).unknown == []


def test_what_a_sweep_has_ended_is_not_unknown_to_it(stage: Stage) -> None:
    stage.launch("a", "b")

    report = stage.sweep(unknown=True)

    assert (len(report.ended), report.unknown) == (2, [])


def test_a_living_pools_machine_is_known_by_its_id_though_its_tag_was_edited(stage: Stage) -> None:
    (instance,) = stage.launch("a", owner=ALIVE)
    stage.provider.instances[instance.id] = replace(instance, key="edited in the console")

    assert stage.sweep(unknown=True).unknown == []
    assert stage.provider.alive == [instance.id]


def test_of_several_machines_of_a_lost_entry_those_that_end_are_reported_beside_the_one_that_does_not(
    stage: Stage,
) -> None:
    (instance,) = stage.launch("a", recorded=False)
    other = twin(stage, instance)
    terminate = stage.provider.terminate

    async def stuck(instance_ids: Sequence[str]) -> None:
        await terminate([each for each in instance_ids if each != other])

    stage.provider.terminate = stuck  # type: ignore[method-assign]
    report = stage.sweep()

    assert [each.instance_id for each in report.ended] == [instance.id]
    assert [(each.entry.key, other in each.reason) for each in report.left] == [("a", True)]
    assert (stage.open_keys, report.clean) == (["a"], False)


def test_what_is_launched_while_the_sweep_looks_is_not_taken_for_unknown(stage: Stage) -> None:
    stage.launch("a")
    tagged = stage.provider.tagged

    async def slow() -> Sequence[Instance]:
        await asyncio.to_thread(lambda: stage.launch("new", owner=ALIVE, pool_id="new pool"))
        return await tagged()

    stage.provider.tagged = slow  # type: ignore[method-assign]
    report = stage.sweep(unknown=True)

    assert report.unknown == []
    assert stage.open_keys == ["new"]


def test_a_pool_that_is_ended_from_outside_is_ended_whoever_owns_it_and_gets_no_more(stage: Stage) -> None:
    stage.launch("a", owner=ALIVE)
    (other,) = stage.launch("b", owner=ALIVE, pool_id="another")

    report = stage.down()

    assert [each.entry.key for each in report.ended] == ["a"]
    assert (stage.provider.alive, stage.open_keys) == ([other.id], ["b"])
    with pytest.raises(PoolStateError):
        stage.launch("c", owner=ALIVE)


@pytest.mark.parametrize(("owner", "kept"), [(ALIVE, True), (ELSEWHERE, True), (DEAD, False)])
def test_a_machine_that_its_owner_may_just_be_asking_for_is_not_forgotten(
    stage: Stage, owner: Owner, kept: bool
) -> None:
    stage.ledger.reserve({"a": 0}, PURCHASE, owner=owner)

    report = stage.down()

    assert [each.entry.key for each in report.left] == (["a"] if kept else [])
    assert stage.open_keys == (["a"] if kept else [])
