"""Which recorded machines their providers still have, whatever the providers do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyward.errors import AuthenticationError
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.sweep import Presence, look_up
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Provider
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider, Fate

HOURS_AGO_S = 7200.0


class Refusing(FakeProvider):
    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        raise AuthenticationError("the key was refused")


class Silent(FakeProvider):
    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        await asyncio.Event().wait()
        raise AssertionError


class Late(FakeProvider):
    listing_s: ClassVar[float] = 3600.0


class Stage:
    """A ledger whose entries are old, and providers by name."""

    def __init__(self, path: Path) -> None:
        self.age_s = HOURS_AGO_S
        self.ledger = Ledger(path, now=lambda: time.time() - self.age_s)
        self.providers = {"a": FakeProvider(), "refusing": Refusing(), "silent": Silent()}

    def launch(self, *keys: str, provider: str = "a", recorded: bool = True, reserved: bool = True) -> list[Instance]:
        async def scenario() -> list[Instance]:
            (offer,) = await self.providers[provider].offers(parse_request())
            order = LaunchOrder(pool_id="pool", keys=tuple(keys), timeout_s=60.0)
            return list(await self.providers[provider].launch([offer], order))

        if reserved:
            purchase = Purchase(pool_id="pool", provider=provider, price_per_hour=1.0)
            self.ledger.reserve({key: rank for rank, key in enumerate(keys)}, purchase)
        launched = asyncio.run(scenario())
        if reserved and recorded:
            self.ledger.record(launched)
        return launched

    def make(self, name: str, settings: Mapping[str, Any]) -> Provider:
        return self.providers[name]

    def look_up(self, **options: Any) -> Presence:
        terms = {"make": self.make, "limit_s": 0.05} | options
        return asyncio.run(look_up(self.ledger, self.ledger.open_entries(), **terms))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "ledger.db")


def test_machines_that_are_there_have_their_state_and_the_others_are_gone_from_now_on(stage: Stage) -> None:
    _, second = stage.launch("k0", "k1")
    stage.launch("k2", recorded=False)
    stage.providers["a"].set_state(second.id, InstanceState.GONE)
    presence = stage.look_up()

    assert {key: state is InstanceState.GONE for key, state in presence.states.items()} == {
        "k0": False,
        "k1": True,
        "k2": False,
    }
    first, gone, unanswered = stage.ledger.open_entries()
    assert (first.gone_at, unanswered.gone_at) == (None, None)
    assert gone.gone_at is not None
    assert gone.gone_at - gone.created_at == pytest.approx(HOURS_AGO_S, abs=60)
    assert presence.silent == presence.unknown == []


def test_a_machine_that_was_launched_just_now_is_not_taken_for_gone(stage: Stage) -> None:
    stage.age_s = 1.0
    (machine,) = stage.launch("k0")
    stage.providers["a"].set_state(machine.id, InstanceState.GONE)

    assert stage.look_up().states == {"k0": InstanceState.GONE}
    assert [entry.gone_at for entry in stage.ledger.open_entries()] == [None]


def test_a_provider_that_refuses_or_does_not_answer_keeps_no_other_from_answering(stage: Stage) -> None:
    stage.launch("k0")
    stage.launch("k1", provider="refusing")
    stage.launch("k2", provider="silent")
    presence = stage.look_up()

    assert presence.states.keys() == {"k0"}
    assert sorted(presence.silent) == ["refusing: the key was refused", "silent: no answer within 0.05 s"]


def test_tagged_machines_without_an_entry_are_listed_where_that_is_asked_for(stage: Stage) -> None:
    stage.launch("k0")
    (stranger,) = stage.launch("k1", reserved=False)

    assert stage.look_up().unknown == []
    (unknown,) = stage.look_up(listed=[("a", "{}")]).unknown
    assert (unknown.provider, unknown.instance_id, unknown.key) == ("a", stranger.id, "k1")


def test_machines_that_no_open_entry_accounts_for_are_listed_too(stage: Stage) -> None:
    first, _ = stage.launch("k0", "k1")
    second = replace(first, id="second")
    stage.providers["a"].instances[second.id] = second
    stage.ledger.close(["k1"])
    presence = stage.look_up(listed=[("a", "{}")])

    assert presence.states.keys() == {"k0"}
    assert sorted(each.key for each in presence.unknown) == ["k0", "k1"]


def test_only_lists_that_were_asked_for_have_unknown_machines(stage: Stage) -> None:
    first, _ = stage.launch("k0", "k1")
    stage.launch("lost", recorded=False)
    second = replace(first, id="second")
    stage.providers["a"].instances[second.id] = second

    assert stage.look_up().unknown == []


def test_a_machine_that_has_just_ended_is_not_unknown(stage: Stage) -> None:
    stage.age_s = 1.0
    stage.launch("k0", "k1")
    stage.ledger.close(["k1"])

    assert stage.look_up(listed=[("a", "{}")]).unknown == []


def test_a_machine_that_is_not_listed_yet_is_not_waited_for_and_not_taken_for_gone(stage: Stage) -> None:
    late = stage.providers["a"] = Late()
    late.fate = Fate(unlisted_s=3600.0)
    stage.launch("k0", recorded=False)
    presence = stage.look_up()

    assert (presence.states, presence.silent) == ({}, [])
    assert [entry.gone_at for entry in stage.ledger.open_entries()] == [None]


def test_a_reason_that_names_its_provider_is_not_given_the_name_again(stage: Stage) -> None:
    stage.providers["a"].fail("tagged", AuthenticationError("A: no key"))

    assert stage.look_up(listed=[("a", "{}")]).silent == ["A: no key"]
