"""What user code sees of its place, and how data is dealt to the workers of a call."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.distributed.runtime import (
    CallContext,
    DistributedSampler,
    InstanceInfo,
    bind_address,
    current_accelerator,
    current_call,
    enter_call,
    instance_info,
    node_address,
    refuse_inside_call,
    shard,
)
from skyward.errors import ConfigurationError, NotInPoolError, PoolStateError

WORLDS = (1, 2, 3, 5, 8)


def set_place(patch: pytest.MonkeyPatch, *, node: int = 1, worker: int = 0, accelerators: Sequence[str] = ()) -> None:
    place = {
        "pool_id": "pool-7",
        "instance_id": "i-1",
        "node": node,
        "total_nodes": 3,
        "worker": worker,
        "workers_per_node": 2,
        "head_addr": "127.0.0.9",
        "accelerators": list(accelerators),
        "memory_limit_bytes": 1 << 30,
        "node_accelerators": 2 * len(accelerators),
    }
    patch.setenv("SKYWARD_WORKER", json.dumps(place))


@pytest.fixture(autouse=True)
def outside_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYWARD_WORKER", raising=False)


def on_each_rank(world: int, ask: Callable[[], Any], *, seed: int = 11) -> list[Any]:
    answers: list[Any] = []
    for rank in range(world):
        with enter_call(CallContext(world=world, rank=rank, seed=seed)):
            answers.append(ask())
    return answers


def flat(parts: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def in_a_thread(ask: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


def in_a_program(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    return json.loads(done.stdout)


def resident_bytes(file: Path) -> int:
    """How much of the file this process has mapped and read."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").partition(str(file))[2]
    return 1024 * int(maps.partition("Rss:")[2].split()[0])


