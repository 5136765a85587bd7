"""Where the fleet and the ledger meet: no machine without an entry, none forgotten, none that nobody wants any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skyward.api.pool import ComputePool
from skyward.errors import ConfigurationError, LedgerError, TerminationError
from skyward.events import Error
from skyward.ledger.ledger import Ledger
from skyward.ledger.ownership import Owner
from skyward.ledger.sweep import Sweep
from skyward.providers.base import Offer, Provider
from skyward.providers.local import Local
from skyward.providers.registry import make_provider, provider_settings
from skyward.providers.ssh import SSH
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider
from skyward.wire.control import Ending
from support.fleets import FleetStage

OFFER = Offer(spec=InstanceSpec(name="big", cpu=2, memory_gib=4), region="here", spot=True, price_per_hour=2.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


async def test_an_entry_says_what_it_takes_to_find_price_and_end_the_machine(ledger: Ledger) -> None:
    provider = FakeProvider([OFFER])
    fleet = FleetStage(ledger=ledger, provider=provider).fleet()
    await fleet.start()
    entries = ledger.open_entries()
    await fleet.stop()

    assert [(entry.node, entry.instance_id) for entry in entries] == [(0, "fake-0"), (1, "fake-1")]
    assert {entry.owner for entry in entries} == {Owner.this_process()}
    for entry in entries:
        bought = entry.purchase
        assert (bought.pool_id, bought.provider, bought.region) == ("pool", "fake", "here")
        assert (bought.machine, bought.spot, bought.price_per_hour) == ("big", True, 2.0)


async def test_no_machine_is_asked_for_when_it_cannot_be_written_down(ledger: Ledger) -> None:
    provider = FakeProvider()
    ledger.path.write_bytes(b"no ledger" * 1000)

    with pytest.raises(LedgerError, match=r"ledger\.db"):
        await FleetStage(ledger=ledger, provider=provider).fleet().start()

    assert "launch" not in provider.calls


async def test_machines_that_are_gone_are_no_error_when_that_cannot_be_written_down(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    provider = FakeProvider()
    fleet = FleetStage(ledger=ledger, provider=provider).fleet()
    await fleet.start()
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(b"no ledger" * 1000)

    with caplog.at_level(logging.WARNING):
        await fleet.stop()

    assert provider.alive == []
    assert "cannot be used" in caplog.text
    ledger.path.write_bytes(whole)
    report = await Sweep(ledger, make=lambda *_: provider).end_pool("pool")
    assert {entry.key for entry in report.forgotten} == {each.key for each in provider.instances.values()}


async def test_a_pool_that_is_ended_from_outside_gets_no_machine_in_the_place_of_those(ledger: Ledger) -> None:
    stage = FleetStage(ledger=ledger)
    provider, events, fleet = stage.provider, stage.events, stage.fleet()
    try:
        await fleet.start()
        await Sweep(ledger, make=lambda *_: provider).end_pool("pool")
        for node in stage.nodes.opened:
            node._receive(Ending(reason="it was terminated", timed_out=False))
        async with asyncio.timeout(10):
            while fleet.wanted:  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.001)
    finally:
        await fleet.stop()

    assert len(provider.instances) == 2
    assert provider.alive == []
    assert any("skyward down" in event.message for event in events if isinstance(event, Error))


# --- providers made again -----------------------------------------------------------------------------------------


def test_providers_are_made_again_from_their_settings(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    provider = SSH(hosts=["a", "me@b:22"], user="me", key_path=str(key))
    settings = provider_settings(provider)

    named = {"hosts": ["a", "me@b:22"], "user": "me", "key_path": str(key)}
    assert settings == named | {"known_hosts": None, "network": "auto"}
    assert make_provider("ssh", settings) == provider
    assert make_provider("local", provider_settings(Local())) == Local()
    assert provider.supports("tagged")
    assert Local().supports("tagged")


def test_what_a_provider_hides_from_its_repr_is_not_written_down() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Account:
        user: str
        folder: Path
        token: str = field(repr=False)

    account = Account(user="me", folder=Path("/here"), token="secret")

    assert provider_settings(account) == {"user": "me", "folder": "/here"}  # type: ignore[arg-type]
    assert provider_settings(FakeProvider()) == {}


def test_a_provider_of_another_version_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"has no provider 'atlantis'; it has aws, .*local, .*ssh"):
        make_provider("atlantis", {})
    with pytest.raises(ConfigurationError, match="provider 'local' has no parameter 'depth'; it has none"):
        make_provider("local", {"depth": 4})


class Hanging(FakeProvider):
    """Whose sessions are still open until they are closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True


def test_sessions_with_the_provider_end_though_a_machine_may_still_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Hanging()

    async def end_in_vain(_provider: Provider, instance_ids: Sequence[str], **_report: Any) -> None:
        raise TerminationError("it does not answer", instance_ids=tuple(instance_ids))

    monkeypatch.setattr("skyward.fleet.machines.end_instances", end_in_vain)
    with pytest.raises(TerminationError, match="it does not answer"), ComputePool(provider=provider, display="quiet"):
        pass

    assert provider.closed
