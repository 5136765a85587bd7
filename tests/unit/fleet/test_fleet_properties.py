"""Whatever goes wrong, and whenever: no machine is unaccounted for, no call is lost or answered twice, all ends.

A plan is drawn: what is asked of a pool, what befalls its nodes, workers and links, which uses of the provider and of
the nodes fail, hang or take their time, and which machines never come up, are smaller or dearer than bought, vanish, or
lie on other networks and islands. The real fleet, engine, lanes and ledger then live through it in simulated time, and
the final cost is compared with the provider's bill. ``HYPOTHESIS_PROFILE=full`` (``make test-full``) tries 1,000 plans
in place of 100, others every time: they follow from pytest's ``--hypothesis-seed``, which its first lines show.
``long`` tries 50,000.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from skyward.errors import (
    AuthenticationError,
    BootstrapError,
    CapacityError,
    PoolStateError,
    QuotaError,
    RateLimitError,
    TerminationError,
    UnreachableError,
    WorkerLostError,
)
from skyward.events import WorkerLost
from skyward.fleet.fleet import NodeState
from skyward.fleet.topology import HEAD
from skyward.ledger.ledger import Ledger
from skyward.providers.base import InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from support.faults import Fate, Fault
from support.pools import Call, SimulatedPool, Ticket, simulated_time
from support.simulation import simulate
from support.supervisors import SimulatedNode, Startup
from support.workers import SimulatedWorker

CENT = 0.01
AWAY_S = 120.0
"""Longer than any link is down."""
SETTLE_S = 3000.0
"""How long a pool may take to settle once nothing goes wrong any more."""
POLL_S = 5.0
END_S = 6000.0
"""How long it may take to close, or to give up opening: each answer that never comes costs an attempt of 420 s."""

READY_S = 300.0
"""Within which a sound machine comes up."""
MAX_PRICE = 5.0
MOST_NODES = 4
MACHINES = 3
"""Most machines that are bought for a rank until it has a node."""
OFFERS = tuple(
    Offer(
        spec=InstanceSpec(name=name, cpu=2, memory_gib=4),
        price_per_hour=price,
        minimum_billed_s=60.0,
        ready_within_s=READY_S,
    )
    for name, price in (("small", 1.0), ("large", 2.0))
)

# To make what fails smaller takes minutes: HYPOTHESIS_PROFILE=small does it, with the same plans.
settings.register_profile("usual", max_examples=100, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.register_profile("full", max_examples=500, derandomize=False, phases=[Phase.explicit, Phase.generate])
settings.register_profile("small", max_examples=1000, derandomize=True)
settings.register_profile("long", max_examples=50_000, derandomize=False)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))
THOROUGH = settings(PROFILE, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)


# --- what a plan is made of -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Something that is asked for, or that befalls the pool, and how much later the next one comes."""

    what: str
    which: int = 0
    other: int = 0
    calls: tuple[Call, ...] = ()
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    nodes: int
    workers: int
    latency_s: float
    control_s: float
    from_the_start: bool
    """Whether trouble begins before the pool is open."""
    cancelled_after_s: float | None
    steps: Sequence[Step]
    settles: bool
    idle_s: float | None = None
    """Of an elastic pool, which opens with a node less; None for one of a fixed size."""
    offers: Sequence[Fault] = ()
    launches: Sequence[Fault] = ()
    describes: Sequence[Fault] = ()
    terminates: Sequence[Fault] = ()
    creates: Sequence[Fault] = ()
    finds: Sequence[Fault] = ()
    destroys: Sequence[Fault] = ()
    fates: Sequence[Fate] = ()
    reaches: Sequence[Fault] = ()
    prepares: Sequence[Fault] = ()
    starts: Sequence[Fault] = ()
    joins: Sequence[Fault] = ()
    stops: Sequence[Fault] = ()
    startups: Sequence[Startup] = ()


REFUSALS = (CapacityError("sold out"), QuotaError("no more"), RateLimitError("later"), AuthenticationError("who?"))
UNCLEAR = (UnreachableError("no answer"), RuntimeError("500"))
TRANSIENT = (RateLimitError("later"), *UNCLEAR)
NODE_ERRORS = (BootstrapError("no", node=0, step="deps"), UnreachableError("no route"), OSError("reset"))
LATE = Fault(delay_s=120.0, error=UnreachableError("no answer for two minutes"))
HANGS = Fault(hangs=True)

