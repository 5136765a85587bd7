"""scikit-learn, a Dask graph and native calls on one pool at the same time, and the processes that each of them used.

usage: python examples/three_front_ends.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from dask import delayed
from distributed import Client
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_validate
from sklearn.neighbors import KNeighborsClassifier

import skyward as sky
from skyward.integrations import sklearn_backend
from skyward_dask import SkywardCluster

ROUNDS = 24


def busy_pid() -> int:
    """Return the id of this process, after some work."""
    sum(number * number for number in range(500_000))
    return os.getpid()


class Witness(ClassifierMixin, BaseEstimator):
    """Classifier that records the process in which it was fitted."""

    def fit(self, features: np.ndarray, labels: np.ndarray) -> Witness:
        """Fit the classifier in this process."""
        self.model_ = KNeighborsClassifier().fit(features, labels)
        self.classes_ = self.model_.classes_
        self.pid_ = busy_pid()
        return self

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return the most likely labels."""
        return self.model_.predict(features)


def with_scikit_learn(pool: sky.ComputePool) -> set[int]:
    iris = load_iris()
    with sklearn_backend(pool):
        found = cross_validate(Witness(), iris.data, iris.target, cv=ROUNDS, n_jobs=-1, return_estimator=True)
    return {witness.pid_ for witness in found["estimator"]}


def with_dask(pool: sky.ComputePool) -> set[int]:
    with SkywardCluster(pool) as cluster, Client(cluster, set_as_default=False) as client:
        pids = [delayed(busy_pid, pure=False)() for _ in range(ROUNDS)]
        return client.compute(delayed(set)(pids)).result()


@sky.compute
def witness() -> int:
    return busy_pid()


def with_gather(pool: sky.ComputePool) -> set[int]:
    return set(sky.gather(*[witness() for _ in range(ROUNDS)]) >> pool)


def main() -> None:
    front_ends: dict[str, Callable[[sky.ComputePool], set[int]]] = {
        "scikit-learn": with_scikit_learn,
        "Dask": with_dask,
        "gather": with_gather,
    }
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool, ThreadPoolExecutor(len(front_ends)) as threads:
        running = {name: threads.submit(run, pool) for name, run in front_ends.items()}
        for name, pids in running.items():
            print(f"{name}: {' '.join(map(str, sorted(pids.result())))}")


if __name__ == "__main__":
    main()
