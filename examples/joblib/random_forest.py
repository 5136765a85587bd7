"""A random forest, grown in parallel tree by tree, and evaluated on the samples that each tree did not see.

usage: python examples/joblib/random_forest.py [loky|skyward]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from joblib import parallel_config
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

import skyward as sky
from skyward.integrations import ScikitLearnPool


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    forest = RandomForestClassifier(100, oob_score=True, n_jobs=-1, random_state=0).fit(images, labels)

    print(f"accuracy {forest.oob_score_:.3f} on digits that a tree has not seen; where it looks:")
    for row in forest.feature_importances_.reshape(8, 8):
        print("  " + "".join(" .:-=+*#"[min(int(300 * weight), 7)] for weight in row))


if __name__ == "__main__":
    [backend] = sys.argv[1:] or ["loky"]
    pool = ScikitLearnPool(provider=sky.Local(), concurrency=2) if backend == "skyward" else nullcontext()
    with pool, parallel_config(backend):
        main()