short = st.sampled_from((0.0, 0.0, 0.1, 3.0))
well = st.builds(Fault, done=st.none(), delay_s=short)


def faults(*each: st.SearchStrategy[Fault]) -> st.SearchStrategy[list[Fault]]:
    """Nothing in most plans, and good uses between bad ones."""
    return st.one_of(st.just([]), st.lists(st.one_of(well, *each), max_size=6))


def raising(errors: Sequence[Exception], **options: Any) -> st.SearchStrategy[Fault]:
    return st.builds(Fault, error=st.sampled_from(errors), delay_s=short, **options)


def plans(*, from_the_start: bool) -> st.SearchStrategy[Plan]:
    phase = faults(raising(NODE_ERRORS), st.just(LATE))
    return st.builds(
        Plan,
        nodes=st.integers(1, 3),
        workers=st.integers(1, 2),
        latency_s=st.sampled_from((0.001, 0.2)),
        control_s=st.sampled_from((0.001, 0.5)),
        from_the_start=st.just(from_the_start),
        cancelled_after_s=st.sampled_from((None, 0.0, 0.05, 2.0, 100.0) if from_the_start else (None,)),
        steps=st.lists(steps, max_size=3) if from_the_start else st.lists(steps, min_size=3, max_size=16),
        settles=st.booleans(),
        idle_s=st.sampled_from((None, None, 2.0, 60.0)),
        offers=faults(raising((*REFUSALS, *UNCLEAR)), st.just(HANGS if from_the_start else LATE)),
        launches=faults(
            raising(REFUSALS),
            raising(UNCLEAR, done=st.sampled_from((0, 1, None))),
            st.builds(Fault, done=st.sampled_from((0, 1)), delay_s=short),
            st.builds(Fault, done=st.none(), said=st.sampled_from((0, 1)), delay_s=short),
        ),
        describes=faults(raising(TRANSIENT), st.just(HANGS)),
        terminates=faults(
            raising(TRANSIENT, done=st.sampled_from((0, 1, None))), st.just(HANGS), st.just(Fault(done=0))
        ),
        creates=faults(raising(REFUSALS), raising(UNCLEAR), raising(UNCLEAR, done=st.none())),
        finds=faults(raising(TRANSIENT), st.just(HANGS)),
        destroys=faults(raising(TRANSIENT), raising(TRANSIENT, done=st.none()), st.just(HANGS)),
        fates=st.lists(fates, max_size=6),
        reaches=faults(raising((UnreachableError("no route"),)), st.just(LATE)),
        prepares=phase,
        starts=phase,
        joins=phase,
        stops=faults(raising(NODE_ERRORS), st.just(HANGS)),
        startups=st.one_of(st.just([]), st.lists(startups, max_size=8)),
    )


