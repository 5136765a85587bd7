"""The seam between Skyward and those who have machines: five verbs, and capabilities as types."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from skyward.errors import CapacityError, ConfigurationError
from skyward.request.instance import InstanceSpec
from skyward.request.metadata import PreemptionWatch
from skyward.request.request import PoolRequest
from skyward.transport.access import Access

__all__ = ["Instance", "InstanceState", "LaunchOrder", "Offer", "Provider", "checked_provider", "first_to_be_had"]


_VERBS = ("offers", "launch", "describe", "terminate", "close")


class InstanceState(enum.Enum):
    """Where a machine is in its life, whatever the vendor calls it."""

    PENDING = "pending"
    """Asked for, not yet running: it may or may not bill."""
    RUNNING = "running"
    """It runs and bills; says nothing about being reachable."""
    STOPPING = "stopping"
    """On its way out; may still bill."""
    GONE = "gone"
    """Terminated, never existed, or forgotten by the provider: it does not bill. Final."""
    FAILED = "failed"
    """The provider could not make it run. Final, but it must still be terminated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A machine that a provider would launch.

    Attributes:
        spec: type, accelerators, cores and memory.
        region: where; empty where it has no meaning.
        zone: the part of the region; empty where it has no meaning, or any will do.
        spot: whether the provider may take it back.
        price_per_hour: USD for one machine as offered; None is unknown, 0.0 is free.
        on_demand_price_per_hour: USD for the same machine on demand; None is unknown.
        minimum_billed_s: a machine is billed for at least so long.
        note: what the user should know before it is bought; empty when there is nothing.
    """

    spec: InstanceSpec
    region: str = ""
    zone: str = ""
    spot: bool = False
    price_per_hour: float | None = None
    on_demand_price_per_hour: float | None = None
    minimum_billed_s: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """What to launch.

    Attributes:
        pool_id: the pool's id; every machine is tagged with it.
        keys: one ledger key per machine wanted; every machine is tagged with its own.
        timeout_s: the hard cap on the machine's life, armed before first contact where the provider can; it holds for
            the dearest of the offers.
        allowance: how long machines bought as an offer may live, in seconds; 0 if they would cost too much. None is
            ``timeout_s`` for any.
    """

    pool_id: str
    keys: tuple[str, ...]
    timeout_s: float
    allowance: Callable[[Offer], float] | None = field(default=None, compare=False, repr=False)

    def lasts_s(self, offer: Offer) -> float:
        """The hard cap on the life of machines bought as that, at its price; 0 if they must not be bought."""
        return self.timeout_s if self.allowance is None else self.allowance(offer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A provider's record of a machine.

    Attributes:
        id: the provider's id.
        key: the ledger key it was launched under.
        state: where it is in its life.
        offer: what it was launched as.
        access: how to reach it; None while the provider does not say yet.
        watch: where the machine itself is told that it will be taken back; None where it is not.
        reason: why it is on its way out, or gone, where the provider says so.
        power_off: what the machine runs, once its node has ended, to end itself and its bill; empty where switching it
            off does not, or where it is not ours to switch off.
    """

    id: str
    key: str
    state: InstanceState
    offer: Offer
    access: Access | None = field(default=None)
    watch: PreemptionWatch | None = None
    reason: str = ""
    power_off: tuple[str, ...] = ()


class Provider(Protocol):
    """Creates and terminates instances. Errors are Skyward's (see :mod:`skyward.errors`); nobody below retries."""

    @property
    def name(self) -> str:
        """The provider's name in events, ledger and documentation, e.g. ``"local"``."""
        ...

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """What could satisfy the request, unranked. Creates nothing. Idempotent."""
        ...

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Create the machines and return at once; waits for none of them. Not idempotent, except by key.

        The first of ``offers`` that is to be had is taken, for all machines of the order; each says what it was
        launched as. Either every machine of the order was asked for, or none is left: a partial success is cleaned up
        here. Raises :class:`~skyward.errors.CapacityError` when none of the offers is to be had.
        """
        ...

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """The machines' present state, in the order asked. An unknown id is :attr:`InstanceState.GONE`. Idempotent."""
        ...

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """End the machines and whatever came with them; silent when they are gone. Idempotent.

        Returns when each is confirmed :attr:`InstanceState.GONE`, or raises
        :class:`~skyward.errors.TerminationError` with the ids that are not.
        """
        ...

    async def close(self) -> None:
        """Give up sessions and connections; ends no machine. Idempotent."""
        ...


async def first_to_be_had(
    provider: str, offers: Sequence[Offer], launch: Callable[[Offer], Awaitable[Sequence[Instance]]]
) -> Sequence[Instance]:
    """What ``launch`` gives for the first offer that it does not refuse, for providers that ask for one at a time.

    Raises:
        CapacityError: all were refused; names them, and quotes the last refusal.
    """
    refused: CapacityError | None = None
    for offer in offers:
        try:
            return await launch(offer)
        except CapacityError as error:
            refused = error
    names = ", ".join(dict.fromkeys(offer.spec.name for offer in offers))
    raise CapacityError(f"{provider} has none of its offers now ({names}); last: {refused}") from refused


def checked_provider(provider: Any) -> Provider:
    """``provider``, if it is one.

    Raises:
        ConfigurationError: it is not; a class instead of its instance is named so.
    """
    example = "a provider object such as sky.Local()"
    if isinstance(provider, type):
        raise ConfigurationError(f"provider must be {example}, got the class {provider.__name__}: add parentheses")
    if not all(callable(getattr(provider, verb, None)) for verb in _VERBS):
        raise ConfigurationError(f"provider must be {example}, got {type(provider).__name__}")
    return cast("Provider", provider)
