"""Life of virtual machines that a provider rents out: launched, described, terminated, with what belongs to them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Protocol, cast

from skyward._concurrency.waiting import to_its_end
from skyward.errors import SkywardError
from skyward.providers._common.create_once import MachineCalls, create_once
from skyward.providers._common.launched_machines import LaunchedMachines, check_login, log_in
from skyward.providers._common.refusals import RefusalKind, is_kind
from skyward.providers._common.rest_client import RestClient
from skyward.providers._common.until_gone import Asked, EndingCalls, until_gone
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer

__all__ = ["MachineApi", "MachineBook", "MachineRecord", "RentedMachines", "label", "labels_of"]

_LABEL: Final = re.compile(r"skyward\.([\w-]+)\.([\w-]+)")
_logger = logging.getLogger("skyward")


def label(pool_id: str, key: str) -> str:
    """Return the name of a machine at a provider without tags."""
    return f"skyward.{pool_id}.{key}"


def labels_of(name: object) -> tuple[str, ...]:
    """Return the pool and the ledger key of a name that :func:`label` made; empty for any other."""
    found = _LABEL.fullmatch(str(name))
    return found.groups() if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    """A provider's record of one of Skyward's machines.

    Attributes:
        id: the provider's id.
        key: its ledger key.
        pool_id: its pool.
        state: its state; it counts as running once it has an address.
        offer: type, place and present price as the record states them.
        public_address: address to log in at; empty for none yet.
        private_address: address in its network; empty for the public one.
        public_port: port of its sshd at the public address; 0 for the class's ``port``.
        network: name of its network; empty for an island.
        host: the physical machine below it; empty if it is not known.
        reason: reason for its state; empty for none.
        preempted: True if the provider took it back.
    """

    id: str
    key: str
    pool_id: str
    state: InstanceState
    offer: Offer
    public_address: str = ""
    private_address: str = ""
    public_port: int = 0
    network: str = ""
    host: str = ""
    reason: str = ""
    preempted: bool = False


@dataclass(slots=True, eq=False)
class MachineBook:
    """Record of one process's machines at a provider.

    Attributes:
        launched: machines that this process has launched, and not ended.
        pools: pool of each machine launched or seen, by id.
        locks: locks of the pools' resources, by pool id.
    """

    launched: LaunchedMachines = field(default_factory=LaunchedMachines)
    pools: dict[str, str] = field(default_factory=dict[str, str])
    locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _launching: Counter[str] = field(default_factory=Counter[str])

    def is_launching(self, pool_id: str) -> bool:
        """Return whether a launch for the pool is under way."""
        return self._launching[pool_id] > 0

    def may_appear(self, pool_id: str, unlisted_s: float) -> bool:
        """Return whether a machine of the pool was launched less than ``unlisted_s`` ago, and has not ended."""
        return any(self.launched.age_s(machine) < unlisted_s for machine, pool in self.pools.items() if pool == pool_id)

    @contextmanager
    def launching(self, pool_id: str) -> Generator[None]:
        """Count a launch for the pool as under way."""
        self._launching[pool_id] += 1
        try:
            yield
        finally:
            self._launching[pool_id] -= 1


class MachineApi(Protocol):
    """Calls of a vendor's API that concern machines, of one place where it has several. All are idempotent."""

    @property
    def rest(self) -> RestClient:
        """The API's client."""
        ...

    async def find(self, key: str) -> MachineRecord | None:
        """Return the machine with that ledger key; None if none is listed."""
        ...

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return at least the machines with these ids that exist; ``pool_id`` is their pool, if they have one pool."""
        ...

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return every machine of Skyward's, or at least every one of that pool."""
        ...

    async def request_end(self, machine: str) -> None:
        """Request the end of a machine; refused as missing if there is none."""
        ...

    async def remove(self, pool_id: str) -> None:
        """Remove a pool's resources other than machines."""
        ...


