"""The end of machines: asked for until it is accepted, and believed once the vendor shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from skyward.errors import AuthenticationError, SkywardError, TerminationError, UnreachableError
from skyward.providers._common.refusals import RefusalTable
from skyward.providers._common.rented_machines import MachineEnding
from skyward.providers.base import InstanceState
from support.clock import FakeClock

MISSING = RefusalTable(rows=()).refused("404", "no such machine", "cloud eu-1", status=404)
RUNNING, STOPPING, GONE = InstanceState.RUNNING, InstanceState.STOPPING, InstanceState.GONE


class Vendor:
    """Machines by id with the states of their looks, the last of which stays; None: not listed."""

    def __init__(self, *, age_s: float = float("inf"), **machines: Sequence[InstanceState | None]) -> None:
        self.clock = FakeClock()
        self.looks = 0
        self.asked: list[str] = []
        self.unknown: set[str] = set()
        self.errors: list[SkywardError] = []
        self.look_errors: list[SkywardError] = []
        self._machines = machines
        self._born = -age_s

    async def look(self, ids: Sequence[str]) -> Mapping[str, InstanceState]:
        self.looks += 1
        if self.look_errors:
            raise self.look_errors.pop(0)
        states = {each: self._machines[each] for each in ids}
        now = {each: some[min(self.looks, len(some)) - 1] for each, some in states.items()}
        return {each: state for each, state in now.items() if state is not None}

    async def ask(self, ids: Sequence[str]) -> Mapping[str, SkywardError]:
        self.asked += ids
        if self.errors:
            return dict.fromkeys(ids, self.errors.pop(0))
        return dict.fromkeys(self.unknown.intersection(ids), MISSING)

    async def end(self, *ids: str, deadline_s: float = 300.0, lists_gone: bool = False) -> None:
        ending = MachineEnding(
            left=[*ids],
            look=self.look,
            ask=self.ask,
            age_s=lambda _: self.clock.monotonic() - self._born,
            unlisted_s=20.0,
            lists_gone=lists_gone,
            clock=self.clock,
        )
        await ending.until_gone("cloud eu-1", deadline_s=deadline_s, look_s=1.0)


async def test_machines_are_asked_once_and_looked_at_until_they_are_gone() -> None:
    vendor = Vendor(a=[RUNNING, STOPPING, None], b=[RUNNING, STOPPING, STOPPING, GONE], c=[GONE])
    await vendor.end("a", "b", "c")
    assert vendor.asked == ["a", "b"]
    assert vendor.looks == 4

    await vendor.end()
    assert vendor.looks == 4


async def test_a_machine_that_nobody_knows_is_gone() -> None:
    vendor = Vendor(a=[None])
    vendor.unknown = {"a"}
    await vendor.end("a")
    assert (vendor.asked, vendor.looks) == (["a"], 2)


async def test_a_machine_too_new_for_the_list_is_asked_until_it_is_known() -> None:
    vendor = Vendor(age_s=0.0, a=[None, None, None, RUNNING, None])
    vendor.unknown = {"a"}
    looks = vendor.look

    async def look(ids: Sequence[str]) -> Mapping[str, InstanceState]:
        if vendor.looks == 3:
            vendor.unknown.clear()
        return await looks(ids)

    vendor.look = look  # type: ignore[method-assign]
    await vendor.end("a")
    assert vendor.asked == ["a"] * 4
    assert vendor.clock.monotonic() < 20.0


async def test_a_machine_that_never_appears_counts_as_gone_after_the_time_of_the_list() -> None:
    vendor = Vendor(age_s=0.0, a=[None])
    vendor.unknown = {"a"}
    await vendor.end("a")
    assert 20.0 <= vendor.clock.monotonic() < 40.0


@pytest.mark.parametrize("lists_gone", [False, True])
async def test_an_accepted_end_of_an_unlisted_machine_is_believed_unless_gone_ones_are_listed(
    *, lists_gone: bool
) -> None:
    vendor = Vendor(age_s=0.0, a=[None])
    await vendor.end("a", lists_gone=lists_gone)
    assert vendor.asked == ["a"]
    assert (vendor.clock.monotonic() >= 20.0) is lists_gone


async def test_an_accepted_end_that_does_not_show_is_asked_for_again() -> None:
    vendor = Vendor(a=[RUNNING] * 8 + [GONE])
    await vendor.end("a")
    assert len(vendor.asked) == 2
    assert 15.0 < vendor.clock.monotonic() < 45.0


async def test_a_refusal_that_passes_is_repeated() -> None:
    vendor = Vendor(a=[RUNNING] * 7 + [STOPPING, GONE])
    vendor.errors = [UnreachableError("it is being made")] * 5
    vendor.look_errors = [UnreachableError("502")]
    await vendor.end("a")
    assert vendor.asked == ["a"] * 6


@pytest.mark.parametrize("next_look", [STOPPING, GONE, None])
async def test_a_refused_machine_that_ends_by_itself_is_gone(next_look: InstanceState | None) -> None:
    vendor = Vendor(a=[RUNNING, next_look, GONE])
    vendor.errors = [UnreachableError("it is being made")]
    await vendor.end("a")
    assert vendor.clock.monotonic() < 10.0


async def test_three_refusals_in_a_row_for_lack_of_permission_are_final() -> None:
    vendor = Vendor(a=[RUNNING], b=[GONE])
    vendor.errors = [AuthenticationError("no scope delete")] * 9
    with pytest.raises(TerminationError, match=r"cloud eu-1 does not confirm .* gone: a: no scope delete") as error:
        await vendor.end("b", "a")
    assert error.value.instance_ids == ("a",)
    assert vendor.asked == ["a"] * 3


async def test_refusals_with_a_success_in_between_are_not_in_a_row() -> None:
    vendor = Vendor(a=[RUNNING, RUNNING, GONE])
    looks, refused = vendor.look, iter([True, True, False] * 2)

    async def look(ids: Sequence[str]) -> Mapping[str, InstanceState]:
        if next(refused, False):
            raise AuthenticationError("no scope read")
        return await looks(ids)

    vendor.look = look  # type: ignore[method-assign]
    await vendor.end("a")
    assert vendor.asked == ["a"]


async def test_the_deadline_names_what_is_left() -> None:
    vendor = Vendor(a=[RUNNING, STOPPING], b=[STOPPING, GONE])
    with pytest.raises(TerminationError, match="gone: a: waited 60 s for machines to be gone") as error:
        await vendor.end("a", "b", deadline_s=60.0)
    assert error.value.instance_ids == ("a",)
