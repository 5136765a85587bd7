"""Data-parallel training of a Keras model on PyTorch: Keras makes the model, PyTorch averages its gradients.

usage: python examples/training/keras_torch.py
"""

from __future__ import annotations

import numpy as np

import skyward as sky


@sky.compute
@sky.distributed.keras(backend="torch")
def train(points: np.ndarray, labels: np.ndarray, epochs: int) -> tuple[list[float], list[np.ndarray]]:
    """Learn which points lie in a circle; return the loss of each epoch and the final weights."""
    import keras
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1, "sigmoid")])

    # On this backend `fit` ignores the other workers. A Keras model is a torch module, though:
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss_of = keras.losses.BinaryCrossentropy()

    dataset = TensorDataset(torch.tensor(points), torch.tensor(labels))
    sampler = sky.DistributedSampler(dataset)
    losses: list[float] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, wanted in DataLoader(dataset, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = loss_of(wanted, parallel(batch).cpu())
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, model.get_weights()


def main() -> None:
    points = np.random.default_rng(0).normal(size=(4096, 2)).astype("f4")
    labels = (np.linalg.norm(points, axis=1, keepdims=True) < 1.2).astype("f4")

    with sky.ComputePool(provider=sky.Local(), concurrency=2, image=sky.Image(pip=["torch", "keras"])) as pool:
        outcomes = train(points, labels, epochs=5) @ pool

    for rank, (losses, weights) in enumerate(outcomes):
        total = sum(float(array.sum()) for array in weights)
        print(f"rank {rank}: loss {losses[0]:.3f} → {losses[-1]:.3f}, weights add up to {total:.5f}")


if __name__ == "__main__":
    main()
