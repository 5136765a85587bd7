"""Asking a provider what has become of a machine that cannot be asked itself."""

from __future__ import annotations

import asyncio
import logging
import math

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.providers.base import InstanceState, Provider

__all__ = ["Inquiry", "unheard"]

_EVERY_S = 5.0
_TIMEOUT_S = 20.0
_OVER = (InstanceState.STOPPING, InstanceState.GONE, InstanceState.FAILED)
_logger = logging.getLogger("skyward")


class Inquiry:
    """Asks a provider about one machine, every five seconds at most. Who does not answer has said nothing.

    Args:
        provider: who has the machine.
        instance_id: its id there.
        clock: the time between two questions.
    """

    def __init__(self, provider: Provider, instance_id: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._provider = provider
        self._instance_id = instance_id
        self._clock = clock
        self._asked_at = -math.inf

    async def __call__(self) -> str:
        """What the provider says if the machine is over, or on its way out; else, or if it says nothing, empty."""
        if self._clock.monotonic() - self._asked_at < _EVERY_S:
            return ""
        self._asked_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                (seen,) = await self._provider.describe([self._instance_id])
        except Exception as error:  # whatever it is, it says nothing about the machine
            _logger.debug("%s does not say what became of %s: %r", self._provider.name, self._instance_id, error)
            return ""
        if seen.state not in _OVER:
            return ""
        return f"{self._provider.name} says that it is {seen.state.value}" + (f": {seen.reason}" if seen.reason else "")


async def unheard() -> str:
    """Nobody is asked."""
    return ""
