"""Provider in memory: its machines fare, and its calls fail, as a test chooses; it keeps a bill."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Literal

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import CapacityError, TerminationError
from skyward.machine.local import LocalAccess
from skyward.providers._common.create_once import MachineCalls, create_once
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer, Provider
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

__all__ = ["FakeProvider", "Fate", "NotedOrder", "Verb", "running"]

Verb = Literal["offers", "launch", "describe", "terminate", "tagged", "create", "find", "destroy"]
"""Verb that a :class:`FakeProvider` can fail at; a launch uses the last three, once for each machine."""

_LISTING_S = 10.0
_END_CHECKS: Final = {None: (), True: ("true",), False: ("sh", "-c", "echo 'no: status 403'; exit 1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedOrder(LaunchOrder):
    """Launch order that goes on under another key, and notes what becomes of it.

    Attributes:
        pool_id, keys, timeout_s, avoid, one_network: see :class:`~skyward.providers.LaunchOrder`.
        undone: the machines that are gone again.
        unseen: the keys of create calls without a clear outcome of which no machine is listed.
        reasons: the reasons for which other keys were asked for; each is the former one with ``"-again"``.
    """

    undone: list[Instance] = field(default_factory=list[Instance])
    unseen: list[str] = field(default_factory=list[str])
    reasons: list[str] = field(default_factory=list[str])

    def note_undone(self, instance: Instance) -> None:
        """See :meth:`LaunchOrder.note_undone`."""
        self.undone.append(instance)

    def note_unseen(self, key: str) -> None:
        """See :meth:`LaunchOrder.note_unseen`."""
        self.unseen.append(key)

    async def renew(self, key: str, reason: str) -> str:
        """See :meth:`LaunchOrder.renew`."""
        assert self.unseen[-1:] == [key], "a key is renewed once no machine of it is listed"
        self.reasons.append(reason)
        return f"{key}-again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Course of one fake machine, and the facts about it. Times are seconds of the provider's clock.

    Attributes:
        pending_s: time from its launch until it is what it becomes; infinite for a machine that never comes up.
        becomes: its state then: running, or gone or failed.
        ending_s: time from its termination until it is gone.
        unlisted_s: time from its launch during which it is missing from lists.
        network: its network, empty for an island; None follows :attr:`FakeProvider.networks`.
        host: the physical machine below it; None for one of its own. A machine on an avoided host is not sold.
        hardware: its real size; None is as bought.
        price_per_hour: USD as charged, which its record states from its launch; None follows
            :attr:`FakeProvider.prices`.
    """

    pending_s: float = 0.0
    becomes: InstanceState = InstanceState.RUNNING
    ending_s: float = 0.0
    unlisted_s: float = 0.0
    network: str | None = None
    host: str | None = None
    hardware: InstanceSpec | None = None
    price_per_hour: float | None = None


@dataclass(slots=True, kw_only=True)
class _Life:
    """A machine's fate, and its times so far: readings of the provider's clock, None before the event."""

    fate: Fate
    born_at: float
    looks: int
    ending_since: float | None = None
    gone_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    error: BaseException
    done: bool


