"""The importance of a model's features: shuffle each of them many times, and measure the loss of accuracy.

usage: python examples/joblib/permutation_importance.py [loky|skyward]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from joblib import parallel_config
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.inspection import permutation_importance
from sklearn.model_selection import train_test_split

import skyward as sky
from skyward.integrations import ScikitLearnPool


def main() -> None:
    cancer = load_breast_cancer()
    train, test, train_labels, test_labels = train_test_split(cancer.data, cancer.target, random_state=0)
    model = GradientBoostingClassifier(random_state=0).fit(train, train_labels)

    found = permutation_importance(model, test, test_labels, n_repeats=10, n_jobs=-1, random_state=0)

    print(f"accuracy {model.score(test, test_labels):.3f}, and what is lost without")
    for feature in found.importances_mean.argsort()[::-1][:5]:
        lost, give_or_take = found.importances_mean[feature], found.importances_std[feature]
        print(f"  {cancer.feature_names[feature]:22} {lost:.3f} ± {give_or_take:.3f}")


if __name__ == "__main__":
    [backend] = sys.argv[1:] or ["loky"]
    pool = ScikitLearnPool(provider=sky.Local(), concurrency=2) if backend == "skyward" else nullcontext()
    with pool, parallel_config(backend):
        main()
