"""A pytest plugin that runs joblib's own tests on one backend.

``suite.py`` starts a pytest of its own with it. It is named with ``-p``, so that the backend is registered before
joblib's tests are imported: they read joblib's table of backends at import.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import joblib.parallel
import pytest
from counting import CountingPool, skip_pinned

import skyward as sky
from skyward_joblib import SkywardBackend

WORKERS = 4
"""joblib's tests ask for up to 4 jobs and look whether they get them."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--backend") == "skyward":
        config.pluginmanager.register(OnSkyward())
    else:
        del joblib.parallel.BACKENDS["skyward"]  # the tests take every backend in it
        config.pluginmanager.register(OnLoky())


class OnLoky:
    """The control: the cases that name loky, or no backend at all, as they are."""

    name = "loky"
    backend_class: type = joblib.parallel.LokyBackend

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        others = [item for item in items if not self._concerns(item)]
        items[:] = [item for item in items if self._concerns(item)]
        config.hook.pytest_deselected(items=others)

    def _concerns(self, item: pytest.Function) -> bool:
        named = _named_backends(item)
        return not named or any(value == self.name or type(value) is self.backend_class for value in named)


class OnSkyward(OnLoky):
    """Cases with loky get a twin with skyward; where a test names no backend, or loky in its code, skyward runs it."""

    name = "skyward"
    backend_class = SkywardBackend

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = metafunc.definition.own_markers
        marks[:] = [_widened(mark) if mark.name == "parametrize" else mark for mark in marks]

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        skip_pinned(items, "joblib")
        _let_scripts_open_pools(items[0].module)
        super().pytest_collection_modifyitems(config, items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        with CountingPool(provider=sky.Local(), concurrency=WORKERS, display="quiet") as self.pool:
            return (yield)

    @pytest.fixture(autouse=True)
    def on_the_pool(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Make skyward the default and loky's stand-in, and notice whether the case sends calls to a pool."""
        source = inspect.getsource(request.function)
        if not _named_backends(request.node):
            monkeypatch.setattr(joblib.parallel, "DEFAULT_BACKEND", "skyward")
            monkeypatch.setitem(joblib.parallel.BACKENDS, "loky", SkywardBackend)
            monkeypatch.setattr(request.module, "LokyBackend", SkywardBackend)
            monkeypatch.setattr(request.module, "DefaultBackend", SkywardBackend, raising=False)  # joblib 1.4's tests
        if "mp.Manager" in source:  # it lets in who knows its key, as its process's children do
            use_authkey(bytes(multiprocessing.current_process().authkey)) @ self.pool
        before = self.pool.calls
        yield
        remote = self.pool.calls > before or "check_subprocess_call" in source  # a script opens its own pool
        request.node.user_properties.append(("remote", remote))


@sky.compute
def use_authkey(key: bytes) -> None:
    multiprocessing.current_process().authkey = key


def _named_backends(item: pytest.Function) -> list[Any]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return [
        value
        for name, value in params.items()
        if name in {"backend", "parent_backend", "child_backend", "outer_backend", "inner_backend"}
        if value is not None
    ]


def _widened(mark: pytest.Mark) -> pytest.Mark:
    """The parametrisation, with a twin on skyward of each case on loky."""
    names, values = mark.args
    values = list(values)
    for value in list(values):
        values += [twin for twin in _twins(value) if twin not in values]
    return pytest.mark.parametrize(names, values, **mark.kwargs).mark


def _twins(value: Any) -> list[Any]:
    """Where a row says that a combination is beyond loky (True: it fails), Skyward's twin expects it to work."""
    if not isinstance(value, tuple):
        return ["skyward"] if isinstance(value, str) and value == "loky" else []
    places = [place for place, part in enumerate(value) if isinstance(part, str) and part == "loky"]
    works = tuple(False if part is True else part for part in value)
    return [(*works[:place], "skyward", *works[place + 1 :]) for place in places]


SCRIPT_TIMEOUT_S = 40
OPEN_A_POOL = """\
if "{backend}" == "skyward":
    import skyward, skyward_joblib
    pool = skyward.ComputePool(provider=skyward.Local(), display="quiet").__enter__()
"""
CLOSE_IT = """
if "{backend}" == "skyward":
    pool.__exit__(None, None, None)
"""


def _let_scripts_open_pools(module: ModuleType) -> None:
    """Some tests run scripts: these need a pool, too, and the seconds that it takes to open."""
    no_main, main, interactive = (
        "UNPICKLABLE_CALLABLE_SCRIPT_TEMPLATE_NO_MAIN",
        "UNPICKLABLE_CALLABLE_SCRIPT_TEMPLATE_MAIN",
        "INTERACTIVE_DEFINED_FUNCTION_AND_CLASS_SCRIPT_CONTENT",
    )
    scripts = vars(module)
    check = scripts["check_subprocess_call"]
    scripts["check_subprocess_call"] = lambda *args, **settings: check(
        *args, **{**settings, "timeout": SCRIPT_TIMEOUT_S}
    )
    scripts[main] = OPEN_A_POOL + scripts[main] + CLOSE_IT
    scripts[no_main] = (OPEN_A_POOL + scripts[no_main].replace("{}", "{backend}") + CLOSE_IT).replace(
        "{backend}", "{0}"
    )
    scripts[interactive] = "".join(
        part.replace("{backend}", "skyward").replace('"loky"', '"skyward"')
        for part in (OPEN_A_POOL, scripts[interactive], CLOSE_IT)
    )
