"""Secrets that machines get over SSH, by which they can end their own bill, and their renewal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from skyward._concurrency.waiting import Clock
from skyward.providers.base import Provider
from skyward.provision.buying.unfit import UnfitMachineError
from skyward.provision.fleet.machines import Machine
from skyward.provision.preparing.node_handle import NodeHandle

__all__ = ["MachineSecrets"]

_LOOK_S: Final = 15.0
_AGAIN_S: Final = 60.0
_TIMEOUT_S: Final = 60.0
_logger = logging.getLogger("skyward")


class MachineSecrets:
    """Delivery of secrets to a fleet's machines. No-op where the provider has none.

    Args:
        provider: the provider of the machines.
        machines: returns every machine of the fleet so far.
        clock: the time between two deliveries.
    """

    def __init__(self, provider: Provider, machines: Callable[[], Sequence[Machine]], *, clock: Clock) -> None:
        self._provider = provider
        self._machines = machines
        self._clock = clock
        self._due_at: dict[str, float] = {}

    async def deliver(self, node: NodeHandle) -> None:
        """Deliver the secret to a machine that admits logins.

        Raises:
            UnfitMachineError: it does not take the secret, so that it would bill on without its client.
        """
        provider = self._provider
        if (secret := await provider.secret(node.instance)) is None:
            return
        sent_at = self._clock.elapsed()
        done = await node.transport.run(secret.command, stdin=secret.value.encode(), timeout_s=_TIMEOUT_S)
        if done.exit_code:
            raise UnfitMachineError(
                f"does not take the secret by which it ends itself: {secret.command[0]} ended with exit status "
                f"{done.exit_code}"
            )
        self._due_at[node.instance.id] = sent_at + secret.renewed_s

    async def renew(self) -> None:
        """Deliver newer secrets before the former ones expire, until cancelled. A failed delivery is repeated."""
        while self._provider.supports("secret"):
            await self._clock.sleep(_LOOK_S)
            now = self._clock.elapsed()
            await asyncio.gather(
                *(
                    self._renew(machine.node)
                    for machine in self._machines()
                    if machine.node is not None
                    and not machine.ended
                    and self._due_at.get(machine.instance.id, now + 1) <= now
                )
            )

    async def _renew(self, node: NodeHandle) -> None:
        try:
            await self.deliver(node)
        except Exception as error:  # the machine may be unreachable for a while, and is looked after by its keeper
            self._due_at[node.instance.id] = self._clock.elapsed() + _AGAIN_S
            _logger.warning("node %d did not get the secret by which it ends itself: %s", node.rank, error)
