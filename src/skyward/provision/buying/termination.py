"""Confirmed termination of machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from skyward.errors import TerminationError
from skyward.providers.base import InstanceState, Provider

__all__ = ["end_instances"]

_ATTEMPTS = 6
_DEADLINE_S = 180.0
_ATTEMPT_S = 420.0  # a machine with many accelerators may take minutes to go
_SECOND = 2
_logger = logging.getLogger("skyward")


async def end_instances(provider: Provider, instance_ids: Sequence[str]) -> None:
    """Terminate machines and confirm it with the provider; retry within some three minutes.

    Raises :class:`~skyward.errors.TerminationError` with the unconfirmed ids; it is logged as an error too.
    """
    import stamina

    if not instance_ids:
        return
    retries = stamina.retry_context(
        on=Exception, attempts=_ATTEMPTS, timeout=_DEADLINE_S, wait_initial=0.5, wait_max=30.0
    )
    try:
        async for attempt in retries:
            with attempt:
                if attempt.num == _SECOND:
                    _logger.warning(
                        "waiting for %s to confirm that these machines are gone, up to %.0f s: %s",
                        provider.name,
                        _DEADLINE_S,
                        ", ".join(instance_ids),
                    )
                async with asyncio.timeout(_ATTEMPT_S):  # an answer that never comes is an error like any other
                    await provider.terminate(instance_ids)
                    await _confirm(provider, instance_ids)
    except Exception as error:
        left = error.instance_ids if isinstance(error, TerminationError) else tuple(instance_ids)
        message = (
            f"{provider.name} did not confirm that these machines are gone and they may still cost money: "
            f"{', '.join(left)}. Run `skyward sweep`, or end them in the provider's console. Last error: {error}"
        )
        _logger.error("%s", message)
        raise TerminationError(message, instance_ids=left) from error


async def _confirm(provider: Provider, instance_ids: Sequence[str]) -> None:
    seen = await provider.describe(instance_ids)
    if left := [instance.id for instance in seen if instance.state is not InstanceState.GONE]:
        raise TerminationError(f"still there: {', '.join(left)}", instance_ids=left)
