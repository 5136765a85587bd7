"""Admission of this machine's present address to a pool's machines; the address may change during the pool's life."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import UnreachableError
from skyward.events import Notice, SkywardEvent
from skyward.providers.base import Provider
from skyward.transport.access import Completed, Transport

__all__ = ["Admission", "AdmittedTransport"]

_EVERY_S = 15.0
_TIMEOUT_S = 30.0
_logger = logging.getLogger("skyward")


class Admission:
    """Requests to the provider to admit this machine's address, every 15 seconds at most for a whole pool.

    No-op where the provider does not restrict connections.

    Args:
        provider: the provider of the machines.
        pool_id: the pool's id.
        publish: receives a notice of each new address; must not block.
        clock: the time between two attempts.
    """

    def __init__(
        self,
        provider: Provider,
        pool_id: str,
        *,
        publish: Callable[[SkywardEvent], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._provider = provider
        self._pool_id = pool_id
        self._publish = publish
        self._clock = clock
        self._asked_at = -math.inf

    async def renew(self) -> None:
        """Have the present address admitted. Raises nothing: without a network, the next attempt may succeed."""
        provider = self._provider
        if not provider.supports("admit") or self._clock.elapsed() - self._asked_at < _EVERY_S:
            return
        self._asked_at = self._clock.elapsed()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                changed = await provider.admit(self._pool_id)
        except Exception as error:
            _logger.debug("%s does not admit this machine's address: %r", provider.name, error)
            return
        if changed:
            self._publish(
                Notice(f"this machine's address is now {changed}: {provider.name} admits it, and no former one")
            )


class AdmittedTransport:
    """A transport that renews the admission whenever its machine does not answer; its caller retries.

    Args:
        transport: the transport to the machine.
        admission: the pool's admission.
    """

    def __init__(self, transport: Transport, admission: Admission) -> None:
        self._transport = transport
        self._admission = admission

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """See :meth:`Transport.run`."""
        try:
            return await self._transport.run(argv, env=env, stdin=stdin, timeout_s=timeout_s)
        except UnreachableError:
            await self._admission.renew()
            raise

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        """See :meth:`Transport.put`."""
        try:
            await self._transport.put(data, path, mode=mode)
        except UnreachableError:
            await self._admission.renew()
            raise

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        """See :meth:`Transport.forward`."""
        return await self._transport.forward(host, port)

    async def close(self) -> None:
        """See :meth:`Transport.close`."""
        await self._transport.close()
