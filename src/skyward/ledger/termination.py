"""Confirmed termination of machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import TerminationError
from skyward.providers.base import InstanceState, Provider

_ATTEMPTS = 6
_DEADLINE_S = 180.0
_ATTEMPT_S = 420.0  # a machine with many accelerators may take minutes to go
_EACH_S = 5.0  # some vendors accept one call that ends a machine in 3.5 s
_SECOND = 2
_LOOK_S = 1.0
_TROUBLE_S = 10.0
"""Seconds of failing calls after which that is reported."""
_logger = logging.getLogger("skyward")


async def end_instances(
    provider: Provider,
    instance_ids: Sequence[str],
    *,
    report: Callable[[str], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Terminate machines and confirm it with the provider; retry within some three minutes.

    Args:
        provider: the provider.
        instance_ids: the machines.
        report: receives a remark once the provider's API has failed for ten seconds on end; it goes on being tried.
        clock: clock for the pauses between two attempts.

    Raises:
        TerminationError: names the unconfirmed ids; it is logged as an error too.
    """
    from tenacity import AsyncRetrying, stop_after_attempt, stop_after_delay, wait_exponential, wait_random

    if not instance_ids:
        return
    retries = AsyncRetrying(
        stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_DEADLINE_S),
        wait=wait_exponential(0.5, 30.0) + wait_random(0, 1),
        sleep=clock.sleep,
        reraise=True,
    )
    watching = asyncio.ensure_future(_watch_trouble(provider, instance_ids, report))
    try:
        async for attempt in retries:
            with attempt:
                if attempt.retry_state.attempt_number == _SECOND:
                    _logger.warning(
                        "waiting for %s to confirm that these machines are gone, up to %.0f s: %s",
                        provider.name,
                        _DEADLINE_S,
                        ", ".join(instance_ids),
                    )
                limit_s = _ATTEMPT_S + _EACH_S * len(instance_ids)
                async with asyncio.timeout(limit_s):  # an answer that never comes is an error like any other
                    await provider.terminate(instance_ids)
                    await _confirm(provider, instance_ids)
    except Exception as error:
        left = error.instance_ids if isinstance(error, TerminationError) else tuple(instance_ids)
        message = _unconfirmed(provider, left, error)
        _logger.error("%s", message)
        raise TerminationError(message, instance_ids=left) from error
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _unconfirmed(provider: Provider, left: Sequence[str], error: Exception) -> str:
    if not provider.own_machines:
        state, advice = "machines are gone and they may still cost money", ", or end them in the provider's console"
    else:
        state, advice = "nodes are gone", "; a node without its client ends after `lease=`"
    return (
        f"{provider.name} did not confirm that these {state}: {', '.join(left)}. Run `skyward sweep`{advice}. "
        f"Last error: {error}"
    )


async def _watch_trouble(provider: Provider, instance_ids: Sequence[str], report: Callable[[str], None] | None) -> None:
    """Report once that the provider's API keeps failing."""
    well_at = SYSTEM_CLOCK.monotonic()
    while report is not None and provider.supports("trouble"):
        await SYSTEM_CLOCK.sleep(_LOOK_S)
        if not (trouble := provider.trouble):
            well_at = SYSTEM_CLOCK.monotonic()
        elif SYSTEM_CLOCK.monotonic() - well_at >= _TROUBLE_S:
            report(
                f"{provider.name} does not confirm the end of {', '.join(instance_ids)}: {trouble}. It is tried again "
                "for some minutes; keep this program running. If it ends before, run `skyward sweep`, or end the "
                "machines in the provider's console: they may cost money until then"
            )
            return


async def _confirm(provider: Provider, instance_ids: Sequence[str]) -> None:
    seen = await provider.describe(instance_ids)
    if left := [instance.id for instance in seen if instance.state is not InstanceState.GONE]:
        raise TerminationError(f"still there: {', '.join(left)}", instance_ids=left)