TINY = InstanceSpec(name="tiny", cpu=1, memory_gib=1)
fates = st.builds(
    Fate,
    pending_s=st.sampled_from((0.0, 0.0, 5.0, 2000.0, math.inf)),
    becomes=st.sampled_from((*[InstanceState.RUNNING] * 5, InstanceState.FAILED, InstanceState.GONE)),
    ending_s=st.sampled_from((0.0, 0.0, 20.0)),
    unlisted_s=st.sampled_from((0.0, 3.0, 60.0)),
    host=st.sampled_from((None, None, "rack 1", "rack 2")),
    network=st.sampled_from((None, None, "elsewhere", "")),
    price_per_hour=st.sampled_from((None, None, None, 1.001, 3.0, 50.0)),
    hardware=st.sampled_from((None, None, None, TINY)),
)
startups = st.one_of(
    st.builds(Startup, delay_s=st.sampled_from((0.0, 0.1, 5.0))),
    st.builds(Startup, delay_s=st.sampled_from((0.1, 200.0)), fails=st.just(True)),
)
ONE_FAULT = (
    *(Fate(pending_s=pending_s) for pending_s in (5.0, READY_S - 1, READY_S + 1, math.inf)),
    *(Fate(pending_s=5.0, becomes=state) for state in (InstanceState.GONE, InstanceState.FAILED)),
    *(Fate(price_per_hour=price) for price in (3.0, MAX_PRICE * 1.01, 50.0)),
    *(Fate(network=network) for network in ("elsewhere", "")),
    Fate(hardware=TINY, host="rack 1"),
)
bad_machines = st.builds(
    Plan,
    nodes=st.integers(1, 3),
    workers=st.just(1),
    latency_s=st.just(0.001),
    control_s=st.just(0.001),
    from_the_start=st.just(True),
    cancelled_after_s=st.none(),
    steps=st.deferred(lambda: st.lists(steps, max_size=3)),
    settles=st.booleans(),
    fates=st.lists(st.sampled_from(ONE_FAULT), min_size=4, max_size=9),
)
"""Nothing else goes wrong: with all kinds of trouble at once hardly any pool opens."""
calls = st.builds(
    Call,
    seconds=st.sampled_from((0.0, 0.001, 0.5, 20.0)),
    held=st.sampled_from((False, False, True)),
    raises=st.sampled_from((False, False, False, True)),
    kills=st.sampled_from((0, 0, 0, 0, 1, 4)),
    retries=st.sampled_from((3, 3, 0, 1)),
)
pauses = st.sampled_from((0.0, 0.0, 0.002, 0.3, 2.0, 40.0))
which = st.integers(0, 5)
other = st.integers(0, 3)
steps = st.one_of(
    st.builds(
        Step,
        what=st.sampled_from(("submit", "submit", "submit", "broadcast")),
        calls=st.lists(calls, min_size=1, max_size=4).map(tuple),
        pause_s=pauses,
    ),
    st.builds(Step, what=st.just("scale"), which=st.integers(0, 4), other=other, pause_s=pauses),
    st.builds(
        Step,
        what=st.sampled_from(("cancel", "drop", "release", "stubborn", "lose greetings")),
        which=which,
        other=other,
        pause_s=pauses,
    ),
    st.builds(
        Step,
        what=st.sampled_from(("kill", "cut", "part", "part silently", "crash", "say farewell")),
        which=which,
        other=other,
        pause_s=pauses,
    ),
    st.builds(
        Step, what=st.sampled_from(("time out", "vanish", "preempt without notice")), which=which, pause_s=pauses
    ),
    st.builds(Step, what=st.just("preempt"), which=which, other=other, pause_s=pauses),
)


# --- the books ------------------------------------------------------------------------------------------------------


