"""Machines of a provider without client tokens: what their pool needs lives as long as they may."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from skyward.errors import CapacityError, ConfigurationError, UnreachableError
from skyward.machine.ssh import SSHAccess
from skyward.providers._common.rented_machines import MachineApi, MachineRecord, RentedMachines
from skyward.providers._common.rest_client import RestClient
from skyward.providers.base import InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

POOL = "sky-1"
OFFER = Offer(spec=InstanceSpec(name="small", cpu=1, memory_gib=1), price_per_hour=1.0)


class Account(MachineApi):
    """Machines of an account, listed or not, and pools whose resources exist."""

    def __init__(self) -> None:
        self.machines: dict[str, MachineRecord] = {}
        self.prepared: list[str] = []
        self.ended_at_once: list[str] = []
        self.listing = True
        self.removing = asyncio.Event()
        self.may_remove = asyncio.Event()
        self.may_remove.set()

    rest: RestClient  # of which no call fails here

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        return await self.listed()

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        return [*self.machines.values()] if self.listing else []

    async def request_end(self, machine: str) -> None:
        self.machines.pop(machine, None)

    async def request_pool_end(self, pool_id: str, machines: Sequence[str]) -> Sequence[str]:
        self.ended_at_once += machines
        for each in machines:
            self.machines.pop(each)
        return machines

    async def remove(self, pool_id: str) -> None:
        self.removing.set()
        await self.may_remove.wait()
        self.prepared.remove(pool_id)


@dataclass(frozen=True, kw_only=True)
class Rented(RentedMachines):
    """A provider whose creations wait for permission."""

    account: Account
    creating: asyncio.Event = field(default_factory=asyncio.Event)
    may_create: asyncio.Event = field(default_factory=asyncio.Event)
    sold_out: bool = False
    lost: bool = False

    listing_s: ClassVar[float] = 0.0
    look_s: ClassVar[float] = 0.01

    @property
    def name(self) -> str:
        return "rented"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        return ()

    @property
    def api(self) -> MachineApi:
        return self.account

    def end_check(self, key: str) -> tuple[str, ...]:
        return ("may-end", key)

    async def prepare(self, order: LaunchOrder) -> None:
        self.account.prepared.append(order.pool_id)

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        self.creating.set()
        await self.may_create.wait()
        if self.sold_out:
            raise CapacityError("sold out")
        made = MachineRecord(id=f"m-{key}", key=key, pool_id=order.pool_id, state=InstanceState.PENDING, offer=offer)
        self.account.machines[made.id] = made
        if self.lost:
            raise UnreachableError("no answer")
        return made


def order() -> LaunchOrder:
    return LaunchOrder(pool_id=POOL, keys=("key-0",), timeout_s=60.0)


async def test_nothing_is_removed_while_a_machine_is_created_or_not_listed_yet() -> None:
    account = Account()
    provider = Rented(account=account)
    launch = asyncio.ensure_future(provider.launch([OFFER], order()))
    await provider.creating.wait()
    await provider.tidy(POOL)
    assert account.prepared == [POOL]

    provider.may_create.set()
    (made,) = await launch
    account.listing = False
    await provider.tidy(POOL)
    assert account.prepared == [POOL]

    account.listing = True
    await provider.terminate([made.id])
    assert account.prepared == []


async def test_a_failed_launch_removes_what_it_prepared_though_it_is_cancelled() -> None:
    account = Account()
    provider = Rented(account=account, sold_out=True)
    provider.may_create.set()
    account.may_remove.clear()
    launch = asyncio.ensure_future(provider.launch([OFFER], order()))
    await account.removing.wait()
    launch.cancel()
    asyncio.get_running_loop().call_soon(account.may_remove.set)
    with pytest.raises(asyncio.CancelledError):
        await launch
    assert account.prepared == []


async def test_machines_whose_ends_keep_a_pace_have_more_time_the_more_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rented, "termination_s", 0.0)
    monkeypatch.setattr(Rented, "ending_pace_s", 15.0)
    account = Account()
    provider = Rented(account=account)
    provider.may_create.set()
    made = await provider.launch([OFFER], LaunchOrder(pool_id=POOL, keys=("a", "b"), timeout_s=60.0))
    await provider.terminate([each.id for each in made])
    assert account.machines == {}


async def test_a_pool_is_ended_by_one_call_unless_a_machine_of_it_is_being_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rented, "unlisted_s", 0.0)
    account = Account()
    provider = Rented(account=account)
    provider.may_create.set()
    ten = LaunchOrder(pool_id=POOL, keys=tuple("abcdefghij"), timeout_s=60.0)
    first = [each.id for each in await provider.launch([OFFER], ten)]
    provider.may_create.clear()
    provider.creating.clear()
    launch = asyncio.ensure_future(provider.launch([OFFER], ten))
    await provider.creating.wait()
    await provider.terminate(first)
    assert (account.machines, account.ended_at_once) == ({}, [])

    provider.may_create.set()
    second = [each.id for each in await launch]
    await provider.terminate(second)
    assert (account.machines, account.ended_at_once) == ({}, second)


async def test_an_adopted_machine_is_pending_while_a_list_lacks_it() -> None:
    account = Account()
    provider = Rented(account=account, lost=True)
    provider.may_create.set()
    (made,) = await provider.launch([OFFER], order())
    account.listing = False
    (seen,) = await provider.describe([made.id])
    assert (seen.state, seen.offer) == (InstanceState.PENDING, OFFER)


@pytest.mark.parametrize(("public_port", "port"), [(0, 22), (40122, 40122)])
async def test_a_container_is_reached_at_its_own_port_and_names_its_host_and_check(public_port: int, port: int) -> None:
    account = Account()
    account.machines["m"] = MachineRecord(
        id="m",
        key="key-0",
        pool_id=POOL,
        state=InstanceState.RUNNING,
        offer=OFFER,
        public_address="127.0.0.9",
        public_port=public_port,
        host="host-7",
    )
    (seen,) = await Rented(account=account).describe(["m"])
    assert isinstance(seen.access, SSHAccess)
    assert (seen.access.target.host, seen.access.target.port) == ("127.0.0.9", port)
    assert (seen.host, seen.end_check) == ("host-7", ("may-end", "key-0"))


async def test_a_configuration_that_no_machine_can_be_reached_with_is_refused_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    await Rented(account=Account()).check_login()
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host *.lab\n  ProxyJump gate\nHost *\n  PubkeyAuthentication no\n")

    with pytest.raises(ConfigurationError, match="PubkeyAuthentication no"):
        await Rented(account=Account()).check_login()
