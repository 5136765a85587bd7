"""scikit-learn through joblib."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.measured import Measured, opened, timed_twice
from benchmarks.peers import WORKERS, Peer

__all__ = ["cross_validation", "forest", "grid_search", "large_search"]


@opened
def grid_search(peer: Peer) -> Measured:
    """SVC on the digits, 24 candidates, 3 folds."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    X, y = load_digits(return_X_y=True)
    grid = {"C": [0.1, 1, 10, 100], "gamma": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, "scale"]}
    return _fitted(peer, lambda: GridSearchCV(SVC(), grid, cv=3, n_jobs=WORKERS), X, y)


@opened
def cross_validation(peer: Peer) -> Measured:
    """Score a logistic regression on the digits, 10 folds."""
    from joblib import parallel_config
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score

    X, y = load_digits(return_X_y=True)

    def score(rows: int) -> None:
        with parallel_config(peer.joblib()):
            cross_val_score(LogisticRegression(max_iter=200), X[:rows] / 16, y[:rows], cv=10, n_jobs=WORKERS)

    score(300)  # imports
    return timed_twice(lambda: score(len(X)), repeats=3)


@opened
def forest(peer: Peer) -> Measured:
    """Fit a random forest of 500 trees."""
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier

    X, y = load_digits(return_X_y=True)
    return _fitted(peer, lambda: RandomForestClassifier(500, n_jobs=WORKERS, random_state=0), X, y)


@opened
def large_search(peer: Peer) -> Measured:
    """Search over 4 candidates, 3 folds, on 200 MB."""
    import numpy as np
    from sklearn.model_selection import GridSearchCV
    from sklearn.naive_bayes import GaussianNB

    X = np.random.default_rng(0).random((50_000, 500))
    y = np.arange(len(X)) % 2
    grid = {"var_smoothing": [1e-9, 1e-6, 1e-3, 1e-1]}
    return _fitted(peer, lambda: GridSearchCV(GaussianNB(), grid, cv=3, n_jobs=WORKERS), X, y)


def _fitted(peer: Peer, make: Callable[[], Any], X: Any, y: Any) -> Measured:
    from joblib import parallel_config

    def fit(rows: int) -> None:
        with parallel_config(peer.joblib()):
            make().fit(X[:rows], y[:rows])

    fit(300)  # imports
    return timed_twice(lambda: fit(len(X)), repeats=1)
