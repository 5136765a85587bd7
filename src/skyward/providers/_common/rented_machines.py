"""Life of machines that a provider rents out: launched, described, terminated, with what belongs to them."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Generic, TypeVar, cast

from skyward.base.waiting import SYSTEM_CLOCK, Clock, NotYet, to_its_end, wait_until
from skyward.errors import AuthenticationError, ConfigurationError, SkywardError, TerminationError
from skyward.machine.ssh import SSHAccess, check_configuration
from skyward.machine.ssh_config import SSHTarget
from skyward.providers._common.create_once import MachineCalls, create_once
from skyward.providers._common.logins import host_key, user_key
from skyward.providers._common.machine_boot import END_COMMAND, MAY_END_COMMAND
from skyward.providers._common.refusals import RefusalKind, is_kind
from skyward.providers._common.rest_client import RestClient
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer, Provider
from skyward.request.instance import InstanceSpec

_AGAIN_S: Final = 15.0
"""Time after which an accepted request is repeated, for a machine that does not show it."""
_MANY: Final = 10
"""Number of machines from which their pool is ended by one call, where the vendor has one."""
_POOL_S: Final = 45.0
"""Time by which such a call may take longer than one for a machine, before each machine left is ended by its own."""
_STRIKES: Final = 3
"""Number of consecutive refusals for lack of permission, or as invalid, before the error is raised."""


@dataclass(slots=True, kw_only=True, eq=False)
class MachineEnding:
    """End of machines. For one use.

    A machine that is not listed may be gone, or too new for the list. The answer to the request for its end decides; a
    machine unknown there counts as gone ``unlisted_s`` after its launch.

    Attributes:
        left: ids of the machines that are not gone.
        look: returns the states of the machines with these ids, by id; without those that are not listed. Idempotent.
        ask: requests the end of the machines with these ids; returns the refusals, by id. Idempotent.
        age_s: returns the seconds since this process launched a machine; infinity if it did not.
        unlisted_s: longest time that a new machine is missing from the provider's lists.
        lists_gone: True if the provider goes on listing machines that are gone, as gone. One that has accepted its end
            and is not listed may then be too new for the list; else it is gone.
        clock: the time.
        accepted_at: times of the clock at which the ends of machines were accepted, by id.
    """

    left: list[str]
    look: Callable[[Sequence[str]], Awaitable[Mapping[str, InstanceState]]]
    ask: Callable[[Sequence[str]], Awaitable[Mapping[str, SkywardError]]]
    age_s: Callable[[str], float]
    unlisted_s: float
    lists_gone: bool = False
    clock: Clock = SYSTEM_CLOCK
    accepted_at: dict[str, float] = field(default_factory=dict[str, float])
    _refused: Mapping[str, SkywardError] = field(default_factory=dict[str, SkywardError])
    _unknown: set[str] = field(default_factory=set[str])
    _strikes: int = 0

    async def until_gone(self, where: str, *, deadline_s: float, look_s: float = 2.0) -> None:
        """Terminate the machines, and wait until they are gone.

        Args:
            where: provider and place, for messages.
            deadline_s: limit for all of them.
            look_s: first pause between two looks; pauses grow to ten times that.

        Raises:
            TerminationError: some are not gone at the deadline, or termination is refused three times in a row; names
                them and the reason.
        """
        what = "machines to be gone"
        try:
            await wait_until(self._ended, deadline_s=deadline_s, interval_s=look_s, what=what, clock=self.clock)
        except (SkywardError, OSError) as error:
            why = "; ".join(dict.fromkeys(map(str, self._refused.values()))) or str(error)
            raise TerminationError(
                f"{where} does not confirm that these machines are gone: {', '.join(self.left)}: {why}",
                instance_ids=self.left,
            ) from error

    async def _ended(self) -> bool | NotYet:
        """Look once, request termination of machines not yet terminating, and return True when all are gone."""
        if not self.left:
            return True
        try:
            found = await self.look(self.left)
            self.left = [each for each in self.left if self._may_live(each, found.get(each))]
            doomed = [each for each in self.left if self._is_due(each, found.get(each))]
            answers = await self.ask(doomed) if doomed else dict[str, SkywardError]()
        except SkywardError as error:
            return self._struck(error)
        self.accepted_at |= {each: self.clock.monotonic() for each in doomed if each not in answers}
        unknown = {each for each, error in answers.items() if is_kind(error, RefusalKind.MISSING)}
        self._unknown |= unknown
        self._refused = {each: error for each, error in answers.items() if each not in unknown}
        for error in self._refused.values():
            return self._struck(error)
        self._strikes = 0
        return NotYet(f"{len(self.left)} are not gone") if self.left else True

    def _may_live(self, instance_id: str, state: InstanceState | None) -> bool:
        """Return whether the machine may exist."""
        if state is not None:
            return state is not InstanceState.GONE
        if instance_id in self.accepted_at:
            if not self.lists_gone:
                return False
            accepted_s = self.clock.monotonic() - self.accepted_at[instance_id]
            return min(accepted_s, self.age_s(instance_id)) < self.unlisted_s
        return instance_id not in self._unknown or self.age_s(instance_id) < self.unlisted_s

    def _is_due(self, instance_id: str, state: InstanceState | None) -> bool:
        """Return whether the machine's end is to be requested now."""
        if state is InstanceState.STOPPING:
            return False
        accepted_at = self.accepted_at.get(instance_id)
        return accepted_at is None or (state is not None and self.clock.monotonic() - accepted_at >= _AGAIN_S)

    def _struck(self, error: SkywardError) -> NotYet:
        final = isinstance(error, AuthenticationError | ConfigurationError)
        self._strikes = self._strikes + 1 if final else 0
        if self._strikes >= _STRIKES:
            raise error
        return NotYet(str(error))


