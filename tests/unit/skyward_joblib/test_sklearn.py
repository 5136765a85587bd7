"""scikit-learn, which takes a second and a half to import: tests do it, not each process that collects them."""

from __future__ import annotations

import numpy as np
import pytest

from skyward_joblib import sklearn_backend


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images[:300], labels[:300]


def test_grid_search_runs_in_the_fleet_and_finds_what_it_finds_here(fleet, digits):
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KNeighborsClassifier

    search = GridSearchCV(KNeighborsClassifier(), {"n_neighbors": [1, 3, 5]}, cv=3)
    expected = search.fit(*digits).best_score_
    with sklearn_backend(fleet):
        assert search.fit(*digits).best_score_ == expected
    assert fleet.labels


def test_cross_validation_runs_in_the_fleet(fleet, digits):
    from sklearn.model_selection import cross_val_score
    from sklearn.neighbors import KNeighborsClassifier

    with sklearn_backend(fleet):
        scores = cross_val_score(KNeighborsClassifier(), *digits, cv=4, n_jobs=-1)
    assert scores.shape == (4,)
    assert scores.mean() > 0.9
    assert fleet.labels


def test_forest_is_grown_in_the_fleet_and_predicts_here(fleet, digits):
    from sklearn.ensemble import RandomForestClassifier

    images, labels = digits
    with sklearn_backend(fleet):
        forest = RandomForestClassifier(8, random_state=0, n_jobs=-1).fit(images, labels)
        sent = len(fleet.labels)
        predicted = forest.predict(images)
    assert np.mean(predicted == labels) > 0.9
    assert sent
    assert len(fleet.labels) == sent


def test_loop_of_sklearns_own_carries_its_settings(fleet):
    from sklearn import config_context, get_config
    from sklearn.utils.parallel import Parallel, delayed

    with sklearn_backend(fleet), config_context(working_memory=17):
        settings = Parallel()([delayed(get_config)()])
    assert settings[0]["working_memory"] == 17


def test_errors_of_estimators_reach_the_caller(fleet, digits):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    search = GridSearchCV(LogisticRegression(max_iter=10), {"C": [-1.0]}, cv=2, error_score="raise")
    with sklearn_backend(fleet), pytest.raises(ValueError, match="'C' parameter of LogisticRegression"):
        search.fit(*digits)
