from __future__ import annotations

import random
from typing import Any

import pytest

from skyward.wire.lane import BrokenSessionError, Session


def deliver(source: Session, target: Session) -> list[Any]:
    got: list[Any] = []
    while (message := source.take()) is not None:
        got += target.receive(message)
    return got


def acknowledge(source: Session, target: Session) -> None:
    if (message := source.take(acknowledge=True)) is not None:
        target.receive(message)


def test_items_arrive_in_order_and_are_kept_until_acknowledged() -> None:
    here, there = Session(), Session()
    for number in range(5):
        here.push([number])
    assert deliver(here, there) == [[number] for number in range(5)]
    assert not here.drained
    acknowledge(there, here)
    assert here.drained
    assert here.kept_bytes == 0


def test_small_items_overtake_bulk_ones() -> None:
    here, there = Session(), Session()
    here.push(["big"], 1 << 20, bulk=True)
    here.push(["small"])
    assert deliver(here, there) == [["small"], ["big"]]


def test_bulk_items_wait_for_credit_and_small_ones_do_not() -> None:
    here, there = Session(), Session()
    for number in range(20):
        here.push([number], 4 << 20, bulk=True)
    first = deliver(here, there)
    assert first == [[number] for number in range(8)]
    here.push(["small"])
    assert deliver(here, there) == [["small"]]
    acknowledge(there, here)
    assert deliver(here, there) == [[number] for number in range(8, 16)]


def test_after_a_lost_link_only_what_was_not_seen_is_sent_again() -> None:
    here, there = Session(), Session()
    for number in range(3):
        here.push([number])
    deliver(here, there)
    here.push([3])
    lost = here.take()
    assert lost is not None
    here.push([4])
    here.resume(there.seen)
    there.resume(here.seen)
    assert deliver(here, there) == [[3], [4]]


def test_a_repeated_message_is_dropped() -> None:
    here, there = Session(), Session()
    here.push([1])
    message = here.take()
    assert message is not None
    assert there.receive(message) == [[1]]
    assert there.receive(message) == []


def test_a_gap_breaks_the_session() -> None:
    there = Session()
    with pytest.raises(BrokenSessionError, match="expected item 1, got 3"):
        there.receive([3, 0, [["x"]]])


@pytest.mark.parametrize("seed", range(20))
def test_every_item_arrives_exactly_once_whatever_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    here, there = Session(), Session()
    sent: list[Any] = []
    got: list[Any] = []
    for number in range(300):
        bulk = chance.random() < 0.3
        here.push([number], chance.choice([10, 2 << 20]), bulk=bulk)
        sent.append([number])
        if chance.random() < 0.5 and (message := here.take()) is not None:
            if chance.random() < 0.2:  # the link breaks with this message on it
                here.resume(there.seen)
                there.resume(here.seen)
            else:
                got += there.receive(message)
        if chance.random() < 0.3:
            acknowledge(there, here)
    for _ in range(100):
        got += deliver(here, there)
        acknowledge(there, here)
    assert sorted(got) == sent
    assert here.drained
