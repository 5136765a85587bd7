"""An elastic pool on a cloud's double, whose machines boot and take logins: it rents none while there are no calls."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from support.clouds.vendors import BOOTED, Vendor, opened_with_hosts
from support.eventually import eventually

pytestmark = pytest.mark.timeout(300)


@sky.compute
def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("vendor", BOOTED)
def test_machines_are_rented_for_calls_and_given_back(
    vendor: Vendor, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_with_hosts(vendor, monkeypatch, tmp_path, ssh_cache) as cloud:
        pool = sky.ComputePool(
            provider=vendor.provider(cloud), machine=vendor.machine, nodes=(0, 2), idle="1s", display="quiet"
        )
        with pool:
            for turn in (1, 2):
                assert square(turn) >> pool == turn * turn
                for attempt in eventually(60):
                    with attempt:
                        assert (pool.status.wanted, cloud.alive) == (0, [])
                assert len(cloud.machines) == turn
        assert cloud.left() == {}
