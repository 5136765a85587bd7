"""What a training leaves behind, when it ends well and when it does not: nothing that is in the way of the next one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ConfigurationError, WorkerLostError

PROMPTLY_S = 15.0


def sum_with_torch() -> float:
    import torch
    from torch import distributed

    total = torch.tensor([float(distributed.get_rank())])
    distributed.all_reduce(total)
    return float(total)


def sum_with_jax() -> float:
    import jax
    from jax.experimental.multihost_utils import process_allgather

    return float(process_allgather(jax.process_index()).sum())


def sum_with_tensorflow() -> float:
    import tensorflow as tf

    # One for the process: with a second one its server forgets what others may still ask it about the first.
    strategy = vars(sys).get("strategy") or tf.distribute.MultiWorkerMirroredStrategy()
    vars(sys)["strategy"] = strategy

    def on_replica() -> Any:
        rank = tf.constant(float(strategy.cluster_resolver.task_id))
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, rank)

    return float(strategy.run(on_replica))


FRAMEWORKS = {
    "torch": (sky.distributed.torch(), sum_with_torch),
    "jax": (sky.distributed.jax(), sum_with_jax),
    "tensorflow": (sky.distributed.tensorflow(), sum_with_tensorflow),
}


def trainer(framework: str, then: Callable[[Callable[[], float]], None] = lambda _: None) -> Any:
    """A function that sums the ranks with a framework, does ``then``, and sums them again."""
    decorate, rank_sum = FRAMEWORKS[framework]

    @sky.compute
    @decorate
    def train() -> tuple[float, float]:
        first = rank_sum()
        then(rank_sum)
        return first, rank_sum()

    return train


def training(framework: str, then: Callable[[Callable[[], float]], None] = lambda _: None) -> Any:
    """The call."""
    return trainer(framework, then)()


def own_place() -> tuple[int, int]:
    info = sky.instance_info()
    return info.node, info.worker


def fail_on(failing: tuple[int, int]) -> Callable[[Callable[[], float]], None]:
    """While the others wait for it in a collective."""

    def fail(rank_sum: Callable[[], float]) -> None:
        if own_place() == failing:
            raise ValueError(f"{failing} has had enough")
        rank_sum()

    return fail


def kill_first_of_node_1(noted: Path) -> Callable[[Callable[[], float]], None]:
    """In the middle, noting when: the others wait for it in a collective."""

    def kill(rank_sum: Callable[[], float]) -> None:
        if own_place() == (1, 0):
            noted.write_text(str(time.time()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        rank_sum()

    return kill


TOTAL = ((6.0, 6.0),) * 4
TOTAL_OF_TWO = ((1.0, 1.0),) * 2


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pool_and_total(
    framework: str, local_pool: sky.ComputePool, small_pool: sky.ComputePool
) -> tuple[sky.ComputePool, tuple[Any, ...]]:
    return (small_pool, TOTAL_OF_TWO) if framework == "tensorflow" else (local_pool, TOTAL)


@pytest.mark.parametrize(
    ("framework", "failing"), [("torch", (0, 0)), ("jax", (0, 1)), ("tensorflow", (1, 0))], indirect=["framework"]
)
def test_after_a_rank_has_raised_its_error_arrives_and_the_next_training_works(
    pool_and_total: tuple[sky.ComputePool, tuple[Any, ...]], framework: str, failing: tuple[int, int]
) -> None:
    pool, total = pool_and_total
    with pytest.raises(ValueError, match="has had enough") as caught:
        training(framework, fail_on(failing)) @ pool
    node, worker = failing
    assert f"raised on node {node}, worker {worker}" in caught.value.__notes__
    assert training(framework) @ pool == total


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_training_inside_a_call_that_is_none_is_its_workers_own(local_pool: sky.ComputePool, framework: str) -> None:
    alone = trainer(framework)

    @sky.compute
    def outer() -> tuple[float, float]:
        return alone.local()

    assert outer() @ local_pool == ((0.0, 0.0),) * 4


@pytest.mark.parametrize("framework", FRAMEWORKS, indirect=True)
def test_after_a_rank_was_killed_the_others_end_at_once_and_the_next_training_works(
    pool_and_total: tuple[sky.ComputePool, tuple[Any, ...]], framework: str, tmp_path: Path
) -> None:
    pool, total = pool_and_total
    noted = tmp_path / "killed"
    with pytest.raises(WorkerLostError, match=r"node 1, worker 0.*signal 9 \(SIGKILL\)"):
        training(framework, kill_first_of_node_1(noted)) @ pool
    assert time.time() - float(noted.read_text(encoding="utf-8")) < PROMPTLY_S
    assert training(framework) @ pool == total


def test_frameworks_follow_each_other_in_one_pool(local_pool: sky.ComputePool) -> None:
    """Both follow TensorFlow in test_frameworks.py."""
    for framework in ("jax", "torch", "jax", "torch"):
        assert training(framework) @ local_pool == TOTAL


def test_two_pools_train_at_once(local_pool: sky.ComputePool, open_pool: Callable[..., sky.ComputePool]) -> None:
    with open_pool(concurrency=2) as other, ThreadPoolExecutor(2) as threads:
        for framework in ("torch", "jax"):  # TensorFlow's ports are found as jax's
            both = threading.Barrier(2)

            def train(pool: sky.ComputePool, framework: str = framework, both: threading.Barrier = both) -> Any:
                both.wait(60)
                return training(framework) @ pool

            here, there = threads.submit(train, local_pool), threads.submit(train, other)
            assert (here.result(120), there.result(120)) == (TOTAL, ((1.0, 1.0),) * 2)


def test_what_was_set_for_a_training_is_as_before_after_it(local_pool: sky.ComputePool) -> None:
    @sky.compute
    def look() -> tuple[dict[str, str], bool, int]:
        import jax
        from torch import distributed

        return dict(os.environ), distributed.is_initialized(), jax.process_count()

    look() @ local_pool
    before = look() @ local_pool
    for framework in ("torch", "jax"):
        training(framework) @ local_pool
    assert look() @ local_pool == before
    assert {(initialised, processes) for _, initialised, processes in before} == {(False, 1)}


def test_a_backend_for_gpus_says_that_there_are_none(local_pool: sky.ComputePool) -> None:
    @sky.compute
    @sky.distributed.torch(backend="nccl")
    def train() -> None:
        return None

    with pytest.raises(ConfigurationError, match=r'backend="nccl" needs a GPU, and torch can use none on node'):
        train() @ local_pool


def test_several_workers_are_asked_for_with_the_other_operator(local_pool: sky.ComputePool) -> None:
    with pytest.raises(ConfigurationError, match="use @"):
        training("torch") >> local_pool
