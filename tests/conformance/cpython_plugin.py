"""A pytest plugin that runs CPython's own tests of thread pools on a pool's executor.

CPython's tests make an executor for each case, from ``ThreadPoolMixin.executor_type``. Here that is an executor on one
pool, which serves them all. The control leaves it alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from counting import CountingPool, skip_pinned

import skyward as sky
from skyward.api.executor import PoolExecutor

WORKERS = 5
"""The tests ask for executors of five workers."""


def pytest_configure(config: pytest.Config) -> None:
    on_backend = OnSkyward if config.getoption("--backend") == "skyward" else OnThreads
    config.pluginmanager.register(on_backend())


def thread_pool_mixin() -> Any:
    """Return what CPython's tests of thread pools inherit; its module became a package in Python 3.12."""
    try:
        home = importlib.import_module("test.test_concurrent_futures.util")
    except ModuleNotFoundError:
        home = importlib.import_module("test.test_concurrent_futures")
    return home.ThreadPoolMixin


class OnThreads:
    """The control: the tests of ``ThreadPoolExecutor`` as they are. Those of process pools are not run."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        mixin = thread_pool_mixin()
        others = [item for item in items if not (item.cls and issubclass(item.cls, mixin))]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


class OnSkyward(OnThreads):
    """Each case has an executor of the pool."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        super().pytest_collection_modifyitems(config, items)
        skip_pinned(items, "cpython")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        with CountingPool(provider=sky.Local(), concurrency=WORKERS, display="quiet") as self.pool:
            thread_pool_mixin().executor_type = executor_type(self.pool)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Notice whether the case sends calls to the pool."""
        before = self.pool.calls
        try:
            return (yield)
        finally:
            item.user_properties.append(("remote", self.pool.calls > before))


def executor_type(pool: sky.ComputePool) -> type[PoolExecutor]:
    """Return a class whose instances are the pool's executors; the number of workers is the pool's."""

    class ExecutorOfThePool(PoolExecutor):
        def __init__(self, max_workers: int = WORKERS) -> None:
            super().__init__(pool)

    return ExecutorOfThePool
