"""Launch of an order at EC2, its undoing, and the termination of machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final

from skyward.base.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import CapacityError, QuotaError, SkywardError, TerminationError, UnreachableError
from skyward.providers._common.create_once import summary
from skyward.providers._common.refusals import RefusalKind
from skyward.providers._common.rented_machines import Asked, EndingCalls, request_ends, until_gone
from skyward.providers.aws.account import (
    KEY_TAG,
    LIVE_STATES,
    POOL_TAG,
    Account,
    Candidate,
    MachineImage,
    MachineOrder,
    Subnet,
    Terms,
    ensure_group,
    filters,
    fleet_call,
    groups,
    in_parts,
    machine_call,
    new_instance,
    template_call,
)
from skyward.providers.aws.api import is_lost, patiently, refused_by_fleet
from skyward.providers.aws.offering import exceeded
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer

UNSEEN_S: Final = 120.0
"""Time after its launch during which a machine may be missing from EC2's lists."""

_LOOK_S: Final = 0.25
_AGAIN_S: Final = 0.2
_BY_PRODUCTS_S: Final = 60.0
_DOOMED: Final = {"shutting-down": InstanceState.STOPPING, "terminated": InstanceState.GONE}
_logger = logging.getLogger("skyward")


async def end(account: Account, instance_ids: Sequence[str], *, deadline_s: float) -> None:
    """Terminate machines and wait until they are gone; then remove security groups and templates of empty pools.

    Raises:
        TerminationError: some are not gone at the deadline, or termination is refused three times in a row; names
            them and the reason.
    """
    pools = {account.book.pools[each] for each in instance_ids if each in account.book.pools}

    async def look(left: Sequence[str]) -> Mapping[str, InstanceState]:
        records = await account.records({"instance-id": left})
        pools.update(record.pool_id for record in records if record.pool_id)
        return {record.id: _DOOMED.get(record.state, InstanceState.RUNNING) for record in records}

    async def terminate(*machines: str) -> None:
        await account.api.call("ec2", "TerminateInstances", InstanceIds=[*machines])

    async def ask(left: Sequence[str]) -> Asked:
        """Request termination by batches; machine by machine where there is one, or where a batch is refused."""
        alone = list[str]()
        for part in in_parts(left):
            try:
                if len(part) > 1:
                    await terminate(*part)
                    continue
            except SkywardError as error:
                _logger.debug("aws %s: refused for %s: %s", account.region, ", ".join(part), error)
            alone += part
        return await request_ends(terminate, alone)

    await until_gone(
        f"aws {account.region}",
        EndingCalls(look=look, ask=ask, age_s=account.book.age_s),
        instance_ids,
        deadline_s=deadline_s,
        unlisted_s=UNSEEN_S,
        lists_gone=True,
        look_s=_LOOK_S,
    )
    for instance_id in instance_ids:
        account.book.drop(instance_id)
        account.book.pools.pop(instance_id, None)
    for pool_id in sorted(pools):
        await remove_by_products(account, pool_id)


async def undo(
    account: Account,
    pool_id: str,
    keys: Collection[str],
    known: Iterable[str],
    *,
    unseen_s: float,
    deadline_s: float,
) -> None:
    """Undo a failed order.

    A machine of an unanswered call may be listed late, or not exist. Removing the pool's security group settles that:
    EC2 refuses the removal as long as the group has a machine, and launches none without the group.

    Args:
        account: the account.
        pool_id: the order's pool.
        keys: ledger keys that may have a machine of unknown id.
        known: ids of the order's other machines.
        unseen_s: time after which EC2 normally lists a new machine.
        deadline_s: limit for the termination.

    Raises:
        TerminationError: some may be left; names the ids, and the keys of those whose ids are unknown.
    """
    left, found = set(known), dict[str, str]()
    for last in (False, True):
        missing = set(keys) - found.keys()
        try:
            new = await _found(account, missing, unseen_s=0.0 if last else unseen_s, deadline_s=deadline_s)
        except UnreachableError as error:
            raise _may_be_left(account, pool_id, missing, f"EC2 cannot list it: {error}", left) from error
        found |= new
        if left := left.union(new.values()):
            await end(account, sorted(left), deadline_s=deadline_s)
            left.clear()
        elif last:
            break
        if await remove_by_products(account, pool_id) or found.keys() >= set(keys):
            return
    raise _may_be_left(account, pool_id, set(keys) - found.keys(), "EC2 does not list it", left)


