"""The table of a node's life."""

from __future__ import annotations

import pytest

from skyward.provision.fleet.lifecycle import (
    Action,
    Add,
    Discard,
    End,
    Ended,
    EndNodes,
    Event,
    HeadGivenUp,
    Join,
    Joined,
    Launch,
    Launched,
    Lifecycle,
    Lost,
    NodeState,
    Prepare,
    Prepared,
    Started,
    StartSupervisor,
)

UP: list[tuple[Event, list[Action], list[NodeState]]] = [
    (Add(ranks=(0, 1)), [Launch(ranks=(0, 1))], [NodeState.LAUNCHING] * 2),
    (Launched(ranks=(0, 1)), [Prepare(rank=0), Prepare(rank=1)], [NodeState.PREPARING] * 2),
    (Prepared(rank=1, network="a"), [StartSupervisor(rank=1)], [NodeState.PREPARING, NodeState.STARTING]),
    (Started(rank=1), [], [NodeState.PREPARING, NodeState.JOINING]),
    (Prepared(rank=0, network="a"), [StartSupervisor(rank=0)], [NodeState.STARTING, NodeState.JOINING]),
    (Started(rank=0), [Join(rank=0), Join(rank=1)], [NodeState.JOINING] * 2),
    (Joined(rank=0), [], [NodeState.READY, NodeState.JOINING]),
    (Joined(rank=1), [], [NodeState.READY] * 2),
]
DOWN: list[tuple[Event, list[Action], list[NodeState]]] = [
    (End(), [EndNodes(ranks=(0, 1))], [NodeState.ENDING] * 2),
    (Ended(ranks=(0, 1)), [], [NodeState.GONE] * 2),
]


def test_a_fleet_comes_up_and_goes_down() -> None:
    lifecycle = Lifecycle()
    for event, actions, states in UP + DOWN:
        assert (list(lifecycle.handle(event)), list(lifecycle.states.values())) == (actions, states), event


def test_a_node_that_starts_after_the_head_joins_at_once() -> None:
    lifecycle = Lifecycle()
    for event in (
        Add(ranks=(0, 1)),
        Launched(ranks=(0, 1)),
        Prepared(rank=0, network="a"),
        Prepared(rank=1, network="a"),
        Started(rank=0),
        Joined(rank=0),
    ):
        lifecycle.handle(event)

    assert list(lifecycle.handle(Started(rank=1))) == [Join(rank=1)]


@pytest.mark.parametrize("steps", range(1, len(UP) + 1))
def test_every_state_that_may_have_a_machine_ends_by_terminating_it(steps: int) -> None:
    lifecycle = Lifecycle()
    for event, _, _ in UP[:steps]:
        lifecycle.handle(event)

    assert list(lifecycle.handle(End())) == [EndNodes(ranks=(0, 1))]


def test_a_fleet_that_never_began_has_nothing_to_end_and_takes_no_more() -> None:
    lifecycle = Lifecycle()

    assert list(lifecycle.handle(End())) == []
    assert list(lifecycle.handle(Add(ranks=(0,)))) == []
    assert dict(lifecycle.states) == {}


def alone() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.handle(Add(ranks=(0,)))
    return lifecycle


def test_an_end_that_failed_is_tried_again_and_one_that_worked_is_not() -> None:
    lifecycle = alone()
    lifecycle.handle(End())

    assert list(lifecycle.handle(End())) == [EndNodes(ranks=(0,))]
    lifecycle.handle(Ended(ranks=(0,)))
    assert list(lifecycle.handle(End())) == []


LATE: list[Event] = [
    Add(ranks=(0,)),
    Launched(ranks=(0,)),
    Prepared(rank=0, network="a"),
    Started(rank=0),
    Joined(rank=0),
    Lost(rank=0),
]


@pytest.mark.parametrize("late", LATE)
def test_what_happens_to_an_ending_node_changes_nothing(late: Event) -> None:
    lifecycle = alone()
    lifecycle.handle(End())

    assert list(lifecycle.handle(late)) == []
    assert list(lifecycle.states.values()) == [NodeState.ENDING]


def up() -> Lifecycle:
    lifecycle = Lifecycle()
    for event, _, _ in UP:
        lifecycle.handle(event)
    return lifecycle


