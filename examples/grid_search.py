"""A grid search on scikit-learn's digits, spread over two nodes of this machine."""

from __future__ import annotations

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import skyward as sky
from skyward.integrations import ScikitLearnPool


def main() -> None:
    """Search, and print the best score."""
    images, labels = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [1, 10, 100], "gamma": [0.0001, 0.001, 0.01]}, cv=3, n_jobs=-1)
    with ScikitLearnPool(provider=sky.Local(), nodes=2, concurrency=1):
        search.fit(images, labels)
    print(f"best score: {search.best_score_:.4f} with {search.best_params_}")


if __name__ == "__main__":
    main()