async def _found(account: Account, keys: Collection[str], *, unseen_s: float, deadline_s: float) -> Mapping[str, str]:
    """Return the ids of listed machines by ledger key, once all are listed or ``unseen_s`` have passed."""
    wanted = {"instance-state-name": LIVE_STATES, f"tag:{KEY_TAG}": sorted(keys)}
    looked_until = SYSTEM_CLOCK.monotonic() + unseen_s
    found = dict[str, str]()

    async def looked() -> Mapping[str, str] | NotYet:
        last = SYSTEM_CLOCK.monotonic() >= looked_until
        try:
            found.update({record.key: record.id for record in await account.records(wanted)})
        except SkywardError as error:
            return NotYet(str(error))
        return found if last or found.keys() >= set(keys) else NotYet("there may be more")

    return await wait_until(looked, deadline_s=unseen_s + deadline_s, interval_s=_LOOK_S, what="the list of machines")


def _may_be_left(
    account: Account, pool_id: str, keys: Collection[str], why: str, known: Collection[str]
) -> TerminationError:
    named = ", ".join(sorted(keys))
    return TerminationError(
        f"aws {account.region} did not answer the launch of a machine of pool {pool_id}, ledger key {named}, and {why}"
        ": it may exist and cost money. It ends by itself at the pool's timeout; to end it earlier, run `skyward "
        f"sweep` once this program has ended, or terminate machines with the tag {KEY_TAG}={named} in the console",
        instance_ids=sorted(known),
        keys=sorted(keys),
    )


async def remove_by_products(account: Account, pool_id: str) -> bool:
    """Remove a pool's security groups and launch templates, unless it has machines or launches under way.

    They cost nothing: a failure is logged, and no error. Returns True if nothing of the pool is left.
    """

    async def removed() -> bool | NotYet:
        if account.book.is_launching(pool_id):
            return False
        try:
            if await account.records({"instance-state-name": LIVE_STATES, f"tag:{POOL_TAG}": [pool_id]}):
                return False
            await _remove_all(account, pool_id)
        except SkywardError as error:
            return NotYet(str(error))
        account.zones.pop(pool_id, None)
        return True

    async with account.book.locks[pool_id]:
        try:
            return await wait_until(
                removed, deadline_s=_BY_PRODUCTS_S, interval_s=_AGAIN_S, what="by-products to be removed"
            )
        except UnreachableError as error:
            _logger.warning("aws %s: a security group of pool %s is left: %s", account.region, pool_id, error)
            return False


async def _remove_all(account: Account, pool_id: str) -> None:
    wanted = filters({f"tag:{POOL_TAG}": [pool_id]})
    templates = await account.api.pages("ec2", "DescribeLaunchTemplates", "LaunchTemplates", Filters=wanted)
    found = [("DeleteLaunchTemplate", {"LaunchTemplateId": row["LaunchTemplateId"]}) for row in templates]
    found += [("DeleteSecurityGroup", {"GroupId": row["GroupId"]}) for row in await groups(account.api, pool_id)]
    for operation, what in found:
        await account.api.call("ec2", operation, **what, done=[RefusalKind.MISSING])


_AT_ONCE: Final = 8
_SIMILAR: Final = 1.5
"""EC2 may choose a spot machine up to so many times as dear as the cheapest, if it is less likely to be preempted."""
_TOO_DEAR: Final = "its price there is unknown, or more than max_cost or max_price_per_hour allows"


