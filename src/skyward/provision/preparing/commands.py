"""Commands of a node's preparation, repeated when the link drops."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from skyward._concurrency.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import AuthenticationError, BootstrapError, HostKeyError, UnreachableError
from skyward.request.checks import without_credentials
from skyward.transport.access import Transport

__all__ = ["GRACE_S", "let_in", "masked", "persist"]

T = TypeVar("T")

GRACE_S = 30.0
"""Seconds beyond the machine's own deadline, so that its report of the cause arrives first."""

_AGAIN_S = 0.5
_LEAST_S = 1.0
_KNOCK_S = 2.5
_ANSWER_S = 90.0
_SHORTEST_SECRET = 8


async def persist(attempt: Callable[[float], Awaitable[T]], *, deadline_s: float, node: int, step: str) -> T:
    """Return the result of ``attempt``, which receives the seconds left; call it again when the link drops.

    Raises :class:`~skyward.errors.BootstrapError` past the deadline, and for files that cannot be read or written here.
    """
    started = SYSTEM_CLOCK.monotonic()

    async def once() -> T | NotYet:
        try:
            return await attempt(max(deadline_s - (SYSTEM_CLOCK.monotonic() - started), _LEAST_S))
        except UnreachableError as error:
            return NotYet(str(error))

    what = f"step {step!r} of preparing node {node}"
    try:
        return await wait_until(once, deadline_s=deadline_s + GRACE_S, interval_s=_AGAIN_S, what=what)
    except UnreachableError as error:
        raise BootstrapError(
            f"preparing node {node} failed at step {step!r}: its deadline of {deadline_s:g} s passed, and the machine "
            f"gave no reason. Check that it is up and reachable; {error}",
            node=node,
            step=step,
        ) from error
    except OSError as error:
        raise BootstrapError(
            f"preparing node {node} failed at step {step!r}: {error}. Check the space and the permissions there",
            node=node,
            step=step,
        ) from error


async def let_in(
    transport: Transport, *, within_s: float, node: int, refused_s: float = math.inf, other_key_s: float = math.inf
) -> None:
    """Wait until a new machine accepts our key; while it boots it may refuse keys and show another host key.

    Args:
        transport: the transport to it.
        within_s: seconds allowed; 0 skips the check.
        node: its rank, for the message.
        refused_s: seconds allowed from its first refusal on.
        other_key_s: seconds allowed from the first time on that it shows another host key.

    Raises:
        AuthenticationError: at a deadline it still refused the key, or showed another host key.
        UnreachableError: at the deadline it still did not answer.
    """
    refusals: list[AuthenticationError] = []
    first_at: dict[str, float] = {}

    async def knock() -> bool | NotYet:
        refusals.clear()
        try:
            await transport.run(["true"], timeout_s=_ANSWER_S)
        except AuthenticationError as error:
            other_key = isinstance(error, HostKeyError)
            did = "showed another host key than ordered" if other_key else "refused the login"
            limit_s, now = other_key_s if other_key else refused_s, SYSTEM_CLOCK.monotonic()
            if now - first_at.setdefault(did, now) >= limit_s:
                raise type(error)(f"node {node} {did} for {limit_s:g} s: {error}") from error
            refusals.append(error)
            return NotYet(str(error))
        except UnreachableError as error:
            return NotYet(str(error))
        return True

    if not within_s:
        return
    try:
        await wait_until(knock, deadline_s=within_s, interval_s=_KNOCK_S, what=f"node {node} to let us in")
    except UnreachableError as error:
        for refusal in refusals:
            raise type(refusal)(f"node {node} did not let us in for {within_s:g} s: {refusal}") from error
        raise


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` without credentials in URLs, and without values in ``secrets`` of 8 and more characters."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return without_credentials(text)
