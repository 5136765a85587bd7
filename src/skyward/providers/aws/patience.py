"""Calls right after something was made that they need: it may not be known everywhere yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from skyward._concurrency.waiting import NotYet, wait_until
from skyward.errors import ConfigurationError, SkywardError, UnreachableError
from skyward.providers.aws.api import Api
from skyward.providers.aws.errors import Refusal, judge, refusal

__all__ = ["judged", "lacks_profile", "no_profile", "patiently"]

_VISIBLE_S: Final = 45.0
_LOOK_S: Final = 0.5
_UNSEEN: Final = ("InvalidGroup.NotFound", "InvalidSecurityGroupID.NotFound", "InvalidLaunchTemplateId.NotFound")
_PROFILE: Final = "InvalidParameterValue"


async def patiently(
    api: Api, operation: str, call: Callable[[int], Mapping[str, Any]], *, instance_profile: str | None
) -> Mapping[str, Any]:
    """Make a call of EC2's, again while it does not know something that may be known soon.

    A fleet says so in its answer. It is asked for again as another one, and at last that answer is returned.

    Args:
        api: the account.
        operation: which call.
        call: its parameters, by the number of such answers before it.
        instance_profile: the role that it names, if any.

    Raises:
        ConfigurationError: there is no such role in the end; or as for any call.
    """
    refused: SkywardError | None = None
    answers: list[Mapping[str, Any]] = []
    unanswered = False

    async def attempt() -> Mapping[str, Any] | NotYet:
        nonlocal refused, unanswered
        unanswered = True
        try:
            answer = await api.call("ec2", operation, **call(len(answers)))
        except SkywardError as error:
            unanswered = False
            found = refusal(error)
            if found is None or not _is_unseen(found):
                raise
            refused = no_profile(instance_profile) if lacks_profile(found) else error
            refused.__cause__ = error.__cause__
            return NotYet(found.message)
        unanswered = False
        if (unseen := _unseen_by_fleet(answer)) is None:
            return answer
        answers.append(answer)
        return NotYet(unseen.message)

    try:
        return await wait_until(attempt, deadline_s=_VISIBLE_S, interval_s=_LOOK_S, what=operation)
    except UnreachableError as error:
        if error.__cause__ is not None or unanswered:  # an attempt's own, or one was cut off at the deadline
            raise
        if answers:
            return answers[-1]
        if refused is None:
            raise
        raise refused from refused.__cause__


def judged(row: Mapping[str, Any]) -> Refusal:
    """What one of the errors in a fleet's answer means."""
    return judge(str(row.get("ErrorCode", "")), str(row.get("ErrorMessage", "")))


def lacks_profile(found: Refusal) -> bool:
    """Whether it is about the role, which is not there, or not yet."""
    return found.code == _PROFILE and "IAM Instance Profile" in found.message


def no_profile(name: str | None) -> ConfigurationError:
    """The error for a role that does not exist."""
    return ConfigurationError(
        f"instance_profile={name!r} does not exist in the account: `aws iam list-instance-profiles` lists what there is"
    )


def _unseen_by_fleet(answer: Mapping[str, Any]) -> Refusal | None:
    """What a fleet that has got nothing did not know yet; None if it has got something, or that is not why."""
    rows = () if answer.get("Instances") else answer.get("Errors", ())
    return next((found for found in map(judged, rows) if _is_unseen(found)), None)


def _is_unseen(found: Refusal) -> bool:
    return found.code in _UNSEEN or lacks_profile(found)
