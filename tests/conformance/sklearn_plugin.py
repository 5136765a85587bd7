"""A pytest plugin that runs scikit-learn's own tests with one backend as joblib's default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib.parallel
import pytest
from counting import CountingPool

import skyward as sky
from skyward_joblib import SkywardBackend

WORKERS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-job", action="store_true", help="one job where a test gives no number")
    parser.addoption("--only", type=Path, help="a file with the ids of the tests to run, one per line")


def pytest_configure(config: pytest.Config) -> None:
    on_backend = OnSkyward if config.getoption("--backend") == "skyward" else OnLoky
    config.pluginmanager.register(on_backend(one_job=config.getoption("--one-job")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (path := config.getoption("--only")) is None:
        return
    only = set(path.read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in only])
    items[:] = [item for item in items if item.nodeid in only]


class OnLoky:
    """The control, with as many jobs as Skyward has by default."""

    def __init__(self, *, one_job: bool) -> None:
        self._settings = {} if one_job else {"n_jobs": WORKERS}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with joblib.parallel_config("loky", **self._settings):
            return (yield)


class OnSkyward:
    """Every test has a pool for its loops; where one names loky, skyward runs that, too."""

    def __init__(self, *, one_job: bool) -> None:
        self._settings = {"n_jobs": 1} if one_job else {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        joblib.parallel.BACKENDS["loky"] = SkywardBackend
        with CountingPool(provider=sky.Local(), concurrency=WORKERS, display="quiet") as self._pool:
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Notice whether the test sends calls to the pool."""
        before = self._pool.calls
        try:
            with joblib.parallel_config("skyward", **self._settings):
                return (yield)
        finally:
            item.user_properties.append(("remote", self._pool.calls > before))