_PATIENCE_S: Final = 60.0
_ANY_ADDRESS: Final = "192.0.2.1"
"""Address for documentation (RFC 5737): for the SSH configuration a machine like any other."""
_NOTHING: Final = Offer(spec=InstanceSpec(name="", cpu=0, memory_gib=0.0))

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
class MachineRecord(Instance):
    """A provider's record of one of Skyward's machines, before the parts that are the same for all of them.

    Attributes:
        offer: type, place and present price as the record states them.
        pool_id: its pool.
        public_address: address to log in at; empty for none yet.
        private_address: address in its network; empty for the public one.
        public_port: port of its sshd at the public address; 0 for the class's ``port``.
    """

    pool_id: str
    public_address: str = ""
    private_address: str = ""
    public_port: int = 0


@dataclass(slots=True, eq=False)
class MachineBook:
    """This process's machines at a provider: those that it has launched and not ended, their pools and locks.

    Attributes:
        clock: the time.
        pools: pool of each machine launched or seen, by id.
        locks: locks of the pools' resources, by pool id.
    """

    clock: Clock = SYSTEM_CLOCK
    pools: dict[str, str] = field(default_factory=dict[str, str])
    locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _launching: Counter[str] = field(default_factory=Counter[str])
    _launched: dict[str, tuple[Instance, float]] = field(default_factory=dict[str, tuple[Instance, float]])

    def add(self, instance: Instance) -> Instance:
        """Record a machine that was launched just now, and return it; again, it does nothing."""
        self._launched.setdefault(instance.id, (instance, self.clock.monotonic()))
        return instance

    def drop(self, machine: str) -> None:
        """Forget a machine, which is gone."""
        self._launched.pop(machine, None)

    def age_s(self, machine: str) -> float:
        """Return the seconds since the launch of a machine; infinity if this process did not launch it."""
        found = self._launched.get(machine)
        return math.inf if found is None else self.clock.monotonic() - found[1]

    def as_bought(self, instance: Instance) -> Instance:
        """Return the record of a listed machine with the offer that it was bought as."""
        found = self._launched.get(instance.id)
        return instance if found is None else replace(instance, offer=found[0].offer)

    def unlisted(self, machine: str, *, listing_s: float) -> Instance:
        """Return the record of a machine that its provider does not list: not yet, or not any more.

        It is pending until ``listing_s`` seconds after its launch, then gone; a spot machine was preempted.
        """
        found = self._launched.get(machine)
        if found is None:
            return Instance(id=machine, key="", state=InstanceState.GONE, offer=_NOTHING)
        bought, _ = found
        if self.age_s(machine) < listing_s:
            return replace(bought, state=InstanceState.PENDING, access=None)
        state, spot = InstanceState.GONE, bought.offer.spot
        return replace(bought, state=state, access=None, preempted=spot, reason="it is not listed any more")

    def is_launching(self, pool_id: str) -> bool:
        """Return whether a launch for the pool is under way."""
        return self._launching[pool_id] > 0

    def may_appear(self, pool_id: str, unlisted_s: float) -> bool:
        """Return whether a machine of the pool was launched less than ``unlisted_s`` ago, and has not ended."""
        return any(self.age_s(machine) < unlisted_s for machine, pool in self.pools.items() if pool == pool_id)

    @contextmanager
    def launching(self, pool_id: str) -> Generator[None]:
        """Count a launch for the pool as under way."""
        self._launching[pool_id] += 1
        try:
            yield
        finally:
            self._launching[pool_id] -= 1


