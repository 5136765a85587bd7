"""Termination of machines, and removal of everything else that was created for their pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from skyward._concurrency.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import SkywardError, TerminationError, UnreachableError
from skyward.providers._common.refusals import RefusalKind, is_kind
from skyward.providers._common.until_gone import Asked, EndingCalls, until_gone
from skyward.providers.aws.account import Account, in_parts
from skyward.providers.aws.network import groups
from skyward.providers.aws.payloads import KEY_TAG, LIVE_STATES, POOL_TAG, filters
from skyward.providers.base import InstanceState

__all__ = ["UNSEEN_S", "end", "remove_by_products", "undo"]

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

    async def ask(left: Sequence[str]) -> Asked:
        answers = await _terminate(account, left)
        unknown = {each for each, error in answers.items() if is_kind(error, RefusalKind.MISSING)}
        return Asked(refused={each: answers[each] for each in answers.keys() - unknown}, unknown=unknown)

    await until_gone(
        f"aws {account.region}",
        EndingCalls(look=look, ask=ask, age_s=account.book.launched.age_s),
        instance_ids,
        deadline_s=deadline_s,
        unlisted_s=UNSEEN_S,
        lists_gone=True,
        look_s=_LOOK_S,
    )
    for instance_id in instance_ids:
        account.book.launched.drop(instance_id)
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


async def _terminate(account: Account, instance_ids: Sequence[str]) -> dict[str, SkywardError]:
    """Request termination and return the errors by id; a batch that is refused is repeated id by id."""
    refused: dict[str, SkywardError] = {}
    for part in in_parts(instance_ids):
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


async def _remove_all(account: Account, pool_id: str) -> None:
    wanted = filters({f"tag:{POOL_TAG}": [pool_id]})
    templates = await account.api.pages("ec2", "DescribeLaunchTemplates", "LaunchTemplates", Filters=wanted)
    found = [("DeleteLaunchTemplate", {"LaunchTemplateId": row["LaunchTemplateId"]}) for row in templates]
    found += [("DeleteSecurityGroup", {"GroupId": row["GroupId"]}) for row in await groups(account.api, pool_id)]
    for operation, what in found:
        await account.api.call("ec2", operation, **what, done=[RefusalKind.MISSING])
