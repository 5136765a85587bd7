"""A provider whose API fails while machines are being ended: the user reads that before the last attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from skyward.errors import TerminationError
from skyward.events import Notice
from skyward.ledger import termination
from skyward.ledger.ledger import Ledger
from skyward.ledger.termination import end_instances
from skyward.providers.base import LaunchOrder
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider
from support.fleets import FleetStage


class Failing(FakeProvider):
    """Its API fails until somebody has looked twenty times, or ``reported``, and machines end after that."""

    looks = 0
    failing = False
    reported: Callable[[], bool]

    @property
    def trouble(self) -> str:
        self.looks += self.failing
        return "DELETE /v1/machines was refused: 500" if self.failing else ""

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        while self.looks < 20 and not self.reported():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)
        await super().terminate(instance_ids)


@pytest.mark.parametrize(("trouble_s", "reports"), [(0.01, 1), (3600.0, 0)])
async def test_an_api_that_fails_for_ten_seconds_while_a_pool_closes_is_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble_s: float, reports: int
) -> None:
    """The time is the real one: a clock that tests move would count the watcher's pauses as the machines' time."""
    monkeypatch.setattr(termination, "_LOOK_S", 0.001)
    monkeypatch.setattr(termination, "_TROUBLE_S", trouble_s)
    provider = Failing()
    stage = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider)
    fleet = stage.fleet()
    await fleet.start()
    before = len(stage.events)
    provider.reported = lambda: any(isinstance(each, Notice) for each in stage.events[before:])
    provider.failing = True

    await fleet.stop()

    told = [each.message for each in stage.events[before:] if isinstance(each, Notice)]
    assert len(told) == reports
    for text in told:
        assert "fake-0, fake-1: DELETE /v1/machines was refused: 500. It is tried again" in text
        assert "`skyward sweep`" in text


class Stuck(FakeProvider):
    """Its machines do not end."""

    async def terminate(self, instance_ids: Sequence[str]) -> None: ...


class OwnHosts(Stuck):
    own_machines: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("provider", "advice"), [(Stuck(), "they may still cost money"), (OwnHosts(), "ends after `lease=`")]
)
async def test_what_is_not_confirmed_gone_costs_money_only_where_it_is_rented(
    monkeypatch: pytest.MonkeyPatch, provider: FakeProvider, advice: str
) -> None:
    monkeypatch.setattr(termination, "_ATTEMPTS", 1)
    (offer,) = await provider.offers(parse_request())
    (made,) = await provider.launch([offer], LaunchOrder(pool_id="pool", keys=("key",), timeout_s=60.0))

    with pytest.raises(TerminationError, match="did not confirm") as caught:
        await end_instances(provider, [made.id])

    assert caught.value.instance_ids == (made.id,)
    assert advice in str(caught.value)
    assert ("console" in str(caught.value)) == ("money" in str(caught.value))
