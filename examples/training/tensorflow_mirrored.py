"""Data-parallel training with TensorFlow: a MultiWorkerMirroredStrategy that finds its workers automatically.

usage: python examples/training/tensorflow_mirrored.py
"""

from __future__ import annotations

import numpy as np

import skyward as sky


@sky.compute
@sky.distributed.tensorflow()
def train(features: np.ndarray, targets: np.ndarray, steps: int) -> tuple[int, np.ndarray]:
    """Fit a line through all data by gradient descent; return the number of workers and the coefficients."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG, which is set
    with strategy.scope():
        coefficients = tf.Variable(tf.zeros([features.shape[1], 1]))  # mirrored on every worker

    x, y = (tf.constant(part) for part in sky.shard(features, targets))
    workers = strategy.num_replicas_in_sync

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ coefficients - y) ** 2)
        gradient = tape.gradient(loss, coefficients)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
        coefficients.assign_sub(0.1 * total)

    @tf.function(autograph=False)  # nothing here depends on values
    def step_everywhere(x: tf.Tensor, y: tf.Tensor) -> None:
        strategy.run(step, args=(x, y))

    for _ in range(steps):
        step_everywhere(x, y)
    return workers, coefficients.numpy().flatten()


def main() -> None:
    chance = np.random.default_rng(0)
    features = chance.normal(size=(4000, 3)).astype("f4")
    noise = chance.normal(scale=0.1, size=(4000, 1))
    targets = (features @ np.array([[1.0], [-2.0], [0.5]]) + noise).astype("f4")

    # On GPUs: pip=["tensorflow[and-cuda]"].
    with sky.ComputePool(provider=sky.Local(), concurrency=2, image=sky.Image(pip=["tensorflow-cpu"])) as pool:
        outcomes = train(features, targets, steps=100) @ pool

    for rank, (workers, coefficients) in enumerate(outcomes):
        print(f"worker {rank} of {workers}: {coefficients.round(4)}")
    print(f"least squares: {np.linalg.lstsq(features, targets)[0].flatten().round(4)}")


if __name__ == "__main__":
    main()
