"""Five clouds and a host as one provider: who serves, what a refusal leads to, and what is left."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pytest

import gallery
from skyward.errors import CapacityError
from skyward.events import Notice, SkywardEvent
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger
from skyward.providers.base import Provider
from skyward.providers.several import parse_provider
from skyward.request.request import parse_request
from support.clock import FakeClock
from support.clouds.all_clouds import CLOUDS, AllClouds, all_clouds

pytestmark = pytest.mark.timeout(300)

EXAMPLE = "providers/many_clouds.py"
BY_PRICE = ("verda", "digitalocean", "vastai", "runpod", "aws")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Generator[AllClouds]:
    with (
        pytest.MonkeyPatch.context() as patch,
        all_clouds(patch, tmp_path_factory.mktemp("clouds"), cache=ssh_cache) as clouds,
    ):
        yield clouds


@pytest.fixture
def clouds(shared: AllClouds) -> Generator[AllClouds]:
    """All of them, with everything in stock; then nothing may be left."""
    yield shared
    shared.restock(*CLOUDS)
    assert shared.alive() == {}


class RestockingClock(FakeClock):
    """Calls back once so many seconds have passed."""

    def __init__(self, at: float, then: Callable[[], None]) -> None:
        super().__init__()
        self.at, self.then = at, then

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        if self.elapsed() >= self.at:
            self.then()


class Buyer:
    """Buys machines for a pool, and ends them.

    Attributes:
        notices: what the user was told.
    """

    def __init__(self, clouds: AllClouds, folder: Path, *names: str, clock: FakeClock | None = None) -> None:
        self.notices: list[str] = []
        self.ledger = Ledger(folder / "ledger.db")
        self._provider = parse_provider(clouds.providers(*names))
        self._clock = clock or FakeClock()

    async def buy(self, **asked: object) -> list[str]:
        """Return who served an order, by the ledger; its machines are ended."""
        request = parse_request(**{"cpu": 2, "memory": "2GB", "spot": "never", **asked})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        machines = Machines(
            self._provider, request, pool_id="pool", publish=self._hear, ledger=self.ledger, clock=self._clock
        )
        try:
            made = await machines.launch(range(request.nodes))
            bought = [entry.purchase.provider for entry in self.ledger.open_entries()]
            assert sorted(node.instance.offer.provider for node in made) == sorted(bought)
            return bought
        finally:
            await machines.end(machines.unended())
            await self._provider.close()
            assert self.ledger.open_entries() == ()

    def _hear(self, event: SkywardEvent) -> None:
        if isinstance(event, Notice):
            self.notices.append(event.message)


@pytest.mark.parametrize("sold_out", range(len(BY_PRICE)))
async def test_the_cheapest_that_has_machines_serves(clouds: AllClouds, tmp_path: Path, sold_out: int) -> None:
    clouds.sell_out(*BY_PRICE[:sold_out])

    buyer = Buyer(clouds, tmp_path, *CLOUDS)

    assert await buyer.buy(nodes=2) == [BY_PRICE[sold_out]] * 2, buyer.notices


async def test_all_sold_out_is_one_error_with_every_refusal(clouds: AllClouds, tmp_path: Path) -> None:
    clouds.sell_out(*CLOUDS)
    with pytest.raises(CapacityError) as raised:
        await Buyer(clouds, tmp_path, *CLOUDS).buy()

    attempts = [line.split()[1].rstrip(":") for line in str(raised.value).splitlines() if line.startswith("- ")]
    assert tuple(dict.fromkeys(attempts)) == BY_PRICE


async def test_machines_of_ones_own_come_first(clouds: AllClouds, tmp_path: Path) -> None:
    assert await Buyer(clouds, tmp_path, "ssh", *CLOUDS).buy(prefer="order") == ["ssh"]
    assert await Buyer(clouds, tmp_path, *CLOUDS, "ssh").buy() == ["ssh"]
    assert await Buyer(clouds, tmp_path, "aws", "verda", "ssh").buy(prefer="order") == ["aws"]


async def test_what_one_host_cannot_hold_is_rented_or_spread(clouds: AllClouds, tmp_path: Path) -> None:
    assert await Buyer(clouds, tmp_path, "ssh", "verda").buy(nodes=2) == ["verda", "verda"]
    assert sorted(await Buyer(clouds, tmp_path, "ssh", "verda").buy(nodes=2, spread=True)) == ["ssh", "verda"]


async def test_a_machine_that_appears_after_half_a_minute_is_had(clouds: AllClouds, tmp_path: Path) -> None:
    clouds.sell_out(*CLOUDS)
    clock = RestockingClock(30.0, lambda: clouds.restock("aws"))
    buyer = Buyer(clouds, tmp_path, *CLOUDS, clock=clock)

    assert await buyer.buy(wait_for_capacity="2h") == ["aws"]
    assert "waiting for capacity: minute 0 of 120" in buyer.notices


@pytest.mark.full
def test_the_example_runs_on_a_host_and_the_cheapest_clouds(
    tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with all_clouds(monkeypatch, tmp_path, cache=ssh_cache, machines=True) as clouds:
        for name in ("AWS", "DigitalOcean", "RunPod", "VastAI", "Verda", "SSH"):
            monkeypatch.setattr(f"skyward.{name}", partial(_stand_in, clouds.provider(name.lower())))
        monkeypatch.setattr(sys, "argv", [EXAMPLE, "workstation"])
        clouds.limit(1, "verda")
        runpy.run_path(str(gallery.EXAMPLES / EXAMPLE), run_name="__main__")
        assert clouds.left() == {}
    gallery.compare(EXAMPLE, capsys.readouterr().out, exactly=False)


def _stand_in(provider: Provider, **_: object) -> Provider:
    return provider
