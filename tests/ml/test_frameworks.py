"""Every framework trains on several workers what gradient descent with all the data finds, from the same weights.

Each worker has its part of the data, and a step is made with all of it, so that the mean of the workers' gradients is
the gradient of one process that has everything. What differs is the order in which numbers are added up.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

import skyward as sky

STEPS = 5
RATE = 0.1
EXACT = {"rel": 1e-5, "abs": 1e-6}
"""Of 32-bit numbers that went through a few sums."""


@dataclass(frozen=True)
class Trained:
    """What one worker has to say."""

    rank: int
    world: int
    weights: list[float]
    environment: dict[str, str]


def data() -> tuple[Any, Any]:
    import numpy as np

    x = np.random.default_rng(7).normal(size=(64, 3)).astype("float32")
    return x, x @ np.array([[1.0], [2.0], [-1.0]], dtype="float32") + 0.5


def descended(*, bias: bool) -> list[float]:
    """Return the weights of a line after as many steps down the mean squared error: from ones, its bias from zero."""
    import numpy as np

    x, y = data()
    if bias:
        x = np.hstack([x, np.ones((len(x), 1))])
    weights = np.ones((x.shape[1], 1))
    weights[3:] = 0.0
    for _ in range(STEPS):
        weights -= RATE * 2 * x.T @ (x @ weights - y) / len(x)
    return [float(number) for number in weights.ravel()]


def trained(rank: int, world: int, weights: Any) -> Trained:
    import numpy as np

    told = {name: value for name, value in os.environ.items() if name in ("LOCAL_RANK", "RANK", "GROUP_RANK")}
    flat = np.concatenate([np.asarray(part).ravel() for part in weights])
    return Trained(rank, world, [float(number) for number in flat], told)


# --- torch ------------------------------------------------------------------------------------------------------------


def fit_torch(model: Any, x: Any, y: Any) -> list[Any]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


@sky.compute
@sky.distributed.torch()
def torch_together() -> Trained:
    import torch
    from torch import distributed

    line = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(line.weight)
    torch.nn.init.zeros_(line.bias)
    if distributed.get_rank() > 0:  # the first one's are broadcast
        torch.nn.init.constant_(line.weight, 7.0)
        torch.nn.init.constant_(line.bias, 7.0)
    model = torch.nn.parallel.DistributedDataParallel(line)
    return trained(distributed.get_rank(), distributed.get_world_size(), fit_torch(model, *sky.shard(*data())))


# --- jax --------------------------------------------------------------------------------------------------------------


def fit_jax(x: Any, y: Any) -> list[Any]:
    import jax

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return ((x @ weights - y) ** 2).mean()

    step = jax.jit(lambda weights, x, y: weights - RATE * jax.grad(loss)(weights, x, y))
    weights = jax.numpy.ones((3, 1))
    for _ in range(STEPS):
        weights = step(weights, x, y)
    return [weights]


@sky.compute
@sky.distributed.jax()
def jax_together() -> Trained:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    rows = NamedSharding(jax.sharding.Mesh(jax.devices(), ("rows",)), PartitionSpec("rows"))
    x, y = (jax.make_array_from_process_local_data(rows, part) for part in sky.shard(*data()))
    return trained(jax.process_index(), jax.process_count(), fit_jax(x, y))


# --- tensorflow -------------------------------------------------------------------------------------------------------


def fit_tensorflow(reduced: Callable[[Any, Any], Any], x: Any, y: Any) -> list[Any]:
    import tensorflow as tf

    weights = tf.ones((3, 1))

    def gradient(weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean((tf.constant(x) @ weights - tf.constant(y)) ** 2)
        return tape.gradient(loss, weights)

    step = tf.function(lambda weights: weights - RATE * reduced(gradient, weights))
    for _ in range(STEPS):
        weights = step(weights)
    return [weights.numpy()]


@sky.compute
@sky.distributed.tensorflow()
def tensorflow_together() -> Trained:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def mean(gradient: Callable[[Any], Any], weights: Any) -> Any:
        def on_replica() -> Any:
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce(tf.distribute.ReduceOp.MEAN, gradient(weights))

        return strategy.run(on_replica)

    weights = fit_tensorflow(mean, *sky.shard(*data()))
    return trained(strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync, weights)


# --- keras ------------------------------------------------------------------------------------------------------------


def fit_keras(x: Any, y: Any, model_of: Callable[[Any], Any]) -> list[Any]:
    import keras

    model = model_of(keras)
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    model.fit(x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0)
    return model.get_weights()


def line(keras: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])


def line_with_averages(keras: Any) -> Any:
    import torch
    from torch import distributed

    class Averaging(keras.Sequential):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            gradients = [weight.value.grad for weight in self.trainable_weights]
            for gradient in gradients:
                distributed.all_reduce(gradient)
                gradient.div_(distributed.get_world_size())
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss}

    return Averaging([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])


@sky.compute
@sky.distributed.keras(backend="jax")
def keras_on_jax_together() -> Trained:
    import jax

    return trained(jax.process_index(), jax.process_count(), fit_keras(*sky.shard(*data()), line))


@sky.compute
@sky.distributed.keras(backend="tensorflow")
def keras_on_tensorflow_together() -> Trained:
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    weights = fit_keras(*data(), line)  # TensorFlow deals what it is given to the workers
    return trained(strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync, weights)


@sky.compute
@sky.distributed.keras(backend="torch")
def keras_on_torch_together() -> Trained:
    from torch import distributed

    weights = fit_keras(*sky.shard(*data()), line_with_averages)
    return trained(distributed.get_rank(), distributed.get_world_size(), weights)


# --- transformers -----------------------------------------------------------------------------------------------------


def fit_transformers(workers: int) -> tuple[Any, list[Any]]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(3)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(5)
    examples = [
        {"input_ids": torch.randint(0, 50, (8,), generator=generator), "labels": torch.tensor(n % 2)} for n in range(32)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=len(examples) // workers,  # a step is made with all of it, in whatever order
            num_train_epochs=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            use_cpu=True,
            ddp_backend="gloo" if torch.distributed.is_initialized() else None,
            ddp_find_unused_parameters=False,
            average_tokens_across_devices=False,  # this model's loss is a mean already, and would be multiplied
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=examples).train()
    return arguments, [parameter.detach().numpy() for parameter in model.parameters()]


@sky.compute
@sky.distributed.transformers()
def transformers_together() -> Trained:
    from torch import distributed

    arguments, weights = fit_transformers(distributed.get_world_size())
    return trained(arguments.process_index, arguments.world_size, weights)


@sky.compute
def transformers_alone() -> Trained:
    return trained(0, 1, fit_transformers(1)[1])


# --- the tests --------------------------------------------------------------------------------------------------------

TRAININGS = {
    "torch": torch_together,
    "transformers": transformers_together,
    "keras on torch": keras_on_torch_together,
    "jax": jax_together,
    "keras on jax": keras_on_jax_together,
    "tensorflow": tensorflow_together,
    "keras on tensorflow": keras_on_tensorflow_together,
}
WITHOUT_BIAS = ("jax", "tensorflow")
TORCHS = ("torch", "transformers", "keras on torch")
FOUR_WORKERS = ("torch", "jax")
TWO_WORKERS = ("keras on tensorflow", "tensorflow", "jax", "transformers", "keras on torch", "keras on jax")
"""TensorFlow, which others follow, and those with processes from others: 4 to 8 s of processor time to import each."""
ON_HOSTS = ("tensorflow", "torch", "jax")
"""These are given addresses, each in its own way."""
ALONE = ("torch", "jax", "tensorflow", "keras on tensorflow")
"""The others have their processes, and what is different with one, from these."""

Expected = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def one_worker(open_pool: Callable[[], sky.ComputePool]) -> Iterator[sky.ComputePool]:
    with open_pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(one_worker: sky.ComputePool) -> Expected:
    """Return the weights that one process gets: by the formula, or by one training of transformers."""

    @cache
    def expected(name: str) -> list[float]:
        if name == "transformers":
            return (transformers_alone() >> one_worker).weights
        return descended(bias=name not in WITHOUT_BIAS)

    return expected


@pytest.mark.parametrize("name", FOUR_WORKERS)
@pytest.mark.parametrize("pool", ["local"], indirect=True)
def test_four_workers_of_two_nodes_train_what_one_process_trains(
    pool: sky.ComputePool, expected: Expected, name: str
) -> None:
    check_training(pool, expected, 4, name)


@pytest.mark.parametrize("name", TWO_WORKERS)
@pytest.mark.parametrize("pool", ["small"], indirect=True)
def test_two_workers_train_what_one_process_trains(pool: sky.ComputePool, expected: Expected, name: str) -> None:
    check_training(pool, expected, 2, name)


@pytest.mark.parametrize("name", ON_HOSTS)
@pytest.mark.parametrize("pool", ["ssh"], indirect=True)
def test_workers_of_two_hosts_train_what_one_process_trains(
    pool: sky.ComputePool, expected: Expected, name: str
) -> None:
    check_training(pool, expected, 2, name)


def check_training(pool: sky.ComputePool, expected: Expected, world: int, name: str) -> None:
    """One training follows another in a pool; one of the same framework does in test_failures.py.

    ``pool`` is parametrized by itself: rows of several parameters have pytest open it again for each of them.
    """
    results = TRAININGS[name]() @ pool
    assert [(result.rank, result.world) for result in results] == [(rank, world) for rank in range(world)]
    for result in results:
        assert result.weights == pytest.approx(expected(name), **EXACT)
    if name in TORCHS:
        places = [(result.environment["GROUP_RANK"], result.environment["LOCAL_RANK"]) for result in results]
        assert places == [(str(node), str(local)) for node in range(2) for local in range(world // 2)]


@pytest.mark.parametrize("name", ALONE)
def test_one_worker_is_a_training_of_one(one_worker: sky.ComputePool, expected: Expected, name: str) -> None:
    result = TRAININGS[name]() >> one_worker
    assert (result.rank, result.world) == (0, 1)
    assert result.weights == pytest.approx(expected(name), **EXACT)
