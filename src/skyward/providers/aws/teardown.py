"""Termination of machines, and removal of everything else that was made for their pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from skyward._concurrency.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import SkywardError, TerminationError, UnreachableError
from skyward.providers.aws.account import Account, in_parts
from skyward.providers.aws.errors import RefusalKind, is_kind
from skyward.providers.aws.network import group_ids
from skyward.providers.aws.payloads import KEY_TAG, LIVE_STATES, POOL_TAG, Record, filters

__all__ = ["UNSEEN_S", "end", "remove_by_products", "undo"]

UNSEEN_S: Final = 120.0
"""So long after its launch a machine may not be listed yet."""

_MOST_IDS: Final = 1000
_LOOK_S: Final = 0.25
_AGAIN_S: Final = 0.2
_BY_PRODUCTS_S: Final = 60.0
_STRIKES: Final = 3
"""So often what nobody will ever be allowed is asked for, before that is said."""
_logger = logging.getLogger("skyward")


async def end(account: Account, instance_ids: Sequence[str], *, deadline_s: float) -> None:
    """Terminate machines until they are gone, then remove what was made for pools that have none any more.

    Raises:
        TerminationError: some are not gone at the deadline, or it is refused again and again; names them, and why.
    """
    ending = _Ending(account, instance_ids)
    try:
        await wait_until(ending.ended, deadline_s=deadline_s, interval_s=_LOOK_S, what="machines to be gone")
    except (SkywardError, OSError) as error:
        why = "; ".join(dict.fromkeys(map(str, ending.refused.values()))) or str(error)
        raise TerminationError(
            f"aws {account.region} does not confirm that these machines are gone: {', '.join(ending.left)}: {why}",
            instance_ids=ending.left,
        ) from error
    for instance_id in instance_ids:
        account.launched.pop(instance_id, None)
    for pool_id in sorted(ending.pools):
        await remove_by_products(account, pool_id)


class _Ending:
    """Machines on their way out; a look at them ends once more those that are not on it.

    Attributes:
        left: those that are not gone.
        pools: whose they are.
        refused: why some could not be ended, by id.
    """

    def __init__(self, account: Account, instance_ids: Sequence[str]) -> None:
        self.left = list(instance_ids)
        self.pools = {account.launched[each].pool_id for each in instance_ids if each in account.launched}
        self.refused: dict[str, SkywardError] = {}
        self._account = account
        self._asked: set[str] = set()
        self._taken_at: dict[str, float] = {}
        self._strikes = 0

    async def ended(self) -> bool | NotYet:
        """Whether all are gone. What is refused again and again is raised."""
        try:
            found = {record.id: record for record in await self._account.records({"instance-id": self.left})}
        except SkywardError as error:
            return self._struck(error)
        self.pools.update(record.pool_id for record in found.values() if record.pool_id)
        self.left = [each for each in self.left if self._may_live(each, found.get(each))]
        doomed = [
            each for each in self.left if (each not in self._taken_at if each not in found else not found[each].ending)
        ]
        await self._terminate(doomed, found)
        for error in self.refused.values():
            return self._struck(error)
        self._strikes = 0
        return NotYet(f"{len(self.left)} are not gone") if self.left else True

    def _may_live(self, instance_id: str, record: Record | None) -> bool:
        """Whether it is not gone: EC2 may have made it, and not list it yet; it is asked to end it to know that."""
        if record is not None:
            return record.state != "terminated"
        if instance_id not in self._asked or self._account.age_s(instance_id) < UNSEEN_S:
            return True
        taken_at = self._taken_at.get(instance_id)
        return taken_at is not None and SYSTEM_CLOCK.monotonic() - taken_at < UNSEEN_S

    async def _terminate(self, instance_ids: Sequence[str], found: Mapping[str, Record]) -> None:
        answers = await _terminate(self._account, instance_ids)
        self.refused = {each: error for each, error in answers.items() if not is_kind(error, RefusalKind.MISSING)}
        self._asked.update(set(instance_ids) - set(self.refused))
        for each in instance_ids:
            if each not in found and each not in answers:
                self._taken_at.setdefault(each, SYSTEM_CLOCK.monotonic())

    def _struck(self, error: SkywardError) -> NotYet:
        self._strikes += 1
        if self._strikes >= _STRIKES and is_kind(error, RefusalKind.AUTH, RefusalKind.BAD_REQUEST):
            raise error
        return NotYet(str(error))


async def undo(
    account: Account,
    pool_id: str,
    keys: Sequence[str],
    known: Iterable[str],
    *,
    unseen_s: float,
    deadline_s: float,
) -> None:
    """Leave nothing of an order. It is still among the launches of its pool that are under way.

    A machine of an unanswered call may be listed late, or not exist. It certainly does not exist, and never will, once
    the security group that it would be in is removed; EC2 refuses that as long as there is a machine in it.

    Args:
        account: whose.
        pool_id: the order's pool.
        keys: those ledger keys of its that may have a machine which nobody knows.
        known: ids of its other machines.
        unseen_s: after so long what was made is listed, as a rule.
        deadline_s: how long it may take.

    Raises:
        TerminationError: some may be left; names the ids, and the keys of those whose ids are unknown.
    """
    search = _Search(account, keys)
    looked_until = SYSTEM_CLOCK.monotonic() + unseen_s

    async def found() -> bool | NotYet:
        last = SYSTEM_CLOCK.monotonic() >= looked_until
        return True if await search.looked() and (last or not search.missing) else NotYet("there may be more")

    try:
        await wait_until(found, deadline_s=unseen_s + deadline_s, interval_s=_LOOK_S, what="the list of machines")
    except UnreachableError as error:
        raise search.error(pool_id, f"EC2 cannot be asked for it: {search.refused or error}", known) from error
    if ids := search.ids.union(known):
        await end(account, sorted(ids), deadline_s=deadline_s)
    if await remove_by_products(account, pool_id, under_way=1) or not search.missing:
        return
    late = search.ids.copy()
    await search.looked()
    if search.ids > late:
        await end(account, sorted(search.ids - late), deadline_s=deadline_s)
        await remove_by_products(account, pool_id, under_way=1)
    if search.missing:
        raise search.error(pool_id, "EC2 does not list it", ())


class _Search:
    """The machines of calls that were never answered, as far as they are listed.

    Attributes:
        missing: ledger keys without a listed machine.
        ids: of the machines that were listed.
        refused: why the last look failed.
    """

    def __init__(self, account: Account, keys: Iterable[str]) -> None:
        self.missing = set(keys)
        self.ids = set[str]()
        self.refused: SkywardError | None = None
        self._account = account

    async def looked(self) -> bool:
        """Look once, and return whether EC2 answered."""
        if not self.missing:
            return True
        wanted = {"instance-state-name": LIVE_STATES, f"tag:{KEY_TAG}": sorted(self.missing)}
        try:
            records = await self._account.records(wanted)
        except SkywardError as error:
            self.refused = error
            return False
        self.ids.update(record.id for record in records)
        self.missing.difference_update(record.key for record in records)
        return True

    def error(self, pool_id: str, why: str, known: Iterable[str]) -> TerminationError:
        """Return the error that names what may be left."""
        keys = ", ".join(sorted(self.missing))
        return TerminationError(
            f"aws {self._account.region} did not answer the launch of a machine of pool {pool_id}, ledger key {keys}, "
            f"and {why}: it may exist and cost money. It ends by itself at the pool's timeout; to end it before, run "
            f"`skyward sweep` once this program has ended, or terminate what has the tag {KEY_TAG}={keys} in the "
            "console",
            instance_ids=sorted(self.ids.union(known)),
            keys=sorted(self.missing),
        )


async def remove_by_products(account: Account, pool_id: str, *, under_way: int = 0) -> bool:
    """Remove a pool's security groups and launch templates, unless it has machines, or is getting some.

    They cost nothing: what cannot be removed is said in the log, and no error.

    Args:
        account: whose.
        pool_id: the pool.
        under_way: so many of its launches that are under way get nothing any more.

    Returns:
        Whether nothing of the pool is left.
    """

    async def removed() -> bool | NotYet:
        if account.launching[pool_id] > under_way:
            return False
        try:
            if await account.records({"instance-state-name": LIVE_STATES, f"tag:{POOL_TAG}": [pool_id]}):
                return False
            await _remove_templates(account, pool_id)
            await _remove_groups(account, pool_id)
        except SkywardError as error:
            return NotYet(str(error))
        account.zones.pop(pool_id, None)
        return True

    async with account.locks[pool_id]:
        try:
            return await wait_until(
                removed, deadline_s=_BY_PRODUCTS_S, interval_s=_AGAIN_S, what="by-products to be removed"
            )
        except UnreachableError as error:
            _logger.warning("aws %s: a security group of pool %s is left: %s", account.region, pool_id, error)
            return False


async def _terminate(account: Account, instance_ids: Sequence[str]) -> dict[str, SkywardError]:
    """Ask for it, and say what was refused; one id that is must not hinder the others."""
    refused: dict[str, SkywardError] = {}
    for part in in_parts(instance_ids, _MOST_IDS):
        if error := await _ask(account, part):
            alone = await asyncio.gather(*(_ask(account, [each]) for each in part)) if len(part) > 1 else [error]
            refused |= {each: error for each, error in zip(part, alone, strict=True) if error is not None}
    return refused


async def _ask(account: Account, instance_ids: Sequence[str]) -> SkywardError | None:
    try:
        await account.api.call("ec2", "TerminateInstances", InstanceIds=list(instance_ids))
    except SkywardError as error:
        return error
    return None


async def _remove_templates(account: Account, pool_id: str) -> None:
    wanted = filters({f"tag:{POOL_TAG}": [pool_id]})
    for row in await account.api.pages("ec2", "DescribeLaunchTemplates", "LaunchTemplates", Filters=wanted):
        await _delete(account, "DeleteLaunchTemplate", LaunchTemplateId=row["LaunchTemplateId"])


async def _remove_groups(account: Account, pool_id: str) -> None:
    for group in await group_ids(account.api, pool_id):
        await _delete(account, "DeleteSecurityGroup", GroupId=group)


async def _delete(account: Account, operation: str, **what: str) -> None:
    try:
        await account.api.call("ec2", operation, **what)
    except SkywardError as error:
        if not is_kind(error, RefusalKind.MISSING):
            raise
