"""Provider of AWS EC2 machines in one region, billed by the second: its five verbs, and the launch of an order."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any, ClassVar, Final

from skyward.base.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import (
    CapacityError,
    ConfigurationError,
    QuotaError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.machine.ssh import SSHAccess
from skyward.providers._common.create_once import summary
from skyward.providers._common.logins import ADDRESS_URL, client_cidr, user_key
from skyward.providers._common.rented_machines import MachineRecord, RentedMachines
from skyward.providers.aws.account import (
    KEY_TAG,
    LIVE_STATES,
    SPOT_WATCH,
    Account,
    Candidate,
    MachineOrder,
    Subnet,
    Terms,
    admit_client,
    ensure_group,
    fleet_call,
    machine_call,
    template_call,
)
from skyward.providers.aws.api import (
    Api,
    Credentials,
    is_lost,
    may_have_credentials,
    new_session,
    patiently,
    refused_by_fleet,
)
from skyward.providers.aws.machine_images import MachineImage
from skyward.providers.aws.offering import Prices, check_account, exceeded, find_offers
from skyward.providers.aws.s3 import grant_with
from skyward.providers.aws.ssm import require_plugin, session_command
from skyward.providers.base import Finding, Instance, InstanceState, LaunchOrder, Offer, Provider, check_settings
from skyward.request.checks import closest, explain_options, flag, refusal, text, web_address
from skyward.request.request import PoolRequest
from skyward.request.volume import Volume, VolumeAccess

_AGAIN_S: Final = 0.2
_UNSEEN_S: Final = 120.0
_BY_PRODUCTS_S: Final = 60.0
_logger = logging.getLogger("skyward")
_SUBNET = re.compile(r"subnet-[0-9a-f]+", re.ASCII)


@explain_options
@dataclass(frozen=True, kw_only=True)
class AWS(RentedMachines[Account]):
    """Machines of AWS EC2, reached over SSH, billed by the second.

    Credentials are those of boto3: the environment, ``~/.aws``, single sign-on, a machine's role. Every resource that
    Skyward creates carries the tag ``skyward:pool`` and is removed with the pool; a machine also terminates itself
    after the pool's ``timeout``.

    Args:
        region: region, e.g. ``"eu-central-1"``.
        use_ssm: reach machines through Session Manager, with no open port; needs its plugin on this machine and an
            ``instance_profile`` with the policy ``AmazonSSMManagedInstanceCore``.
        profile: profile of the shared configuration; None means the usual chain of credentials.
        subnet: id of the subnet for all machines; by default those of the default VPC.
        instance_profile: name or ARN of the machines' role, e.g. to read from S3.
        endpoint_url: endpoint used instead of AWS's; for tests.

    Raises:
        ConfigurationError: a value is wrong, or boto3 is not installed.
    """

    region: str = "us-east-1"
    use_ssm: bool = False
    profile: str | None = None
    subnet: str | None = None
    instance_profile: str | None = None
    endpoint_url: str | None = None

    patience_s: ClassVar[float] = 60.0
    """Time for which throttled and interrupted calls are retried."""
    listing_s: ClassVar[float] = 10.0
    unlisted_s: ClassVar[float] = 0.0
    lists_gone: ClassVar[bool] = True
    look_s: ClassVar[float] = 0.25
    address_url: ClassVar[str] = ADDRESS_URL
    """Web page that answers with the client's public address."""
    user: ClassVar[str | None] = "ubuntu"
    home: ClassVar[str] = "/home/ubuntu"
    power_off: ClassVar[tuple[str, ...]] = ("sudo", "-n", "shutdown", "-h", "now")
    """Command that ends a machine from within: EC2 terminates machines launched here when they shut down."""
    trouble = Provider.trouble  # pyright: ignore[reportIncompatibleMethodOverride] - repeated calls are not reported

    def __post_init__(self) -> None:
        flag("use_ssm", self.use_ssm)
        check_settings(self, profile=text, subnet=text, instance_profile=text, endpoint_url=web_address)
        if not _SUBNET.fullmatch(self.subnet or "subnet-0"):
            raise refusal("subnet", "a subnet's id such as 'subnet-0123456789abcdef0'", self.subnet)
        if self.use_ssm and self.instance_profile is None:
            raise ConfigurationError(
                "use_ssm=True needs instance_profile=: a role with the policy AmazonSSMManagedInstanceCore, by which "
                "machines register with Session Manager"
            )
        if text("region", self.region) not in (known := _known_regions()):
            raise ConfigurationError(f"region={self.region!r}: AWS has no such region{closest(self.region, known)}")
        credentials = Credentials(region=self.region, profile=self.profile, endpoint_url=self.endpoint_url)
        self.use_api(Account(api=Api(credentials=credentials, patience_s=self.patience_s), subnet=self.subnet))

    @classmethod
    def has_credentials(cls) -> bool:
        """Return whether this machine seems to have credentials of AWS's, or a role."""
        return may_have_credentials()

    @property
    def name(self) -> str:
        """``"aws"``."""
        return "aws"

    @property
    def place(self) -> str:
        """``"aws us-east-1"``."""
        return f"aws {self.region}"

    @property
    def unseen_s(self) -> float:
        """Two minutes: EC2 may list a machine that late."""
        return _UNSEEN_S

    @property
    def ends_itself(self) -> bool:
        """True: EC2 terminates machines launched here when they shut down."""
        return True

    def end_command(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - it is the same on every machine
        """Return the command by which a machine ends its bill."""
        return self.power_off

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the cheapest few machine types of the region that satisfy the request, on spot and on demand.

        Prices that the account may not query are unknown.

        Raises:
            ConfigurationError: EC2 has no such machine, none in this region, or no network for it; names alternatives.
                Or Session Manager's plugin is not installed.
            QuotaError: the account's quotas allow none of them.
            AuthenticationError: there are no credentials, or they lack a permission.
        """
        if self.use_ssm:
            require_plugin()
        return await find_offers(self.api, request)

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Launch machines of one type in one zone, in a security group of their pool.

        Of spot offers at similar prices, EC2 takes the one least likely to be preempted.
        """
        await self.check_login()
        _, key = await asyncio.to_thread(user_key)
        on_spot = dict.fromkeys(each.spec.name for each in offers if each.spot and each.price_per_hour is not None)
        terms = Terms(
            user_key=key.public,
            ssh_from=None if self.use_ssm else await self._client(),
            instance_profile=self.instance_profile,
            zone_prices=await Prices(self.api).by_zone([*on_spot]),
        )
        return await _Launch(self, order, terms).create_all(offers)

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address over SSH, in the pool's security group; does nothing with ``use_ssm``.

        The address is found as in :meth:`launch`.
        """
        if self.use_ssm:
            return ""
        cidr = await self._client()
        async with self.book.locks[pool_id]:
            return cidr if await admit_client(self.api.api, pool_id, cidr) else ""

    async def tidy(self, pool_id: str) -> None:
        """Remove a pool's security group and launch templates, unless it has machines."""
        await _remove_by_products(self, pool_id)

    async def check(self) -> Sequence[Finding]:
        """Check credentials, permissions, network, image and quotas; creates nothing."""
        return await check_account(self.api, use_ssm=self.use_ssm)

    async def zones(self, machines: Sequence[str]) -> Mapping[str, Mapping[str, float | None]]:
        """Return the zones that offer each machine type, with the price on spot."""
        offered, prices = await self.api.offered(machines), await Prices(self.api).of(machines)
        return {name: {zone: prices.spot.get(name, {}).get(zone) for zone in zones} for name, zones in offered.items()}

    async def grant(self, volumes: Sequence[Volume], *, lifetime_s: float) -> Sequence[VolumeAccess]:
        """Grant machines access to volumes: by their role if they have one, else by short-lived keys."""
        return await grant_with(
            new_session(profile=self.profile, region=self.region),
            volumes,
            lifetime_s=lifetime_s,
            keys="none" if self.instance_profile else "lent",
            endpoint_url=self.endpoint_url,
            mountable=True,
        )

    async def _client(self) -> str:
        return await client_cidr(self.address_url, otherwise="use AWS(use_ssm=True)")

    def access(self, record: MachineRecord) -> SSHAccess | None:
        """Return the access to a running machine, with ``use_ssm`` through Session Manager."""
        host = record.private_address if self.use_ssm else record.public_address
        if not (host and record.private_address):
            return None
        proxy = session_command(self.api.api.credentials, record.id, self.port or 22) if self.use_ssm else ()
        return self.access_at(record, host, proxy=proxy)


@cache
def _known_regions() -> Sequence[str]:
    session = new_session()
    return [each for part in session.get_available_partitions() for each in session.get_available_regions("ec2", part)]


async def _undo(provider: AWS, pool_id: str, keys: Collection[str], known: Iterable[str]) -> None:
    """Undo a failed order.

    A machine of an unanswered call may be listed late, or not exist. Removing the pool's security group settles that:
    EC2 refuses the removal as long as the group has a machine, and launches none without the group.

    Args:
        provider: the provider.
        pool_id: the order's pool.
        keys: ledger keys that may have a machine of unknown id.
        known: ids of the order's other machines.

    Raises:
        TerminationError: some may be left; names the ids, and the keys of those whose ids are unknown.
    """
    left, found = set(known), dict[str, str]()
    for last in (False, True):
        missing = set(keys) - found.keys()
        try:
            new = await _find_machines(provider, missing, unseen_s=0.0 if last else provider.listing_s)
        except UnreachableError as error:
            raise _may_be_left(provider.place, pool_id, missing, f"EC2 cannot list it: {error}", left) from error
        found |= new
        if left := left.union(new.values()):
            await provider.terminate(sorted(left))
            left.clear()
        elif last:
            break
        if await _remove_by_products(provider, pool_id) or found.keys() >= set(keys):
            return
    raise _may_be_left(provider.place, pool_id, set(keys) - found.keys(), "EC2 does not list it", left)


async def _find_machines(provider: AWS, keys: Collection[str], *, unseen_s: float) -> Mapping[str, str]:
    """Return the ids of listed machines by ledger key, once all are listed or ``unseen_s`` have passed."""
    wanted = {"instance-state-name": LIVE_STATES, f"tag:{KEY_TAG}": sorted(keys)}
    looked_until = SYSTEM_CLOCK.monotonic() + unseen_s
    found = dict[str, str]()

    async def looked() -> Mapping[str, str] | NotYet:
        last = SYSTEM_CLOCK.monotonic() >= looked_until
        try:
            found.update({record.key: record.id for record in await provider.api.matching(wanted)})
        except SkywardError as error:
            return NotYet(str(error))
        return found if last or found.keys() >= set(keys) else NotYet("there may be more")

    deadline_s = unseen_s + provider.termination_s
    return await wait_until(looked, deadline_s=deadline_s, interval_s=provider.look_s, what="the list of machines")


def _may_be_left(place: str, pool_id: str, keys: Collection[str], why: str, known: Collection[str]) -> TerminationError:
    named = ", ".join(sorted(keys))
    return TerminationError(
        f"{place} did not answer the launch of a machine of pool {pool_id}, ledger key {named}, and {why}"
        ": it may exist and cost money. It ends by itself at the pool's timeout; to end it earlier, run `skyward "
        f"sweep` once this program has ended, or terminate machines with the tag {KEY_TAG}={named} in the console",
        instance_ids=sorted(known),
        keys=sorted(keys),
    )


async def _remove_by_products(provider: AWS, pool_id: str) -> bool:
    """Remove a pool's security groups and launch templates, unless it has machines or launches under way.

    They cost nothing: a failure is logged, and no error. Returns True if nothing of the pool is left.
    """

    async def removed() -> bool | NotYet:
        try:
            return await provider.remove_resources(pool_id)
        except SkywardError as error:
            return NotYet(str(error))

    async with provider.book.locks[pool_id]:
        try:
            return await wait_until(
                removed, deadline_s=_BY_PRODUCTS_S, interval_s=_AGAIN_S, what="by-products to be removed"
            )
        except UnreachableError as error:
            _logger.warning("%s: a security group of pool %s is left: %s", provider.place, pool_id, error)
            return False


_AT_ONCE: Final = 8
_SIMILAR: Final = 1.5
"""Highest price of a spot machine, in units of the cheapest, that EC2 may choose because preemption is less likely."""
_TOO_DEAR: Final = "its price there is unknown, or more than max_cost or max_price_per_hour allows"


@dataclass(slots=True, eq=False)
class _Launch:
    """Launch of one order. For one use.

    Attributes:
        provider: the provider.
        order: the order.
        terms: parameters common to its machines.
    """

    provider: AWS
    order: LaunchOrder
    terms: Terms
    _group: str = ""
    _made: dict[str, Instance] = field(default_factory=dict[str, Instance])
    _refused: dict[Offer, SkywardError] = field(default_factory=dict[Offer, SkywardError])
    _unsure: set[str] = field(default_factory=set[str])

    @property
    def _account(self) -> Account:
        return self.provider.api

    async def create_all(self, offers: Sequence[Offer]) -> Sequence[Instance]:
        """Launch every machine and return them in the order of the keys; after an error none is left.

        Raises:
            CapacityError: none of the offers is available.
            QuotaError: the account's quotas allow none of them.
            TerminationError: the launch failed, and some machine may be left.
        """
        try:
            with self.provider.book.launching(self.order.pool_id):
                await self._all(offers)
        except BaseException:
            made = [machine.id for machine in self._made.values()]
            await _undo(self.provider, self.order.pool_id, self._unsure, made)
            self._report_undone()
            raise
        return [self._made[key] for key in self.order.keys]

    async def _all(self, offers: Sequence[Offer]) -> None:
        subnets = await self._subnets()
        async with self.provider.book.locks[self.order.pool_id]:
            self._group = await ensure_group(
                self._account.api, pool_id=self.order.pool_id, vpc=subnets[0].vpc, ssh_from=self.terms.ssh_from
            )
        for group in _groups(await self._candidates(offers, subnets)):
            left = list(group)
            while left and (got := await self._first(left)) is not None:
                if await self._others(got):
                    self._account.zones[self.order.pool_id] = got.subnet.zone
                    return
                left = [each for each in left if each != got]
        raise self._none_left()

    async def _subnets(self) -> Sequence[Subnet]:
        """Return the subnets for this pool's machines: those of its zone, if it has machines already."""
        subnets = await self._account.subnets()
        pinned = self._account.zones.get(self.order.pool_id)
        return [subnet for subnet in subnets if pinned in (None, subnet.zone)]

    async def _candidates(self, offers: Sequence[Offer], subnets: Sequence[Subnet]) -> list[Candidate]:
        """Return every offer in every zone that has it and where it may be bought; on spot the cheapest first."""
        zones = await self._account.offered(list(dict.fromkeys(offer.spec.name for offer in offers)))
        found: list[Candidate] = []
        for offer in offers:
            image = await self._account.image(offer.spec.name)
            here = [self._placed(offer, each, image) for each in subnets if each.zone in zones[offer.spec.name]]
            found += [placed for placed in here if placed is not None]
        runs = (list(run) for _, run in groupby(found, lambda each: each.offer.spot))
        return [each for run in runs for each in (sorted(run, key=_price) if run[0].offer.spot else run)]

    def _placed(self, offer: Offer, subnet: Subnet, image: MachineImage) -> Candidate | None:
        """Return the offer at the zone's price, the dearest zone's if unknown; None if a limit forbids it."""
        prices = self.terms.zone_prices.get(offer.spec.name, {})
        price = prices.get(subnet.zone) if offer.spot else offer.price_per_hour
        placed = replace(offer, zone=subnet.zone, price_per_hour=price)
        lasts_s = self.order.lasts_s(placed)
        if lasts_s <= 0:
            self._refuse(placed, CapacityError(_TOO_DEAR))
            return None
        if price is None:
            placed = replace(placed, price_per_hour=max(prices.values(), default=offer.price_per_hour))
        return Candidate(offer=placed, subnet=subnet, image=image, lasts_s=lasts_s)

    async def _first(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Launch the order's first machine as one of the candidates; return None if none is available."""
        key = self.order.keys[0]
        if len({each.offer.spec.name for each in candidates}) > 1:
            return await self._by_fleet(self._machine_order(key, candidates), candidates)
        for candidate in candidates:
            if await self._by_type(self._machine_order(key, [candidate]), candidate):
                return candidate
        return None

    async def _others(self, got: Candidate) -> bool:
        """Launch the other machines like the first one; if EC2 has fewer, terminate all and return False."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> bool:
            async with turns:
                return await self._by_type(self._machine_order(key, [got]), got)

        outcomes = await asyncio.gather(*map(one, self.order.keys[1:]), return_exceptions=True)
        for failed in (each for each in outcomes if isinstance(each, BaseException)):
            raise failed
        if all(outcomes):
            return True
        await self.provider.terminate([machine.id for machine in self._made.values()])
        self._report_undone()
        self._made.clear()
        return False

    def _report_undone(self) -> None:
        """Report the machines made so far, which are gone again, to the order's owner."""
        for each in self._made.values():
            self.order.note_undone(replace(each, state=InstanceState.GONE))

    async def _by_type(self, order: MachineOrder, candidate: Candidate) -> bool:
        """Launch the machine as ``candidate``; return False if that is refused."""
        try:
            answer = await self._create("RunInstances", order.key, lambda _: machine_call(order, candidate))
        except (CapacityError, QuotaError) as error:
            self._refuse(candidate.offer, error)
            return False
        self._book(order.key, str(answer["Instances"][0]["InstanceId"]), candidate.offer)
        return True

    async def _by_fleet(self, order: MachineOrder, candidates: Sequence[Candidate]) -> Candidate | None:
        """Launch the machine as one of the candidates; return that one, or None if all are refused."""
        made = await self._account.api.call("ec2", "CreateLaunchTemplate", **template_call(order, candidates[0]))
        template_id = str(made["LaunchTemplate"]["LaunchTemplateId"])
        try:
            answer = await self._create(
                "CreateFleet", order.key, lambda turn: fleet_call(order, candidates, template_id, turn=turn)
            )
        except (CapacityError, QuotaError) as error:
            self._refuse(candidates[0].offer, error)
            return None
        finally:
            await self._drop(template_id)
        errors: list[SkywardError] = []
        for row in answer.get("Errors", ()):
            role = self.terms.instance_profile
            errors.append(refused_by_fleet(row, self._account.region, instance_profile=role))
            self._refuse(_launched_as(row, candidates).offer, errors[-1])
        for group in answer.get("Instances", ()):
            got = _launched_as(group, candidates)
            for instance_id in group["InstanceIds"]:
                self._book(order.key, str(instance_id), got.offer)
                return got
        self._unsure.discard(order.key)
        if fatal := [error for error in errors if not isinstance(error, CapacityError | QuotaError)]:
            raise fatal[0]
        return None

    async def _create(self, operation: str, key: str, call: Callable[[int], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Make a call that launches; ``key`` stays unsure until the call is refused or its machine is booked."""
        self._unsure.add(key)
        try:
            return await patiently(self._account.api, operation, call, instance_profile=self.terms.instance_profile)
        except SkywardError as error:
            if not is_lost(error):
                self._unsure.discard(key)
            raise

    async def _drop(self, template_id: str) -> None:
        """Delete a launch template; a failure is made up for when the pool's last machine ends."""
        try:
            await self._account.api.call("ec2", "DeleteLaunchTemplate", LaunchTemplateId=template_id)
        except SkywardError as error:
            _logger.debug("the launch template %s is left for now: %s", template_id, error)

    def _machine_order(self, key: str, candidates: Sequence[Candidate]) -> MachineOrder:
        lasts_s = min(each.lasts_s for each in candidates)
        return MachineOrder(
            pool_id=self.order.pool_id, key=key, terms=self.terms, group=self._group, time_to_live_s=lasts_s
        )

    def _book(self, key: str, instance_id: str, offer: Offer) -> None:
        watch = SPOT_WATCH if offer.spot else None
        made = Instance(
            id=instance_id, key=key, state=InstanceState.PENDING, offer=offer, watch=watch, ends_itself=True
        )
        self._made[key] = self.provider.book.add(made)
        self.provider.book.pools[instance_id] = self.order.pool_id
        self._unsure.discard(key)

    def _refuse(self, offer: Offer, error: SkywardError) -> None:
        self._refused[offer] = (
            exceeded(offer, self._account.region, str(error)) if isinstance(error, QuotaError) else error
        )

    def _none_left(self) -> SkywardError:
        region = self._account.region
        pinned = self._account.zones.get(self.order.pool_id)
        where = f"zone {pinned}, where the pool's other machines are" if pinned else region
        if not self._refused:
            return CapacityError(f"aws {region}: none of the offers is available in {where}")
        last = list(self._refused.values())[-1]
        kind = QuotaError if all(isinstance(each, QuotaError) for each in self._refused.values()) else CapacityError
        _logger.debug("aws %s cannot launch any of %s", region, summary(self._refused, most=len(self._refused)))
        count = len(self.order.keys)
        error = kind(
            f"aws {region} cannot launch {count} {'machine' if count == 1 else 'machines'} of any of these types now, "
            f"in {where}: {summary(self._refused)}; last: {last}"
        )
        error.__cause__ = last
        return error


def _groups(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Group consecutive candidates among which one call may choose."""
    groups: list[list[Candidate]] = []
    for each in candidates:
        if groups and _belongs(each, groups[-1][0]):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _price(each: Candidate) -> float:
    price = each.offer.price_per_hour
    return float("inf") if price is None else price


def _belongs(each: Candidate, first: Candidate) -> bool:
    if each.image != first.image or each.offer.spot != first.offer.spot or each.lasts_s * _SIMILAR < first.lasts_s:
        return False
    if each.offer.spec.name == first.offer.spec.name or not each.offer.spot:
        return True
    price, cheapest = each.offer.price_per_hour, first.offer.price_per_hour
    return price is not None and cheapest is not None and price <= _SIMILAR * cheapest


def _launched_as(group: Mapping[str, Any], candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that a part of a fleet's answer refers to."""
    wanted = group.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    name = group.get("InstanceType") or wanted.get("InstanceType")
    place = wanted.get("SubnetId")

    def unlike(candidate: Candidate) -> tuple[bool, bool]:
        return candidate.offer.spec.name != name, place is not None and candidate.subnet.id != place

    return min(candidates, key=unlike)
