"""A grid search of scikit-learn over a PyTorch model: every fit on a worker of its own, with its own GPU if it has one.

usage: python examples/training/skorch_grid.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

import skyward as sky
from skyward.integrations import ScikitLearnPool


class Digits(nn.Module):
    """Network with scores of the ten digits for an image of 64 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a row of scores per image."""
        return self.layers(images)


class Net(NeuralNetClassifier):
    """Classifier that selects its device in ``fit``, on the worker, and not in the process of the search."""

    def initialize(self) -> Net:
        """Select the device, and create the model on it."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        return super().initialize()


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("f4")
    torch.manual_seed(0)
    net = Net(
        Digits, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, max_epochs=10, train_split=None, verbose=0
    )
    grid = {"module__width": [8, 64], "lr": [0.001, 0.01]}

    # On GPUs: accelerator=sky.accelerators.A10G(count=4), concurrency=4 makes four workers of a GPU each.
    with ScikitLearnPool(provider=sky.Local(), concurrency=2, image=sky.Image(pip=["torch", "skorch"])):
        search = GridSearchCV(net, grid, cv=3, n_jobs=-1).fit(images[:1200], labels[:1200])

    print(f"best: {search.best_params_}, accuracy {search.best_score_:.3f}")
    print(f"on images that it has not seen: {search.score(images[1200:], labels[1200:]):.3f}")


if __name__ == "__main__":
    main()
