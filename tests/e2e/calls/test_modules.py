"""The user's own modules that are imported inside a function, on a real pool."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from joblib import Parallel, delayed

import skyward as sky
from skyward.integrations import JoblibPool

FILES = {
    "sky_helper.py": "def times(x):\n    import sky_deeper\n    return sky_deeper.FACTOR * x\n",
    "sky_deeper.py": "FACTOR = 10\n",
    "sky_pkg/__init__.py": "",
    "sky_pkg/inner.py": "from . import outer\n\ndef fail():\n    raise outer.SkyError('at home')  # the line\n",
    "sky_pkg/outer.py": "class SkyError(Exception):\n    pass\n",
    "sky_locked.py": "import threading\nLOCK = threading.Lock()\ndef times(x):\n    return 2 * x\n"
    "def locked():\n    with LOCK:\n        return 1\n",
    "logs.py": "SAID = 'not the folder of this name'\n",
}


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.startswith("sky_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def pool(project: Path) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


@sky.compute
def plain(x: int) -> Any:
    import sky_helper

    return sky_helper.times(x)


@sky.compute
def renamed(x: int) -> Any:
    import sky_helper as h

    return h.times(x)


@sky.compute
def taken_from(x: int) -> Any:
    from sky_helper import times

    return times(x)


@sky.compute
def said(x: int) -> Any:
    import logs  # pyright: ignore[reportMissingImports]

    return logs.SAID


@sky.compute
def fails() -> None:
    import sky_pkg.inner

    sky_pkg.inner.fail()


@pytest.mark.parametrize("fn", [plain, renamed, taken_from])
def test_modules_imported_inside_a_function_travel(fn: Callable[[int], Any], pool: sky.ComputePool) -> None:
    assert fn(2) >> pool == 20
    assert "sky_helper" not in sys.modules


def test_a_folder_of_the_node_does_not_hide_a_module(pool: sky.ComputePool) -> None:
    assert said(0) >> pool == FILES["logs.py"].split("'")[1]


def test_an_error_of_such_a_module_comes_back_as_itself_with_its_line(pool: sky.ComputePool) -> None:
    with pytest.raises(Exception, match="at home") as caught:
        fails() >> pool
    from sky_pkg.outer import SkyError

    assert type(caught.value) is SkyError
    assert "# the line" in str(caught.value.__cause__)


def test_changed_code_is_picked_up_by_the_next_call(project: Path, pool: sky.ComputePool) -> None:
    results: list[Any] = []
    for text in ("FACTOR = 10\n", "FACTOR = 2222\n", "FACTOR = 10\n"):
        (project / "sky_deeper.py").write_text(text)
        results.append(plain(1) >> pool)
    assert results == [10, 2222, 10]


def test_functions_that_are_arguments_bring_their_modules(pool: sky.ComputePool) -> None:
    assert list(pool.map(plain.local, [1, 2])) == [10, 20]


def test_functions_of_joblib_bring_their_modules(project: Path) -> None:
    with JoblibPool(provider=sky.Local(), display="quiet"):
        assert Parallel()(delayed(plain.local)(n) for n in range(3)) == [0, 10, 20]


def test_a_module_with_a_lock_has_one_of_its_own_on_the_worker(pool: sky.ComputePool) -> None:
    sky_locked = importlib.import_module("sky_locked")
    assert pool.submit(lambda x: 1 + sky_locked.times(x), 2).result() == 5
    assert pool.submit(lambda: [sky_locked.locked()]).result() == [1]
