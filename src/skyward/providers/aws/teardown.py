"""Termination of machines, and removal of everything else that was created for their pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from skyward._concurrency.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import SkywardError, TerminationError, UnreachableError
from skyward.providers._common.refusals import RefusalKind
from skyward.providers._common.until_gone import Asked, EndingCalls, until_gone
from skyward.providers.aws.account import Account, in_parts
from skyward.providers.aws.errors import is_kind
from skyward.providers.aws.network import group_ids
from skyward.providers.aws.payloads import KEY_TAG, LIVE_STATES, POOL_TAG, filters
from skyward.providers.base import InstanceState

__all__ = ["UNSEEN_S", "end", "remove_by_products", "undo"]

UNSEEN_S: Final = 120.0
"""Time after its launch during which a machine may be missing from EC2's lists."""

_MOST_IDS: Final = 1000
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
    pools = {account.pools[each] for each in instance_ids if each in account.pools}

    async def look(left: Sequence[str]) -> Mapping[str, InstanceState]:
        records = await account.records({"instance-id": left})
        pools.update(record.pool_id for record in records if record.pool_id)
        return {record.id: _DOOMED.get(record.state, InstanceState.RUNNING) for record in records}

    async def ask(left: Sequence[str]) -> Asked:
        answers = await _terminate(account, left)
        unknown = {each for each, error in answers.items() if is_kind(error, RefusalKind.MISSING)}
        return Asked(refused={each: answers[each] for each in answers.keys() - unknown}, unknown=unknown)

    await until_gone(
        f"aws {account.region}",
        EndingCalls(look=look, ask=ask, age_s=account.launched.age_s),
        instance_ids,
        deadline_s=deadline_s,
        unlisted_s=UNSEEN_S,
        lists_gone=True,
        look_s=_LOOK_S,
    )
    for instance_id in instance_ids:
        account.launched.drop(instance_id)
        account.pools.pop(instance_id, None)
    for pool_id in sorted(pools):
        await remove_by_products(account, pool_id)


async def undo(
    account: Account,
    pool_id: str,
    keys: Sequence[str],
    known: Iterable[str],
    *,
    unseen_s: float,
    deadline_s: float,
) -> None:
    """Undo a failed order, which still counts among its pool's launches under way.

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
    search = _Search(account, keys)
    looked_until = SYSTEM_CLOCK.monotonic() + unseen_s

    async def found() -> bool | NotYet:
        last = SYSTEM_CLOCK.monotonic() >= looked_until
        return True if await search.looked() and (last or not search.missing) else NotYet("there may be more")

    try:
        await wait_until(found, deadline_s=unseen_s + deadline_s, interval_s=_LOOK_S, what="the list of machines")
    except UnreachableError as error:
        raise search.error(pool_id, f"EC2 cannot list it: {search.refused or error}", known) from error
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
    """Search for the machines of unanswered calls by their ledger keys.

    Attributes:
        missing: ledger keys without a listed machine.
        ids: ids of the listed machines.
        refused: error of the last look; None for none.
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
        """Return the error that names the machines that may be left."""
        keys = ", ".join(sorted(self.missing))
        return TerminationError(
            f"aws {self._account.region} did not answer the launch of a machine of pool {pool_id}, ledger key {keys}, "
            f"and {why}: it may exist and cost money. It ends by itself at the pool's timeout; to end it earlier, run "
            f"`skyward sweep` once this program has ended, or terminate machines with the tag {KEY_TAG}={keys} in the "
            "console",
            instance_ids=sorted(self.ids.union(known)),
            keys=sorted(self.missing),
        )


async def remove_by_products(account: Account, pool_id: str, *, under_way: int = 0) -> bool:
    """Remove a pool's security groups and launch templates, unless it has machines or launches under way.

    They cost nothing: a failure is logged, and no error.

    Args:
        account: the account.
        pool_id: the pool.
        under_way: number of failed launches that still count as under way.

    Returns:
        True if nothing of the pool is left.
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
    """Request termination and return the errors by id; a batch that is refused is repeated id by id."""
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