class Books:
    """What has to be true of a pool, whatever befalls it; what is not is noted where nobody can swallow it."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self.preempted: set[str] = set()
        self.violations: list[str] = []
        self.opened = self.closing = self.closed = False
        self._while_opening: Counter[int] = Counter()
        self.pool = SimulatedPool(
            ledger,
            nodes=plan.nodes if plan.idle_s is None else (plan.nodes - 1, MOST_NODES),
            idle=plan.idle_s,
            workers=plan.workers,
            away_s=AWAY_S,
            latency_s=plan.latency_s,
            control_s=plan.control_s,
            on_order=self.check_order,
            on_begin=self.check_begin,
            offers=OFFERS,
            max_price_per_hour=MAX_PRICE,
        )
        self._ledger = ledger

    def check(self) -> None:
        """At any time."""
        running = [
            node.rank for node in self.pool.nodes.simulated if node.runs and not node.lost and "stop" not in node.log
        ]
        assert len(running) == len(set(running)), f"these ranks have nodes: {running}"
        in_use = self._ranks_in_use()
        assert len(in_use) == len(set(in_use)), f"these ranks have machines: {in_use}"
        assert not self.violations, self.violations

    def check_order(self, order: LaunchOrder) -> None:
        """Machines are about to be launched: they are in the ledger, and there are not too many."""
        written = {entry.key for entry in self._ledger.open_entries(pool_id=self.pool.pool_id)}
        if unwritten := set(order.keys) - written:
            self.violations.append(f"{unwritten} were ordered before the ledger knew of them")
        if self.closed:
            self.violations.append(f"{order.keys} were ordered after the end")
        ranks, in_use = [_rank(key) for key in order.keys], self._ranks_in_use()
        wanted = self.pool.scheduler.expected
        self._while_opening.update([] if self.opened else ranks)
        if any(count > MACHINES for count in self._while_opening.values()):
            self.violations.append(f"{self._while_opening} machines were ordered for these ranks of a pool that opens")
        if not wanted.issuperset(ranks) or set(in_use) & set(ranks) or len(in_use) + len(ranks) > len(wanted):
            self.violations.append(f"{ranks} were ordered, there are {in_use}, there may be {wanted}")

    def _ranks_in_use(self) -> list[int]:
        """Ranks of the machines that cost money and are to have a node, as far as anybody can know."""
        provider = self.pool.provider
        provider.refresh()
        written_off = provider.terminating | provider.untold
        written_off |= {node.instance.id for node in self.pool.nodes.simulated if node.lost}
        return [
            _rank(instance.key)
            for instance in provider.instances.values()
            if instance.state is not InstanceState.GONE
            and instance.id not in written_off
            and _rank(instance.key) in self.pool.scheduler.expected
        ]

    def check_begin(self, ticket: Ticket, worker: SimulatedWorker) -> None:
        """A worker is about to begin a call: nobody else still runs it, and it has no answer yet."""
        forgotten = self.pool.scheduler.detached
        for earlier in ticket.ran_on:
            if earlier is worker or (earlier.alive and earlier.host not in forgotten):
                self.violations.append(
                    f"call {ticket.number} runs on {worker.incarnation}, and did on {earlier.incarnation}, which lives"
                )
        free = sum(each.host in self.preempted for each in ticket.ran_on) if ticket.call.retries else 0
        if len(ticket.ran_on) - free >= 1 + ticket.call.retries:
            self.violations.append(f"call {ticket.number}, with retries={ticket.call.retries}, runs once too often")
        answered = ticket.future.done() and not ticket.cancelled and not self.closing
        if answered and worker.host not in forgotten:
            self.violations.append(f"call {ticket.number} runs on {worker.incarnation} although it is answered")

    def check_machines(self, error: BaseException | None) -> None:
        """After the end: a machine that may be left is named and in the ledger; no other is."""
        named = set(error.instance_ids) if isinstance(error, TerminationError) else set[str]()
        provider = self.pool.provider
        provider.refresh()
        entries = {entry.key: entry.instance_id for entry in self._ledger.open_entries(pool_id=self.pool.pool_id)}
        for instance in provider.instances.values():
            if instance.id in provider.untold:
                assert instance.state is InstanceState.GONE or instance.key in entries, f"{instance} may be left"
            elif instance.id in named:
                assert entries.pop(instance.key, None) == instance.id, f"{instance} is named, but not in the ledger"
            else:
                assert instance.state is InstanceState.GONE, f"{instance} is left, and nobody says so"
                assert instance.key not in entries, f"{instance} was confirmed gone, but is in the ledger"
        assert entries.keys() <= provider.unclear, "the ledger has to know of what may exist, and of nothing else"

    def check_bill(self) -> None:
        """After the end: the final cost is the bill, but for seconds in which the client could not know better.

        Those are counted in the vendor's favour: from the order until the machine was made, and from the machine's end
        until it was confirmed.
        """
        provider, machines = self.pool.provider, self.pool.fleet._machines.all  # pyright: ignore[reportPrivateUsage]
        assert sorted(each.instance.id for each in machines) == sorted(provider.told), "each machine counts once"
        slack = 0.0
        for machine in machines:
            born_at, gone_at = provider.span(machine.instance.id)
            usage = machine.usage
            assert gone_at is not None
            assert usage.ended_at is not None
            assert usage.launched_at <= born_at <= gone_at <= usage.ended_at
            late_s = born_at - usage.launched_at + usage.ended_at - gone_at
            slack += (math.ceil(late_s) + 1) / 3600 * (usage.price_per_hour or 0.0) if late_s else 0.0
        now = max((each.usage.ended_at or 0.0 for each in machines), default=0.0)
        excess = self.pool.fleet.cost(now).final().total_cost - sum(map(provider.billed, provider.told))
        assert -CENT / 2 < excess < slack + CENT / 2, f"billed is ${excess:.4f} less than the final cost says"

    def check_calls(self) -> None:
        """After the end: each call has one outcome, its own, for a reason."""
        for ticket in self.pool.tickets:
            assert ticket.future.done(), f"call {ticket.number} was lost"
            try:
                value, error = ticket.future.result(0), None
            except (CancelledError, Exception) as raised:
                value, error = None, raised
            assert self._is_right(ticket, value, error), f"{ticket} ended with {value}, {error!r}"

    def _is_right(self, ticket: Ticket, value: object, error: BaseException | None) -> bool:
        match error:
            case None:
                return value == ticket.number and not ticket.call.raises and bool(ticket.ran_on)
            case ValueError():
                return error.args == (ticket.number,) and ticket.call.raises and bool(ticket.ran_on)
            case CancelledError():
                return ticket.cancelled
            case WorkerLostError():
                losses = sum(isinstance(event, WorkerLost) for event in self.pool.events)
                return "has nowhere left to run" in str(error) or losses > ticket.call.retries
            case PoolStateError():
                return self.closed or not self.pool.fleet.wanted or not self.pool.scheduler.places
            case _:
                return False


def _rank(key: str) -> int:
    return int(key.split("-")[-2])


# --- how a plan is lived through ------------------------------------------------------------------------------------


class Life:
    """A pool's life by a plan."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self.plan = plan
        self.books = Books(plan, ledger)
        self.pool = self.books.pool
        self.scaling: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        if self.plan.from_the_start:
            self.begin_trouble()
        try:
            if await self.open():
                self.books.opened = True
                self.begin_trouble()
                for step in self.plan.steps:
                    self.take(step)
                    await asyncio.sleep(step.pause_s)
                    self.books.check()
                if self.plan.settles:
                    await self.settle()
            await self.close()
        finally:
            await self.pool.destroy()
        self.books.check()

    def begin_trouble(self) -> None:
        plan = self.plan
        script = {
            "offers": plan.offers,
            "launch": plan.launches,
            "describe": plan.describes,
            "terminate": plan.terminates,
            "create": plan.creates,
            "find": plan.finds,
            "destroy": plan.destroys,
        }
        phases = {
            "reach": plan.reaches,
            "prepare": plan.prepares,
            "start": plan.starts,
            "join": plan.joins,
            "stop": plan.stops,
        }
        self.pool.provider.plan_faults(script, plan.fates)
        self.pool.nodes.trouble(phases, startups=plan.startups)

    async def open(self) -> bool:
        """Whether the pool opened. What goes on for too long is interrupted, as a user would."""
        opening = asyncio.ensure_future(self.pool.open())
        patience_s = self.plan.cancelled_after_s
        await asyncio.wait([opening], timeout=SETTLE_S if patience_s is None else patience_s)
        if not opening.done():
            assert patience_s is not None or HANGS in self.plan.offers, "it opens for ever"
            opening.cancel()
            await asyncio.wait([opening], timeout=END_S)
        assert opening.done(), "giving up the opening does not end"
        return not opening.cancelled() and opening.exception() is None

    async def settle(self) -> None:
        """Nothing goes wrong any more: every call gets its answer, and the fleet is as it is meant to be."""
        pool = self.pool
        pool.heal()
        for _ in range(int(SETTLE_S / POLL_S)):
            waiting = [ticket.number for ticket in pool.tickets if not ticket.future.done()]
            if not waiting and all(scaling.done() for scaling in self.scaling):
                break
            await asyncio.sleep(POLL_S)
        else:
            raise AssertionError(f"these calls never end: {waiting}, or this scaling: {self.scaling}")
        await asyncio.sleep(SETTLE_S)
        self._check_heads()
        ready = [member for member in pool.fleet.members.values() if member.state is NodeState.READY]
        assert len(ready) == len(pool.fleet.nodes) == len(pool.fleet.wanted)
        for node in pool.fleet.nodes:
            async with asyncio.timeout(60):
                await pool.scheduler.drain(node.rank)  # its workers are idle, and are known to be
        pool.provider.refresh()
        left = set(pool.provider.alive) - {node.instance.id for node in pool.fleet.nodes} - pool.provider.untold
        assert not left, f"{left} were lost or given up, and are still there"

    def _check_heads(self) -> None:
        """Each node knows the head's address if it reaches the head, else its own."""
        nodes = {node.rank: node for node in self.pool.nodes.simulated if node in self.pool.fleet.nodes}
        network = nodes[HEAD].instance.network if HEAD in nodes else ""
        for node in nodes.values():
            leader = nodes[HEAD] if network and node.instance.network == network else node
            assert node.head_addr == leader.address, f"node {node.rank} was told of {node.head_addr}"

    async def close(self) -> None:
        self.books.closing = True
        closing = asyncio.ensure_future(self.pool.close())
        await asyncio.wait([closing], timeout=END_S)
        assert closing.done(), "closing does not end"
        error = closing.exception()
        assert error is None or isinstance(error, TerminationError), f"closing raised {error!r}"
        self.books.closed = True
        self.books.check_machines(error)
        self.books.check_calls()
        assert all(scaling.done() for scaling in self.scaling), "who scaled the pool waits for ever"
        await asyncio.gather(*self.scaling, return_exceptions=True)
        self.pool.heal()
        await self.pool.fleet.stop()
        self.books.check_machines(None)
        self.books.check_bill()

    def take(self, step: Step) -> None:
        pool = self.pool
        match step.what:
            case "submit":
                for call in step.calls:
                    pool.submit(call)
            case "broadcast":
                pool.broadcast(step.calls[0])
            case "cancel" | "drop":
                self.cancel(pool.tickets[step.which :: 2], step)
            case "release":
                pool.released.set()
            case "scale":
                size = max(step.which, self.plan.idle_s is None)
                self.scaling.append(asyncio.ensure_future(pool.fleet.scale(size, {step.other})))
            case "lose greetings":
                pool.network.lost_greetings = 1 + step.other
            case "stubborn":
                pool.provider.stubborn.add(f"fake-{step.which}")
            case _:
                if nodes := [node for node in pool.nodes.simulated if node.runs]:
                    self.befall(nodes[step.which % len(nodes)], step)

    def cancel(self, tickets: Sequence[Ticket], step: Step) -> None:
        for ticket in tickets:
            ticket.cancelled = True
            if step.what == "drop":
                ticket.future.cancel()
        if step.what == "cancel":
            self.pool.cancel(tickets, kill=bool(step.other))

    def befall(self, node: SimulatedNode, step: Step) -> None:
        worker = step.other % self.plan.workers
        match step.what:
            case "kill":
                node.kill_process(worker)
            case "cut":
                self.pool.network.cut(node.lanes[worker])
            case "part" | "part silently":
                node.cut_off(silently=step.what == "part silently")
                asyncio.get_running_loop().call_later((0.5, 5.0, 20.0, 100.0)[step.other], node.reconnect)
            case "say farewell" | "time out":
                node.say_farewell("it was told to", timed_out=step.what == "time out")
            case "crash":
                node.crash()
            case "preempt":
                self.books.preempted.add(node.instance.id)
                self.pool.preempt(node, (0.0, 2.0, 30.0, 120.0)[step.other])
            case "vanish":
                self.pool.provider.lose(node.instance.id)
            case "preempt without notice":
                self.books.preempted.add(node.instance.id)
                self.pool.provider.preempt(node.instance.id)
            case _:
                raise AssertionError(step.what)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return Ledger(tmp_path_factory.mktemp("ledger") / "ledger.db")


