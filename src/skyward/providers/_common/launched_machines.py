"""Machines that this process has launched, until a provider lists them; and the way to log in to one."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.providers._common.ssh_keys import host_key, user_key
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.transport.access import SSHAccess, SSHTarget
from skyward.transport.ssh_transport import check_configuration

__all__ = ["LaunchedMachines", "Logins", "check_login", "log_in"]

_PATIENCE_S: Final = 60.0
_ANY_ADDRESS: Final = "192.0.2.1"
"""Address for documentation (RFC 5737): for the SSH configuration a machine like any other."""
_NOTHING: Final = Offer(spec=InstanceSpec(name="", cpu=0, memory_gib=0.0))


class Logins(Protocol):
    """Provider that logs in to its machines in one way."""

    user: ClassVar[str | None]
    """User name to log in with; None leaves it to the SSH configuration."""
    home: ClassVar[str]
    """Home folder of that user."""
    port: ClassVar[int | None]
    """Port of sshd; None leaves it to the SSH configuration."""
    boot_s: ClassVar[float]
    """Time for which a new machine may refuse the login."""
    other_key_s: ClassVar[float]
    """Time for which it may show another host key."""


def log_in(
    logins: Logins, machine: str, ledger_key: str, *, host: str, address: str, port: int = 0, bind: str = ""
) -> SSHAccess:
    """Return the access to a machine whose host key is derived from its ledger key.

    Args:
        logins: the provider.
        machine: the machine's id.
        ledger_key: its ledger key.
        host: address at which this machine reaches it.
        address: see :class:`~skyward.transport.access.SSHAccess`.
        port: port of its sshd there; 0 for the provider's.
        bind: see there.
    """
    path, _ = user_key()
    target = SSHTarget(
        host=host,
        port=port or logins.port,
        user=logins.user,
        key_path=str(path),
        host_keys=(host_key(ledger_key).public,),
        patience_s=_PATIENCE_S,
    )
    cache = f"{logins.home}/.cache/skyward"
    return SSHAccess(
        target=target,
        address=address,
        workdir=f"{cache}/nodes/{machine}",
        cache=cache,
        boot_s=logins.boot_s,
        other_key_s=logins.other_key_s,
        bind=bind,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    instance: Instance
    at: float


async def check_login(logins: Logins) -> None:
    """Check, before a machine is paid for, that the SSH configuration lets Skyward log in to a new one.

    Raises:
        ConfigurationError: it cannot be read, or demands what Skyward cannot do.
    """
    target = SSHTarget(host=_ANY_ADDRESS, port=logins.port, user=logins.user)
    await asyncio.to_thread(check_configuration, target)


class LaunchedMachines:
    """Machines that this process has launched, by id.

    Args:
        clock: the time.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._launched: dict[str, _Launched] = {}

    def add(self, instance: Instance) -> Instance:
        """Record a machine that was launched just now, and return it; again, it does nothing."""
        self._launched.setdefault(instance.id, _Launched(instance=instance, at=self._clock.monotonic()))
        return instance

    def drop(self, machine: str) -> None:
        """Forget a machine, which is gone."""
        self._launched.pop(machine, None)

    def age_s(self, machine: str) -> float:
        """Return the seconds since the launch of a machine; infinity if this process did not launch it."""
        found = self._launched.get(machine)
        return math.inf if found is None else self._clock.monotonic() - found.at

    def as_bought(self, instance: Instance) -> Instance:
        """Return the record of a listed machine with the offer that it was bought as."""
        found = self._launched.get(instance.id)
        return instance if found is None else replace(instance, offer=found.instance.offer)

    def unlisted(self, machine: str, *, listing_s: float) -> Instance:
        """Return the record of a machine that its provider does not list: not yet, or not any more.

        It is pending until ``listing_s`` seconds after its launch, then gone; a spot machine was preempted.
        """
        found = self._launched.get(machine)
        if found is None:
            return Instance(id=machine, key="", state=InstanceState.GONE, offer=_NOTHING)
        if self.age_s(machine) < listing_s:
            return replace(found.instance, state=InstanceState.PENDING, access=None)
        state, spot = InstanceState.GONE, found.instance.offer.spot
        return replace(found.instance, state=state, access=None, preempted=spot, reason="it is not listed any more")
