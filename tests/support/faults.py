"""Faults in an order that a test chooses: a provider that suffers them, and how its machines fare."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import TerminationError
from skyward.providers.base import REFUSALS, Instance, InstanceState, LaunchOrder, Offer
from skyward.request.request import PoolRequest
from skyward.testing.provider import FakeProvider, Fate, Verb

__all__ = ["NO_FAULT", "Fate", "Fault", "FaultyProvider", "suffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one use of a verb.

    Attributes:
        delay_s: how long it takes.
        error: what it raises then.
        hangs: whether it never comes back.
        done: of how many machines it does what it should before that; None is all.
        said: of how many of those a launch tells; None is all.
    """

    delay_s: float = 0.0
    error: BaseException | None = None
    hangs: bool = False
    done: int | None = 0
    said: int | None = None


NO_FAULT = Fault(done=None)
"""Nothing."""


async def suffer(fault: Fault) -> None:
    """Take as long as it takes, then hang or raise if that is what happens."""
    await SYSTEM_CLOCK.sleep(fault.delay_s)
    if fault.hangs:
        await asyncio.Event().wait()
    if fault.error is not None:
        raise fault.error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FollowedOrder(LaunchOrder):
    """The part of an order that is made; its provider follows what becomes of its keys."""

    order: LaunchOrder
    provider: FaultyProvider
    used: set[str]
    unseen: set[str] = field(default_factory=set[str])

    def lasts_s(self, offer: Offer) -> float:
        return self.order.lasts_s(offer)

    def note_undone(self, instance: Instance) -> None:
        self.provider.told.append(instance.id)
        self.order.note_undone(instance)

    def note_unseen(self, key: str) -> None:
        self.unseen.add(key)
        self.provider.under_way.discard(key)
        self.order.note_unseen(key)

    async def renew(self, key: str, reason: str) -> str:
        other = await self.order.renew(key, reason)
        for keys in (self.used, self.provider.unclear, self.provider.under_way):
            keys.add(other)
        return other


class FaultyProvider(FakeProvider):
    """A provider whose verbs suffer faults, and whose machines take their time.

    Attributes:
        terminating: ids that it was asked to terminate.
        stubborn: ids of machines that it does not terminate for now; it says so by describing them.
        unclear: ledger keys that it was given, without saying what became of them.
        under_way: those of orders that it has not answered, whose create calls may still be answered.
        told: ids of the machines that its launches told of, those that it undid included, and of those that it could
            not undo once they were described.

    Args:
        on_order: hears of every order before anything happens.
        on_gone: hears of every machine that is no more.
    """

    def __init__(
        self,
        *,
        offers: Sequence[Offer] = (),
        on_order: Callable[[LaunchOrder], None],
        on_gone: Callable[[str], None],
    ) -> None:
        super().__init__(offers)
        self.terminating: set[str] = set()
        self.stubborn: set[str] = set()
        self.unclear: set[str] = set()
        self.under_way: set[str] = set()
        self.told: list[str] = []
        self._not_undone: set[str] = set()
        self._script: dict[Verb, deque[Fault]] = {}
        self._on_order = on_order
        self._on_gone = on_gone

    @property
    def untold(self) -> set[str]:
        """Ids of machines that it made and never told of."""
        return {each.id for each in self.instances.values() if each.key in self.unclear}

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """See :meth:`Provider.offers`."""
        await suffer(self._next("offers"))
        return await super().offers(request)

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`Provider.launch`."""
        self._on_order(order)
        fault = self._next("launch")
        followed = _FollowedOrder(
            pool_id=order.pool_id,
            keys=order.keys[: fault.done],
            timeout_s=order.timeout_s,
            avoid=order.avoid,
            one_network=order.one_network,
            order=order,
            provider=self,
            used={*order.keys},
        )
        self.unclear |= followed.used
        self.under_way |= followed.used
        try:
            made = await super().launch(offers, followed)
            await suffer(fault)
        except REFUSALS:
            self.unclear -= followed.used - followed.unseen
            raise
        except TerminationError as error:
            self._not_undone.update(error.instance_ids)
            raise
        finally:
            self.under_way -= followed.used
        said = made[: fault.said]
        self.unclear.difference_update(instance.key for instance in said)
        self.told += [instance.id for instance in said]
        return [self._update(instance.id) for instance in said]

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """See :meth:`Provider.describe`."""
        await suffer(self._next("describe"))
        seen = await super().describe(instance_ids)
        for each in seen:
            if each.id in self._not_undone and each.state is not InstanceState.GONE:
                self._not_undone.discard(each.id)
                self.unclear.discard(each.key)
                self.told.append(each.id)
        return seen

    async def tagged(self) -> Sequence[Instance]:
        """See :meth:`Provider.tagged`: it tells of the machines of unclear launches."""
        listed = await super().tagged()
        found = {each.id: each.key for each in listed if each.key in self.unclear - self.under_way}
        self.told += found
        self._not_undone -= found.keys()
        self.unclear.difference_update(found.values())
        return listed

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """See :meth:`Provider.terminate`."""
        fault = self._next("terminate")
        self.calls.append("terminate")
        self.terminating.update(instance_ids)
        self._terminate([each for each in instance_ids if each in self.instances][: fault.done])
        await suffer(fault)

    def span(self, instance_id: str) -> tuple[float, float | None]:
        """When a machine was made, and when it was gone; None if it is not."""
        life = self._lives[instance_id]
        return life.born_at, life.gone_at

    def lose(self, instance_id: str) -> None:
        """The machine is taken away, behind everybody's back."""
        self.set_state(instance_id, InstanceState.GONE)

    def set_state(self, instance_id: str, state: InstanceState) -> None:
        """See :meth:`FakeProvider.set_state`."""
        was = self.instances[instance_id].state
        super().set_state(instance_id, state)
        if state is InstanceState.GONE and was is not state:
            self._on_gone(instance_id)

    def plan_faults(self, script: Mapping[Verb, Iterable[Fault]], fates: Iterable[Fate] = ()) -> None:
        """What happens from now on: to the uses of each verb, in order, and to new machines; nothing to later ones."""
        self._script = {verb: deque(faults) for verb, faults in script.items()}
        self.fates = deque(fates)

    def heal(self) -> None:
        """From now on nothing goes wrong, and what is terminated is gone at once."""
        self.plan_faults({})
        self.stubborn.clear()
        self.end_at_once()

    async def _create(self, order: LaunchOrder, offer: Offer, key: str) -> Instance:
        fault = self._next("create")
        made = await super()._create(order, offer, key) if fault.done is None else None
        await suffer(fault)
        return made or await super()._create(order, offer, key)

    async def _find(self, key: str) -> Instance | None:
        await suffer(self._next("find"))
        return await super()._find(key)

    async def _destroy(self, instance_id: str) -> None:
        fault = self._next("destroy")
        if fault.done is None:
            self._terminate([instance_id])
        await suffer(fault)
        await super()._destroy(instance_id)

    def _end(self, instance_id: str) -> None:
        if instance_id not in self.stubborn:
            super()._end(instance_id)

    def _next(self, verb: Verb) -> Fault:
        faults = self._script.get(verb)
        return faults.popleft() if faults else NO_FAULT