def test_a_lost_node_is_discarded_at_once_and_its_rank_may_be_launched_again() -> None:
    lifecycle = up()

    assert list(lifecycle.handle(Lost(rank=1))) == [Discard(rank=1)]
    assert list(lifecycle.handle(Lost(rank=1))) == []
    assert list(lifecycle.handle(Add(ranks=(1,)))) == [Launch(ranks=(1,))]
    assert list(lifecycle.states.values()) == [NodeState.READY, NodeState.LAUNCHING]


def test_a_node_that_started_while_the_head_is_away_joins_with_the_next_head() -> None:
    lifecycle = up()
    for event in (Lost(rank=0), Lost(rank=1), Add(ranks=(0, 1)), Launched(ranks=(0, 1)), Prepared(rank=1, network="a")):
        lifecycle.handle(event)

    assert list(lifecycle.handle(Started(rank=1))) == []
    lifecycle.handle(Prepared(rank=0, network="a"))
    assert list(lifecycle.handle(Started(rank=0))) == [Join(rank=0), Join(rank=1)]


def prepared(*networks: str) -> Lifecycle:
    """A fleet of nodes on these networks, of which the head is prepared last and none has started."""
    lifecycle = Lifecycle()
    ranks = tuple(range(len(networks)))
    lifecycle.handle(Add(ranks=ranks))
    lifecycle.handle(Launched(ranks=ranks))
    for rank in reversed(ranks):
        lifecycle.handle(Prepared(rank=rank, network=networks[rank]))
    return lifecycle


@pytest.mark.parametrize(
    ("networks", "heads"),
    [
        (("a", "a", "a"), [0, 0, 0]),
        (("a", "b", "b", "a", ""), [0, 1, 2, 0, 4]),
        (("", "", "a"), [0, 1, 2]),
        (("",), [0]),
    ],
)
def test_a_node_joins_the_head_if_it_reaches_it_and_else_itself(networks: tuple[str, ...], heads: list[int]) -> None:
    lifecycle = prepared(*networks)

    assert [lifecycle.head_of(rank) for rank in range(len(networks))] == heads


def test_a_node_of_its_own_does_not_wait_for_the_head() -> None:
    lifecycle = prepared("a", "b", "", "a")

    assert list(lifecycle.handle(Started(rank=1))) == [Join(rank=1)]
    assert list(lifecycle.handle(Started(rank=2))) == [Join(rank=2)]
    assert list(lifecycle.handle(Started(rank=3))) == []
    for rank in (1, 2):
        lifecycle.handle(Joined(rank=rank))
    assert list(lifecycle.handle(Started(rank=0))) == [Join(rank=0), Join(rank=3)]


def test_a_started_node_joins_itself_once_the_head_turns_out_to_be_elsewhere() -> None:
    lifecycle = Lifecycle()
    for event in (Add(ranks=(0, 1)), Launched(ranks=(0, 1)), Prepared(rank=1, network="b")):
        lifecycle.handle(event)

    assert lifecycle.head_of(1) is None
    assert list(lifecycle.handle(Started(rank=1))) == []
    assert list(lifecycle.handle(Prepared(rank=0, network="a"))) == [StartSupervisor(rank=0), Join(rank=1)]


def test_the_next_head_may_be_on_another_network() -> None:
    lifecycle = up()
    for event in (Lost(rank=0), Add(ranks=(0,)), Launched(ranks=(0,))):
        lifecycle.handle(event)

    assert lifecycle.head_of(1) == 0
    lifecycle.handle(Prepared(rank=0, network="b"))
    assert lifecycle.head_of(1) == 1


def test_without_a_head_every_node_joins_itself_until_there_is_one_again() -> None:
    lifecycle = up()
    for event in (Add(ranks=(2,)), Launched(ranks=(2,)), Prepared(rank=2, network="a"), Lost(rank=0), Started(rank=2)):
        lifecycle.handle(event)

    assert list(lifecycle.handle(HeadGivenUp())) == [Join(rank=2)]
    assert lifecycle.head_of(1) == 1
    for event in (Add(ranks=(0,)), Launched(ranks=(0,)), Prepared(rank=0, network="a")):
        lifecycle.handle(event)
    assert lifecycle.head_of(1) == 0


def test_a_fleet_grows_while_others_work_and_only_those_named_end() -> None:
    lifecycle = up()

    assert list(lifecycle.handle(Add(ranks=(1, 2)))) == [Launch(ranks=(2,))]
    assert list(lifecycle.handle(End(ranks=(2,)))) == [EndNodes(ranks=(2,))]
    lifecycle.handle(Ended(ranks=(2,)))
    assert list(lifecycle.handle(Add(ranks=(2,)))) == [Launch(ranks=(2,))]