class FakeProvider(Provider):
    """Provider in memory; lists and paces its machines.

    Methods take the ``instance_id`` of a launched machine.

    Attributes:
        name: its name, and the beginning of its machines' ids.
        instances: every machine ever launched, by id, as last described.
        calls: the verbs called, in order.
        looked_at: times of the calls of ``describe``.
        launch_limit: largest number of machines launched of an order, without an error; None launches all.
        pending_looks: number of times that a new machine is described as pending before it runs.
        fates: courses of the next machines, in order.
        fate: course of every machine after those.
        networks: networks of the machines, in the order of their launch; the last one is that of all further ones.
        prices: USD an hour as charged, by machine type; a machine's record states it once it runs.
        may_end: outcome of the :attr:`~skyward.providers.base.Instance.end_check` of new machines; None if they have no
            such check.
        sold_out: offers whose machines are refused.
        look_interval_s: see :attr:`Provider.look_interval_s`; recorded, not enforced.
        clock: the time, for fates and the bill.
    """

    this_machine: ClassVar[bool] = True

    def __init__(
        self,
        offers: Sequence[Offer] = (),
        *,
        pending_looks: int = 0,
        networks: Sequence[str] = ("fake",),
        fates: Iterable[Fate] = (),
        look_interval_s: float = 1.0,
        clock: Clock = SYSTEM_CLOCK,
        name: str = "fake",
    ) -> None:
        self._name = name
        self.instances: dict[str, Instance] = {}
        self.calls: list[Verb] = []
        self.looked_at: list[float] = []
        self.launch_limit: int | None = None
        self.pending_looks = pending_looks
        self.fates = deque(fates)
        self.fate = Fate()
        self.networks = networks
        self.prices: dict[str, float] = {}
        self._ends_itself = True
        self.may_end: bool | None = None
        self.sold_out: set[Offer] = set()
        self.look_interval_s = look_interval_s  # pyright: ignore[reportAttributeAccessIssue] - one for each fake
        self.clock = clock
        self._offers = offers or (Offer(spec=InstanceSpec(name="fake", cpu=2, memory_gib=4), price_per_hour=1.0),)
        self._faults: dict[Verb, deque[_Fault]] = defaultdict(deque)
        self._numbers = itertools.count()
        self._lives: dict[str, _Life] = {}

    @property
    def ends_itself(self) -> bool:
        """True if new machines are gone once the client is dead: see :meth:`client_dies`."""
        return self._ends_itself

    @ends_itself.setter
    def ends_itself(self, value: bool) -> None:
        self._ends_itself = value

    @property
    def name(self) -> str:
        """``"fake"``, or as it was made: several in one pool need names of their own."""
        return self._name

    # Controls and state for a test

    @property
    def alive(self) -> Sequence[str]:
        """Ids of the machines that are not gone."""
        return [each.id for each in self.instances.values() if each.state is not InstanceState.GONE]

    def fail(self, verb: Verb, error: BaseException, *, times: int = 1, done: bool = False) -> None:
        """Let the next ``times`` calls of ``verb`` raise ``error``; with ``done``, after the work.

        ``fail("create", UnreachableError("no answer"), done=True)`` makes a machine without a clear answer.
        """
        self._faults[verb].extend([_Fault(error=error, done=done)] * times)

    def set_state(self, instance_id: str, state: InstanceState) -> None:
        """Change a machine's state from outside Skyward."""
        self.instances[instance_id] = replace(self.instances[instance_id], state=state)
        life = self._lives.get(instance_id)
        if life is not None and state is InstanceState.GONE and life.gone_at is None:
            life.gone_at = self.clock.elapsed()

    def preempt(self, instance_id: str) -> None:
        """Take a machine back at once, without notice; its record shows that."""
        self.set_state(instance_id, InstanceState.GONE)
        record = self.instances[instance_id]
        self.instances[instance_id] = replace(record, preempted=True, reason="taken back by the provider")

    def client_dies(self) -> None:
        """Let the time-to-live of every machine pass without a client: those that may end themselves are gone."""
        for instance_id in self.alive:
            record = self.instances[instance_id]
            if record.ends_itself and record.end_check != _END_CHECKS[False]:
                self.set_state(instance_id, InstanceState.GONE)

    def end_at_once(self) -> None:
        """Let machines that are ending be gone now, and later ones as soon as they are terminated."""
        self.refresh()
        now = self.clock.elapsed()
        for life in self._lives.values():
            ending_s = 0.0 if life.ending_since is None else now - life.ending_since
            life.fate = replace(life.fate, ending_s=min(life.fate.ending_s, ending_s))

    def refresh(self) -> None:
        """Bring :attr:`instances` up to date."""
        for instance_id in self.instances:
            self._update(instance_id)

    def hardware(self, instance_id: str) -> InstanceSpec:
        """Return the real size of a machine."""
        life = self._lives.get(instance_id)
        return (life and life.fate.hardware) or self.instances[instance_id].offer.spec

    def billed(self, instance_id: str) -> float:
        """Return the USD charged for a machine so far.

        Billed is every begun second from its launch until it is gone, and at least the billed minimum, at the price
        that its record states, else as offered; and at least the offer's least charge.
        """
        life, record = self._lives[instance_id], self._update(instance_id)
        price = record.offer.price_per_hour if record.price_per_hour is None else record.price_per_hour
        end = self.clock.elapsed() if life.gone_at is None else life.gone_at
        seconds = math.ceil(round(end - life.born_at, 6))  # 0.1 + 0.2 - 0.3 is no begun second
        of_time = max(seconds, record.offer.minimum_billed_s) / 3600 * (price or 0.0)
        return max(of_time, record.offer.minimum_charge) if price else 0.0

    def bill(self) -> float:
        """Return the USD charged for all machines so far."""
        return sum(self.billed(instance_id) for instance_id in self._lives)

    # The seam

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:  # noqa: ARG002 - the seam takes it
        """See :meth:`Provider.offers`."""
        with self._entered("offers"):
            return self._offers

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`Provider.launch`."""
        with self._entered("launch"):
            order = replace(order, keys=order.keys[: self.launch_limit])
            create = partial(self._create, order)
            calls = MachineCalls(create=create, find=self._find, destroy=self._destroy)
            return await create_once(self.name, calls, offers, order, listing_s=_LISTING_S, clock=self.clock)

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """See :meth:`Provider.describe`."""
        self.looked_at.append(self.clock.elapsed())
        with self._entered("describe"):
            return [self._look(instance_id) for instance_id in instance_ids]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """See :meth:`Provider.terminate`; does not wait for machines that take their time to end."""
        with self._entered("terminate"):
            self._terminate(instance_ids)

    async def tagged(self) -> Sequence[Instance]:
        """See :meth:`Provider.tagged`."""
        with self._entered("tagged"):
            return self._listed()

    # Calls that concern one machine

    async def _create(self, order: LaunchOrder, offer: Offer, key: str) -> Instance:
        with self._entered("create"):
            if offer in self.sold_out:
                raise CapacityError("sold out")
            return self._make(offer, key, order)

    async def _find(self, key: str) -> Instance | None:
        with self._entered("find"):
            return next((each for each in self._listed() if each.key == key), None)

    async def _destroy(self, instance_id: str) -> None:
        with self._entered("destroy"):
            self._terminate([instance_id])
            if instance_id in self.instances and self._update(instance_id).state is not InstanceState.GONE:
                raise TerminationError(f"{instance_id} is not gone yet", instance_ids=[instance_id])

    # Machines

    @contextmanager
    def _entered(self, verb: Verb) -> Generator[None]:
        """Record a call of ``verb``; raise its fault before its work, or after it."""
        self.calls.append(verb)
        fault = self._faults[verb].popleft() if self._faults[verb] else None
        if fault is not None and not fault.done:
            raise fault.error
        yield
        if fault is not None:
            raise fault.error

    def _make(self, offer: Offer, key: str, order: LaunchOrder) -> Instance:
        number = next(self._numbers)
        fate = self._next_fate(order)
        network = self.networks[min(number, len(self.networks) - 1)] if fate.network is None else fate.network
        made = Instance(
            id=f"{self._name}-{number}",
            key=key,
            state=InstanceState.PENDING,
            offer=offer,
            network=network,
            host=f"host-{number}" if fate.host is None else fate.host,
            ends_itself=self.ends_itself,
            end_check=_END_CHECKS[self.may_end],
            price_per_hour=fate.price_per_hour,
        )
        self._lives[made.id] = _Life(fate=fate, born_at=self.clock.elapsed(), looks=self.pending_looks)
        self.instances[made.id] = made
        return self._update(made.id)

    def _next_fate(self, order: LaunchOrder) -> Fate:
        while self.fates:
            if (fate := self.fates.popleft()).host not in order.avoid:
                return fate
        return self.fate if self.fate.host not in order.avoid else replace(self.fate, host=None)

    def _listed(self) -> Sequence[Instance]:
        now = self.clock.elapsed()
        unlisted = {each for each, life in self._lives.items() if now < life.born_at + life.fate.unlisted_s}
        found = [self._update(each) for each in self.instances if each not in unlisted]
        return [each for each in found if each.state is not InstanceState.GONE]

    def _terminate(self, instance_ids: Sequence[str]) -> None:
        for instance_id in self.instances.keys() & set(instance_ids):
            self._end(instance_id)

    def _end(self, instance_id: str) -> None:
        """Begin to end a machine that is not gone."""
        life = self._lives.get(instance_id)
        if life is None:
            self.set_state(instance_id, InstanceState.GONE)
        elif self._update(instance_id).state is not InstanceState.GONE and life.ending_since is None:
            life.ending_since = self.clock.elapsed()
            self._update(instance_id)

    def _look(self, instance_id: str) -> Instance:
        """Return a machine's record for ``describe``, which takes one of its pending looks."""
        if instance_id not in self.instances:
            return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=self._offers[0])
        record = self._update(instance_id)
        if instance_id in self._lives:
            self._lives[instance_id].looks -= 1
        return record

    def _update(self, instance_id: str) -> Instance:
        """Bring a machine's record up to date by its fate, and return it; a state set by a test stays."""
        record, life = self.instances[instance_id], self._lives.get(instance_id)
        if life is None or record.state is InstanceState.GONE:
            return record
        if life.ending_since is not None:
            state, since, before = InstanceState.GONE, life.ending_since + life.fate.ending_s, InstanceState.STOPPING
        elif record.state is InstanceState.PENDING and life.looks <= 0:
            state, since, before = life.fate.becomes, life.born_at + life.fate.pending_s, InstanceState.PENDING
        else:
            return record
        if self.clock.elapsed() < since:
            state = before
        elif state is InstanceState.GONE:
            life.gone_at = since
        if state is InstanceState.RUNNING:
            price = self.prices.get(record.offer.spec.name) if record.price_per_hour is None else record.price_per_hour
            self.instances[instance_id] = replace(running(record), price_per_hour=price)
        elif state is not record.state:
            self.set_state(instance_id, state)
        return self.instances[instance_id]


def running(instance: Instance) -> Instance:
    """Return the instance in state running, with access."""
    access = LocalAccess(address="127.0.0.1", workdir=f"/nonexistent/{instance.id}")
    return replace(instance, state=InstanceState.RUNNING, access=access)
