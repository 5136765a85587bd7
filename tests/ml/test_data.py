"""Data as frameworks hold it: dealt as torch's own sampler deals it, and no more of it copied than a worker's part."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler as Oracle

import skyward as sky
from skyward.distributed.runtime import CallContext, enter_call
from skyward.errors import ConfigurationError

EPOCHS = (0, 1, 7)


def on_each_rank(world: int, ask: Callable[[], object], *, seed: int = 11) -> list:
    answers = []
    for rank in range(world):
        with enter_call(CallContext(world=world, rank=rank, seed=seed)):
            answers.append(ask())
    return answers


class Counting(Dataset):
    """Squares, and which of them were asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index * index


class Stream(IterableDataset):
    """Has a length, and no positions."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


# --- DistributedSampler -------------------------------------------------------------------------------------------


def draws(count: int) -> list[dict[str, int]]:
    rng = random.Random(7)
    return [
        {
            "length": rng.choice([1, 2, 3, rng.randrange(10, 500)]),
            "world": rng.randrange(1, 9),
            "seed": rng.choice([0, rng.randrange(1 << 20), rng.randrange(1 << 40)]),
            "shuffle": rng.random() < 0.7,
            "drop_last": rng.random() < 0.5,
        }
        for _ in range(count)
    ]


def dealt(make: type, *, length: int, world: int, **options) -> list[list[int]]:
    """What every rank gets in every epoch."""
    parts = []
    for rank in range(world):
        sampler = make(range(length), num_replicas=world, rank=rank, **options)
        for epoch in EPOCHS:
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
            assert len(parts[-1]) == len(sampler)
    return parts


@pytest.mark.parametrize("torch_is_loaded", [True, False])
@pytest.mark.parametrize("draw", draws(50), ids=str)
def test_every_rank_gets_the_indices_of_torchs_own_sampler(draw, torch_is_loaded, monkeypatch):
    expected = dealt(Oracle, **draw)
    if not torch_is_loaded:
        monkeypatch.setitem(sys.modules, "torch", None)

    assert dealt(sky.DistributedSampler, **draw) == expected


def test_a_loader_gets_the_batches_that_torchs_sampler_would_give_it():
    whole = TensorDataset(torch.arange(23))

    def batches(sampler) -> list[list[int]]:
        return [batch.tolist() for (batch,) in DataLoader(whole, batch_size=4, sampler=sampler)]

    ours = on_each_rank(3, lambda: batches(sky.DistributedSampler(whole, seed=5)))

    assert ours == [batches(Oracle(whole, num_replicas=3, rank=rank, seed=5)) for rank in range(3)]


def test_a_subset_is_dealt_by_its_own_positions():
    half = Subset(Counting(20), range(10, 20))

    parts = on_each_rank(2, lambda: [half[index] for index in sky.DistributedSampler(half)])

    assert sorted(chain.from_iterable(parts)) == [number * number for number in range(10, 20)]


def test_a_stream_cannot_be_dealt():
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with pytest.raises(ConfigurationError, match="DistributedSampler needs a value with a length"):
        sky.DistributedSampler(Endless())


@pytest.mark.timeout(120)
def test_the_workers_of_a_pool_share_out_a_dataset_as_torchs_sampler_would():
    @sky.compute
    def indices(length: int, epoch: int) -> list[int]:
        sampler = sky.DistributedSampler(range(length), seed=3)
        sampler.set_epoch(epoch)
        return list(sampler)

    oracles = [Oracle(range(101), num_replicas=4, rank=rank, seed=3) for rank in range(4)]
    for oracle in oracles:
        oracle.set_epoch(2)
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, display="quiet") as pool:
        assert list(indices(101, 2) @ pool) == [list(oracle) for oracle in oracles]


@pytest.mark.timeout(120)
def test_a_large_array_is_one_copy_on_each_node_and_a_part_of_it_is_none():
    @sky.compute
    def file_behind_my_part(whole: np.ndarray) -> tuple[int, str, float]:
        part = sky.shard(whole)
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            span, _, _, device, inode, *_ = line.split()
            first, _, end = span.partition("-")
            if int(first, 16) <= part.ctypes.data < int(end, 16):
                return sky.instance_info().node, f"{device} {inode}", float(part.sum())
        raise AssertionError("the part is nowhere")

    whole = np.arange(1_000_000.0)
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, display="quiet") as pool:
        found = file_behind_my_part(whole) @ pool

    assert [node for node, _, _ in found] == [0, 0, 1, 1]
    assert len({file for _, file, _ in found}) == len({(node, file) for node, file, _ in found}) == 2
    assert not any(file.endswith(" 0") for _, file, _ in found), "memory that no file is behind is not shared"
    assert sum(total for _, _, total in found) == whole.sum()


# --- shard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_becomes_a_subset_of_which_nothing_is_read(shuffle):
    whole = Counting(11)

    parts = on_each_rank(3, lambda: sky.shard(whole, shuffle=shuffle))

    assert whole.read == []
    assert {type(part) for part in parts} == {Subset}
    assert sorted(number for part in parts for (number,) in DataLoader(part)) == [n * n for n in range(11)]


def test_a_shard_of_a_subset_is_one_of_its_own_positions():
    first, second = on_each_rank(2, lambda: sky.shard(Subset(Counting(9), [8, 6, 4, 2])))

    assert [*first, *second] == [64, 36, 16, 4]


def test_a_part_of_a_tensor_is_a_view():
    whole = torch.arange(40, dtype=torch.bfloat16).reshape(10, 4)

    parts = on_each_rank(3, lambda: sky.shard(whole))

    assert torch.equal(torch.cat(parts), whole)
    assert {part.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}


def test_a_shuffled_part_of_a_tensor_is_as_large_as_the_part():
    whole = torch.arange(4000.0).reshape(1000, 4)

    parts = on_each_rank(4, lambda: sky.shard(whole, shuffle=True))

    assert {part.untyped_storage().nbytes() for part in parts} == {whole.nbytes // 4}
    assert torch.equal(torch.cat(parts)[:, 0].sort().values, whole[:, 0])


def test_tensors_arrays_and_frames_are_dealt_alike():
    pandas = pytest.importorskip("pandas")
    tensor, array = torch.arange(30), np.arange(30)
    frame = pandas.DataFrame({"x": range(30)}, index=range(100, 130))

    for first, second, third in on_each_rank(4, lambda: sky.shard(tensor, array, frame, shuffle=True)):
        assert first.tolist() == second.tolist() == third["x"].tolist()
        assert (third.index == second + 100).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_of_jax_are_dealt(shuffle):
    jax = pytest.importorskip("jax")
    whole = jax.numpy.arange(10)

    parts = on_each_rank(3, lambda: sky.shard(whole, shuffle=shuffle))

    assert all(isinstance(part, jax.Array) for part in parts)
    assert sorted(int(number) for part in parts for number in part) == list(range(10))


@pytest.mark.parametrize(
    "make, instead",
    [
        (Stream, "itertools.islice"),
        (lambda: DataLoader(Counting(4)), "sampler=DistributedSampler"),
        (lambda: torch.tensor(3.0), "indexed by position"),
        (lambda: {"x": torch.arange(3)}, "values"),
        (lambda: torch.arange(6).reshape(3, 2).to_sparse(), "rows cannot be selected"),
    ],
    ids=["stream", "loader", "scalar", "dict", "sparse"],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_what_cannot_be_divided_is_refused_with_what_to_do(make, instead, shuffle):
    value = make()

    with pytest.raises(ConfigurationError, match=instead) as refused:
        on_each_rank(2, lambda: sky.shard(value, shuffle=shuffle))
    assert type(value).__name__ in str(refused.value)
