"""Purchase and termination of machines; each is in the ledger before its request and until it is confirmed gone."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any, cast

from skyward.base.waiting import Clock, NotYet, to_its_end, wait_until
from skyward.environment.includes_and_volumes import Grants
from skyward.errors import (
    CapacityError,
    ConfigurationError,
    LedgerError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.events import (
    Error,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstancePreempted,
    InstanceStopping,
    Notice,
    SkywardEvent,
)
from skyward.fleet.capacity_wait import CapacityWait, WaitReports
from skyward.fleet.node import OVER, MakeNode, Node, SharedLooks
from skyward.fleet.outputs import Outputs
from skyward.fleet.topology import connected, note_on_gangs
from skyward.ledger.fleet_record import KeptNode
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.termination import end_instances
from skyward.market.budget import Budget, PriceLimit, expected_usages, notes_on_bill
from skyward.market.choose import (
    Attempt,
    Batch,
    UnfitMachineError,
    UnfitMachines,
    choose,
    notes_on_purchase,
)
from skyward.market.consent import Consent, Forecast
from skyward.market.cost import Usage
from skyward.market.interruptions import Interruptions, SpotLife
from skyward.providers.base import (
    PASSING,
    REFUSALS,
    Instance,
    InstanceState,
    LaunchOrder,
    Offer,
    Provider,
    matching_offers,
)
from skyward.providers.registry import provider_settings
from skyward.providers.several import Several, labelled
from skyward.request.request import PoolRequest

_LOOK_S = 120.0
"""Timeout of one describe() call; a later call may still succeed."""
_END_S = 30.0
_AGAIN_S = 60.0
_LIST_EVERY_S, _LIST_S = 30.0, 60.0
_CERTAIN_S = 600.0
"""Time after which a machine that is not listed was certainly never made, however late its provider lists it."""
_AT_ONCE = 8
"""Orders of single machines, where the nodes are spread, that are under way at once."""
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCall:
    """A create call of one machine.

    Attributes:
        provider: the provider that it was sent to.
        label: that one's label in a list of several; else empty.
        rank: rank of the node for which it was made.
        began: ``elapsed`` reading of the clock before the call.
        usage: what its machine may cost until it is certain that there is none, as the most expensive of its offers.
    """

    provider: Provider
    label: str
    rank: int
    began: float
    usage: Usage

    @property
    def seller(self) -> str:
        """Name of the provider among those of the pool."""
        return self.label or self.provider.name


@dataclass(eq=False)
class Machines:
    """Purchase and termination of a pool's machines.

    Attributes:
        provider: the provider of the machines, which may be made of others.
        request: the pool's parameters.
        pool_id: the pool's id.
        publish: receives the events of purchase and termination; must not block.
        ledger: where machines are recorded before they are requested.
        clock: the time, for deadlines and cost.
        make_node: maker of the record of each.
        all: every machine so far, including those of a launch that failed halfway.
        grants: their access to the pool's volumes.
        unfit: those bought in vain.
        consent: the user's consent to what machines can cost.
        past: the cost of machines that were gone before this client took a kept fleet over.
    """

    provider: Provider
    request: PoolRequest
    _: KW_ONLY
    pool_id: str
    publish: Callable[[SkywardEvent], None]
    ledger: Ledger
    clock: Clock
    make_node: MakeNode = Node
    all: list[Node] = field(default_factory=list[Node])
    unfit: UnfitMachines = field(default_factory=UnfitMachines)
    past: list[Usage] = field(default_factory=list[Usage])
    _noted: set[str] = field(default_factory=set[str])
    _coming: list[list[Usage]] = field(default_factory=list[list[Usage]])
    # Create calls whose outcome is unknown: their machines may still be listed, and must end then.
    _lost: dict[str, CreateCall] = field(default_factory=dict[str, CreateCall])
    _lost_some: asyncio.Event = field(default_factory=asyncio.Event)
    _placing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        request = self.request
        members = self.provider.members
        self.grants = Grants(next((each for each in members if each.supports("grant")), members[0]), request)
        self._looks: dict[int, SharedLooks] = {}
        self._outputs = Outputs(request, self.pool_id, self.publish)
        self._budget = Budget() if request.max_cost is None else Budget(max_cost=request.max_cost)
        self._price_limit = PriceLimit.of(request)
        self._wait_reports = WaitReports(self.publish, self.clock)
        self.consent = Consent(Forecast(timeout_s=request.timeout_s, max_cost=self._budget.max_cost))

    def provider_of(self, instance: Instance) -> Provider:
        """Return the provider of a machine."""
        return self.provider.member_of(instance.offer)

    def _looks_at(self, provider: Provider) -> SharedLooks:
        """Return the present records of one provider's machines: one that hangs delays no other."""
        if id(provider) not in self._looks:
            self._looks[id(provider)] = SharedLooks(provider, clock=self.clock)
        return self._looks[id(provider)]

    def _usages(self, instead: list[Usage] | None = None) -> list[Usage]:
        """Return the usages of existing machines, of requested ones, and of those that unanswered calls may have made.

        Without the requested ones in ``instead``.
        """
        coming = chain.from_iterable(usages for usages in self._coming if usages is not instead)
        lost = (create.usage for create in self._lost.values())
        return [*self.usages(), *coming, *lost]

    def usages(self) -> list[Usage]:
        """Return the usages of all machines so far, with what others cost before this client took the fleet over."""
        return [*self.past, *(machine.usage for machine in self.all)]

    def unended(self) -> list[Node]:
        """Return the machines that are not confirmed gone."""
        return [machine for machine in self.all if not machine.ended]

    def unended_of(self, rank: int, *, since: int = 0) -> list[Node]:
        """Return the machines of a rank that may exist; only those after the first ``since`` of :attr:`all`."""
        return [each for each in self.all[since:] if each.rank == rank and each.has_rank and not each.ended]

    async def ask_for_elastic(self) -> None:
        """Have the user agree to what an elastic pool can cost, before it opens."""
        request = self.request
        if request.elastic is None or self.consent.covers_elastic:
            return
        wait = self._wait_for_capacity()
        while True:
            try:
                offers = connected(await self._offers(), request, nodes=request.nodes)
                choice = choose(request, offers, nodes=request.nodes, provider=self.provider.name)
            except PASSING as error:
                await wait.pause(error)
            else:
                await self.consent.given_to_elastic(choice.batches, provider=self.provider.name)
                return

    async def launch(
        self,
        ranks: Sequence[int],
        *,
        beside: Iterable[Node] = (),
        instead_of: Offer | None = None,
        waits: bool = True,
        is_wanted: Callable[[int], bool] = lambda _: True,
        between: asyncio.Event | None = None,
    ) -> Sequence[Node]:
        """Launch one machine for each rank; the spot share and the budget include the fleet's machines ``beside`` them.

        For no ranks, raise what the launch of one machine would, as far as offers and limits are concerned. A pool that
        waits for capacity keeps what it has bought, and tries to launch the missing machines until its time is over;
        not ``instead_of`` a machine on demand, for which see :func:`~skyward.market.choose.choose`.

        Raises the provider's errors. Machines created until then are among ``all``.

        Args:
            ranks: the ranks.
            beside: machines of other ranks.
            instead_of: the offer of a machine to be replaced.
            waits: False for a launch that never waits for capacity.
            is_wanted: False for a rank that needs no machine any more.
            between: set while none is being bought.
        """
        if not ranks:
            await self._refuse_impossible()
            return ()
        if instead_of is None:
            self.publish(InfraCreating())
        between = between or asyncio.Event()
        between.clear()
        await self.grants.check()
        has, first = [machine.instance.offer for machine in beside], len(self.all)
        wait = self._wait_for_capacity(waits=waits and instead_of is None)
        bought: dict[int, Node] = {}
        while missing := [rank for rank in ranks if is_wanted(rank) and rank not in bought]:
            known = len(self.all)
            present = [*has, *(node.instance.offer for node in bought.values())]
            buy = self._buy_one_by_one if self.request.spread else self._buy_together
            failed = self.unfit.offers(missing)
            try:
                async with self._turn_to_place(missing):
                    batches = await self.decide(len(missing), present, failed, instead_of, self._near(missing))
                    self.publish(InfraCreated(batches[0].offers[0].region))
                    bought |= {node.rank: node for node in await buy(batches, missing)}
            except PASSING as error:
                between.set()
                await wait.pause(error, costly=any(node.ended for node in self.all[known:]))
                between.clear()
                bought = {rank: node for rank in ranks for node in self.unended_of(rank, since=first)}
                for node in bought.values():
                    node.allow_boot()
        return [bought[rank] for rank in ranks if rank in bought]

    def _wait_for_capacity(self, *, waits: bool = True) -> CapacityWait:
        limit_s = self.request.wait_for_capacity_s if waits else 0.0
        return CapacityWait(limit_s=limit_s, reports=self._wait_reports, clock=self.clock)

    async def _refuse_impossible(self) -> None:
        """Raise what the launch of one machine would, unless that may succeed later and the pool waits for capacity."""
        try:
            await self._choose(1, (), ())
        except PASSING as error:
            if not self.request.wait_for_capacity_s:
                raise
            self.notice(str(error))

    def _near(self, ranks: Sequence[int]) -> list[Offer]:
        """Return the offers of the machines of other ranks, also of those that are no nodes yet."""
        machines = (machine for machine in self.all if machine.has_rank and not machine.ended)
        return [machine.instance.offer for machine in machines if machine.rank not in ranks]

    @asynccontextmanager
    async def _turn_to_place(self, ranks: Sequence[int]) -> AsyncGenerator[None]:
        """Wait while another order of the pool's first machines finds the place where all nodes go."""
        together = isinstance(self.provider, Several) and not self.request.spread
        if together and not self._near(ranks):
            async with self._placing:
                if not self._near(ranks):
                    yield
                    return
        yield

    def _expect(self, batches: Iterable[Batch]) -> list[Usage]:
        coming = [*expected_usages(batches, self.clock.elapsed())]
        self._coming.append(coming)
        return coming

    async def _buy_together(
        self, batches: Sequence[Batch], ranks: Sequence[int], coming: list[Usage] | None = None
    ) -> list[Node]:
        """Launch the machines of batches, one batch after the other; what they may cost is expected, in ``coming``."""
        coming = self._expect(batches) if coming is None else coming
        launched: list[Node] = []
        try:
            for index, batch in enumerate(batches, 1):
                ours, ranks = ranks[: batch.nodes], ranks[batch.nodes :]
                at_hand = _beside(batch, [node.instance.offer for node in launched])
                launched += await self._buy(at_hand, ours, batches[index:], coming)
                del coming[: batch.nodes]
        finally:
            self._coming = [each for each in self._coming if each is not coming]
        return launched

    async def _buy_one_by_one(self, batches: Sequence[Batch], ranks: Sequence[int]) -> list[Node]:
        """Launch each machine by itself, wherever one can be had.

        Once all are done, raise an error if there is one, first of those that waiting does not cure.
        """
        singles = [replace(batch, nodes=1) for batch in batches for _ in range(batch.nodes)]
        turns = asyncio.Semaphore(_AT_ONCE)

        async def buy(single: Batch, rank: int, coming: list[Usage]) -> list[Node]:
            async with turns:
                return await self._buy_together([single], [rank], coming)

        coming = [self._expect([single]) for single in singles]
        try:
            work = map(buy, singles, ranks, coming)
            outcomes = await asyncio.gather(*work, return_exceptions=True)
        finally:  # a purchase that is cancelled before its turn does not remove its own
            self._coming = [each for each in self._coming if not any(each is ours for ours in coming)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, PASSING)):
            raise error
        return [node for nodes in outcomes if not isinstance(nodes, BaseException) for node in nodes]

    async def decide(
        self,
        nodes: int,
        has: Sequence[Offer],
        failed: Sequence[Offer] = (),
        instead_of: Offer | None = None,
        near: Sequence[Offer] | None = None,
    ) -> Sequence[Batch]:
        """Return what to buy for so many nodes beside others, and publish the remarks on it. Buys nothing.

        Raises as :meth:`launch` does before it buys, except for the errors of volumes.
        """
        batches, remark = await self._choose(nodes, has, failed, instead_of, near)
        batches = await self.consent.given(batches, has, provider=self.provider.name)
        offers = [offer for batch in batches for offer in batch.offers]
        apart = note_on_gangs(offers, nodes + len(has), self.provider.name, spread=self.request.spread)
        for note in (remark, apart, *(batch.offers[0].note for batch in batches)):
            self.notice(note)
        return batches

    async def _choose(
        self,
        nodes: int,
        has: Sequence[Offer],
        failed: Sequence[Offer],
        instead_of: Offer | None = None,
        near: Sequence[Offer] | None = None,
    ) -> tuple[list[Batch], str]:
        """Return what to buy for so many nodes beside others, within all limits; and a remark for the user."""
        name = self.provider.name
        offers = connected(await self._offers(), self.request, nodes=nodes + len(has))
        choice = choose(
            self.request,
            offers,
            nodes=nodes,
            provider=name,
            beside=has,
            near=near,
            failed=failed,
            seen=self._interruptions(),
            instead_of=instead_of,
        )
        bought = [machine.instance for machine in self.all]
        try:
            batches = self._price_limit.among(choice.batches, bought, provider=name)
        except ConfigurationError as error:
            if not self.request.wait_for_capacity_s:
                raise
            raise CapacityError(str(error)) from error  # what is cheap enough may be sold out now
        return self._budget.afford(batches, self._usages(), self.clock.elapsed(), provider=name), choice.note

    async def _offers(self) -> Sequence[Offer]:
        """Return the offers; publish which providers of a list have none, and why."""
        offers = await matching_offers(self.provider, self.request)
        if isinstance(self.provider, Several):
            self.notice(self.provider.silence)
        return offers

    def note_preempted(self, machine: Node) -> None:
        """Record that the provider takes a machine back: its market is expected to do so again. Idempotent."""
        if machine.preempted_at is None:
            machine.preempted_at = self.clock.elapsed()

    def _interruptions(self) -> Interruptions:
        """Return what the pool has seen of spot markets so far."""
        now = self.clock.elapsed()
        return Interruptions(
            tuple(
                SpotLife(
                    offer=machine.instance.offer,
                    began_h=(now - machine.usage.launched_at) / 3600,
                    ended_h=0.0 if (end := _end_of(machine)) is None else (now - end) / 3600,
                    preempted=machine.preempted_at is not None,
                )
                for machine in self.all
                if machine.instance.offer.spot
            )
        )

    def timeout_s(self, *, age_s: float = 0.0) -> float:
        """Return the hard cap on a node's remaining life, in seconds.

        It is the rest of the pool's ``timeout`` at that age, or less if ``max_cost`` allows less.
        """
        return min(max(1.0, self.request.timeout_s - age_s), self._budget.cap_s(self._usages(), self.clock.elapsed()))

    def lasts_s(self, offer: Offer, nodes: int, later: Sequence[Batch], instead: list[Usage]) -> float:
        """Return the seconds for which so many machines of an offer may live; 0 if a limit of cost or price forbids it.

        They, and the ``later`` batches, replace the usages in ``instead``, which were expected.
        """
        if not self._price_limit.allows(offer.price_per_hour):
            return 0.0
        if math.isinf(self._budget.max_cost):  # a thousand machines would be added up for each of them
            return self.request.timeout_s
        now = self.clock.elapsed()
        usages = [*self._usages(instead), *expected_usages([Batch(nodes=nodes, offers=(offer,)), *later], now)]
        if not self._budget.covers(usages, now):
            return 0.0
        return min(self.request.timeout_s, self._budget.cap_s(usages, now))

    async def wait_running(self, machine: Node) -> None:
        """Return once the machine runs and its address is known.

        Raises:
            UnfitMachineError: it ended instead, did not run in time, or costs more than ``max_price_per_hour``.
        """
        self._check_price(machine)
        if machine.instance.state is InstanceState.RUNNING and machine.instance.access is not None:
            return
        try:
            seen = await wait_until(
                lambda: self._look(machine),
                deadline_s=machine.left_s,
                interval_s=1.0,
                what=f"{self.provider_of(machine.instance).name} to run it",
                clock=self.clock,
            )
        except UnreachableError as error:
            limit_s = machine.instance.offer.ready_within_s
            raise UnfitMachineError(f"did not run within {limit_s:g} s of its launch ({error})") from error
        if isinstance(seen, Exception):
            raise seen
        await self.observe(machine, seen)
        self._check_price(machine)

    async def observe(self, machine: Node, seen: Instance) -> None:
        """Take over a fresh record of a machine. A price that is read back counts from the launch."""
        before = machine.instance
        known = before.price_per_hour
        seen = labelled(seen, before.offer.provider)
        if seen.end_check and not before.end_check:  # its outcome is recorded
            seen = replace(seen, end_check=(), ends_itself=before.ends_itself)
        machine.instance = seen if seen.price_per_hour is not None else replace(seen, price_per_hour=known)
        if machine.instance.price_per_hour != known:
            machine.usage = machine.usage.charged(seen.price_per_hour)
            await asyncio.to_thread(self.ledger.record, [seen])
            self._note_bill([seen])

    async def note_end(self, machine: Node, *, may_end: bool) -> None:
        """Record the outcome of a machine's end check, which counts from then on instead of its provider's word."""
        claimed = machine.instance.ends_itself
        machine.instance = replace(machine.instance, end_check=(), ends_itself=claimed and may_end)
        try:
            await asyncio.to_thread(self.ledger.record, [machine.instance])
        except LedgerError as error:  # it counts there as one that cannot, until this is recorded
            _logger.warning("%s; until then the next pool's opening looks for machines that end themselves", error)

    def _check_price(self, machine: Node) -> None:
        if excess := self._price_limit.excess(machine.instance):
            raise UnfitMachineError(excess)

    def _note_bill(self, instances: Iterable[Instance]) -> None:
        for note in notes_on_bill(self.provider.name, instances, kept=bool(self.request.keep_s)):
            self.notice(note)

    def reject(self, machine: Node, error: UnfitMachineError) -> None:
        """Record that a machine cannot become a node; its host is avoided from now on.

        The caller ends it in the background, and launches another with :meth:`instead_of`.

        Raises:
            CapacityError: no other may be bought for its rank; lists all attempts.
        """
        usage, instance = machine.usage, machine.instance
        cost = None if usage.price_per_hour is None else usage.cost(self.clock.elapsed())
        attempt = Attempt(instance=instance, reason=error.reason, cost=cost, preempted=error.preempted)
        self.unfit.add(machine.rank, attempt)
        outcome = self.unfit.outcome(machine.rank)
        if error.preempted:
            self.note_preempted(machine)
            self.publish(InstancePreempted(instance.id, machine.rank, 0.0))
        self.publish(Notice(f"{attempt}; {outcome or 'no other is bought'}", instance.id))
        if not outcome:
            exhausted = self.unfit.exhausted(machine.rank)
            self.unfit.forget(machine.rank)
            raise exhausted from error

    async def instead_of(self, machine: Node, *, beside: Iterable[Node], waits: bool = True) -> Node:
        """Launch another machine for the rank of a rejected one, once that one's termination was requested.

        Raises the provider's errors, with the earlier attempts for the rank in a note.
        """
        with suppress(TimeoutError):  # the order to terminate is sent by then, and a node need not wait for its effect
            async with asyncio.timeout(_END_S):
                await machine.end_tried.wait()
        try:
            (other,) = await self.launch([machine.rank], beside=beside, waits=waits)
        except Exception as error:
            for attempt in self.unfit.attempts(machine.rank):
                error.add_note(f"before that: {attempt}")
            raise
        return other

    def count_past(self, spent: Mapping[str, float]) -> None:
        """Count the cost of a kept fleet's former machines: USD by provider."""
        now = self.clock.elapsed()
        self.past += [Usage.past(usd, now, provider=name) for name, usd in spent.items() if usd]

    def resume(self, kept: KeptNode) -> Node:
        """Return the record of a kept node's machine, which counts from its launch."""
        launched_at = self.clock.elapsed() + kept.launched.left_s
        looks = self._looks_at(self.provider_of(kept.instance))
        node = self.make_node(rank=kept.rank, instance=kept.instance, launched_at=launched_at, looks=looks)
        node.take_over(kept)
        self.all.append(node)
        return node

    async def leave(self, machines: Sequence[Node]) -> None:
        """Fetch the outputs of kept nodes, and close the connections to them."""
        await self._outputs.rescue_and_stop(machines, leave=True)

    async def end(self, machines: Sequence[Node]) -> None:
        """Stop the nodes on the machines, terminate the machines, confirm it.

        Raises:
            TerminationError: some may still exist; the ledger keeps their entries, and another call retries.
        """
        if not machines:
            return
        for machine in machines:
            self.publish(InstanceStopping(machine.instance.id))
        await self._outputs.rescue_and_stop([machine for machine in machines if machine.is_open])
        try:
            await self._terminate(machines)
        finally:
            for machine in machines:
                machine.end_tried.set()

    async def _terminate(self, machines: Sequence[Node]) -> None:
        """Terminate machines of any of the providers, all at the same time."""
        by_label: defaultdict[str, list[Node]] = defaultdict(list)
        for machine in machines:
            by_label[machine.instance.offer.provider].append(machine)
        work = [self._terminate_at(self.provider_of(theirs[0].instance), theirs) for theirs in by_label.values()]
        errors = [each for each in await asyncio.gather(*work, return_exceptions=True) if each is not None]
        left = [each for error in errors if isinstance(error, TerminationError) for each in error.instance_ids]
        for error in errors:
            if len(errors) == 1 or not isinstance(error, TerminationError):
                raise error
        if errors:
            raise TerminationError("\n".join(map(str, errors)), instance_ids=left)

    async def _terminate_at(self, provider: Provider, machines: Sequence[Node]) -> None:
        """Terminate machines of one provider, and record the ends that it confirms, whenever the others do."""
        ids = [machine.instance.id for machine in machines]
        try:
            await end_instances(provider, ids, report=self.notice, clock=self.clock)
        except TerminationError as error:
            await self._note_ended([each for each in machines if each.instance.id not in error.instance_ids])
            raise
        await self._note_ended(machines)

    async def end_at_last(self, machine: Node) -> None:
        """End a machine that has no rank any more; retry every minute, because it costs money until it is gone."""
        while not machine.ended:
            if machine.end_tried.is_set():
                await self.clock.sleep(_AGAIN_S)
            try:
                await self.end([machine])
            except TerminationError as error:
                self.publish(Error(str(error), machine.instance.id))

    async def appeared(self) -> Sequence[Node]:
        """Wait for machines of lost create calls to be listed, and return them; they have no rank, and are to end."""
        while True:
            await self._lost_some.wait()
            await self.clock.sleep(_LIST_EVERY_S)
            machines, errors = await self._take_listed()
            for name, error in errors.items():  # it is asked again
                _logger.debug("%s does not list its machines: %r", name, error)
            if machines:
                return machines

    async def settle_lost(self) -> None:
        """Look for the machines of lost create calls once more; take in those that exist, forget the others.

        Machines of recent calls may still come. The entries of calls that cannot be settled stay in the ledger, for a
        sweep.
        """
        made_by = self.clock.elapsed() - _CERTAIN_S
        _, errors = await self._take_listed()
        never_made = [
            key
            for key, create in self._lost.items()
            if create.began <= made_by and create.provider.supports("tagged") and create.seller not in errors
        ]
        self._forget_lost(never_made)
        if never_made:
            try:
                await asyncio.to_thread(self.ledger.delete_never_made, never_made)
            except LedgerError as error:
                _logger.warning("%s; until then `skyward ls` lists machines that were never made", error)
        for name, error in errors.items():
            _logger.warning(
                "%s: machines of create calls without an answer may exist: run `skyward sweep` later. Last error: %s",
                name,
                error,
            )

    async def _take_listed(self) -> tuple[Sequence[Node], Mapping[str, Exception]]:
        """Add the machines of lost create calls that are listed now: they have cost money since their create calls.

        Returns these machines, and the errors of the providers that do not list theirs.
        """
        providers = {each.seller: each.provider for each in self._lost.values() if each.provider.supports("tagged")}
        answers = dict(zip(providers, await asyncio.gather(*map(_list_tagged, providers.values())), strict=True))
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
        found = [each for answer in answers.values() if not isinstance(answer, Exception) for each in answer]
        listed = [each for each in found if each.key in self._lost]
        machines = [self._node(self._lost[each.key], each) for each in listed]
        self._forget_lost([each.key for each in listed])
        for machine in machines:
            machine.has_rank = False
            name = machine.instance.id
            self.publish(Notice(f"machine {name} of a create call without an answer has appeared: it is ended", name))
        self.all += machines
        if not listed:
            return machines, errors
        try:
            await asyncio.to_thread(self.ledger.record, listed)
        except LedgerError as error:  # they end all the same, and the search for others goes on
            _logger.warning("machines that appeared late are not recorded, and are ended: %s", error)
        return machines, errors

    def _forget_lost(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._lost.pop(key, None)
        if not self._lost:
            self._lost_some.clear()

    def look_for(self, creates: Mapping[str, CreateCall]) -> None:
        """Have the machines of these create calls looked for, unless they are known."""
        known = {machine.instance.key for machine in self.all}
        self._lost |= {key: create for key, create in creates.items() if key not in known}
        if self._lost:
            self._lost_some.set()

    async def _note_ended(self, machines: Sequence[Node]) -> None:
        now = self.clock.elapsed()
        try:
            await asyncio.to_thread(self.ledger.close, [machine.instance.key for machine in machines])
        except LedgerError as error:  # the machines are gone, only their entries stay open
            _logger.warning("%s; until then `skyward ls` lists machines that are gone", error)
        for machine in machines:  # after the ledger, so that a cancellation in between repeats both
            machine.mark_ended(now)

    async def _look(self, machine: Node) -> Instance | Exception | NotYet:
        """Return a running machine, or the error that ends the wait; the deadline's error is another."""
        try:
            async with asyncio.timeout(_LOOK_S):
                seen = await self._looks_at(self.provider_of(machine.instance)).at(machine.instance.id)
        except TimeoutError:
            return NotYet("no answer")
        except Exception as error:
            return error
        if seen.state in OVER:
            why = seen.state.value + (f" ({seen.reason})" if seen.reason else "")
            return UnfitMachineError(f"did not run: it is {why}", preempted=seen.preempted)
        if seen.state is InstanceState.RUNNING and seen.access is not None:
            return seen
        return NotYet(seen.state.value)

    async def _buy(
        self, batch: Batch, ranks: Sequence[int], later: Sequence[Batch], coming: list[Usage]
    ) -> Sequence[Node]:
        """Launch machines of a batch, with the retries of its strategy."""
        asked = batch.offers[0]
        if not isinstance(self.provider, Several):  # there each attempt is a launch
            self.announce(self.provider, asked, len(ranks))
        began = self.clock.monotonic()
        for left in range(batch.retries, -1, -1):
            try:
                order = _Order(
                    pool_id=self.pool_id,
                    keys=tuple(f"{self.pool_id}-{rank}" for rank in ranks),
                    ranks=tuple(ranks),
                    timeout_s=0.0,
                    one_network=self.request.one_network,
                    avoid=frozenset(self.unfit.hosts),
                    machines=self,
                    batch=batch,
                    later=later,
                    coming=coming,
                    buyer=asyncio.current_task(),
                )
                launched = await to_its_end(self._create(order))
            except CapacityError as error:
                if not left:
                    tried_s = self.clock.monotonic() - began
                    raise _refused(error, batch, tried_s, own=self.provider.own_machines) from error
                await self.clock.sleep(batch.interval_s)
            else:
                bought = [machine.instance.offer for machine in launched]
                notes = [*notes_on_purchase(asked, bought)]
                if notes and (most := self._note_on_most(asked, bought)):
                    notes[0] += f"; {most}"
                for note in notes:
                    self.notice(note)
                self._note_bill(machine.instance for machine in launched)
                return launched
        raise AssertionError("unreachable")

    def _note_on_most(self, asked: Offer, bought: Sequence[Offer]) -> str:
        """Return what machines can cost that were announced as cheaper ones; empty if that still holds."""
        forecast = self.consent.forecast
        most = min(forecast.max_cost, sum(map(forecast.most, bought)))
        return f"they can cost ${most:.2f} until timeout" if forecast.most(asked, len(bought)) < most < math.inf else ""

    async def _create(self, order: _Order) -> Sequence[Node]:
        """Launch machines of the first offers of an order, still without ledger entries, that a provider can serve."""
        ranks, offers = order.ranks, order.batch.offers
        if isinstance(self.provider, Several):
            instances = await self.provider.launch(offers, order)
        else:
            async with order.served_by(self.provider, offers) as own:
                instances = await self.provider.launch(offers, own)
        made = [self._node(order.creates[each.key], each) for each in instances]
        self.all += made
        await asyncio.to_thread(self.ledger.record, instances)
        if len(instances) < len(ranks):
            self.look_for(order.creates)
            raise SkywardError(
                f"{self.provider.name} launched {len(instances)} of {len(ranks)} machines without an error; "
                "this is a fault of the provider's adapter, please report it"
            )
        return made

    def announce(self, provider: Provider, offer: Offer, count: int) -> None:
        """Publish that so many machines are about to be launched as an offer."""
        self.publish(_launching(provider, self.request, offer, count, self.consent.forecast))

    async def settle(self, creates: Mapping[str, CreateCall], error: Exception) -> None:
        """Delete the ledger entries of create calls that made nothing; have the machines of others looked for."""
        if isinstance(error, REFUSALS):
            settled = creates.keys() - self._lost.keys()
            undone = settled & {machine.instance.key for machine in self.all}
            await asyncio.to_thread(self.ledger.close, undone)
            await asyncio.to_thread(self.ledger.delete_never_made, settled - undone)
            return
        if isinstance(error, TerminationError):
            await self._take_over(error.instance_ids, creates)
        self.look_for(creates)

    async def _take_over(self, left: Sequence[str], creates: Mapping[str, CreateCall]) -> None:
        """Take over machines of an order that could not be undone: they count, and end with their rank's others."""
        if not left:
            return
        create = next(iter(creates.values()))  # all of them were sent to one provider
        try:
            async with asyncio.timeout(_LOOK_S):
                seen = await create.provider.describe(left)
            ours = [each for each in seen if each.key in creates and each.state is not InstanceState.GONE]
            self.all += [self._node(creates[each.key], each) for each in ours]
            await asyncio.to_thread(self.ledger.record, ours)
        except Exception as error:  # the ledger has their keys: they are looked for later
            _logger.warning("%s gives no records of %s: %s", create.provider.name, ", ".join(left), error)

    def count_ended(self, create: CreateCall, instance: Instance) -> None:
        """Count the cost of a machine whose order failed, although it is gone."""
        node = self._node(create, instance)
        node.mark_ended(self.clock.elapsed())
        self.all.append(node)

    def _node(self, create: CreateCall, instance: Instance) -> Node:
        """Return the record of a machine that was requested by ``create``, and answered now."""
        instance, looks = labelled(instance, create.label), self._looks_at(create.provider)
        return self.make_node(rank=create.rank, instance=instance, launched_at=create.began, looks=looks)

    def notice(self, message: str, *, about: str = "") -> None:
        """Publish a message unless it was published before, or another ``about`` the same."""
        if message and (about or message) not in self._noted:
            self._noted.add(about or message)
            self.publish(Notice(message))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Order(LaunchOrder):
    """Order of a batch, whose machines count among those of a fleet from their create calls to their ends.

    Until it is served by a provider, its keys stand for those that its machines will have.

    Attributes:
        machines: the fleet's machines.
        batch: what is bought.
        later: the batches to be bought after it.
        coming: the expected usages of all these machines.
        buyer: the task that buys; once it is cancelled, no create call is repeated.
        ranks: the ranks that it is for.
        creates: its create calls by key, with those that repeat others.
        offers: what the present provider sells for it.
        server: that provider.
        refusals: what providers refused it so far: place and kind of error, and the words.
    """

    machines: Machines = field(repr=False)
    batch: Batch
    later: Sequence[Batch]
    coming: list[Usage]
    buyer: asyncio.Task[Any] | None
    ranks: tuple[int, ...] = ()
    offers: tuple[Offer, ...] = ()
    server: Provider | None = None
    creates: dict[str, CreateCall] = field(default_factory=dict[str, CreateCall])
    refusals: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @asynccontextmanager
    async def served_by(self, provider: Provider, offers: Sequence[Offer]) -> AsyncGenerator[LaunchOrder]:
        """Yield the order with ledger entries at a provider, which an error settles."""
        self._refuse_to_go_on("machines are no longer asked for")
        if self.refusals:
            about, refusal = self.refusals[-1]
            self.machines.notice(refusal, about=about)
        if provider is not self.machines.provider:
            self.machines.announce(provider, offers[0], len(self.ranks))
        earlier = set(self.creates)
        order = replace(self, server=provider, offers=tuple(offers))
        keys = await order.reserve(self.ranks)
        try:
            yield replace(order, keys=keys, timeout_s=max(1.0, min(map(self.lasts_s, offers))))
        except Exception as error:
            mine = {key: self.creates.pop(key) for key in self.creates.keys() - earlier}
            await self.machines.settle(mine, error)
            label = offers[0].provider or provider.name
            about = f"{label} {offers[0].region} {type(error).__name__}"  # texts may have ids and times
            self.refusals.append((about, f"{label} refuses: {' '.join(str(error).split())}"))
            raise

    async def reserve(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Write a ledger entry for the machine of each rank; return their keys."""
        machines, offers, provider = self.machines, self.offers, self.server
        assert provider is not None  # it is served
        keys = {f"{self.pool_id}-{rank}-{uuid.uuid4().hex[:8]}": rank for rank in ranks}
        purchase = _purchase(self.pool_id, provider, offers[0])
        await asyncio.to_thread(machines.ledger.reserve, keys, purchase)
        began = machines.clock.elapsed()
        dearest = max(offers, key=lambda offer: offer.price_per_hour or 0.0)
        usage = replace(Usage.of(dearest, began), ended_at=began + _CERTAIN_S)
        create = CreateCall(provider=provider, label=dearest.provider, rank=0, began=began, usage=usage)
        self.creates.update({key: replace(create, rank=rank) for key, rank in keys.items()})
        return tuple(keys)

    def lasts_s(self, offer: Offer) -> float:
        return self.machines.lasts_s(offer, self.batch.nodes, self.later, self.coming)

    def note_undone(self, instance: Instance) -> None:
        self.machines.count_ended(self.creates[instance.key], instance)

    def note_unseen(self, key: str) -> None:
        self.machines.look_for({key: self.creates[key]})

    async def renew(self, key: str, reason: str) -> str:
        self._refuse_to_go_on(f"{reason}; another is not created")
        self.machines.notice(f"{reason}: another is created. If the first one appears after all, it is ended")
        (other,) = await self.reserve([self.creates[key].rank])
        return other

    def _refuse_to_go_on(self, what: str) -> None:
        if self.buyer is not None and self.buyer.cancelling():
            raise UnreachableError(f"{what}, since the pool ends")


async def _list_tagged(provider: Provider) -> Sequence[Instance] | Exception:
    """Return a provider's machines, or why it does not list them in time."""
    try:
        async with asyncio.timeout(_LIST_S):
            return await provider.tagged()
    except Exception as error:
        return error


def _beside(batch: Batch, launched: Sequence[Offer]) -> Batch:
    """Return a batch with only the offers at the site of the machines that were just launched, if they share one."""
    sites = {offer.site for offer in launched if offer.provider and not offer.island}
    offers = tuple(offer for offer in batch.offers if not sites or offer.site in sites)
    return replace(batch, offers=offers or batch.offers)


def _end_of(machine: Node) -> float | None:
    """Return the ``elapsed`` reading at which a machine was taken back or was gone; None while it may run."""
    return machine.usage.ended_at if machine.preempted_at is None else machine.preempted_at


def _launching(
    provider: Provider, request: PoolRequest, offer: Offer, count: int, forecast: Forecast
) -> InstanceLaunching:
    at_most, accelerator = forecast.most(offer, count), request.accelerator_of(offer.spec)
    return InstanceLaunching(
        count,
        offer.spec.name,
        cast("Any", offer.provider or provider.name),
        region=offer.region,
        spot=offer.spot,
        price_per_hour=offer.price_per_hour,
        workers_per_node=request.workers_per_node,
        cpu_per_worker=request.cpu,
        memory_gib_per_worker=request.memory_gib,
        accelerator=offer.spec.accelerator or "",
        accelerators=offer.spec.accelerator_count,
        accelerators_asked=accelerator.count if accelerator else 0,
        at_most=None if math.isinf(at_most) else at_most,
    )


def _purchase(pool_id: str, provider: Provider, offer: Offer) -> Purchase:
    return Purchase(
        pool_id=pool_id,
        provider=provider.name,
        settings=provider_settings(provider),
        region=offer.region,
        machine=offer.spec.name,
        spot=offer.spot,
        price_per_hour=offer.price_per_hour,
        ends_itself=provider.own_machines,  # of others it is known once they are launched
        minimum_billed_s=offer.minimum_billed_s,
        minimum_charge=offer.minimum_charge,
    )


def _refused(error: CapacityError, batch: Batch, tried_s: float, *, own: bool) -> CapacityError:
    tries = f"for {tried_s:.0f} s, " if batch.retries else ""
    start = "\n" if "\n" in str(error) else "; "  # of several providers, each has a line
    advice = "" if own else f"{start}{batch.advice}"  # one's own hosts are no market; their error names the next step
    return CapacityError(f"{tries}{error}{advice}")
