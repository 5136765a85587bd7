"""A grid search on spot machines, for at most two dollars: preempted fits run again elsewhere.

usage: python examples/providers/aws_search.py [REGION]
"""

from __future__ import annotations

import sys

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import skyward as sky
from skyward.integrations import ScikitLearnPool


def main(region: str = "us-east-1") -> None:
    """Search on the fleet with the code of a local search: ``n_jobs=-1``."""
    x, y = load_digits(return_X_y=True)
    grid = GridSearchCV(SVC(), {"C": [1, 10], "gamma": [1e-4, 1e-3]}, cv=3, n_jobs=-1)
    with ScikitLearnPool(provider=sky.AWS(region=region), nodes=2, cpu=2, concurrency=2, max_cost=2.0):
        grid.fit(x, y)
    print(f"best score: {grid.best_score_:.4f} with {grid.best_params_}")


if __name__ == "__main__":
    main(*sys.argv[1:])
