"""Data-parallel training with Keras on JAX: `fit` as usual, on every worker's part of the data.

usage: python examples/training/keras_jax.py
"""

from __future__ import annotations

import numpy as np

import skyward as sky


@sky.compute
@sky.distributed.keras(backend="jax")
def train(points: np.ndarray, labels: np.ndarray, epochs: int) -> tuple[list[float], list[np.ndarray]]:
    """Learn which points lie in a circle; return the loss of each epoch and the final weights."""
    import keras

    # Keras averages over all devices of all workers (keras.distribution.DataParallel).
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1, "sigmoid")])
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")

    mine, labels_of_mine = sky.shard(points, labels)
    history = model.fit(mine, labels_of_mine, batch_size=32, epochs=epochs, verbose=0)
    return history.history["loss"], model.get_weights()


def main() -> None:
    points = np.random.default_rng(0).normal(size=(4096, 2)).astype("f4")
    labels = (np.linalg.norm(points, axis=1, keepdims=True) < 1.2).astype("f4")

    # On GPUs: pip=["keras", "jax[cuda12]"].
    image = sky.Image(pip=["keras", "jax"])
    with sky.ComputePool(provider=sky.Local(), concurrency=2, image=image) as pool:
        outcomes = train(points, labels, epochs=5) @ pool

    for rank, (losses, weights) in enumerate(outcomes):
        total = sum(float(array.sum()) for array in weights)
        print(f"rank {rank}: loss {losses[0]:.3f} → {losses[-1]:.3f}, weights add up to {total:.5f}")


if __name__ == "__main__":
    main()