class TestPlace:
    def test_instance_info_tells_place_cluster_and_the_calls_port(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_place(monkeypatch, accelerators=["H100", "H100"])

        with enter_call(CallContext(world=6, rank=2, seed=0, head_port=4711)):
            info = instance_info()

        assert info == InstanceInfo(1, 3, False, ["H100", "H100"], "127.0.0.9", 4711, "pool-7", 0, 2, 12)
        assert vars(info)["total_accelerators"] == 12

    @pytest.mark.parametrize("node, worker, head", [(0, 0, True), (0, 1, False), (1, 0, False)])
    def test_only_worker_0_of_node_0_is_head(
        self, monkeypatch: pytest.MonkeyPatch, node: int, worker: int, head: bool
    ) -> None:
        set_place(monkeypatch, node=node, worker=worker)

        assert instance_info().is_head is head

    def test_outside_a_pool_it_says_what_to_do(self) -> None:
        with pytest.raises(NotInPoolError, match="@compute"):
            instance_info()

    def test_it_cannot_be_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_place(monkeypatch)
        info = instance_info()

        with pytest.raises(FrozenInstanceError):
            info.node = 5  # pyright: ignore[reportAttributeAccessIssue]

    def test_it_reads_what_node_config_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from skyward.wire.node_config import WorkerPlace

        place = WorkerPlace(
            pool_id="p",
            instance_id="i",
            node=0,
            total_nodes=1,
            worker=0,
            workers_per_node=1,
            head_addr="127.0.0.1",
            address="127.0.0.1",
            accelerators=("T4",),
            memory_limit_bytes=1,
        )
        monkeypatch.setenv("SKYWARD_WORKER", place.to_json())

        assert instance_info() == InstanceInfo(0, 1, True, ["T4"], "127.0.0.1", 0, "p", 0, 1)
        assert (node_address(), bind_address()) == ("127.0.0.1", "127.0.0.1")
        monkeypatch.setenv("SKYWARD_WORKER", replace(place, bind="10.1.2.3").to_json())
        assert (node_address(), bind_address()) == ("127.0.0.1", "10.1.2.3")

    def test_a_pool_used_in_a_call_is_refused_and_one_of_a_module_with_the_place_to_change(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        text = "from skyward.distributed.runtime import refuse_inside_call\ndef use(): refuse_inside_call()\nuse()\n"
        (tmp_path / "sky_opens_at_import.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        set_place(monkeypatch)
        with pytest.raises(PoolStateError, match="used inside a call"):
            refuse_inside_call()
        with pytest.raises(PoolStateError, match="module sky_opens_at_import uses a pool while it is imported"):
            importlib.import_module("sky_opens_at_import")

    def test_a_program_that_a_call_starts_knows_its_place_but_not_the_call(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_place(monkeypatch, worker=1)
        code = (
            "import json; from skyward.distributed.runtime import *; i = instance_info();"
            "print(json.dumps([i.node, i.worker, i.head_port, current_call(), shard([1, 2, 3])]))"
        )

        with enter_call(CallContext(world=2, rank=1, seed=0, head_port=4711)):
            assert in_a_program(code) == [1, 1, 0, None, [1, 2, 3]]

    def test_accelerator_is_the_workers_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_place(monkeypatch, accelerators=["A100", "A100"])

        assert current_accelerator() == "A100"

    def test_no_accelerator_without_one_or_without_a_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert current_accelerator() is None
        set_place(monkeypatch)
        assert current_accelerator() is None


class TestCurrentCall:
    def test_is_none_outside_and_the_innermost_inside(self) -> None:
        outer, inner = CallContext(world=2), CallContext(world=3)

        assert current_call() is None
        with enter_call(outer):
            with enter_call(inner):
                assert current_call() == inner
            assert current_call() == outer
        assert current_call() is None

    def test_is_left_when_the_call_fails(self) -> None:
        with pytest.raises(ZeroDivisionError), enter_call(CallContext(world=2)):
            _ = 1 / 0

        assert current_call() is None
        assert in_a_thread(current_call) is None

    def test_reaches_threads_that_the_call_starts(self) -> None:
        context = CallContext(world=4, rank=3)

        with enter_call(context):
            assert in_a_thread(current_call) == context

    def test_belongs_to_its_thread_when_two_calls_run(self) -> None:
        mine, other = CallContext(rank=0, world=2), CallContext(rank=1, world=2)

        def runs_beside() -> CallContext | None:
            with enter_call(other):
                return current_call()

        with enter_call(mine):
            assert in_a_thread(runs_beside) == other
            assert current_call() == mine


class Squares:
    """A dataset with a length and items, and nothing else."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        assert 0 <= index < self.length
        return index * index


def kinds(length: int) -> list[Any]:
    return [list(range(length)), tuple(range(length)), range(length), np.arange(length), array("q", range(length))]


class TestShard:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_parts_of_all_workers_are_the_whole_each_element_once(self, shuffle: bool) -> None:
        rng = random.Random(20)
        for world in WORLDS:
            for length in [0, 1, world, *(rng.randrange(200) for _ in range(8))]:
                for whole in kinds(length):
                    parts = on_each_rank(world, lambda whole=whole: shard(whole, shuffle=shuffle))
                    elements = [int(element) for part in parts for element in part]
                    assert (sorted(elements) if shuffle else elements) == list(range(length))
                    sizes = {len(part) for part in parts}
                    assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("whole", [[1, 2, 3], (1, 2, 3), np.arange(3.0)], ids=lambda whole: type(whole).__name__)
    def test_keeps_the_type(self, whole: Any, shuffle: bool) -> None:
        for part in on_each_rank(2, lambda: shard(whole, shuffle=shuffle)):
            assert type(part) is type(whole)

    def test_a_range_stays_one_unless_shuffled(self) -> None:
        assert on_each_rank(2, lambda: shard(range(10))) == [range(5), range(5, 10)]
        assert type(shard(range(10), shuffle=True)) is list

    def test_arrays_are_views_unless_shuffled(self, tmp_path: Path) -> None:
        for whole in (np.arange(10), np.memmap(tmp_path / "data", dtype="u1", mode="w+", shape=(10, 4))):
            assert all(np.shares_memory(part, whole) for part in on_each_rank(3, lambda whole=whole: shard(whole)))

    def test_other_datasets_become_lists_of_their_elements(self) -> None:
        assert on_each_rank(2, lambda: shard(Squares(5))) == [[0, 1], [4, 9, 16]]
        assert sorted(flat(on_each_rank(2, lambda: shard(Squares(5), shuffle=True)))) == [0, 1, 4, 9, 16]

    def test_pandas_goes_by_position_not_by_label(self) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"x": range(5)}, index=[9, 8, 7, 6, 5])

        part, labels = on_each_rank(2, lambda: shard(frame, frame["x"]))[1]
        shuffled = pandas.concat(on_each_rank(2, lambda: shard(frame, shuffle=True)))

        assert list(part.index) == [7, 6, 5]
        assert list(labels) == [2, 3, 4]
        assert sorted(shuffled["x"]) == [0, 1, 2, 3, 4]
        assert all(9 - row.Index == row.x for row in shuffled.itertuples())

    def test_several_arrays_are_dealt_alike(self) -> None:
        x, y = list(range(50)), np.arange(50) * 10

        for part_x, part_y in on_each_rank(4, lambda: shard(x, y, shuffle=True)):
            assert [10 * element for element in part_x] == part_y.tolist()

    def test_two_shards_of_one_call_agree(self) -> None:
        def ask() -> tuple[list[int], list[int]]:
            return shard(list(range(20)), shuffle=True), shard(list(range(20)), shuffle=True)

        assert all(first == second for first, second in on_each_rank(3, ask))

    def test_the_calls_seed_shuffles_unless_one_is_given(self) -> None:
        def order(call_seed: int, seed: int | None) -> list[int]:
            return on_each_rank(1, lambda: shard(list(range(100)), shuffle=True, seed=seed), seed=call_seed)[0]

        assert order(1, None) != order(2, None)
        assert order(1, None) == order(1, None)
        assert order(1, 42) == order(2, 42) == order(1, np.int64(42))  # type: ignore[arg-type]
        assert order(1, 0) == order(2, 0)

    def test_the_order_does_not_depend_on_numpy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with_numpy = shard(list(range(1000)), shuffle=True, seed=5)
        monkeypatch.setitem(sys.modules, "numpy", None)

        assert shard(list(range(1000)), shuffle=True, seed=5) == with_numpy

    def test_outside_a_call_everything_is_returned(self) -> None:
        assert shard([1, 2, 3]) == [1, 2, 3]

    def test_one_array_gives_an_array_and_several_a_tuple(self) -> None:
        assert shard([1]) == [1]
        assert shard([1], (2,)) == ([1], (2,))

    def test_no_array_is_an_error(self) -> None:
        with pytest.raises(ConfigurationError, match="at least one array"):
            shard()

    def test_unequal_lengths_are_named(self) -> None:
        with pytest.raises(ConfigurationError, match=r"\[3, 2\]"):
            shard([1, 2, 3], np.zeros((2, 3)))

    @pytest.mark.parametrize("value", [{1: 2}, {1, 2}, iter([1]), 5, None, np.float64(1.0), np.array(3)])
    def test_what_has_no_positions_is_refused_by_type(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=type(value).__name__):
            shard(value)

    @pytest.mark.parametrize(
        "value, instead",
        [
            ({"x": [1]}, "values"),
            ({1, 2}, "sorted"),
            ((number for number in range(3)), "islice"),
            (zip([1], [2], strict=True), "islice"),
        ],
        ids=["dict", "set", "generator", "zip"],
    )
    def test_what_is_refused_says_what_to_do_instead(self, value: Any, instead: str) -> None:
        with pytest.raises(ConfigurationError, match=instead):
            shard(value)

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_what_has_a_shape_but_no_rows_is_refused(self, shuffle: bool) -> None:
        class Bare:
            shape = (3, 2)

        class Columns(Bare):
            def __getitem__(self, index: object) -> dict[str, object]:
                return {"x": index}

        with pytest.raises(ConfigurationError, match=r"Bare.*rows cannot be selected"):
            shard(Bare(), shuffle=shuffle)
        with pytest.raises(ConfigurationError, match=r"Columns.*shard\(range\(len\(data\)\)\)"):
            shard(Columns(), shuffle=shuffle)

    def test_a_part_of_a_frame_is_a_view(self) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"x": np.arange(10), "y": np.arange(10.0)})

        for part, column in on_each_rank(3, lambda: shard(frame, frame["y"])):
            assert np.shares_memory(part["x"].to_numpy(), frame["x"].to_numpy())
            assert np.shares_memory(column.to_numpy(), frame["y"].to_numpy())

    def test_no_more_of_a_memory_map_is_read_than_the_part(self, tmp_path: Path) -> None:
        file = tmp_path / "rows"
        np.ones((4096, 4096), "u1").tofile(file)
        whole = np.memmap(file, dtype="u1", mode="r", shape=(4096, 4096))

        with enter_call(CallContext(world=8, rank=5)):
            assert int(shard(whole).sum()) == whole.nbytes // 8

        assert whole.nbytes / 8 <= resident_bytes(file) < whole.nbytes / 4

    def test_a_shuffled_part_costs_its_own_memory(self) -> None:
        whole = np.zeros((1000, 4096))

        with enter_call(CallContext(world=8, rank=5)):
            tracemalloc.start()
            part = shard(whole, shuffle=True)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()

        assert part.nbytes <= peak < 1.2 * part.nbytes

    def test_what_has_no_length_is_refused(self) -> None:
        class Endless:
            def __getitem__(self, index: int) -> int:
                return index

        with pytest.raises(ConfigurationError, match="length"):
            shard(Endless())


def draws(count: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {
            "length": rng.choice([0, 1, 2, rng.randrange(100)]),
            "world": rng.randrange(1, 9),
            "seed": rng.randrange(1000),
            "epoch": rng.randrange(5),
            "shuffle": rng.random() < 0.5,
            "drop_last": rng.random() < 0.5,
        }
        for _ in range(count)
    ]


def deal(
    make: Callable[..., Any], *, length: int, world: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> list[list[int]]:
    dealt: list[list[int]] = []
    for rank in range(world):
        sampler = make(Squares(length), num_replicas=world, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        sampler.set_epoch(epoch)
        dealt.append(list(sampler))
        assert len(dealt[-1]) == len(sampler)
    return dealt


class TestDistributedSampler:
    @pytest.mark.parametrize("draw", draws(40), ids=str)
    def test_deals_everything_and_equally_much(self, draw: dict[str, Any]) -> None:
        dealt = deal(DistributedSampler, **draw)

        counts: dict[int, int] = dict.fromkeys(range(draw["length"]), 0)
        for index in flat(dealt):
            counts[index] += 1
        assert len({len(part) for part in dealt}) == 1
        if draw["drop_last"]:
            assert sum(counts.values()) == draw["length"] // draw["world"] * draw["world"]
            assert all(count <= 1 for count in counts.values())
        elif draw["length"]:
            assert min(counts.values()) >= 1
            assert max(counts.values()) - min(counts.values()) <= 1

    def test_takes_world_and_rank_from_the_call(self) -> None:
        assert on_each_rank(2, lambda: list(DistributedSampler(range(4), shuffle=False))) == [[0, 2], [1, 3]]
        assert list(DistributedSampler(range(3), shuffle=False)) == [0, 1, 2]

    def test_keeps_its_rank_when_iterated_in_another_thread_after_the_call(self) -> None:
        with enter_call(CallContext(world=2, rank=1)):
            sampler = DistributedSampler(range(4), shuffle=False)

        assert in_a_thread(lambda: list(sampler)) == [1, 3]

    def test_each_epoch_has_its_order_and_can_be_repeated(self) -> None:
        sampler = DistributedSampler(range(50))
        first, again = list(sampler), list(sampler)
        sampler.set_epoch(1)

        assert first == again
        assert list(sampler) != first
        assert sorted(sampler) == sorted(first) == list(range(50))

    def test_works_without_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)

        parts = on_each_rank(3, lambda: list(DistributedSampler(range(9))))

        assert sorted(flat(parts)) == list(range(9))
        assert all(type(index) is int for index in flat(parts))

    def test_deals_what_torch_draws_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)

        assert list(DistributedSampler(range(10), seed=0)) == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]

    @pytest.mark.parametrize("num_replicas, rank", [(2, 2), (2, -1), (0, 0), (None, 1)])
    def test_a_rank_outside_the_world_is_refused(self, num_replicas: int | None, rank: int) -> None:
        with pytest.raises(ConfigurationError, match="rank"):
            DistributedSampler(range(4), num_replicas=num_replicas, rank=rank)

    def test_a_dataset_without_a_length_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="DistributedSampler needs a value with a length"):
            DistributedSampler(iter([1]))  # type: ignore[arg-type]


def test_it_loads_nothing_heavy() -> None:
    code = "import sys, json, skyward.distributed.runtime; print(json.dumps(sorted(sys.modules)))"

    assert not {"numpy", "torch", "pandas", "distributed", "skyward.node"} & set(in_a_program(code))
