"""Workers, which Dask counts, and whole nodes."""

from __future__ import annotations

import math

import pytest

from skyward.errors import ConfigurationError
from skyward.submission import FleetStatus, NodeStatus
from skyward_dask.scaling import (
    SizeParams,
    WorkerSize,
    fewest_workers,
    memory_size,
    most_workers,
    nodes_for,
    planned_workers,
    ranks_named,
    requested_workers,
    superfluous,
    whole_bounds,
    worker_count,
)

SIZE = WorkerSize(threads=2, memory_bytes=4 << 30)


def fleet(*ranks, wanted=None, ending=(), per_node=2):
    nodes = tuple(
        NodeStatus(
            rank=rank,
            state="ending" if rank in ending else "ready",
            workers=tuple(f"node{rank}-worker{index}" for index in range(per_node)),
        )
        for rank in ranks
    )
    return FleetStatus(wanted=len(ranks) if wanted is None else wanted, workers_per_node=per_node, nodes=nodes)


def workers(*ranks, per_node=2):
    return [f"node{rank}-worker{index}" for rank in ranks for index in range(per_node)]


@pytest.mark.parametrize(("asked", "nodes"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_nodes_are_whole_and_one_stays(asked, nodes):
    assert nodes_for(asked, 2) == nodes


@pytest.mark.parametrize("wrong", [-1, "x", 1.5, None, True, [2], math.inf])
def test_a_wrong_number_of_workers_names_its_parameter(wrong):
    with pytest.raises(ConfigurationError, match=r"maximum must be a whole number ≥ 0, got"):
        worker_count("maximum", wrong)


@pytest.mark.parametrize("wrong", ["lots", "", -5, None, True, [1]])
def test_a_wrong_memory_size_names_its_parameter(wrong):
    with pytest.raises(ConfigurationError, match='memory must be a size such as "64 GiB", got'):
        memory_size("memory", wrong)


class TestNames:
    def test_of_a_settled_fleet_are_all_the_same(self):
        assert planned_workers(fleet(0, 1)) == requested_workers(fleet(0, 1)) == set(workers(0, 1))

    def test_of_nodes_not_yet_asked_for_are_planned_with_the_lowest_free_ranks(self):
        status = fleet(0, 2, wanted=4)
        assert planned_workers(status) == set(workers(0, 1, 2, 3))
        assert requested_workers(status) == set(workers(0, 2))

    def test_of_nodes_on_their_way_out_are_neither(self):
        status = fleet(0, 1, 2, wanted=2, ending=[1])
        assert planned_workers(status) == requested_workers(status) == set(workers(0, 2))

    def test_of_a_replacement_are_not_those_of_the_node_that_ends(self):
        status = fleet(0, 1, wanted=2, ending=[1])
        assert planned_workers(status) == set(workers(0, 1))
        assert requested_workers(status) == set(workers(0))


class TestNodesThatGo:
    @pytest.mark.parametrize(
        ("named", "ranks"),
        [
            (workers(1), [1]),
            (["node1-worker0"], []),
            (["node1-worker0", *workers(2)], [2]),
            (workers(0, 1, 2), [1, 2]),
            (["elsewhere"], []),
            ([], []),
        ],
    )
    def test_are_those_all_of_whose_workers_are_named(self, named, ranks):
        assert ranks_named(fleet(0, 1, 2), named) == ranks

    def test_go_in_the_order_of_what_closing_them_costs(self):
        order = [*workers(2), *workers(0), *workers(1), *workers(3)]
        chosen = superfluous(fleet(0, 1, 2, 3), target=4, observed=workers(0, 1, 2, 3), cheapest_first=order)
        assert chosen == [*workers(2), *workers(1)]

    def test_have_not_arrived_before_those_that_have(self):
        chosen = superfluous(fleet(0, 1, 2, 3), target=4, observed=workers(0, 1), cheapest_first=workers(1, 0))
        assert chosen == [*workers(3), *workers(2)]

    def test_are_left_alone_when_one_of_their_workers_must_stay(self):
        order = ["node1-worker0", *workers(2)]
        assert superfluous(fleet(0, 1, 2), target=2, observed=workers(0, 1, 2), cheapest_first=order) == workers(2)

    def test_are_none_when_nothing_is_superfluous(self):
        assert superfluous(fleet(0, 1), target=3, observed=workers(0, 1), cheapest_first=workers(1, 0)) == []


class TestUnits:
    def test_the_smallest_worker_counts(self):
        known = {"a": {"nthreads": 4, "memory_limit": 8}, "b": {"nthreads": 2, "memory_limit": 16}}
        assert WorkerSize.of(known) == WorkerSize(threads=2, memory_bytes=8)
        assert WorkerSize.of({}) == WorkerSize(threads=1, memory_bytes=0)

    def test_all_that_was_asked_for_is_met(self):
        assert fewest_workers(SizeParams(prefix=""), SIZE) == 0
        assert fewest_workers(SizeParams(prefix="", workers=2), SIZE) == 2
        assert fewest_workers(SizeParams(prefix="", workers=2, cores=7), SIZE) == 4
        assert fewest_workers(SizeParams(prefix="", cores=7, memory="17 GiB"), SIZE) == 5

    def test_no_maximum_is_exceeded(self):
        assert most_workers(SizeParams(prefix="maximum_"), SIZE) == math.inf
        assert most_workers(SizeParams(prefix="maximum_", workers=math.inf, cores=7), SIZE) == 3
        assert most_workers(SizeParams(prefix="maximum_", workers=9, memory="17 GiB"), SIZE) == 4

    def test_a_wrong_one_names_its_parameter(self):
        with pytest.raises(ConfigurationError, match="maximum_cores must be"):
            most_workers(SizeParams(prefix="maximum_", cores=-1), SIZE)
        with pytest.raises(ConfigurationError, match="minimum must be"):
            fewest_workers(SizeParams(prefix="minimum_", workers="few"), SIZE)
        with pytest.raises(ConfigurationError, match="minimum_memory cannot be converted to workers before the first"):
            fewest_workers(SizeParams(prefix="minimum_", memory="1 GiB"), WorkerSize.of({}))

    @pytest.mark.parametrize(
        ("minimum", "maximum", "bounds"),
        [
            (0, 6, (2, 6)),
            (3, 7, (4, 6)),
            (0, 1, (2, 2)),
            (0, math.inf, (2, math.inf)),
            (3, 3, (4, 4)),
        ],
    )
    def test_bounds_make_whole_nodes(self, minimum, maximum, bounds):
        assert whole_bounds(minimum, maximum, 2) == bounds

    def test_a_minimum_above_the_maximum_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"minimum must not be above maximum \(2 workers\), got 3"):
            whole_bounds(3, 2, 1)
