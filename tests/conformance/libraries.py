"""Libraries that run on Dask or joblib, each with a small problem: on a fleet of two nodes, and on the control.

``more.py`` runs this file; a test's name is the library's.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import joblib
import numpy as np
import pytest
from distributed import Client

import skyward_joblib  # noqa: F401 - the backend

SEED = 0


@pytest.fixture(scope="module")
def table() -> tuple[Any, Any]:
    rng = np.random.default_rng(SEED)
    features = rng.normal(size=(600, 6))
    return features, 3 * features[:, 0] + features[:, 1] + rng.normal(scale=0.1, size=600)


def in_parts(table: tuple[Any, Any]) -> tuple[Any, Any]:
    features, target = table
    return da.from_array(features, chunks=(150, 6)), da.from_array(target, chunks=150)


def agreement(found: Any, target: Any) -> float:
    return float(np.corrcoef(np.asarray(found), target)[0, 1])


@pytest.fixture
def in_parallel(request: pytest.FixtureRequest, cluster: Any) -> Any:
    """The joblib backend: the cluster's pool, or loky."""
    if request.config.getoption("--backend") == "skyward":
        return joblib.parallel_config("skyward", pool=cluster.pool)
    return joblib.parallel_config("loky", n_jobs=2)


def test_xgboost_dask(client: Client, table: tuple[Any, Any]) -> None:
    from xgboost.dask import DaskXGBRegressor

    features, target = in_parts(table)
    model = DaskXGBRegressor(n_estimators=30, max_depth=3, tree_method="hist")
    model.client = client
    model.fit(features, target)
    assert agreement(model.predict(features).compute(), table[1]) > 0.98


def test_lightgbm_dask(client: Client, table: tuple[Any, Any]) -> None:
    from lightgbm import DaskLGBMRegressor

    features, target = in_parts(table)
    model = DaskLGBMRegressor(n_estimators=30, min_child_samples=5, client=client, verbosity=-1)
    model.fit(features, target)
    assert agreement(model.predict(features).compute(), table[1]) > 0.98


def test_dask_ml(client: Client, table: tuple[Any, Any]) -> None:
    from dask_ml.linear_model import LinearRegression

    features, target = in_parts(table)
    model = LinearRegression(solver="gradient_descent").fit(features, target)
    assert agreement(model.predict(features).compute(), table[1]) > 0.98


def test_optuna(client: Client) -> None:
    import optuna
    from optuna_integration import DaskStorage

    def objective(trial: Any) -> float:
        return (trial.suggest_float("x", -10, 10) - 2) ** 2

    study = optuna.create_study(storage=DaskStorage(client=client), sampler=optuna.samplers.RandomSampler(seed=SEED))
    futures = [client.submit(study.optimize, objective, n_trials=5, pure=False) for _ in range(4)]
    client.gather(futures)
    assert len(study.trials) == 20
    assert study.best_value < 5


def test_imbalanced_learn(in_parallel: Any) -> None:
    from imblearn.ensemble import BalancedBaggingClassifier
    from sklearn.datasets import make_classification
    from sklearn.model_selection import cross_val_score

    features, classes = make_classification(n_samples=300, weights=[0.9], random_state=SEED)
    model = BalancedBaggingClassifier(n_estimators=8, random_state=SEED)
    with in_parallel:
        assert cross_val_score(model, features, classes, scoring="balanced_accuracy", cv=3).mean() > 0.6


def test_tsfresh(request: pytest.FixtureRequest, cluster: Any) -> None:
    import pandas as pd
    from tsfresh import extract_features
    from tsfresh.feature_extraction import MinimalFCParameters
    from tsfresh.utilities.distribution import ClusterDaskDistributor

    series = pd.DataFrame({"id": [1, 1, 1, 2, 2, 2], "time": [0, 1, 2] * 2, "value": [1.0, 2, 3, 5, 5, 5]})
    features = extract_features(
        series,
        column_id="id",
        column_sort="time",
        default_fc_parameters=MinimalFCParameters(),
        distributor=ClusterDaskDistributor(address=cluster.scheduler_address),
        disable_progressbar=True,
    )
    assert list(features["value__mean"]) == [2.0, 5.0]
