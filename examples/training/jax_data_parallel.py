"""Data-parallel training with JAX: arrays that span all workers, and one jitted step over them.

usage: python examples/training/jax_data_parallel.py
"""

from __future__ import annotations

import numpy as np

import skyward as sky


@sky.compute
@sky.distributed.jax()
def train(features: np.ndarray, targets: np.ndarray, steps: int) -> tuple[int, np.ndarray]:
    """Fit a line through all data by gradient descent; return this process's index and the coefficients."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    # jax.distributed is initialized: jax.devices() lists the devices of all workers.
    mesh = Mesh(jax.devices(), ("data",))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    # Every worker contributes its part; together the parts form one array.
    x, y = (jax.make_array_from_process_local_data(by_rows, part) for part in sky.shard(features, targets))
    coefficients = jax.device_put(jnp.zeros(x.shape[1]), everywhere)

    def loss_of(coefficients: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ coefficients - y) ** 2)  # the mean over all workers' rows

    @jax.jit
    def step(coefficients: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(coefficients, x, y)
        return coefficients - 0.1 * gradient, loss

    for number in range(steps):
        coefficients, loss = step(coefficients, x, y)
        if number % 50 == 0 and jax.process_index() == 0:
            print(f"step {number}: loss {loss:.4f}")
    return jax.process_index(), np.asarray(coefficients)


def main() -> None:
    chance = np.random.default_rng(0)
    features = chance.normal(size=(4000, 3)).astype("f4")
    targets = features @ np.array([1.0, -2.0, 0.5], "f4") + chance.normal(scale=0.1, size=4000).astype("f4")

    # On GPUs: sky.Image(pip=["jax[cuda12]"]), and concurrency= the number of GPUs of a node.
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, image=sky.Image(pip=["jax"])) as pool:
        outcomes = train(features, targets, steps=200) @ pool

    for rank, coefficients in outcomes:
        print(f"process {rank}: {coefficients.round(4)}")
    best = np.linalg.lstsq(features, targets)[0]
    print(f"least squares: {best.round(4)}")


if __name__ == "__main__":
    main()
