"""Verda's machines without a client: those that may delete themselves do, the others switch themselves off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.base.waiting import wait_until
from skyward.machine.ssh import SSHAccess, SshTransport
from skyward.providers.base import Instance, InstanceState, LaunchOrder
from skyward.providers.verda import Verda
from skyward.request.request import parse_request
from skyward.testing.hosts import require_sshd
from support.clouds.vendors import PATH, PROMPT, VENDORS, opened
from support.clouds.verda_api import VerdaApi

require_sshd()

DEADLINE_S = 60.0


@pytest.fixture
def verda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerdaApi]:
    (vendor,) = [each for each in VENDORS if each.name == "verda"]
    with opened(vendor, monkeypatch, tmp_path, machines=True, env={"PATH": PATH}, provider=PROMPT) as cloud:
        assert isinstance(cloud, VerdaApi)
        yield cloud


async def running(provider: Verda) -> Instance:
    offers = await provider.offers(parse_request(machine="CPU.4V.16G"))
    (made,) = await provider.launch(offers, LaunchOrder(pool_id="sky-1", keys=("sky-1-0-ab",), timeout_s=60.0))

    async def up() -> Instance | None:
        (seen,) = await provider.describe([made.id])
        return seen if seen.state is InstanceState.RUNNING else None

    return await wait_until(up, deadline_s=DEADLINE_S, interval_s=0.05, what="the machine to run")


async def eventually(condition: Callable[[], Any], what: str) -> None:
    async def met() -> bool | None:
        return True if condition() else None

    await wait_until(met, deadline_s=DEADLINE_S, interval_s=0.05, what=what)


async def test_a_machine_whose_client_dies_deletes_itself_with_its_volume_and_script(verda: VerdaApi) -> None:
    provider = Verda(endpoint_url=verda.endpoint_url, self_destruct=True)
    await running(provider)
    await provider.close()
    verda.room.elapse()
    await eventually(lambda: not verda.alive, "the machine to delete itself")
    assert verda.left() == {}
    assert verda.failures() == []


async def test_a_delivery_over_ssh_takes_the_place_of_the_former_one_and_the_end_command_uses_it(
    verda: VerdaApi,
) -> None:
    provider = Verda(endpoint_url=verda.endpoint_url, self_destruct=True)
    machine = await running(provider)
    assert isinstance(machine.access, SSHAccess)
    transport = SshTransport(machine.access.target)
    try:
        verda.expire_bearers()  # the one in the startup script
        secret = await provider.secret(machine)
        assert secret is not None
        done = await transport.run(secret.command, stdin=secret.value.encode(), timeout_s=30)
        assert (done.exit_code, done.stdout) == (0, ""), done.stderr
        mode = await transport.run(["stat", "-c", "%a", f"{provider.home}/.skyward/end-{machine.key}.py"], timeout_s=30)
        assert mode.stdout == "600\n"
        await transport.run(machine.power_off, timeout_s=30)
        await eventually(lambda: not verda.alive, "the machine to delete itself")
    finally:
        await transport.close()
        await provider.close()
    assert verda.left() == {}


async def test_without_self_destruct_the_machine_goes_off_bills_on_and_is_swept(verda: VerdaApi) -> None:
    provider = Verda(endpoint_url=verda.endpoint_url)
    machine = await running(provider)
    verda.room.elapse()
    await eventually(lambda: verda.machines[machine.id].status == "offline", "the machine to go off")
    assert verda.service.bill.open == [machine.id]
    (left,) = await provider.tagged()
    assert (left.id, left.state) == (machine.id, InstanceState.FAILED)
    await provider.terminate([left.id])
    await provider.close()
    assert verda.left() == {}