@dataclass(slots=True, eq=False)
class Launching:
    """Launch of one order. For one use.

    Attributes:
        account: the account.
        order: the order.
        terms: parameters common to its machines.
    """

    account: Account
    order: LaunchOrder
    terms: Terms
    _group: str = ""
    _made: dict[str, Instance] = field(default_factory=dict[str, Instance])
    _refused: dict[Offer, SkywardError] = field(default_factory=dict[Offer, SkywardError])
    _unsure: set[str] = field(default_factory=set[str])

    async def run(self, offers: Sequence[Offer]) -> Sequence[Instance]:
        """Launch every machine and return them in the order of the keys; after an error none is left.

        Raises:
            CapacityError: none of the offers is available.
            QuotaError: the account's quotas allow none of them.
            TerminationError: the launch failed, and some machine may be left.
        """
        account, terms, pool_id = self.account, self.terms, self.order.pool_id
        try:
            with account.book.launching(pool_id):
                await self._all(offers)
        except BaseException:
            made = [each.id for each in self._made.values()]
            await undo(account, pool_id, self._unsure, made, unseen_s=terms.listing_s, deadline_s=terms.deadline_s)
            self._report_undone()
            raise
        return [self._made[key] for key in self.order.keys]

    async def _all(self, offers: Sequence[Offer]) -> None:
        subnets = await self._subnets()
        async with self.account.book.locks[self.order.pool_id]:
            self._group = await ensure_group(
                self.account.api, pool_id=self.order.pool_id, vpc=subnets[0].vpc, ssh_from=self.terms.ssh_from
            )
        for group in _groups(await self._candidates(offers, subnets)):
            left = list(group)
            while left and (got := await self._first(left)) is not None:
                if await self._others(got):
                    self.account.zones[self.order.pool_id] = got.subnet.zone
                    return
                left = [each for each in left if each != got]
        raise self._none_left()

    async def _subnets(self) -> Sequence[Subnet]:
        """Return the subnets for this pool's machines: those of its zone, if it has machines already."""
        subnets = await self.account.subnets()
        pinned = self.account.zones.get(self.order.pool_id)
        return [subnet for subnet in subnets if pinned in (None, subnet.zone)]

    async def _candidates(self, offers: Sequence[Offer], subnets: Sequence[Subnet]) -> list[Candidate]:
        """Return every offer in every zone that has it and where it may be bought; on spot the cheapest first."""
        zones = await self.account.offered(list(dict.fromkeys(offer.spec.name for offer in offers)))
        found: list[Candidate] = []
        for offer in offers:
            image = await self.account.image(offer.spec.name)
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
        await end(self.account, [each.id for each in self._made.values()], deadline_s=self.terms.deadline_s)
        self._report_undone()
        self._made.clear()
        return False

    def _report_undone(self) -> None:
        """Report the machines made so far, which are gone again, to the order's owner."""
        if self.order.undone is not None:
            for each in self._made.values():
                self.order.undone(replace(each, state=InstanceState.GONE))

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
        made = await self.account.api.call("ec2", "CreateLaunchTemplate", **template_call(order, candidates[0]))
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
            errors.append(refused_by_fleet(row, self.account.region, instance_profile=role))
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
            return await patiently(self.account.api, operation, call, instance_profile=self.terms.instance_profile)
        except SkywardError as error:
            if not is_lost(error):
                self._unsure.discard(key)
            raise

    async def _drop(self, template_id: str) -> None:
        """Delete a launch template; a failure is made up for when the pool's last machine ends."""
        try:
            await self.account.api.call("ec2", "DeleteLaunchTemplate", LaunchTemplateId=template_id)
        except SkywardError as error:
            _logger.debug("the launch template %s is left for now: %s", template_id, error)

    def _machine_order(self, key: str, candidates: Sequence[Candidate]) -> MachineOrder:
        lasts_s = min(each.lasts_s for each in candidates)
        return MachineOrder(
            pool_id=self.order.pool_id, key=key, terms=self.terms, group=self._group, time_to_live_s=lasts_s
        )

    def _book(self, key: str, instance_id: str, offer: Offer) -> None:
        self._made[key] = self.account.book.add(new_instance(instance_id, key, offer))
        self.account.book.pools[instance_id] = self.order.pool_id
        self._unsure.discard(key)

    def _refuse(self, offer: Offer, error: SkywardError) -> None:
        self._refused[offer] = (
            exceeded(offer, self.account.region, str(error)) if isinstance(error, QuotaError) else error
        )

    def _none_left(self) -> SkywardError:
        region = self.account.region
        pinned = self.account.zones.get(self.order.pool_id)
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
