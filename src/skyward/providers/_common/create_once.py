"""Launch of an order at a provider without client tokens: every create is sent once, and its outcome is settled."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from skyward.base.waiting import SYSTEM_CLOCK, Clock, NotYet, to_its_end, wait_until
from skyward.errors import CapacityError, QuotaError, SkywardError, TerminationError, UnreachableError
from skyward.providers._common.refusals import is_unsent
from skyward.providers.base import NOTHING_MADE, REFUSALS, Instance, InstanceState, LaunchOrder, Offer

_AT_ONCE: Final = 8
_LOOK_S: Final = 1.0
_READ_S: Final = 15.0
"""Time allowed for one list to be read once a machine must be listed, if it exists."""
_CREATES: Final = 3
"""Most create calls without a clear outcome for one machine."""
_TRIES: Final = 3
"""Most machines bought one after the other as one offer for one key, when they turn out to be on avoided hosts."""
_NAMED: Final = 3
"""Number of machine types named in the error when no offer is left."""
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCalls:
    """Calls of a provider's API that concern one machine. Up to eight are under way at once.

    Attributes:
        create: requests one machine as an offer, tagged with a ledger key, and returns its record without waiting for
            it. Must not repeat the request. Raises one of :data:`~skyward.providers.base.REFUSALS` if no machine was
            made, and any other error if that is unknown, or if the request was never sent.
        find: returns the record of the machine tagged with a key, None if none is listed. Idempotent.
        destroy: terminates a machine and returns once it is gone. Idempotent; ignores machines that are gone.
        turn: returns when ``create`` would send its request without a wait; None if it never waits. Create calls are
            sent one after the other then, and one that is cancelled until its turn is not sent.
    """

    create: Callable[[Offer, str], Awaitable[Instance]]
    find: Callable[[str], Awaitable[Instance | None]]
    destroy: Callable[[str], Awaitable[None]]
    turn: Callable[[], Awaitable[None]] | None = None


async def create_once(
    provider: str,
    calls: MachineCalls,
    offers: Sequence[Offer],
    order: LaunchOrder,
    *,
    listing_s: float = 60.0,
    ending_s: float = 300.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Sequence[Instance]:
    """Create every machine of an order, each as the best offer left, and return them in the order of the keys.

    A refused offer is not tried again for this order. A machine on a host of ``order.avoid`` is destroyed, and the next
    one is created once it is gone; after three of them the offer counts as refused. A machine whose create call has no
    clear outcome is looked up by its key and adopted. If it is not listed within ``listing_s``, it is created under
    another key (:attr:`~skyward.providers.base.LaunchOrder.renew`). After an error, or when cancelled, every machine of
    the order is destroyed and confirmed gone.

    Args:
        provider: the provider's name, for messages.
        calls: its API.
        offers: the offers, best first.
        order: the order.
        listing_s: longest time after its create call that a new machine is missing from the provider's lists.
        ending_s: limit for the destruction of one machine.
        clock: the time.

    Raises:
        CapacityError: the offers do not suffice.
        QuotaError: the account's quotas allow none of them.
        UnreachableError: create calls have no clear outcome, and no machine of theirs is listed.
        TerminationError: a machine of the order may be left; names its id, or its key if no list could be read.
    """
    work = _OrderCreation(
        provider=provider,
        calls=calls,
        offers=offers,
        order=order,
        listing_s=listing_s,
        ending_s=ending_s,
        clock=clock,
    )
    try:
        await work.create_all()
    except BaseException as error:
        await to_its_end(work.undo(error))
        raise
    return [work.made[work.keys[slot]] for slot in order.keys]


@dataclass(kw_only=True, eq=False)
class _OrderCreation:
    """One order under way; its arguments are those of :func:`create_once`.

    Attributes:
        made: the order's machines, by key.
        keys: present key of each machine, by the order's key for it.
    """

    provider: str
    calls: MachineCalls
    offers: Sequence[Offer]
    order: LaunchOrder
    listing_s: float
    ending_s: float
    clock: Clock
    made: dict[str, Instance] = field(default_factory=dict[str, Instance])
    keys: dict[str, str] = field(init=False)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    _creating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _refused: dict[Offer, SkywardError] = field(init=False)
    _unsure: dict[str, float] = field(default_factory=dict[str, float])
    """Time at which each create call without a known outcome failed, or was sent, by its key."""

    def __post_init__(self) -> None:
        self.keys = {key: key for key in self.order.keys}
        too_dear = CapacityError("max_cost does not allow its price")
        self._refused = {each: too_dear for each in self.offers if self.order.lasts_s(each) <= 0}

    async def create_all(self) -> None:
        """Create every machine; the first error stops the others before their next call."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in self.order.keys:
                    tasks.create_task(self._create_best(slot))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__

    async def undo(self, error: BaseException) -> None:
        """Destroy every machine of the order, found ones included.

        Raises:
            TerminationError: some may be left.
        """
        await asyncio.gather(*(self._settle(key) for key in sorted(self._unsure)))
        doomed = [*self.made.values()]
        outcomes = await asyncio.gather(*map(self._destroy, doomed))
        left = {each.id: why for each, why in zip(doomed, outcomes, strict=True) if why}
        if left or self._unsure:
            raise self._left_error(left, error) from error

    async def _create_best(self, slot: str) -> None:
        async with self._turns:
            for offer in self.offers:
                if offer in self._refused:
                    continue
                try:
                    await self._create_elsewhere(slot, offer)
                except (CapacityError, QuotaError) as error:
                    self._refused.setdefault(offer, error)
                else:
                    return
            raise self._none_left()

    async def _create_elsewhere(self, slot: str, offer: Offer) -> None:
        """Create one machine as an offer, on a host that is not to be avoided."""
        for _ in range(_TRIES):
            await self._create_or_adopt(slot, offer)
            if (made := self.made[self.keys[slot]]).host not in self.order.avoid:
                return
            if why := await to_its_end(self._end(made)):
                raise UnreachableError(why)
        raise CapacityError(f"each of {_TRIES} machines was on a host that has failed before")

    async def _create_or_adopt(self, slot: str, offer: Offer) -> None:
        """Create one machine, or adopt that of a call without a clear outcome; without either, use another key."""
        for calls in itertools.count(1):
            key = self.keys[slot]
            if (error := await self._send_in_turn(key, offer)) is None or await self._adopt(key, offer, error):
                return
            unclear = (
                f"{self.provider} gave no clear answer to a create call ({error!s:.300}), and lists no machine of it "
                f"{self.listing_s:g} s later"
            )
            if calls == _CREATES:
                raise UnreachableError(f"{unclear}: {NOTHING_MADE}") from error
            self.keys[slot] = await self.order.renew(key, unclear)

    async def _send_in_turn(self, key: str, offer: Offer) -> Exception | None:
        """Wait for the turn, which a cancellation ends, and send one create call, which is then awaited in any case."""
        if self.calls.turn is None:
            return await to_its_end(self._send(key, offer))
        async with self._creating:
            await self.calls.turn()
            await self.clock.sleep(0)  # an error of the last create call ends the order before this one is sent
            return await to_its_end(self._send(key, offer))

    async def _send(self, key: str, offer: Offer) -> Exception | None:
        """Send one create call; return an error that leaves its outcome open."""
        self._unsure[key] = self.clock.monotonic()
        try:
            self._book(key, offer, await self.calls.create(offer, key))
        except REFUSALS:
            del self._unsure[key]
            raise
        except Exception as error:
            if is_unsent(error):
                del self._unsure[key]
                raise
            self._unsure[key] = self.clock.monotonic()
            return error
        return None

    async def _adopt(self, key: str, offer: Offer, error: Exception) -> bool:
        """Adopt the machine of a call without a clear outcome; return False if none is listed in time."""
        _logger.warning(
            "%s gave no clear answer to a create call (%s): looking for its machine, for up to %.0f s",
            self.provider,
            error,
            self.listing_s,
        )
        found = await self._find(key)
        if found is not None:
            self._book(key, offer, found)
        return found is not None

    def _book(self, key: str, offer: Offer, instance: Instance) -> None:
        self.made[key] = replace(instance, key=key, offer=offer)
        self._unsure.pop(key, None)

    async def _find(self, key: str) -> Instance | None:
        """Return the machine of a key, once it is listed; None if it must be listed by now, and is not.

        Raises:
            UnreachableError: no list could be read then.
        """
        due_at = self._unsure[key] + self.listing_s

        async def listed() -> Instance | Literal[False] | NotYet:
            due = self.clock.monotonic() >= due_at
            try:
                found = await self.calls.find(key)
            except Exception as error:
                return NotYet(repr(error))
            return found or (False if due else NotYet("not listed"))

        deadline_s = max(0.0, due_at - self.clock.monotonic()) + _READ_S
        what = f"a list of machines that has {key}, or does not"
        found = await wait_until(listed, deadline_s=deadline_s, interval_s=_LOOK_S, what=what, clock=self.clock)
        if found is not False:
            return found
        del self._unsure[key]
        self.order.note_unseen(key)
        return None

    async def _settle(self, key: str) -> None:
        """Look for the machine of a create call without a clear outcome, which stays unsure if no list can be read."""
        async with self._turns:
            try:
                found = await self._find(key)
            except UnreachableError:
                return
        if found is not None:
            self._book(key, found.offer, found)

    async def _destroy(self, machine: Instance) -> str:
        async with self._turns:
            return await self._end(machine)

    async def _end(self, machine: Instance) -> str:
        """Destroy a machine and report that; return why it may be left, empty if it is gone."""

        async def gone() -> bool | NotYet:
            try:
                await self.calls.destroy(machine.id)
            except Exception as error:
                return NotYet(repr(error))
            return True

        try:
            await wait_until(
                gone, deadline_s=self.ending_s, interval_s=_LOOK_S, what=f"{machine.id} to end", clock=self.clock
            )
        except UnreachableError as error:
            return str(error)
        self.made.pop(machine.key, None)
        self.order.note_undone(replace(machine, state=InstanceState.GONE))
        return ""

    def _none_left(self) -> SkywardError:
        *_, last = self._refused.values()
        kind = QuotaError if all(isinstance(each, QuotaError) for each in self._refused.values()) else CapacityError
        error = kind(f"{self.provider} has none of its offers available now: {summary(self.offers)}; last: {last}")
        error.__cause__ = last
        return error

    def _left_error(self, left: dict[str, str], error: BaseException) -> TerminationError:
        parts = [f"{machine} does not end: {why}" for machine, why in left.items()]
        if self._unsure:
            keys = ", ".join(sorted(self._unsure))
            parts.append(f"machines with the ledger keys {keys} may exist, and no list of machines could be read")
        return TerminationError(
            f"{self.provider} launched an order of pool {self.order.pool_id} in part, and it could not be undone: "
            f"{'; '.join(parts)}. They may cost money: run `skyward sweep` once this program has ended, or look for "
            f"them in the provider's console. The launch failed with {type(error).__name__}: {error}",
            instance_ids=sorted(left),
            keys=sorted(self._unsure),
        )


def summary(offers: Iterable[Offer], *, most: int = _NAMED) -> str:
    """Return the first ``most`` machine types for a message, each with its market and the places of its offers."""
    places: dict[str, list[str]] = {}
    for offer in offers:
        named = f"{offer.spec.name} ({'spot' if offer.spot else 'on-demand'}"
        places.setdefault(named, []).append(offer.zone or offer.region)
    listed = [", ".join(filter(None, (named, *dict.fromkeys(where)))) + ")" for named, where in places.items()]
    return ", ".join(listed[:most]) + (f", and {len(listed) - most} more" if len(listed) > most else "")
