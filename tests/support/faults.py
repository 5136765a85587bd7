"""Faults in an order that a test chooses: a provider that suffers them, and how its machines fare."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.errors import AuthenticationError, CapacityError, ConfigurationError, QuotaError, RateLimitError
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.request import PoolRequest
from skyward.testing.provider import FakeProvider, Verb, running

__all__ = ["NO_FAULT", "REFUSALS", "Fate", "Fault", "FaultyProvider", "suffer"]


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
    error: Exception | None = None
    hangs: bool = False
    done: int | None = 0
    said: int | None = None


REFUSALS = (AuthenticationError, CapacityError, ConfigurationError, QuotaError, RateLimitError)
"""With these a launch says that it has made nothing."""
NO_FAULT = Fault(done=None)
"""Nothing."""


async def suffer(fault: Fault) -> None:
    """Take as long as it takes, then hang or raise if that is what happens."""
    await SYSTEM_CLOCK.sleep(fault.delay_s)
    if fault.hangs:
        await asyncio.Event().wait()
    if fault.error is not None:
        raise fault.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How a machine fares.

    Attributes:
        pending_s: how long it takes to be what it becomes.
        becomes: running, or what it ends as instead.
        ending_s: how long it takes to be gone after it was terminated.
    """

    pending_s: float = 0.0
    becomes: InstanceState = InstanceState.RUNNING
    ending_s: float = 0.0


@dataclass(slots=True)
class _Life:
    fate: Fate
    born_at: float
    ending_since: float | None = field(default=None)


class FaultyProvider(FakeProvider):
    """A provider whose verbs suffer faults, and whose machines take their time.

    Attributes:
        terminating: ids that it was asked to terminate.
        stubborn: ids of machines that it does not terminate for now; it says so by describing them.
        untold: ids of machines that it made and never told of.
        unclear: ledger keys that it was given, without saying what became of them.

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
        self.untold: set[str] = set()
        self.unclear: set[str] = set()
        self._script: dict[Verb, deque[Fault]] = {}
        self._fates: deque[Fate] = deque()
        self._on_order = on_order
        self._on_gone = on_gone
        self._lives: dict[str, _Life] = {}

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """See :meth:`Provider.offers`."""
        await suffer(self._next("offers"))
        return await super().offers(request)

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`Provider.launch`."""
        self._on_order(order)
        fault = self._next("launch")
        made = await super().launch(offers, replace(order, keys=order.keys[: fault.done]))
        now = asyncio.get_running_loop().time()
        for instance in made:
            fate = self._fates.popleft() if self._fates else Fate()
            self._lives[instance.id] = _Life(fate, now)
        self.untold.update(instance.id for instance in made)
        self.unclear.update(order.keys)
        try:
            await suffer(fault)
        except REFUSALS:
            self.unclear.difference_update(order.keys)
            raise
        said = made[: fault.said]
        self.untold.difference_update(instance.id for instance in said)
        self.unclear.difference_update(instance.key for instance in said)
        return [self._look(instance.id) for instance in said]

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """See :meth:`Provider.describe`."""
        await suffer(self._next("describe"))
        return await super().describe(instance_ids)

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """See :meth:`Provider.terminate`."""
        fault = self._next("terminate")
        self.terminating.update(instance_ids)
        now = asyncio.get_running_loop().time()
        for instance_id in [each for each in instance_ids if each in self._lives][: fault.done]:
            life = self._lives[instance_id]
            if instance_id not in self.stubborn and life.ending_since is None:
                life.ending_since = now
                self._look(instance_id)
        self.calls.append("terminate")
        await suffer(fault)

    def lose(self, instance_id: str) -> None:
        """The machine is taken away, behind everybody's back."""
        self.set_state(instance_id, InstanceState.GONE)

    def set_state(self, instance_id: str, state: InstanceState) -> None:
        """See :meth:`FakeProvider.set_state`."""
        was = self.instances[instance_id].state
        super().set_state(instance_id, state)
        if state is InstanceState.GONE and was is not state:
            self._on_gone(instance_id)

    def trouble(self, script: Mapping[Verb, Iterable[Fault]], fates: Iterable[Fate] = ()) -> None:
        """What happens from now on: to the uses of each verb, in order, and to new machines; nothing to later ones."""
        self._script = {verb: deque(faults) for verb, faults in script.items()}
        self._fates = deque(fates)

    def heal(self) -> None:
        """From now on nothing goes wrong, and what is terminated is gone at once."""
        self.trouble({})
        self.stubborn.clear()
        for life in self._lives.values():
            life.fate = replace(life.fate, ending_s=0.0)

    def refresh(self) -> None:
        """Bring :attr:`instances` up to date."""
        for instance_id in self.instances:
            self._look(instance_id)

    def _next(self, verb: Verb) -> Fault:
        faults = self._script.get(verb)
        return faults.popleft() if faults else NO_FAULT

    def _look(self, instance_id: str) -> Instance:
        life = self._lives.get(instance_id)
        if life is None:
            return super()._look(instance_id)
        now = asyncio.get_running_loop().time()
        instance = self.instances[instance_id]
        if instance.state is InstanceState.GONE:
            return instance
        if life.ending_since is not None:
            over = now >= life.ending_since + life.fate.ending_s
            self.set_state(instance_id, InstanceState.GONE if over else InstanceState.STOPPING)
        elif now < life.born_at + life.fate.pending_s:
            self.set_state(instance_id, InstanceState.PENDING)
        elif life.fate.becomes is InstanceState.RUNNING:
            self.instances[instance_id] = running(instance)
        else:
            self.set_state(instance_id, life.fate.becomes)
        return self.instances[instance_id]