@pytest.fixture(scope="module", autouse=True)
def in_simulated_time() -> Iterator[None]:
    with simulated_time():
        yield


def live_through(plan: Plan, ledger: Ledger) -> None:
    async def life() -> None:
        await Life(plan, ledger).run()

    simulate(life)


@pytest.mark.timeout(0)
@settings(THOROUGH, max_examples=THOROUGH.max_examples // 5)
@given(plan=plans(from_the_start=True))
def test_an_opening_that_meets_trouble_leaves_no_machine_unaccounted_for_and_ends(plan: Plan, ledger: Ledger) -> None:
    live_through(plan, ledger)


@pytest.mark.timeout(0)
@settings(THOROUGH, max_examples=THOROUGH.max_examples * 3 // 5)
@given(plan=plans(from_the_start=False))
def test_no_machine_is_unaccounted_for_no_call_lost_or_answered_twice_and_all_ends(plan: Plan, ledger: Ledger) -> None:
    live_through(plan, ledger)


@pytest.mark.timeout(0)
@settings(THOROUGH, max_examples=THOROUGH.max_examples // 5)
@given(plan=bad_machines)
def test_a_pool_whose_machines_are_bad_opens_on_others_or_ends_and_has_cost_what_is_billed(
    plan: Plan, ledger: Ledger
) -> None:
    live_through(plan, ledger)