class MachineApi(ABC):
    """Calls of a vendor's API that concern machines, of one place where it has several. All are idempotent.

    Attributes:
        rest: the API's client.
    """

    rest: RestClient

    async def close(self) -> None:
        """Close the connections."""
        await self.rest.close()

    @abstractmethod
    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return at least the machines with these ids that exist; ``pool_id`` is their pool, if they have one pool."""

    @abstractmethod
    async def request_end(self, machine: str) -> None:
        """Request the end of a machine; refused as missing if there is none."""

    async def request_ends(self, machines: Sequence[str]) -> Mapping[str, SkywardError]:
        """Request the end of machines, and return the refusals, by id.

        One by one, all at once, unless the vendor takes several in one call.
        """

        async def refusal(machine: str) -> SkywardError | None:
            try:
                await self.request_end(machine)
            except SkywardError as error:
                return error
            return None

        answers = await asyncio.gather(*map(refusal, machines))
        return {machine: error for machine, error in zip(machines, answers, strict=True) if error is not None}

    async def request_pool_end(self, pool_id: str, machines: Sequence[str]) -> Sequence[str]:  # noqa: ARG002 - for subclasses
        """Request the end of a pool by one call, if it has no other machines; return the ids of those that it ends.

        None of them is new, and none is being launched. By default vendors have no such call.
        """
        return ()

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return every machine of Skyward's, or at least every one of that pool: here, those of :meth:`records`."""
        return [each for each in await self.records((), pool_id) if each.state is not InstanceState.GONE]

    async def find(self, key: str) -> MachineRecord | None:
        """Return the machine with that ledger key; None if none is listed."""
        return next((each for each in await self.listed() if each.key == key), None)

    async def remove(self, pool_id: str) -> None:  # noqa: ARG002 - for subclasses
        """Remove a pool's resources other than machines; by default it has none."""
        return


A = TypeVar("A", bound=MachineApi)


