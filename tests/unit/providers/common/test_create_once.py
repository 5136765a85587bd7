"""Whichever call of a launch without client tokens fails, and however: nothing is sent twice, nothing is left."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from skyward.base.waiting import Clock
from skyward.errors import AuthenticationError, CapacityError, QuotaError, TerminationError, UnreachableError
from skyward.providers._common.create_once import MachineCalls, create_once, summary
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusedCall
from skyward.providers.base import REFUSALS, Instance, InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import NotedOrder
from support.clock import FakeClock
from support.simulation import SimulatedClock, simulate

Trouble = Literal["sold out", "forbidden", "unsent", "unanswered", "cancelled"]
"""How a call goes wrong; "cancelled": its caller is cancelled while it is under way, and it has its effect."""

TROUBLES: tuple[Trouble, ...] = ("sold out", "forbidden", "unsent", "unanswered", "cancelled")
ERRORS = {
    "sold out": CapacityError("sold out"),
    "forbidden": AuthenticationError("forbidden"),
    "unsent": UnreachableError("reset"),
    "unanswered": RuntimeError("502"),
}
CHEAP, DEAR, DEAREST = (
    Offer(spec=InstanceSpec(name=name, cpu=1, memory_gib=1), price_per_hour=price)
    for name, price in (("cheap", 1.0), ("dear", 2.0), ("dearest", 3.0))
)
ORDER = LaunchOrder(pool_id="pool", keys=("k0", "k1", "k2"), timeout_s=600.0)


class Vendor:
    """Machines by id, each call as it came, and the trouble that befalls some of them, by number."""

    def __init__(self, troubles: Mapping[int, Trouble], *, unlisted_looks: int = 0, stock: int = 99) -> None:
        self.alive: dict[str, str] = {}
        self.trace: list[str] = []
        self.sent: list[tuple[str, Offer]] = []
        self.launching: asyncio.Task[Outcome] | None = None
        self._troubles = troubles
        self._unlisted_looks = unlisted_looks
        self._stock = dict.fromkeys((CHEAP, DEAR, DEAREST), stock)
        self._numbers = itertools.count()

    async def create(self, offer: Offer, key: str) -> Instance:
        self.sent.append((key, offer))
        with_effect = await self._call(f"create {key}")
        if self._stock[offer] == 0:
            raise CapacityError(f"{offer.spec.name} is sold out")
        self._stock[offer] -= 1
        instance_id = f"m{next(self._numbers)}"
        self.alive[instance_id] = key
        self._answer(with_effect)
        return self._record(instance_id, offer)

    async def find(self, key: str) -> Instance | None:
        with_effect = await self._call(f"find {key}")
        self._answer(with_effect)
        self._unlisted_looks -= 1
        if self._unlisted_looks >= 0:
            return None
        return next((self._record(each, CHEAP) for each, of in self.alive.items() if of == key), None)

    async def destroy(self, instance_id: str) -> None:
        with_effect = await self._call(f"destroy {instance_id}")
        self.alive.pop(instance_id, None)
        self._answer(with_effect)

    async def _call(self, what: str) -> Exception | None:
        """Raise the trouble without effect; return the one that comes after the effect."""
        trouble = self._troubles.get(len(self.trace))
        self.trace.append(what)
        await asyncio.sleep(0)
        if trouble == "cancelled":
            assert self.launching is not None
            self.launching.cancel()
            await asyncio.sleep(0)
            return None
        if trouble == "unanswered":
            return ERRORS[trouble]
        if trouble is not None:
            raise ERRORS[trouble]
        return None

    def _answer(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def _record(self, instance_id: str, offer: Offer) -> Instance:
        return Instance(id=instance_id, key=self.alive[instance_id], state=InstanceState.PENDING, offer=offer)


@dataclass(frozen=True)
class Outcome:
    machines: Sequence[Instance] = ()
    error: BaseException | None = None


async def launch(
    vendor: Vendor,
    offers: Sequence[Offer] = (CHEAP, DEAR),
    order: LaunchOrder = ORDER,
    clock: Clock | None = None,
) -> Outcome:
    calls = MachineCalls(create=vendor.create, find=vendor.find, destroy=vendor.destroy)

    async def work() -> Outcome:
        try:
            machines = await create_once(
                "vendor", calls, offers, order, listing_s=5.0, ending_s=5.0, clock=clock or FakeClock()
            )
        except BaseException as error:
            return Outcome(error=error)
        return Outcome(machines=machines)

    vendor.launching = asyncio.ensure_future(work())
    return await vendor.launching


def check(vendor: Vendor, outcome: Outcome, story: object) -> None:
    """All or none, nothing sent twice, and what may be left is named."""
    assert max(Counter(vendor.sent).values()) == 1, f"{story}: sent twice: {vendor.sent}"
    match outcome.error:
        case None:
            assert [each.key for each in outcome.machines] == list(ORDER.keys), story
            assert {each.id: each.key for each in outcome.machines} == vendor.alive, story
        case (TerminationError() as left) | asyncio.CancelledError(__cause__=TerminationError() as left):
            named = {*left.instance_ids, *(each for each, key in vendor.alive.items() if key in left.keys)}
            assert named >= vendor.alive.keys(), f"{story}: {vendor.alive} is left, and not named in {left}"
        case _:
            expected = (*REFUSALS, UnreachableError, asyncio.CancelledError)
            assert isinstance(outcome.error, expected), (story, outcome.error)
            assert vendor.alive == {}, f"{story}: {vendor.alive} is left after {outcome.error!r}"


async def calls_of_a_launch(*, last: int) -> range:
    """Numbers of the calls of a launch at which nothing fails, and of so many calls that trouble may add."""
    vendor = Vendor({})
    outcome = await launch(vendor)
    check(vendor, outcome, "healthy")
    assert vendor.trace == [f"create {key}" for key in ORDER.keys]
    return range(len(vendor.trace) + last)


async def test_whichever_call_fails_all_machines_are_there_or_none() -> None:
    for number, trouble in itertools.product(await calls_of_a_launch(last=0), TROUBLES):
        for unlisted_looks in (0, 3):
            vendor = Vendor({number: trouble}, unlisted_looks=unlisted_looks)
            outcome = await launch(vendor)
            story = (number, trouble, unlisted_looks, vendor.trace)
            check(vendor, outcome, story)
            match trouble:
                case "sold out" | "unanswered":
                    assert outcome.error is None, story
                case "forbidden":
                    assert isinstance(outcome.error, AuthenticationError), story
                case "unsent":
                    assert isinstance(outcome.error, UnreachableError), story
                    assert "lists no machine of it 5 s later" in str(outcome.error)
                    assert vendor.alive == {}
                case "cancelled":
                    assert isinstance(outcome.error, asyncio.CancelledError), story
                    assert vendor.alive == {}


async def test_whichever_two_or_three_calls_fail_what_may_be_left_is_named() -> None:
    numbers = await calls_of_a_launch(last=6)
    for count in (2, 3):
        for where in itertools.combinations(numbers, count):
            for troubles in _some(itertools.product(TROUBLES, repeat=count), every=3 if count == 2 else 41):
                vendor = Vendor(dict(zip(where, troubles, strict=True)), unlisted_looks=1)
                outcome = await launch(vendor)
                check(vendor, outcome, (where, troubles, vendor.trace))


def _some(all_of: Iterator[tuple[Trouble, ...]], *, every: int) -> Iterator[tuple[Trouble, ...]]:
    return itertools.islice(all_of, 0, None, every)


async def test_each_machine_is_the_best_offer_left_and_what_was_refused_is_not_tried_again() -> None:
    vendor = Vendor({}, stock=2)
    order = LaunchOrder(pool_id="pool", keys=tuple(f"k{number}" for number in range(20)), timeout_s=600.0)
    outcome = await launch(vendor, offers=(CHEAP, DEAR, DEAREST), order=order)

    assert isinstance(outcome.error, CapacityError)
    assert "available now: cheap (on-demand), dear (on-demand), dearest (on-demand); last: dearest is sold out" in str(
        outcome.error
    )
    assert vendor.alive == {}

    vendor = Vendor({}, stock=1)
    outcome = await launch(vendor, offers=(CHEAP, DEAR, DEAREST))
    assert [each.offer for each in outcome.machines] == [CHEAP, DEAR, DEAREST]
    later = vendor.sent[len(ORDER.keys) :]
    assert CHEAP not in [offer for _, offer in later]


async def test_no_more_than_eight_creates_are_under_way_at_once() -> None:
    under_way, most = 0, 0

    class Counting(Vendor):
        async def create(self, offer: Offer, key: str) -> Instance:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                return await super().create(offer, key)
            finally:
                under_way -= 1

    order = LaunchOrder(pool_id="pool", keys=tuple(f"k{number}" for number in range(20)), timeout_s=600.0)
    outcome = await launch(Counting({}), order=order)

    assert len(outcome.machines) == 20
    assert most == 8


async def test_what_max_cost_rules_out_is_not_sent() -> None:
    class Limited(LaunchOrder):
        def lasts_s(self, offer: Offer) -> float:
            return 0.0 if offer == CHEAP else 60.0

    vendor, order = Vendor({}), Limited(pool_id="pool", keys=ORDER.keys, timeout_s=600.0)
    outcome = await launch(vendor, order=order)

    assert [each.offer for each in outcome.machines] == [DEAR] * 3
    assert {offer for _, offer in vendor.sent} == {DEAR}


async def test_quotas_alone_are_an_error_of_quotas() -> None:
    class Poor(Vendor):
        async def create(self, offer: Offer, key: str) -> Instance:
            raise QuotaError(f"no quota for {offer.spec.name}, {key}")

    outcome = await launch(Poor({}))
    assert isinstance(outcome.error, QuotaError)


async def test_an_order_that_cannot_be_undone_says_which_machines_may_be_left() -> None:
    class Stubborn(Vendor):
        async def destroy(self, instance_id: str) -> None:
            raise UnreachableError(f"{instance_id}: 503")

        async def find(self, key: str) -> Instance | None:
            raise UnreachableError(f"no list: {key}")

    vendor = Stubborn({2: "unsent"})
    outcome = await launch(vendor)

    assert isinstance(outcome.error, TerminationError)
    assert outcome.error.instance_ids == ("m0", "m1")
    assert outcome.error.keys == ("k2",)
    for part in (
        "m0 does not end",
        "503",
        "ledger keys k2",
        "skyward sweep",
        "failed with UnreachableError",
        "no list",
    ):
        assert part in str(outcome.error)


async def test_a_program_that_is_interrupted_undoes_its_order_first() -> None:
    class Interrupting(Vendor):
        async def find(self, key: str) -> Instance | None:
            raise UnreachableError("the list cannot be read")

    vendor = Interrupting({0: "unanswered", 1: "cancelled"})
    outcome = await launch(vendor)

    assert isinstance(outcome.error, TerminationError)
    assert outcome.error.keys == ("k0",)
    assert list(vendor.alive.values()) == ["k0"]


@pytest.mark.parametrize("verb", ["find", "destroy"])
def test_a_call_that_hangs_keeps_nobody_for_ever(verb: str) -> None:
    class Hanging(Vendor):
        async def find(self, key: str) -> Instance | None:
            if verb == "find":
                await asyncio.Event().wait()
            return await super().find(key)

        async def destroy(self, instance_id: str) -> None:
            if verb == "destroy":
                await asyncio.Event().wait()
            await super().destroy(instance_id)

    vendor = Hanging({0: "unsent"})
    outcome = simulate(lambda: launch(vendor, clock=SimulatedClock()))

    assert isinstance(outcome.error, TerminationError)
    assert outcome.error.keys == (("k0",) if verb == "find" else ())
    assert outcome.error.instance_ids == (("m0", "m1") if verb == "destroy" else ())


@pytest.mark.parametrize(
    ("troubles", "unlisted_looks", "keys", "error"),
    [
        pytest.param(["unsent"], 0, ["k0-again"], None, id="a 500 without effect"),
        pytest.param(["unanswered"], 0, ["k0"], None, id="a 500 with effect"),
        pytest.param(["unanswered"], 5, ["k0"], None, id="a 500 with effect, listed late"),
        pytest.param(["unsent", "unsent"], 0, ["k0-again-again"], None, id="two 500 without effect"),
        pytest.param(["unsent", "unanswered"], 0, ["k0-again"], None, id="one without effect, one with it"),
        pytest.param(["unsent", "sold out"], 0, ["k0-again"], None, id="then sold out, and the next offer"),
        pytest.param(["unsent", "forbidden"], 0, [], AuthenticationError, id="then forbidden"),
        pytest.param(["unsent"] * 3, 0, [], UnreachableError, id="three 500 without effect"),
    ],
)
async def test_a_create_without_a_clear_outcome_is_repeated_under_another_key_once_nothing_can_have_been_made(
    troubles: list[Trouble], unlisted_looks: int, keys: list[str], error: type[Exception] | None
) -> None:
    class Scripted(Vendor):
        async def _call(self, what: str) -> Exception | None:
            self._troubles = {len(self.trace): coming.pop(0)} if what.startswith("create") and coming else {}
            return await super()._call(what)

    coming, clock = list(troubles), FakeClock()
    vendor = Scripted({}, unlisted_looks=unlisted_looks)
    order = NotedOrder(pool_id="pool", keys=("k0",), timeout_s=600.0)
    calls = MachineCalls(create=vendor.create, find=vendor.find, destroy=vendor.destroy)

    async def work() -> Sequence[Instance]:
        return await create_once("vendor", calls, (CHEAP, DEAR), order, listing_s=60.0, clock=clock)

    if error is None:
        assert [each.key for each in await work()] == keys
    else:
        with pytest.raises(error):
            await work()

    assert list(vendor.alive.values()) == keys
    assert max(Counter(vendor.sent).values()) == 1
    lost = troubles.count("unsent")
    assert order.unseen == ["k0", "k0-again", "k0-again-again"][:lost]
    assert lost * 60.0 <= clock.monotonic() < lost * 60.0 + 60.0
    assert all("reset" in reason and "lists no machine of it 60 s later" in reason for reason in order.reasons)


async def test_a_cancelled_search_goes_on_until_the_machine_is_listed_and_ends_it() -> None:
    clock = FakeClock()

    class Late(Vendor):
        async def find(self, key: str) -> Instance | None:
            assert self.launching is not None
            self.launching.cancel()
            await asyncio.sleep(0)
            return None if clock.monotonic() < 50 else await super().find(key)

    vendor = Late({0: "unanswered"})
    calls = MachineCalls(create=vendor.create, find=vendor.find, destroy=vendor.destroy)
    order = LaunchOrder(pool_id="pool", keys=("k0",), timeout_s=600.0)

    async def work() -> Outcome:
        try:
            await create_once("vendor", calls, (CHEAP,), order, listing_s=60.0, clock=clock)
        except asyncio.CancelledError as error:
            return Outcome(error=error)
        return Outcome()

    vendor.launching = asyncio.ensure_future(work())
    assert isinstance((await vendor.launching).error, asyncio.CancelledError)
    assert vendor.alive == {}
    assert vendor.trace[-1].startswith("destroy")


def test_a_summary_names_types_markets_and_places_once() -> None:
    spec = InstanceSpec(name="gpu", cpu=1, memory_gib=1)
    offers = [
        Offer(spec=spec, region="nyc", zone="nyc-a"),
        Offer(spec=spec, region="nyc", zone="nyc-b"),
        Offer(spec=spec, region="nyc", zone="nyc-b"),
        Offer(spec=spec, region="tor", spot=True),
        CHEAP,
        DEAR,
    ]
    assert summary(offers) == "gpu (on-demand, nyc-a, nyc-b), gpu (spot, tor), cheap (on-demand), and 1 more"


@pytest.mark.parametrize(("hosts", "bought"), [("bad bad good", 3), ("bad bad bad good", 4)])
async def test_machines_on_avoided_hosts_are_ended_before_the_next_one_is_created(hosts: str, bought: int) -> None:
    """After three of them on one offer, the next offer follows; each has cost money."""
    coming, alive, sent = iter(hosts.split()), set[str](), list[Offer]()

    async def create(offer: Offer, key: str) -> Instance:
        assert not alive
        sent.append(offer)
        alive.add(f"m{len(sent)}")
        return Instance(id=f"m{len(sent)}", key=key, state=InstanceState.PENDING, offer=offer, host=next(coming))

    async def find(key: str) -> Instance | None:
        raise AssertionError(key)

    async def destroy(instance_id: str) -> None:
        alive.discard(instance_id)

    order = NotedOrder(pool_id="p", keys=("k0",), timeout_s=60.0, avoid=frozenset({"bad"}))
    calls = MachineCalls(create=create, find=find, destroy=destroy)
    (made,) = await create_once("vendor", calls, (CHEAP, DEAR), order, clock=FakeClock())
    assert (made.host, alive, len(sent)) == ("good", {made.id}, bought)
    assert sent == ([CHEAP] * 3 + [DEAR])[:bought]
    assert [each.id for each in order.undone] == [f"m{number}" for number in range(1, bought)]


async def test_a_create_that_was_never_sent_is_not_searched_for() -> None:
    """Its connection was refused: it cannot have made anything. The machines of the others are undone."""
    calls, alive = list[str](), set[str]()

    async def create(offer: Offer, key: str) -> Instance:
        if key == "k1":
            refusal = Refusal(kind=RefusalKind.TRANSIENT, code="no answer", message="refused", unsent=True)
            raise UnreachableError("connection refused") from RefusedCall(refusal)
        alive.add(key)
        return Instance(id=key, key=key, state=InstanceState.PENDING, offer=offer)

    async def find(key: str) -> Instance | None:
        calls.append(key)
        return None

    async def destroy(instance_id: str) -> None:
        alive.discard(instance_id)

    clock = FakeClock()
    with pytest.raises(UnreachableError, match="connection refused"):
        await create_once(
            "vendor", MachineCalls(create=create, find=find, destroy=destroy), [CHEAP], ORDER, clock=clock
        )
    assert (calls, alive, clock.monotonic()) == ([], set(), 0)


@pytest.mark.parametrize("interrupted", ["cancelled", "failed"])
@pytest.mark.parametrize("turns", ["one", "any"])
async def test_a_create_that_waits_for_its_turn_is_not_sent_once_the_order_is_over(
    interrupted: str, turns: str
) -> None:
    sent, alive, sending, next_turn = list[str](), set[str](), asyncio.Event(), asyncio.Event()
    next_turn.set()

    async def turn() -> None:
        await next_turn.wait()
        if turns == "one":  # else others are in turn too until the call is sent, as those of a client with a pace
            next_turn.clear()

    async def create(offer: Offer, key: str) -> Instance:
        sent.append(key)
        sending.set()
        await asyncio.sleep(0.05)
        if interrupted == "failed":
            raise AuthenticationError("the key was revoked")
        alive.add(key)
        return Instance(id=key, key=key, state=InstanceState.PENDING, offer=offer)

    async def find(key: str) -> Instance | None:
        raise AssertionError(f"{key} was not sent, or is known")

    async def destroy(instance_id: str) -> None:
        alive.discard(instance_id)

    calls = MachineCalls(create=create, find=find, destroy=destroy, turn=turn)
    launching = asyncio.ensure_future(create_once("vendor", calls, [CHEAP], ORDER))
    await sending.wait()
    if interrupted == "cancelled":
        launching.cancel()
    outcome = await asyncio.wait_for(asyncio.gather(launching, return_exceptions=True), 10)

    assert (len(sent), alive) == (1, set())
    assert [type(error) for error in outcome] == [
        asyncio.CancelledError if interrupted == "cancelled" else AuthenticationError
    ]
