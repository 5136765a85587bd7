"""Inference on many rows: each worker processes its part, and the results return in order.

usage: python examples/training/sharded_inference.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import skyward as sky


def make_model() -> nn.Module:
    """Return a model with ten scores for every row of 64 numbers."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@sky.compute
def predict(weights: dict[str, torch.Tensor], rows: np.ndarray) -> np.ndarray:
    """Return the class of each row of this worker's part."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device).eval()
    model.load_state_dict(weights)

    # The workers of a node share one copy of `rows` in memory, and a part of it is a view.
    mine = sky.shard(rows)
    print(f"{len(mine)} of {len(rows)} rows")
    with torch.inference_mode():
        return np.concatenate(
            [model(torch.tensor(batch).to(device)).argmax(dim=1).cpu().numpy() for batch in np.array_split(mine, 10)]
        )


def main() -> None:
    torch.manual_seed(0)
    model = make_model()  # replace it with your trained model
    rows = np.random.default_rng(0).normal(size=(40_000, 64)).astype("f4")

    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, image=sky.Image(pip=["torch", "numpy"])) as pool:
        parts = predict(model.state_dict(), rows) @ pool

    classes = np.concatenate(parts)  # parts are ordered by node and worker, as in shard
    with torch.inference_mode():
        here = model(torch.tensor(rows)).argmax(dim=1).numpy()
    print(f"{len(classes)} rows classified, {np.mean(classes == here):.2%} as here")


if __name__ == "__main__":
    main()
