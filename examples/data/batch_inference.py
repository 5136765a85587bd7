"""Predictions for every file of a folder: the files travel with the pool, the model once to each node, results back.

usage: python examples/data/batch_inference.py [FOLDER]

FOLDER gets the files and the classes; without it they are thrown away. Needs scikit-learn. On a cloud: replace
`sky.Local()` with `sky.AWS()`, for example. For more data than you want to send, keep the folder in a bucket:
`volume=[sky.S3Volume(...)]` instead of `includes=`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import skyward as sky


@sky.compute
def predict(model: KNeighborsClassifier) -> str:
    """Classify this worker's files, and write the classes of each into a file of the node's folder."""
    info = sky.instance_info()
    mine = sky.shard(sorted(Path("images").glob("*.npy")))
    for file in mine:
        np.savetxt(f"{file.stem}.csv", model.predict(np.load(file)), fmt="%d")
    return f"worker {info.worker} of node {info.node}: {len(mine)} files"


def main(folder: str) -> None:
    """Make a folder of files and a model, classify, and bring the results back."""
    digits = load_digits()
    images, unseen = np.repeat(digits.data[:1500], 4, axis=0), digits.data[1500:1788]
    model = KNeighborsClassifier(3, algorithm="brute").fit(images, np.repeat(digits.target[:1500], 4))  # 3 MB
    (source := Path(folder, "images")).mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.split(unseen, 12)):
        np.save(source / f"part-{number:02}.npy", part)

    image = sky.Image(pip=["scikit-learn"], includes=[str(source)])
    with sky.ComputePool(provider=sky.Local(), nodes=2, image=image) as pool:
        print(*(predict(model) @ pool), sep="\n")
        found = sorted(pool.fetch("part-*.csv", to=Path(folder, "classes")), key=lambda path: path.name)

    classes = np.concatenate([np.loadtxt(path) for path in found])
    print(f"{len(found)} files, {len(classes)} images, {np.mean(classes == digits.target[1500:1788]):.1%} correct")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)
