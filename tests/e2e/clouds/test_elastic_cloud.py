"""An elastic pool on a cloud's double, whose machines boot and take logins: it rents none while there are no calls."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward.testing.hosts import require_sshd
from support.clouds.vendors import BOOTED, PATH, PROMPT, Vendor, opened
from support.eventually import eventually

pytestmark = pytest.mark.timeout(300)


@sky.compute
def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("vendor", BOOTED)
def test_machines_are_rented_for_calls_and_given_back(
    vendor: Vendor, tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_sshd()
    env = {"PATH": PATH, "PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    with opened(vendor, monkeypatch, tmp_path, machines=True, cache=ssh_cache, env=env, provider=PROMPT) as cloud:
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
