"""Fine-tuning for images, end to end: pretrain on many, fine-tune on few with other classes, evaluate, plot.

usage: python examples/training/image_classification.py [PICTURE]

The images are drawn here, so that nothing is downloaded; replace `pretrain` with weights of yours, or torchvision's.
Needs torch, and matplotlib for the picture. On a cloud: `provider=sky.AWS(), accelerator="L4"`.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import skyward as sky

SHAPES = ("disc", "ring", "square", "frame", "cross", "diamond")
COUNTS = (12, 24, 48, 96)


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images, 16 by 16 pixels, and the index of the shape on each."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(len(SHAPES), size=count)
    images = chance.normal(0, 0.3, (count, 1, 16, 16)).astype("f4")
    for image, label in zip(images, labels, strict=True):
        radius = chance.uniform(4, 6)
        dx, dy = (np.abs(axis - chance.uniform(6, 10)) for axis in np.mgrid[:16, :16])
        norms = (
            np.hypot(dx, dy),
            np.hypot(dx, dy),
            np.maximum(dx, dy),
            np.maximum(dx, dy),
            np.maximum(dx, dy),
            dx + dy,
        )
        hollow = {"ring": norms[1] > radius - 2, "frame": norms[3] > radius - 2, "cross": np.minimum(dx, dy) < 1.5}
        image[0] += (norms[label] < radius) & hollow.get(SHAPES[label], True)
    return torch.tensor(images), torch.tensor(labels)


def make_model(classes: int) -> nn.Sequential:
    """Return a small convolutional network; its last layer has one score for each class."""
    first = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(128, classes))


def fit(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


@sky.compute
def pretrain() -> dict[str, torch.Tensor]:
    """Learn the six shapes from many images; return the weights of all layers except the last."""
    torch.manual_seed(0)
    fit(model := make_model(6), *draw(1500, seed=1), epochs=5)
    return {name: weights for name, weights in model.state_dict().items() if not name.startswith("7.")}


@sky.compute
def finetune(weights: dict[str, torch.Tensor], examples: int) -> float:
    """Learn from few images whether a shape is round, square or pointed; return the accuracy on others."""
    torch.manual_seed(0)
    model = make_model(3)
    model.load_state_dict(weights, strict=False)
    images, shapes = draw(examples, seed=2)
    fit(model, images, shapes // 2, epochs=20)
    images, shapes = draw(300, seed=3)
    with torch.inference_mode():
        return float((model(images).argmax(1) == shapes // 2).float().mean())


def main(picture: str = "") -> None:
    """Pretrain once, then fine-tune with several numbers of examples at the same time, and compare."""
    with sky.ComputePool(provider=sky.Local(), nodes=2, image=sky.Image(pip=["torch", "numpy"])) as pool:
        weights = pretrain() >> pool
        tuned = sky.gather(*[finetune(weights, count) for count in COUNTS]) >> pool
        scratch = sky.gather(*[finetune({}, count) for count in COUNTS]) >> pool

    for count, with_weights, without in zip(COUNTS, tuned, scratch, strict=True):
        print(f"{count:2} examples: {with_weights:.1%} fine-tuned, {without:.1%} from scratch")
    if picture:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3), layout="constrained")
        curves, *grid = figure.subplot_mosaic("CCAB;CCDE").values()
        curves.plot(COUNTS, tuned, "o-", COUNTS, scratch, "s--")
        curves.set(xlabel="examples", ylabel="accuracy", xticks=COUNTS)
        curves.legend(["fine-tuned", "from scratch"])
        for axes, image, shape in zip(grid, *draw(4, seed=14), strict=True):
            axes.imshow(image[0], cmap="gray")
            axes.set_title(("round", "square", "pointed")[shape // 2], fontsize="small")
            axes.set_axis_off()
        figure.savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
