"""Seam between Skyward and providers of machines: five verbs, and capabilities with defaults."""

from __future__ import annotations

import asyncio
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    UnreachableError,
)
from skyward.machine.access import Access
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.request.volume import Volume, VolumeAccess
from skyward.wire.node_config import PreemptionWatch

REFUSALS: Final = (AuthenticationError, CapacityError, ConfigurationError, QuotaError, RateLimitError)
"""Errors of a launch that leaves no machine; after any other error a machine may exist."""
PASSING: Final = (CapacityError, QuotaError, RateLimitError, UnreachableError)
"""Errors after which the same request may succeed later."""
ELSEWHERE: Final = (*PASSING, AuthenticationError)
"""Errors of one provider that another may not have."""
ANSWERS: Final = (CapacityError, ConfigurationError, QuotaError)
"""Errors that say something about the request: the provider was asked, and has no such machine for it."""
NOTHING_MADE: Final = "nothing seems to have been made. Try again later, or see the provider's status page"
"""End of the error of a launch whose create calls had no clear outcome."""


class InstanceState(enum.Enum):
    """State of a machine, the same for every vendor."""

    PENDING = "pending"
    """Requested, not yet running: it may or may not bill."""
    RUNNING = "running"
    """Running and billed; not necessarily reachable."""
    STOPPING = "stopping"
    """Terminating; may still bill."""
    GONE = "gone"
    """Terminated, nonexistent, or no longer listed by the provider: it does not bill. Final."""
    FAILED = "failed"
    """The provider could not make it run. Final, but it must still be terminated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A machine that a provider would launch.

    Attributes:
        spec: type, accelerators, cores and memory.
        region: region; empty if the provider has none.
        zone: zone of the region; empty if the provider has none, or for any zone.
        spot: True if the provider may preempt the machine.
        price_per_hour: USD for one machine as offered; None is unknown, 0.0 is free.
        on_demand_price_per_hour: USD for the same machine on demand; None is unknown.
        price_age_s: seconds for which the provider's price has been cached; 0 for one just requested.
        minimum_billed_s: shortest time that is billed.
        minimum_charge: least USD charged for a machine, however short its life.
        note: remark for the user before purchase; empty for none.
        ready_within_s: seconds from the launch within which a sound machine of this kind runs and can be reached. One
            that takes longer is terminated, and another is bought.
        island: True if machines of this kind reach no other machine of the pool.
        provider: label of its provider in a pool's list: the name, and what tells several of that name apart. Empty in
            a pool of one provider.
    """

    spec: InstanceSpec
    region: str = ""
    zone: str = ""
    spot: bool = False
    price_per_hour: float | None = None
    on_demand_price_per_hour: float | None = None
    price_age_s: float = field(default=0.0, compare=False)
    minimum_billed_s: float = 0.0
    minimum_charge: float = 0.0
    note: str = ""
    ready_within_s: float = 900.0
    island: bool = False
    provider: str = ""

    @property
    def site(self) -> tuple[str, str]:
        """Where its machines may reach each other: label of the provider, and region; islands have none."""
        return self.provider, "" if self.island else self.region


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """Order of machines for one pool. A subclass records what becomes of it; this class records nothing.

    Attributes:
        pool_id: the pool's id; every machine is tagged with it.
        keys: one ledger key per machine; every machine is tagged with its own.
        timeout_s: hard cap on a machine's life, valid for the most expensive of the offers. Armed before first
            contact where the provider supports that.
        avoid: hosts (:attr:`Instance.host`) whose machines have failed: none is to be bought there.
        one_network: True if the machines must reach each other and those that the pool has already.
    """

    pool_id: str
    keys: tuple[str, ...]
    timeout_s: float
    avoid: frozenset[str] = frozenset()
    one_network: bool = False

    def lasts_s(self, offer: Offer) -> float:  # noqa: ARG002 - for subclasses
        """Return the hard cap on the life of machines bought as ``offer``; 0 if they would cost too much."""
        return self.timeout_s

    def note_undone(self, instance: Instance) -> None:
        """Note that ``instance`` is gone again, because the order, or a part of it, failed: it has cost money."""

    def note_unseen(self, key: str) -> None:
        """Note the key of a create call without a clear outcome of which no machine is listed in time.

        It stays in the ledger, since a machine may still appear.
        """

    @asynccontextmanager
    async def served_by(self, provider: Provider, offers: Sequence[Offer]) -> AsyncGenerator[LaunchOrder]:  # noqa: ARG002 - for subclasses
        """Yield the order as ``provider`` gets it, to buy its machines as one of ``offers``.

        A provider that is made of others enters it for each one's launch, whose errors pass through it.
        """
        yield self

    async def renew(self, key: str, reason: str) -> str:  # noqa: ARG002 - for subclasses
        """Return another key than that one, to create the machine under; ``reason`` is in words.

        Raises:
            UnreachableError: the order is not to go on; without a ledger it never is.
        """
        raise UnreachableError(f"{reason}: {NOTHING_MADE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A provider's record of a machine.

    Attributes:
        id: the provider's id.
        key: the ledger key it was launched under.
        state: its present state.
        offer: the offer it was launched as.
        access: route to it; None while the provider does not report one yet.
        watch: endpoint that announces preemption on the machine; None without such announcements.
        reason: reason for its termination, as reported by the provider; empty for none.
        power_off: command by which the machine ends itself and its bill once its node has ended. Empty where powering
            off does not stop the bill, or where the machine is not rented.
        end_check: command that exits with 0 if the machine may end its bill by itself, else prints the reason, without
            secrets. It runs once, after the first login. Until then, and where it fails or does not end within two
            minutes, the machine counts as one that cannot. Empty where nothing can be refused.
        network: name of the network through which it reaches other machines: equal and not empty means that two reach
            each other, at :attr:`~skyward.machine.ssh.SSHAccess.address` and on every port. Empty is an island.
        host: the physical machine below it, for :attr:`LaunchOrder.avoid`; empty if it is not known.
        preempted: True if the provider took it back, noticed or not.
        ends_itself: True if it can stop its own bill when the client is dead, or costs nothing.
        price_per_hour: USD as charged, read back from the provider's record; None means the offer's price.
        ended_at: Unix time of its end, by the provider's record; None while it exists, or if that is not stated.
    """

    id: str
    key: str
    state: InstanceState
    offer: Offer
    access: Access | None = field(default=None)
    watch: PreemptionWatch | None = None
    reason: str = ""
    power_off: tuple[str, ...] = ()
    end_check: tuple[str, ...] = ()
    network: str = ""
    host: str = ""
    preempted: bool = False
    ends_itself: bool = False
    price_per_hour: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check of a provider.

    Attributes:
        what: name of the item.
        state: ``"ok"``; ``"warn"`` if something optional will not work; ``"fail"``.
        found: the item's present value, or the error.
        fix: remedy; empty if it is ok.
    """

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSecret:
    """Secret by which a machine can end its own bill. It travels over SSH, and is in no first-boot order and no argv.

    Attributes:
        command: command on the machine that takes the secret from its standard input, in the user's home folder.
        value: the secret.
        renewed_s: time after which a newer one is delivered; infinite for never.
    """

    command: tuple[str, ...]
    value: str = field(repr=False)
    renewed_s: float = math.inf


class Provider(ABC):
    """Creation and termination of instances. Errors are Skyward's (:mod:`skyward.errors`).

    Implementations retry throttled and interrupted calls themselves; their callers decide about everything else.

    An implementation is a frozen dataclass of its settings, from which another process recreates it. Secrets are fields
    with ``repr=False``, which no file holds. Name, ``offers``, ``launch``, ``describe`` and ``terminate`` are required;
    everything else has a default that works, and an implementation that can do more overrides it.
    """

    own_machines: ClassVar[bool] = False
    """True if the machines are the user's own; others count as rented, by the hour, from their launch."""
    this_machine: ClassVar[bool] = False
    """True if all nodes run on this machine."""
    look_interval_s: ClassVar[float] = 0.0
    """Least number of seconds between two calls of ``describe``, where the provider limits them."""
    listing_s: ClassVar[float] = 0.0
    """Time after its launch for which a machine may be missing from ``tagged``: a sweep lists once more after it."""
    unlisted_s: ClassVar[float] = 0.0
    """The longest that this may be: for so long a machine is not treated as never made. At least ``listing_s``."""

    @property
    def members(self) -> Sequence[Provider]:
        """The providers that it is made of; most are made of themselves."""
        return (self,)

    def member_of(self, offer: Offer) -> Provider:  # noqa: ARG002 - for subclasses
        """Return the one of :attr:`members` that an offer, or a machine bought as it, is from."""
        return self

    @classmethod
    def supports(cls, capability: str) -> bool:
        """Return whether the class overrides the default of a ``capability``, such as ``"tagged"``."""
        return getattr(cls, capability) is not getattr(Provider, capability)

    @classmethod
    def has_credentials(cls) -> bool:
        """Return whether credentials seem to exist here, without asking anyone. They may still be refused."""
        return True

    async def public_offers(self, request: PoolRequest) -> Sequence[Offer]:  # noqa: ARG002 - for subclasses
        """Return what the vendor shows to anyone, without credentials, for a request. Creates nothing. Idempotent.

        It is asked once, since prices have other sources. What is not in stock may be among the offers. A class without
        it has a vendor that shows prices to customers only.
        """
        return ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The provider's name in events, ledger and documentation, e.g. ``"local"``."""

    @property
    def ends_itself(self) -> bool:
        """True if its machines can end their own bill when the client is dead, or cost nothing.

        A machine's own check may find that it cannot (:attr:`Instance.end_check`).
        """
        return self.own_machines

    def wishes(self, request: PoolRequest) -> Sequence[PoolRequest]:
        """Return the requests to make of :meth:`offers` for a ``request`` with several accelerators: one for each."""
        return request.alternatives

    @abstractmethod
    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the offers that satisfy the request, unranked. Creates nothing. Idempotent."""

    @abstractmethod
    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Create the machines and return without waiting for them. Not idempotent, except by key.

        Each machine is bought as the best offer that is still available for it; its record holds that offer. Either
        every machine of the order is requested, or none is left: a partial success is undone before this raises. A
        create call without a client token is sent once; when its outcome is unknown, the machine is looked up by its
        key, and adopted or undone, or created under another key (``providers/_common/create_once.py``). Raises
        :class:`~skyward.errors.CapacityError` when the offers do not suffice.
        """

    @abstractmethod
    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the machines' present records, in the order of ``instance_ids``. Idempotent.

        An unknown id is :attr:`InstanceState.GONE`.
        """

    @abstractmethod
    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Terminate the machines ``instance_ids``, and everything created with them. Idempotent; ignores gone ones.

        Returns when each is confirmed :attr:`InstanceState.GONE`, or raises
        :class:`~skyward.errors.TerminationError` with the ids that are not.
        """

    async def close(self) -> None:
        """Close sessions and connections; terminates no machine. Idempotent. By default nothing is held."""
        return

    async def tagged(self) -> Sequence[Instance]:
        """Return every listed machine of Skyward's with these settings that is not gone, of any pool. Idempotent.

        This is how a machine is found whose id a crash has lost. It waits for no machine that is not listed yet. A
        class without it cannot list machines.

        Raises:
            UnreachableError: a host or service that may have such machines did not answer.
        """
        return ()

    async def check(self) -> Sequence[Finding]:
        """Check credentials, permissions, quotas and the like. Creates nothing; raises none of Skyward's errors."""
        return ()

    async def zones(self, machines: Sequence[str]) -> Mapping[str, Mapping[str, float | None]]:  # noqa: ARG002 - for subclasses
        """Return the zones of each of the machine types ``machines``, with the USD an hour on spot. Idempotent.

        A type without zones is not offered; a price of None is unknown.
        """
        return {}

    async def admit(self, pool_id: str) -> str:  # noqa: ARG002 - for subclasses
        """Admit this machine's present address to the machines of ``pool_id``, and remove its former ones. Idempotent.

        For machines that admit only the client's own address. Returns the address if it was not admitted before, else
        an empty text. Raises :class:`~skyward.errors.SkywardError` when the address or the rules cannot be read.
        """
        return ""

    async def secret(self, instance: Instance) -> MachineSecret | None:  # noqa: ARG002 - for subclasses
        """Return the secret by which ``instance``, which admits logins, ends its own bill; None if it needs none.

        A newer one is asked for each time it is due.
        """
        return None

    async def tidy(self, pool_id: str) -> None:  # noqa: ARG002 - for subclasses
        """Remove everything but machines created for ``pool_id``, unless it has machines. Idempotent; logs failures."""
        return

    async def grant(self, volumes: Sequence[Volume], *, lifetime_s: float) -> Sequence[VolumeAccess]:  # noqa: ARG002
        """Grant machines access to ``volumes``, for ``lifetime_s`` if that can be had, as a store of volumes does.

        The store does it for a class without this method, with the credentials of this process.
        """
        return ()

    @property
    def trouble(self) -> str:
        """Errors of the calls that are being repeated at present, since the vendor's API fails; empty for none."""
        return ""


def error_of_all(message: str, errors: Sequence[BaseException]) -> SkywardError:
    """Return the error of a request that was refused in several ways; if one may pass, so may this."""
    kind = next((kind for kind in ELSEWHERE if any(isinstance(error, kind) for error in errors)), ConfigurationError)
    return kind(message)


async def matching_offers(provider: Provider, request: PoolRequest) -> Sequence[Offer]:
    """Return a provider's offers for a request, unranked; of several accelerators, for each that it has.

    Raises the provider's errors; if it refuses every accelerator, one error with all the reasons.
    """
    return await offers_for_each(provider.wishes(request), provider.offers)


async def offers_for_each(
    wishes: Sequence[PoolRequest], ask: Callable[[PoolRequest], Awaitable[Sequence[Offer]]]
) -> Sequence[Offer]:
    """Return the offers for each of the wishes that is not refused, each once; see :func:`matching_offers`.

    Wishes that may be served, but could not be made, are named in the offers' notes: they may be cheaper.
    """
    if len(wishes) == 1:
        return await ask(wishes[0])
    answers = await asyncio.gather(*map(ask, wishes), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        if not isinstance(error, SkywardError):
            raise error
    if len(errors) == len(answers):
        raise _none_offered(wishes, errors)
    found = dict.fromkeys(offer for answer in answers if not isinstance(answer, BaseException) for offer in answer)
    if not (remark := _not_asked(wishes, answers)):
        return list(found)
    return [replace(offer, note="; ".join(filter(None, (offer.note, remark)))) for offer in found]


def _not_asked(wishes: Sequence[PoolRequest], answers: Sequence[object]) -> str:
    failed = {
        str(wish.accelerator): answer
        for wish, answer in zip(wishes, answers, strict=True)
        if isinstance(answer, BaseException) and not isinstance(answer, ANSWERS)
    }
    return f"{' and '.join(failed)} could not be asked for: {next(iter(failed.values()))}" if failed else ""


_LISTED: Final = 5


def _none_offered(wishes: Sequence[PoolRequest], errors: Sequence[BaseException]) -> BaseException:
    """Return the error of a provider that refuses every accelerator."""
    if len(set(map(str, errors))) == 1:
        return errors[0]
    lines = [f"{wish.accelerator}: {error}" for wish, error in zip(wishes, errors, strict=True)]
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    message = "\n  ".join([f"none of {len(lines)} accelerators can be had:", *lines[:_LISTED], *more])
    return error_of_all(message, errors)


def check_settings(settings: object, **checks: Callable[[str, object], object]) -> None:
    """Check the settings of these names that are not None, and store what their checks return."""
    for name, check in checks.items():
        if (value := getattr(settings, name)) is not None:
            object.__setattr__(settings, name, check(name, value))


def checked_provider(provider: object, parameter: str = "provider") -> Provider:
    """Return ``provider`` if it is one.

    Raises:
        ConfigurationError: it is not, or it is a class instead of an instance.
    """
    must_be = f"{parameter} must be a provider object such as sky.Local()"
    if isinstance(provider, type):
        raise ConfigurationError(f"{must_be}, got the class {provider.__name__}: add parentheses")
    if not isinstance(provider, Provider):
        advice = ": its class must inherit from skyward.providers.Provider" if hasattr(provider, "launch") else ""
        raise ConfigurationError(f"{must_be}, got {type(provider).__name__}{advice}")
    return provider
