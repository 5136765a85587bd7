"""An elastic pool on this machine: operators, broadcasts and a grid search, from no node and back to none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.errors import ConfigurationError
from skyward.ledger.ledger import Ledger
from skyward.submission import ArgumentMemo, Invocation
from skyward_joblib import ScikitLearnPool
from support.eventually import eventually


@sky.compute
def node() -> int:
    return sky.instance_info().node


@sky.compute
def nodes() -> Iterator[int]:
    yield sky.instance_info().node


def test_a_pool_comes_from_no_node_and_goes_back_to_none():
    with sky.ComputePool(provider=sky.Local(), nodes=(0, 2), idle="1s", display="quiet") as pool:
        for _ in range(2):
            assert (pool.status.wanted, pool.instance_count, pool.capacity) == (0, 0, 2)
            assert node() >> pool == 0
            for attempt in eventually(30):
                with attempt:
                    assert pool.instance_count == 0
        assert node() @ pool == (0,), "a broadcast brings a node"
        pool.scale(0).result()
        assert [list(items) for items in nodes() @ pool] == [[0]]
        pool.scale(2).result()
        assert node() @ pool == (0, 1)
        with pytest.raises(ConfigurationError, match=r"at most 2, as the pool has nodes=\(0, 2\)"):
            pool.scale(3)
        pool.scale(0).result()
        (future,) = pool.submit_calls([Invocation(fn=abs, args=(-3,))], memo=ArgumentMemo())
        assert future.result(60) == 3
    assert Ledger.of_user().open_entries() == ()


# In `make test`: unit/scheduling/test_elastic.py. Each node imports scikit-learn.
@pytest.mark.full
def test_a_grid_search_counts_the_maximum_and_brings_the_nodes_that_it_is_worth():
    from sklearn.datasets import load_iris
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    data, labels = load_iris(return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [1, 10], "gamma": [0.001, 0.01]}, cv=3, scoring=slow_score, n_jobs=-1)
    with ScikitLearnPool(provider=sky.Local(), nodes=(0, 4), display="quiet") as pool:
        best = search.fit(data, labels).best_params_
        assert pool.capacity == 4
        assert 1 < pool.status.wanted <= 4
    assert best == search.set_params(n_jobs=1, scoring=None).fit(data, labels).best_params_


def slow_score(model, data, labels):
    time.sleep(1)
    return model.score(data, labels)
