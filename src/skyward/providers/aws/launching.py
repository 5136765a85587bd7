"""Launch of one order: all of its machines, of one type and in one zone, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from skyward.errors import CapacityError, QuotaError, SkywardError
from skyward.providers._common.create_once import summary
from skyward.providers.aws.account import Account
from skyward.providers.aws.api import patiently, refused_by_fleet
from skyward.providers.aws.boot import MachineImage
from skyward.providers.aws.errors import is_lost
from skyward.providers.aws.network import ensure_group
from skyward.providers.aws.payloads import (
    Candidate,
    MachineOrder,
    Subnet,
    Terms,
    fleet_call,
    machine_call,
    new_instance,
    template_call,
)
from skyward.providers.aws.quotas import exceeded
from skyward.providers.aws.teardown import end, undo
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer

__all__ = ["Launching"]

_AT_ONCE: Final = 8
_SIMILAR: Final = 1.5
"""EC2 may choose a spot machine up to so many times as dear as the cheapest, if it is less likely to be preempted."""
_TOO_DEAR: Final = "its price there is unknown, or more than max_cost or max_price_per_hour allows"
_logger = logging.getLogger("skyward")


class Launching:
    """Launch of one order. For one use.

    Args:
        account: the account.
        order: the order.
        terms: parameters common to its machines.
    """

    def __init__(self, account: Account, order: LaunchOrder, terms: Terms) -> None:
        self._account = account
        self._order = order
        self._terms = terms
        self._group = ""
        self._made: dict[str, Instance] = {}
        self._refused: dict[Offer, SkywardError] = {}
        self._unsure: set[str] = set()

    async def run(self, offers: Sequence[Offer]) -> Sequence[Instance]:
        """Launch every machine and return them in the order of the keys; after an error none is left.

        Raises:
            CapacityError: none of the offers is available.
            QuotaError: the account's quotas allow none of them.
            TerminationError: the launch failed, and some machine may be left.
        """
        account, terms, pool_id = self._account, self._terms, self._order.pool_id
        try:
            with account.book.launching(pool_id):
                await self._all(offers)
        except BaseException:
            made = [each.id for each in self._made.values()]
            await undo(account, pool_id, self._unsure, made, unseen_s=terms.listing_s, deadline_s=terms.deadline_s)
            self._report_undone()
            raise
        return [self._made[key] for key in self._order.keys]

    async def _all(self, offers: Sequence[Offer]) -> None:
        subnets = await self._subnets()
        async with self._account.book.locks[self._order.pool_id]:
            self._group = await ensure_group(
                self._account.api, pool_id=self._order.pool_id, vpc=subnets[0].vpc, ssh_from=self._terms.ssh_from
            )
        for group in _groups(await self._candidates(offers, subnets)):
            left = list(group)
            while left and (got := await self._first(left)) is not None:
                if await self._others(got):
                    self._account.zones[self._order.pool_id] = got.subnet.zone
                    return
                left = [each for each in left if each != got]
        raise self._none_left()

    async def _subnets(self) -> Sequence[Subnet]:
        """Return the subnets for this pool's machines: those of its zone, if it has machines already."""
        subnets = await self._account.subnets()
        pinned = self._account.zones.get(self._order.pool_id)
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
        prices = self._terms.zone_prices.get(offer.spec.name, {})
        price = prices.get(subnet.zone) if offer.spot else offer.price_per_hour
        placed = replace(offer, zone=subnet.zone, price_per_hour=price)
        lasts_s = self._order.lasts_s(placed)
        if lasts_s <= 0:
            self._refuse(placed, CapacityError(_TOO_DEAR))
            return None
        if price is None:
            placed = replace(placed, price_per_hour=max(prices.values(), default=offer.price_per_hour))
        return Candidate(offer=placed, subnet=subnet, image=image, lasts_s=lasts_s)

    async def _first(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Launch the order's first machine as one of the candidates; return None if none is available."""
        key = self._order.keys[0]
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

        outcomes = await asyncio.gather(*map(one, self._order.keys[1:]), return_exceptions=True)
        for failed in (each for each in outcomes if isinstance(each, BaseException)):
            raise failed
        if all(outcomes):
            return True
        await end(self._account, [each.id for each in self._made.values()], deadline_s=self._terms.deadline_s)
        self._report_undone()
        self._made.clear()
        return False

    def _report_undone(self) -> None:
        """Report the machines made so far, which are gone again, to the order's owner."""
        if self._order.undone is not None:
            for each in self._made.values():
                self._order.undone(replace(each, state=InstanceState.GONE))

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
            role = self._terms.instance_profile
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
            return await patiently(self._account.api, operation, call, instance_profile=self._terms.instance_profile)
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
            pool_id=self._order.pool_id, key=key, terms=self._terms, group=self._group, time_to_live_s=lasts_s
        )

    def _book(self, key: str, instance_id: str, offer: Offer) -> None:
        self._made[key] = self._account.book.launched.add(new_instance(instance_id, key, offer))
        self._account.book.pools[instance_id] = self._order.pool_id
        self._unsure.discard(key)

    def _refuse(self, offer: Offer, error: SkywardError) -> None:
        self._refused[offer] = (
            exceeded(offer, self._account.region, str(error)) if isinstance(error, QuotaError) else error
        )

    def _none_left(self) -> SkywardError:
        region = self._account.region
        pinned = self._account.zones.get(self._order.pool_id)
        where = f"zone {pinned}, where the pool's other machines are" if pinned else region
        if not self._refused:
            return CapacityError(f"aws {region}: none of the offers is available in {where}")
        last = list(self._refused.values())[-1]
        kind = QuotaError if all(isinstance(each, QuotaError) for each in self._refused.values()) else CapacityError
        _logger.debug("aws %s cannot launch any of %s", region, summary(self._refused, most=len(self._refused)))
        count = len(self._order.keys)
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
