"""The kit of fake vendors: its service fails as told and bills by its clock; its machines run what they are given."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import SkywardError
from skyward.machine.ssh import SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.testing.bill import Tariff
from skyward.testing.hosts import SshHost, find_openssh, require_sshd
from support.clock import FakeClock
from support.clouds.booted_machine import MachineRoom
from support.clouds.rest_service import FAULTS, SPECS, Pace, RestAnswer, RestCall, RestService, call_api
from support.eventually import eventually


def errors(status: int, message: str) -> RestAnswer:
    return RestAnswer(status=status, body={"id": "error", "message": message})


class Things(RestService):
    """Things that are made and listed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("things", errors=errors, **settings)
        self.things: list[Any] = []
        self.route("POST /things", self.make)
        self.route("GET /things/{name}", lambda call: RestAnswer(body=call.parts))

    def make(self, call: RestCall) -> RestAnswer:
        self.things.append(call.body)
        return RestAnswer(status=201, body=call.body)


@pytest.fixture
def things() -> Iterator[Things]:
    with Things() as service:
        yield service


def test_a_call_is_answered_by_its_route_and_logged(things: Things) -> None:
    assert call_api(things.url, "POST /things", {"a": 1})[:2] == (201, {"a": 1})
    assert call_api(things.url, "GET /things/new%3Aone")[:2] == (200, {"name": "new:one"})
    assert call_api(things.url, "GET /nowhere")[0] == 404
    assert [(call.route, call.status) for call in things.calls] == [
        ("POST /things", 201),
        ("GET /things/{name}", 200),
        ("", 404),
    ]


@pytest.mark.parametrize(
    ("fault", "status", "effect"),
    [("refused", 403, 0), ("throttled", 429, 0), ("failed after", 500, 1), ("lost before", 0, 0), ("lost after", 0, 1)],
)
def test_a_planned_fault_meets_one_call_before_or_after_its_effect(
    things: Things, fault: str, status: int, effect: int
) -> None:
    things.fail(FAULTS[fault], route="POST /things")
    try:
        found, *_ = call_api(things.url, "POST /things", {})
    except OSError:
        found = 0
    assert (found, len(things.things)) == (status, effect)
    assert call_api(things.url, "POST /things", {})[0] == 201


def test_a_pace_refuses_what_exceeds_it_until_the_time_is_over() -> None:
    clock = FakeClock()
    with Things(clock=clock.monotonic) as things:
        things.paces.append(Pace(calls=2, per_s=60.0))
        assert [call_api(things.url, "GET /things/a")[0] for _ in range(3)] == [200, 200, 429]
        clock.advance(61.0)
        assert call_api(things.url, "GET /things/a")[0] == 200


def test_the_bill_has_every_begun_second_the_least_time_and_the_peak() -> None:
    clock = FakeClock()
    bill = Things(clock=clock.monotonic).bill
    bill.begin("a", Tariff(usd_per_hour=3.6, minimum_s=60))
    bill.begin("b", Tariff(usd_per_hour=36.0))
    clock.advance(10.5)
    bill.end("a")
    clock.advance(10.0)
    assert (bill.seconds(), bill.peak, bill.open) == ({"a": 60, "b": 21}, 2, ["b"])
    assert bill.usd() == pytest.approx(0.06 + 0.21)


@pytest.mark.skipif(not SPECS.exists(), reason="the vendors' descriptions are not in the project")
def test_an_exchange_against_the_description_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="droplets 200"),
        RestService("do", errors=errors, description="digitalocean-compute-openapi.json") as service,
    ):
        service.route("GET /v2/droplets", lambda call: RestAnswer(body={"droplets": [{"id": "text"}]}))
        call_api(service.url, "GET /v2/droplets", headers={"Authorization": "Bearer x"})


CLOUD_CONFIG = """\
#cloud-config
bootcmd:
- [sh, -c, "systemd-run --no-block --unit=a --on-active=600 /usr/sbin/shutdown -h now && echo early >/etc/early"]
ssh_keys: {ed25519_private: @private, ed25519_public: @public}
ssh_authorized_keys: [@user]
disable_root: false
"""

SCRIPT = """\
#!/bin/sh
set -eu
cat >/etc/ssh/ssh_host_ed25519_key <<'KEY'
@private
KEY
systemctl restart ssh
"""


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """A machine's host key and a user's key."""
    require_sshd()
    keygen = find_openssh("ssh-keygen")
    for name in ("host", "user"):
        command = [str(keygen), "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", tmp_path / name]
        subprocess.run(command, check=True)
    private = (tmp_path / "host").read_text(encoding="utf-8")
    public = (tmp_path / "host.pub").read_text(encoding="utf-8").strip()
    return {"private": private, "public": public, "user": (tmp_path / "user.pub").read_text(encoding="utf-8").strip()}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[MachineRoom]:
    with MachineRoom(tmp_path / "machines", block=81) as room:
        yield room
    assert room.failures() == []


async def log_in(host: SshHost, public: str, key: Path) -> str:
    """Return the machine's own folder as a session on it reports it; the error's name if it cannot be logged in to."""
    target = SSHTarget(host=host.address, port=host.port, user=host.user, key_path=str(key), host_keys=(public,))
    transport = SshTransport(target)
    command = [sys.executable, "-c", "import os; print(os.path.dirname(os.environ['MACHINE_ORDERS']), end='')"]
    try:
        return (await transport.run(command, timeout_s=30)).stdout
    except SkywardError as error:
        return type(error).__name__
    finally:
        await transport.close()


async def test_a_machine_runs_its_cloud_config_admits_its_key_and_powers_itself_off(
    room: MachineRoom, keys: dict[str, str], tmp_path: Path
) -> None:
    off: list[str] = []
    orders = CLOUD_CONFIG
    for name in ("private", "public", "user"):
        orders = orders.replace(f"@{name}", json.dumps(keys[name]))
    room.add("one", orders, powered_off=lambda: off.append("one"))
    machine = room.machine("one")
    for attempt in eventually(20):
        with attempt:
            assert machine.host is not None
            assert await log_in(machine.host, keys["public"], tmp_path / "user") == str(machine.folder)
    assert off == []
    room.elapse()
    for attempt in eventually(20):
        with attempt:
            assert off == ["one"]
    assert (machine.own_root / "etc/early").read_text(encoding="utf-8") == "early\n"
    assert machine.host is not None
    assert machine.host.processes() == []


async def test_a_script_puts_the_host_key_in_place_and_an_impostor_keeps_its_own(
    room: MachineRoom, keys: dict[str, str], tmp_path: Path
) -> None:
    orders = SCRIPT.replace("@private", keys["private"].strip())
    room.add("one", orders, keys=[keys["user"]])
    room.impostors = True
    room.add("two", orders, keys=[keys["user"]])
    for attempt in eventually(20):
        with attempt:
            one, two = (room.machine(name).host for name in ("one", "two"))
            assert one is not None
            assert two is not None
            assert await log_in(one, keys["public"], tmp_path / "user") == str(room.machine("one").folder)
            assert room.machine("two").services == ["ssh"]
    assert await log_in(two, keys["public"], tmp_path / "user") == "HostKeyError"
    assert "Accepted" not in two.log.read_text(encoding="utf-8")
