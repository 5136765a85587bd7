"""A kept fleet on a cloud's double, ended from another computer of its user."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli import main
from skyward.ledger.fleet_record import FleetFolder
from skyward.ledger.ledger import Ledger
from support.clouds.vendors import BOOTED, Vendor, opened_with_hosts
from support.eventually import eventually

pytestmark = pytest.mark.timeout(300)

KEEPER_S = 180.0
"""Longest time until the keeper asks the provider again: 60 s for a machine that ended during a look, then 60 s."""


@sky.compute
def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("vendor", BOOTED)
def test_down_on_another_computer_ends_the_machines_and_the_first_one_forgets_them_with_their_keys(
    vendor: Vendor, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_with_hosts(vendor, monkeypatch, tmp_path, ssh_cache) as cloud:
        provider = vendor.provider(cloud)
        with sky.ComputePool(
            provider=provider, machine=vendor.machine, name="cloud", keep="20m", display="quiet"
        ) as pool:
            assert square(3) >> pool == 9
        (machine,) = cloud.alive
        settings = {**vendor.settings, "endpoint_url": cloud.endpoint_url}
        place = ["--provider", vendor.name, *(f"--set={name}={value}" for name, value in settings.items())]
        with monkeypatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "another-computer"))
            done = CliRunner().invoke(main, ["down", "cloud", *place])
            assert Ledger.of_user().entries() == ()

        assert (done.exit_code, cloud.alive) == (0, []), done.output
        assert machine in done.output
        for attempt in eventually(KEEPER_S):
            with attempt:
                assert Ledger.of_user().open_entries() == ()
                assert not FleetFolder("cloud").path.exists()
        assert cloud.left() == {}