class RentedMachines:
    """Base of providers of virtual machines without client tokens; a subclass is a frozen dataclass of its settings.

    The subclass implements ``offers`` and the methods that raise :class:`NotImplementedError` here. Machines have host
    keys derived from their ledger keys, and admit the user's key.
    """

    termination_s: ClassVar[float] = 300.0
    """Deadline for the termination of machines."""
    ending_pace_s: ClassVar[float] = 0.0
    """Addition to that for each machine, where the calls that end them have to keep a pace."""
    look_s: ClassVar[float] = 2.0
    """First pause between two looks at machines that are being terminated."""
    listing_s: ClassVar[float] = 15.0
    """Time after its launch during which a machine is normally missing from lists."""
    unlisted_s: ClassVar[float] = 60.0
    """Longest time after its launch during which a machine may be missing from lists."""
    user: ClassVar[str | None] = "root"
    """User name to log in with."""
    home: ClassVar[str] = "/root"
    """Home folder of that user."""
    port: ClassVar[int | None] = 22
    """Port of sshd."""
    boot_s: ClassVar[float] = 300.0
    """Time for which a machine may refuse the first login."""
    other_key_s: ClassVar[float] = 10.0
    """Time for which it may show another host key: where its first boot puts ours in place before sshd starts, that is
    another machine's that had the address until now."""
    create_route: ClassVar[str] = ""
    """Route of the call that creates a machine, if such calls have to keep a pace: ``"POST /v2/things"``."""
    bind: ClassVar[str] = ""
    """Address to which the ports of nodes bind; empty for the machine's address in its network."""

    @property
    def name(self) -> str:
        """The provider's name."""
        raise NotImplementedError

    @property
    def ends_itself(self) -> bool:
        """True if machines can stop their own bill when their client is dead."""
        return False

    @property
    def api(self) -> MachineApi:
        """The vendor's calls that concern machines."""
        raise NotImplementedError

    @property
    def trouble(self) -> str:
        """See :attr:`skyward.providers.registry.Troubled.trouble`."""
        return self.api.rest.trouble

    async def prepare(self, order: LaunchOrder) -> None:
        """Create the pool's resources other than machines. Idempotent."""

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Create a machine, with one call; see :class:`~skyward.providers._common.create_once.MachineCalls`.

        Where the vendor's offers name hosts, those in ``order.avoid`` are not tried.
        """
        raise NotImplementedError

    def end_command(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - for subclasses
        """Return the command by which the machine with that ledger key ends its bill; empty for none."""
        return ()

    def end_check(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - for subclasses
        """Return the command that exits with 0 if that machine may end its bill, see :attr:`Instance.end_check`."""
        return ()

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`~skyward.providers.base.Provider.launch`."""

        async def create(offer: Offer, key: str) -> Instance:
            made = self._instance(await self.create(offer, key, order))
            return self._add(replace(made, offer=offer), order)

        async def find(key: str) -> Instance | None:
            record = await self.api.find(key)
            return None if record is None else self._instance(record)

        await check_login(self)
        turn = partial(self.api.rest.ready, self.create_route) if self.create_route else None
        calls = MachineCalls(create=create, find=find, destroy=lambda machine: self._end([machine]), turn=turn)
        try:
            with self.book.launching(order.pool_id):
                async with self.book.locks[order.pool_id]:
                    await self.prepare(order)
                made = await create_once(
                    self.name, calls, offers, order, listing_s=self.unlisted_s, ending_s=self.termination_s
                )
        except BaseException:
            await to_its_end(self.tidy(order.pool_id))
            raise
        return [self._add(each, order) for each in made]

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the machines' records; one launched just now and not listed yet is pending."""
        if not instance_ids:
            return []
        found = await self._look(instance_ids)

        def seen(machine: str) -> Instance:
            if machine in found:
                return self._instance(found[machine])
            return self.book.launched.unlisted(machine, listing_s=self.unlisted_s)

        return [seen(each) for each in instance_ids]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Terminate machines and wait for that; with a pool's last one, what belongs to the pool is removed."""
        await self._end(instance_ids)
        pools = {self.book.pools.get(each) for each in instance_ids}
        for pool_id in sorted(filter(None, pools)):
            await self.tidy(pool_id)

    async def close(self) -> None:
        """Close the connections to the vendor."""
        await self.api.rest.close()

    async def tidy(self, pool_id: str) -> None:
        """Remove what belongs to a pool, unless it has machines, listed or not, or launches under way.

        Failures are logged.
        """
        async with self.book.locks[pool_id]:
            if self.book.is_launching(pool_id) or self.book.may_appear(pool_id, self.unlisted_s):
                return
            try:
                left = [each for each in await self.api.listed(pool_id) if each.pool_id == pool_id]
                if all(each.state is InstanceState.GONE for each in left):
                    await self.api.remove(pool_id)
            except SkywardError as error:
                _logger.warning("%s: something of pool %s is left: %s", self.name, pool_id, error)

    async def tagged(self) -> Sequence[Instance]:
        """Return every machine of Skyward's with these settings that is listed and not gone."""
        return [self._instance(each) for each in await self.api.listed() if each.state is not InstanceState.GONE]

    @property
    def book(self) -> MachineBook:
        """This process's machines."""
        return cast("MachineBook", self.__dict__.setdefault("_book", MachineBook()))

    async def _look(self, instance_ids: Sequence[str]) -> Mapping[str, MachineRecord]:
        pools = {self.book.pools.get(each, "") for each in instance_ids}
        records = await self.api.records(instance_ids, pools.pop() if len(pools) == 1 else "")
        self.book.pools.update({each.id: each.pool_id for each in records})
        return {each.id: each for each in records}

    async def _end(self, instance_ids: Sequence[str]) -> None:
        async def look(left: Sequence[str]) -> Mapping[str, InstanceState]:
            found = await self._look(left)
            return {each: found[each].state for each in left if each in found}

        calls = EndingCalls(look=look, ask=self._ask, age_s=self.book.launched.age_s)
        await until_gone(
            self.name,
            calls,
            instance_ids,
            deadline_s=self.termination_s + self.ending_pace_s * len(instance_ids),
            unlisted_s=self.unlisted_s,
            look_s=self.look_s,
        )
        for each in instance_ids:
            self.book.launched.drop(each)

    async def _ask(self, instance_ids: Sequence[str]) -> Asked:
        answers = await asyncio.gather(*(self._refusal(each) for each in instance_ids))
        refused = {each: error for each, error in zip(instance_ids, answers, strict=True) if error is not None}
        unknown = [each for each, error in refused.items() if is_kind(error, RefusalKind.MISSING)]
        return Asked(refused={each: error for each, error in refused.items() if each not in unknown}, unknown=unknown)

    async def _refusal(self, machine: str) -> SkywardError | None:
        try:
            await self.api.request_end(machine)
        except SkywardError as error:
            return error
        return None

    def _add(self, instance: Instance, order: LaunchOrder) -> Instance:
        self.book.pools[instance.id] = order.pool_id
        return self.book.launched.add(instance)

    def _instance(self, record: MachineRecord) -> Instance:
        running = record.state is InstanceState.RUNNING
        reached = running and bool(record.public_address)
        address = record.private_address or record.public_address
        listed = Instance(
            id=record.id,
            key=record.key,
            state=record.state if reached or not running else InstanceState.PENDING,
            offer=record.offer,
            access=log_in(
                self,
                record.id,
                record.key,
                host=record.public_address,
                port=record.public_port,
                address=address,
                bind=self.bind,
            )
            if reached
            else None,
            reason=record.reason,
            power_off=self.end_command(record.key),
            end_check=self.end_check(record.key),
            network=record.network,
            host=record.host,
            preempted=record.preempted,
            ends_itself=self.ends_itself,
            price_per_hour=record.offer.price_per_hour,
        )
        return self.book.launched.as_bought(listed)