class RentedMachines(Provider, Generic[A]):
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
    lists_gone: ClassVar[bool] = False
    """True if the vendor goes on listing machines that are gone, as gone."""
    create_route: ClassVar[str] = ""
    """Route of the call that creates a machine, if such calls have to keep a pace: ``"POST /v2/things"``."""
    bind: ClassVar[str] = ""
    """Address to which the ports of nodes bind; empty for the machine's address in its network."""

    @property
    def ends_itself(self) -> bool:
        """True if machines can stop their own bill when their client is dead."""
        return False

    @property
    def api(self) -> A:
        """The vendor's calls that concern machines."""
        return cast("A", vars(self)["_api"])

    def use_api(self, api: A) -> None:
        """Make the vendor's calls by ``api``; to be called once the settings are checked."""
        vars(self)["_api"] = api

    @property
    def unseen_s(self) -> float:
        """Time after its launch for which a machine of this process may be missing from lists."""
        return self.unlisted_s

    @property
    def place(self) -> str:
        """The provider, and the place where its machines are, for messages."""
        return self.name

    @property
    def trouble(self) -> str:
        """See :attr:`~skyward.providers.base.Provider.trouble`."""
        return self.api.rest.trouble

    async def prepare(self, order: LaunchOrder) -> None:
        """Create the pool's resources other than machines. Idempotent."""

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Create a machine, with one call; see :class:`~skyward.providers._common.create_once.MachineCalls`.

        Where the vendor's offers name hosts, those in ``order.avoid`` are not tried.
        """
        raise NotImplementedError

    def access(self, record: MachineRecord) -> SSHAccess | None:
        """Return the access to a running machine; None while it has no address."""
        return self.access_at(record, record.public_address) if record.public_address else None

    def access_at(self, record: MachineRecord, host: str, *, proxy: tuple[str, ...] = ()) -> SSHAccess:
        """Return the access to a machine that this one reaches at ``host``, by way of ``proxy`` if that is given."""
        path, _ = user_key()
        target = SSHTarget(
            host=host,
            port=record.public_port or self.port,
            user=self.user,
            key_path=str(path),
            host_keys=(host_key(record.key).public,),
            proxy=proxy,
            patience_s=_PATIENCE_S,
        )
        cache = f"{self.home}/.cache/skyward"
        return SSHAccess(
            target=target,
            address=record.private_address or record.public_address,
            workdir=f"{cache}/nodes/{record.id}",
            cache=cache,
            boot_s=self.boot_s,
            other_key_s=self.other_key_s,
            bind=self.bind,
        )

    async def check_login(self) -> None:
        """Check, before a machine is paid for, that the SSH configuration lets Skyward log in to a new one.

        Raises:
            ConfigurationError: it cannot be read, or demands what Skyward cannot do.
        """
        target = SSHTarget(host=_ANY_ADDRESS, port=self.port, user=self.user)
        await asyncio.to_thread(check_configuration, target)

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

        await self.check_login()
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
            return self.book.unlisted(machine, listing_s=self.unseen_s)

        return [seen(each) for each in instance_ids]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Terminate machines and wait for that; with a pool's last one, what belongs to the pool is removed."""
        await self._end(instance_ids)
        pools = {self.book.pools.get(each) for each in instance_ids}
        for pool_id in sorted(filter(None, pools)):
            await self.tidy(pool_id)

    async def close(self) -> None:
        """Close the connections to the vendor."""
        await self.api.close()

    async def tidy(self, pool_id: str) -> None:
        """Remove what belongs to a pool, unless it has machines, listed or not, or launches under way.

        Failures are logged.
        """
        async with self.book.locks[pool_id]:
            try:
                await self.remove_resources(pool_id)
            except SkywardError as error:
                _logger.warning("%s: something of pool %s is left: %s", self.name, pool_id, error)

    async def remove_resources(self, pool_id: str) -> bool:
        """Do :meth:`tidy` under its lock, and return True if nothing of the pool is left; raises the failures."""
        if self.book.is_launching(pool_id) or self.book.may_appear(pool_id, self.unlisted_s):
            return False
        machines = [each for each in await self.api.listed(pool_id) if each.pool_id == pool_id]
        if any(each.state is not InstanceState.GONE for each in machines):
            return False
        await self.api.remove(pool_id)
        return True

    async def tagged(self) -> Sequence[Instance]:
        """Return every machine of Skyward's with these settings that is listed and not gone."""
        return [self._instance(each) for each in await self.api.listed() if each.state is not InstanceState.GONE]

    @property
    def book(self) -> MachineBook:
        """This process's machines."""
        return cast("MachineBook", vars(self).setdefault("_book", MachineBook()))

    async def _look(self, instance_ids: Sequence[str]) -> Mapping[str, MachineRecord]:
        pools = {self.book.pools.get(each, "") for each in instance_ids}
        records = await self.api.records(instance_ids, pools.pop() if len(pools) == 1 else "")
        self.book.pools.update({each.id: each.pool_id for each in records})
        return {each.id: each for each in records}

    async def _end(self, instance_ids: Sequence[str]) -> None:
        async def look(left: Sequence[str]) -> Mapping[str, InstanceState]:
            found = await self._look(left)
            return {each: found[each].state for each in left if each in found}

        asked = await self._end_pool(instance_ids)
        ending = MachineEnding(
            left=[*instance_ids],
            look=look,
            ask=self.api.request_ends,
            accepted_at=dict.fromkeys(asked, SYSTEM_CLOCK.monotonic() + _POOL_S),
            age_s=self.book.age_s,
            unlisted_s=self.unseen_s,
            lists_gone=self.lists_gone,
        )
        deadline_s = self.termination_s + self.ending_pace_s * len(instance_ids)
        await ending.until_gone(self.place, deadline_s=deadline_s, look_s=self.look_s)
        for each in instance_ids:
            self.book.drop(each)

    async def _end_pool(self, machines: Sequence[str]) -> Sequence[str]:
        """Request the end of machines by one call for their pool; return the ids of those that it ends."""
        pool_id, *others = {self.book.pools.get(each, "") for each in machines} or {""}
        if len(machines) < _MANY or others or min(map(self.book.age_s, machines)) < self.unseen_s:
            return ()
        async with self.book.locks[pool_id]:  # a launch waits for it before its first create call
            try:
                return () if self.book.is_launching(pool_id) else await self.api.request_pool_end(pool_id, machines)
            except SkywardError as error:
                _logger.debug("%s ends the machines of pool %s one by one: %s", self.name, pool_id, error)
                return ()

    def _add(self, instance: Instance, order: LaunchOrder) -> Instance:
        self.book.pools[instance.id] = order.pool_id
        return self.book.add(instance)

    def _instance(self, record: MachineRecord) -> Instance:
        running = record.state is InstanceState.RUNNING
        access = self.access(record) if running else None
        listed = replace(
            record,
            state=InstanceState.PENDING if running and access is None else record.state,
            access=access,
            power_off=self.end_command(record.key),
            end_check=self.end_check(record.key),
            ends_itself=self.ends_itself,
            price_per_hour=record.offer.price_per_hour,
        )
        return self.book.as_bought(listed)


class RentedContainers(RentedMachines[A]):
    """Base of providers of containers; see :class:`~skyward.providers._common.rented_machines.RentedMachines`.

    :class:`~skyward.providers._common.machine_boot.ContainerBoot` starts them. They are islands, on hosts that
    run those of strangers, too.
    """

    bind: ClassVar[str] = "127.0.0.1"
    boot_s: ClassVar[float] = 60.0
    """Time for which a container may refuse the first login: its sshd starts with the list of keys in place."""

    @property
    def ends_itself(self) -> bool:
        """True, as far as a container's own check confirms it."""
        return True

    def end_command(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - it is the same in every container
        """Return the command by which a container ends itself."""
        return END_COMMAND

    def end_check(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - it is the same in every container
        """Return the command that reports whether a container's key was accepted."""
        return MAY_END_COMMAND
