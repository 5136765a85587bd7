"""The fake provider: its machines fare as fated, its create calls fail as told, and its bill is right."""

from __future__ import annotations

import math

import pytest

from skyward.errors import CapacityError, UnreachableError
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider, Fate
from support.clock import FakeClock

SPEC = InstanceSpec(name="fake", cpu=2, memory_gib=4)
OFFER = Offer(spec=SPEC, price_per_hour=3.6, minimum_billed_s=60.0)
OTHER = Offer(spec=InstanceSpec(name="other", cpu=2, memory_gib=4), price_per_hour=7.2)
NO_ANSWER = UnreachableError("no answer")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def provider(clock: FakeClock) -> FakeProvider:
    return FakeProvider([OFFER, OTHER], clock=clock)


async def launch(provider: FakeProvider, nodes: int = 1, avoid: frozenset[str] = frozenset()) -> list[Instance]:
    keys = tuple(f"k{number}" for number in range(nodes))
    order = LaunchOrder(pool_id="pool", keys=keys, timeout_s=60.0, avoid=avoid)
    return [*await provider.launch([OFFER, OTHER], order)]


async def state(provider: FakeProvider, instance: Instance) -> InstanceState:
    (seen,) = await provider.describe([instance.id])
    return seen.state


@pytest.mark.parametrize("becomes", [InstanceState.RUNNING, InstanceState.FAILED, InstanceState.GONE])
async def test_a_machine_is_pending_as_long_as_fated_and_then_what_it_becomes(
    provider: FakeProvider, clock: FakeClock, becomes: InstanceState
) -> None:
    provider.fates.append(Fate(pending_s=10.0, becomes=becomes))
    (machine,) = await launch(provider)

    assert machine.state is InstanceState.PENDING
    clock.advance(9)
    assert await state(provider, machine) is InstanceState.PENDING
    clock.advance(1)
    assert await state(provider, machine) is becomes


async def test_a_machine_may_never_come_up_and_take_its_time_to_end(provider: FakeProvider, clock: FakeClock) -> None:
    provider.fate = Fate(pending_s=math.inf, ending_s=5.0)
    (machine,) = await launch(provider)
    clock.advance(1e6)

    assert await state(provider, machine) is InstanceState.PENDING
    await provider.terminate([machine.id])
    assert await state(provider, machine) is InstanceState.STOPPING
    clock.advance(5)
    assert await state(provider, machine) is InstanceState.GONE


async def test_the_bill_counts_begun_seconds_from_launch_to_the_end_and_at_least_the_minimum(
    provider: FakeProvider, clock: FakeClock
) -> None:
    provider.fates.append(Fate(pending_s=100.0, becomes=InstanceState.GONE))
    machines = await launch(provider, 3)
    await provider.terminate([machines[1].id])
    clock.advance(150.5)

    assert [provider.billed(each.id) for each in machines] == pytest.approx([0.1, 0.06, 0.151])
    assert provider.bill() == pytest.approx(0.311)


async def test_a_machine_is_billed_at_the_price_that_its_record_states(
    provider: FakeProvider, clock: FakeClock
) -> None:
    provider.fates += [Fate(price_per_hour=36.0), Fate(pending_s=50.0)]
    provider.prices["fake"] = 7.2
    first, second = await launch(provider, 2)
    clock.advance(100)

    assert (first.price_per_hour, second.price_per_hour) == (36.0, None)
    assert [each.price_per_hour for each in await provider.describe([second.id])] == [7.2]
    assert provider.billed(first.id) == pytest.approx(1.0)
    assert provider.billed(second.id) == pytest.approx(0.2)


async def test_machines_lie_on_the_networks_and_hosts_that_were_chosen_and_avoided_hosts_get_none(
    provider: FakeProvider,
) -> None:
    provider.networks = ("a", "")
    provider.fates += [Fate(host="bad"), Fate(network="b", host="bad"), Fate(host="bad"), Fate(host="good")]
    first, second, third, fourth = await launch(provider, 2) + await launch(provider, 2, frozenset({"bad"}))

    assert [each.network for each in (first, second, third, fourth)] == ["a", "b", "", ""]
    assert [each.host for each in (first, second, third)] == ["bad", "bad", "good"]
    assert fourth.host not in ("bad", "good", "")


async def test_a_machine_has_the_size_that_was_bought_or_the_fated_one(provider: FakeProvider) -> None:
    small = InstanceSpec(name="fake", cpu=1, memory_gib=2)
    provider.fates.append(Fate(hardware=small))
    machines = await launch(provider, 2)

    assert [provider.hardware(each.id) for each in machines] == [small, SPEC]
    assert [each.offer.spec for each in machines] == [SPEC, SPEC]


async def test_a_create_call_whose_answer_is_lost_makes_one_machine_which_is_adopted(provider: FakeProvider) -> None:
    provider.fail("create", NO_ANSWER, done=True)
    provider.fate = Fate(unlisted_s=5.0)
    machines = await launch(provider, 2)

    assert [each.id for each in machines] == provider.alive
    assert provider.calls.count("create") == 2
    assert provider.calls.count("find") > 1


async def test_a_create_call_that_is_never_settled_undoes_the_order(provider: FakeProvider) -> None:
    provider.fail("create", NO_ANSWER)
    with pytest.raises(UnreachableError, match="lists no machine of it 10 s later"):
        await launch(provider, 2)

    assert provider.alive == []


async def test_what_is_sold_out_is_refused(provider: FakeProvider) -> None:
    provider.sold_out = {OFFER}
    assert [each.offer for each in await launch(provider, 2)] == [OTHER, OTHER]

    provider.sold_out = {OFFER, OTHER}
    with pytest.raises(CapacityError, match=r"available now: fake \(on-demand\), other \(on-demand\); last: sold out"):
        await launch(provider)


async def test_machines_taken_back_say_so_and_machines_of_a_dead_client_end_if_they_can(
    provider: FakeProvider,
) -> None:
    (taken,) = await launch(provider)
    provider.preempt(taken.id)
    (seen,) = await provider.describe([taken.id])
    assert (seen.state, seen.preempted) == (InstanceState.GONE, True)

    (ends,) = await launch(provider)
    provider.ends_itself = False
    (stays,) = await launch(provider)
    provider.client_dies()
    assert provider.alive == [stays.id]
    assert ends.ends_itself
    assert not stays.ends_itself


async def test_the_times_of_looks_are_recorded(provider: FakeProvider, clock: FakeClock) -> None:
    machines = await launch(provider, 2)
    await provider.describe([each.id for each in machines])
    clock.advance(2)
    await provider.describe([each.id for each in machines])

    assert provider.looked_at == [0, 2]
