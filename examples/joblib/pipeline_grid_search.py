"""A grid search over a whole pipeline, scaling and components included.

usage: python examples/joblib/pipeline_grid_search.py [loky|skyward]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from joblib import parallel_config
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC

import skyward as sky
from skyward.integrations import ScikitLearnPool


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    pipeline = Pipeline([("scale", StandardScaler()), ("reduce", PCA(random_state=0)), ("classify", SVC())])
    grid = {
        "scale": [StandardScaler(), MinMaxScaler()],
        "reduce__n_components": [10, 20, 40],
        "classify__C": [1, 10],
    }
    search = GridSearchCV(pipeline, grid, cv=3, n_jobs=-1).fit(images[:600], labels[:600])

    print(f"accuracy {search.best_score_:.3f} on unseen digits, with")
    for name, value in search.best_params_.items():
        print(f"  {name} = {value}")
    print(f"accuracy {search.score(images[600:], labels[600:]):.3f} on all the others")


if __name__ == "__main__":
    [backend] = sys.argv[1:] or ["loky"]
    pool = ScikitLearnPool(provider=sky.Local(), concurrency=2) if backend == "skyward" else nullcontext()
    with pool, parallel_config(backend):
        main()
