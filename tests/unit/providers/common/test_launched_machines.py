"""Machines between their launch and their first appearance in a list, and the login to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from skyward.errors import ConfigurationError
from skyward.providers._common.logins import host_key, user_key
from skyward.providers._common.rented_machines import MachineBook, check_login, log_in
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from support.clock import FakeClock

OFFER = Offer(spec=InstanceSpec(name="small", cpu=1, memory_gib=1), spot=True, price_per_hour=1.0)
MACHINE = Instance(id="m1", key="pool-0", state=InstanceState.PENDING, offer=OFFER, ends_itself=True)


def test_a_machine_not_listed_yet_is_pending_then_gone_as_preempted() -> None:
    clock = FakeClock()
    launched = MachineBook(clock=clock)
    launched.add(MACHINE)
    clock.advance(29.0)
    launched.add(MACHINE)

    assert launched.age_s("m1") == 29.0
    assert launched.unlisted("m1", listing_s=30.0) == MACHINE
    clock.advance(2.0)
    gone = launched.unlisted("m1", listing_s=30.0)
    assert (gone.state, gone.key, gone.offer, gone.preempted) == (InstanceState.GONE, "pool-0", OFFER, True)


def test_a_machine_of_another_process_is_gone_if_it_is_not_listed() -> None:
    launched = MachineBook(clock=FakeClock())
    launched.add(MACHINE)
    launched.drop("m1")
    launched.drop("m1")

    gone = launched.unlisted("m1", listing_s=30.0)
    assert (gone.state, gone.key, gone.preempted) == (InstanceState.GONE, "", False)
    assert launched.age_s("m1") == float("inf")


def test_a_record_has_the_offer_that_was_bought() -> None:
    launched = MachineBook(clock=FakeClock())
    seen = replace(MACHINE, offer=replace(OFFER, price_per_hour=None))
    assert launched.as_bought(seen) == seen
    launched.add(MACHINE)
    assert launched.as_bought(seen) == MACHINE


def test_a_login_holds_the_derived_host_key_and_the_users_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    class Cloud:
        user: ClassVar[str | None] = "root"
        home: ClassVar[str] = "/root"
        port: ClassVar[int | None] = 22
        boot_s: ClassVar[float] = 9.0
        other_key_s: ClassVar[float] = 3.0

    access = log_in(Cloud(), "m1", "pool-0", host="203.0.113.7", address="10.0.0.7", bind="127.0.0.1")

    assert access.target.host_keys == (host_key("pool-0").public,)
    assert access.target.key_path == str(user_key()[0])
    assert (access.target.host, access.target.user, access.address, access.bind) == (
        "203.0.113.7",
        "root",
        "10.0.0.7",
        "127.0.0.1",
    )
    assert (access.workdir, access.boot_s, access.other_key_s) == ("/root/.cache/skyward/nodes/m1", 9.0, 3.0)


async def test_a_configuration_that_no_machine_can_be_reached_with_is_refused_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cloud:
        user: ClassVar[str | None] = "root"
        home: ClassVar[str] = "/root"
        port: ClassVar[int | None] = 22
        boot_s: ClassVar[float] = 0.0
        other_key_s: ClassVar[float] = 0.0

    monkeypatch.setenv("HOME", str(tmp_path))
    await check_login(Cloud())
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host *.lab\n  ProxyJump gate\nHost *\n  PubkeyAuthentication no\n")

    with pytest.raises(ConfigurationError, match="PubkeyAuthentication no"):
        await check_login(Cloud())
