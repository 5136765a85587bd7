"""A provider whose API fails while machines are being ended: the user reads that before the last attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from skyward.events import Notice
from skyward.provision.buying.ledger import Ledger
from skyward.testing.provider import FakeProvider
from support.fleets import FleetStage


class Failing(FakeProvider):
    """Its API fails from one moment to another, in seconds; calls are repeated meanwhile."""

    fails_from = well_at = 0.0

    @property
    def trouble(self) -> str:
        fails = self.fails_from <= self.clock.elapsed() < self.well_at
        return "DELETE /v1/machines was refused: 500" if fails else ""

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        while self.clock.elapsed() < self.fails_from + 15:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)
        await super().terminate(instance_ids)


@pytest.mark.parametrize(("fails_s", "reports"), [(60.0, 1), (9.0, 0)])
async def test_an_api_that_fails_for_ten_seconds_while_a_pool_closes_is_one_notice(
    tmp_path: Path, fails_s: float, reports: int
) -> None:
    provider = Failing()
    stage = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider)
    fleet = stage.fleet()
    await fleet.start()
    provider.fails_from = stage.clock.elapsed()
    provider.well_at = provider.fails_from + fails_s
    before = len(stage.events)

    async def passing() -> None:
        while True:
            stage.clock.advance(0.1)
            await asyncio.sleep(0.001)

    time = asyncio.ensure_future(passing())
    await fleet.stop()
    time.cancel()

    told = [each.message for each in stage.events[before:] if isinstance(each, Notice)]
    assert len(told) == reports
    for text in told:
        assert "fake-0, fake-1: DELETE /v1/machines was refused: 500. It is tried again" in text
        assert "`skyward sweep`" in text
