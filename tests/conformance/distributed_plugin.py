"""A pytest plugin that runs distributed's own tests on a cluster in other processes.

distributed's wheel has no tests: they come from a checkout of its repository. Tests of the client get a client of one
cluster of two workers, which serves them all. Tests that use the scheduler or a worker as an object of their own
process are not run. Tests of ``LocalCluster`` make a cluster each.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import distributed.utils_test
import pytest
from counting import skip_pinned
from distributed import Client, LocalCluster

import skyward as sky
from skyward_dask import SkywardCluster

WORKERS = 2
CASE_S = 60
NOT_SKYWARDS = {
    "dashboard_address",
    "host",
    "interface",
    "ip",
    "memory_limit",
    "processes",
    "protocol",
    "scheduler_kwargs",
    "scheduler_port",
    "silence_logs",
    "threads_per_worker",
}
"""Parameters of ``LocalCluster`` about how it makes its processes: left out, where a pool has ways of its own."""


def skyward_cluster(n_workers: int | None = None, **options: Any) -> SkywardCluster:
    """Make a cluster as ``LocalCluster`` is made."""
    nodes = max(WORKERS if n_workers is None else n_workers, 1)
    ours = {name: value for name, value in options.items() if name not in NOT_SKYWARDS}
    return SkywardCluster(provider=sky.Local(), nodes=nodes, display="quiet", **ours)


def local_cluster(n_workers: int = WORKERS) -> LocalCluster:
    """Make the control's cluster: workers in processes of their own."""
    return LocalCluster(n_workers=n_workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")


class Shared:
    """One cluster for the tests of the client; made again when a test has ended it or its workers."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._cluster: Any = None

    @property
    def cluster(self) -> Any:
        if self._cluster is not None and len(self._cluster.scheduler_info["workers"]) != WORKERS:
            self.close()
        if self._cluster is None or self._cluster.status.name != "running":
            self._cluster = self._make(n_workers=WORKERS)
            self._cluster.wait_for_workers(WORKERS)
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow")
    make = skyward_cluster if config.getoption("--backend") == "skyward" else local_cluster
    shared = Shared(make)
    # Before the tests are imported. What a cluster of all tests has open is no leak of one of them.
    distributed.utils_test.gen_cluster = functools.partial(gen_cluster, shared)
    distributed.utils_test.clean = no_check
    config.pluginmanager.register(OnCluster(shared, config.getoption("--backend")))


@contextmanager
def no_check(**_settings: Any) -> Iterator[None]:
    """Stand in for distributed's search for leaks."""
    yield


def gen_cluster(shared: Shared, *args: Any, client: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Stand in for distributed's decorator: run the test with an asynchronous client of the shared cluster."""
    unusual = bool(args) or bool(options.keys() - {"timeout", "clean_kwargs", "allow_unclosed"})

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(test).parameters)
        fixtures = [name for name in names if _is_fixture(name)]
        in_process = [name for name in names[1 if client else 0 :] if name not in fixtures]

        async def run(fixtures: dict[str, Any]) -> None:
            given = dict.fromkeys(in_process)
            address, security = shared.cluster.scheduler_address, shared.cluster.security
            async with asyncio.timeout(CASE_S), Client(address, security=security, asynchronous=True) as c:
                await test(*([c] if client else []), **given, **fixtures)

        def wrapper(**fixtures: Any) -> None:
            shared.cluster  # noqa: B018 - made outside of the event loop
            asyncio.run(run(fixtures))

        functools.update_wrapper(wrapper, test)
        del wrapper.__wrapped__
        wrapper.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures]
        )
        wrapper.own_process = unusual or not client or _uses(test, in_process)
        return wrapper

    return decorate


IN_PROCESS = re.compile(r"\b(c|cluster)\.(scheduler|workers)\b")
"""A test of ``LocalCluster`` that has this looks at objects in the cluster's own process."""

FIXTURES = {"tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog", "request", "loop", "cleanup"}
HELD = {"c", "s", "a", "b", "w", "e", "f", "n", "alice", "bob", "workers", "worker", "nanny", "scheduler", "_"}


def _is_fixture(name: str) -> bool:
    return name in FIXTURES or (name not in HELD and len(name.strip("_0123456789")) > 1)


def _uses(test: Callable[..., Any], names: list[str]) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(test)))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return bool(used & set(names)) or any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in inspect.signature(test).parameters.values()
    )


class OnCluster:
    """Gives the tests their clients and clusters."""

    def __init__(self, shared: Shared, backend: str) -> None:
        self._shared = shared
        self._backend = backend

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        others = [item for item in items if not self._concerns(item)]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)
        if self._backend == "skyward":
            skip_pinned(items, "distributed")
            for module in {item.module for item in items}:
                if "LocalCluster" in vars(module):
                    module.LocalCluster = skyward_cluster

    def _concerns(self, item: pytest.Function) -> bool:
        """Whether the test needs nothing but a client or a ``LocalCluster``, and is not one of the slow ones."""
        if item.get_closest_marker("slow"):
            return False
        if item.path.parent.name == "deploy":
            source = inspect.getsource(inspect.unwrap(item.function))
            return "LocalCluster(" in source and "processes=False" not in source and not IN_PROCESS.search(source)
        if hasattr(item.function, "own_process"):
            return not item.function.own_process
        return bool({"c", "client"} & set(item.fixturenames)) and not {"s", "a", "b"} & set(item.fixturenames)

    @pytest.fixture
    def client(self) -> Iterator[Client]:
        with Client(self._shared.cluster) as client:
            yield client

    @pytest.fixture
    def c(self, client: Client) -> Client:
        return client

    @pytest.fixture
    def loop(self) -> None:
        """Nothing: a cluster has a loop of its own."""

    @pytest.fixture
    def loop_in_thread(self) -> None:
        """Nothing: a cluster has a loop of its own."""

    @pytest.fixture
    def cleanup(self) -> None:
        """Nothing: the cluster stays."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        try:
            return (yield)
        finally:
            self._shared.close()
