"""Distributions that a program's modules and functions import."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward import Image
from skyward.environment.image_mirror import lack_of, with_all_missing
from skyward.environment.installed import installed_distributions
from skyward.environment.program_imports import LoadedNames, needs_of, needs_of_program, own_modules

FILES = {
    "sky_main.py": """\
import json, numpy
import sky_part
from sky_part import late
try:
    import joblib
except ImportError:
    joblib = None

ARRAY = numpy.zeros(1)

def alone():
    return json.dumps({})

def with_array():
    return ARRAY

def with_module():
    return sky_part.frame()

def with_used_function():
    return sky_part.late()

def with_late_imports():
    import sklearn.linear_model
    try:
        import scipy
    except ImportError:
        pass
    import sky_unloaded

def with_condition(plot=False):
    if plot:
        import matplotlib, pandas

def with_editable():
    import sky_edited

def nested():
    return [inner for inner in map(lambda x: with_array(), [1])]

class Model:
    def fit(self):
        return ARRAY

def with_class():
    return Model().fit()

def attribute_of_that_name(x):
    return x.ARRAY
""",
    "sky_part.py": """\
import pandas as pd

def frame():
    return pd.DataFrame()

def late():
    import xmltodict
""",
    "sky_unloaded.py": "import pyte\n\ndef f():\n    import openapi_core\n",
}


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "sky_main.py"
    spec = importlib.util.spec_from_file_location("__main__", script)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(script.read_text(), script, "exec"), vars(module))
    yield module
    del sys.modules["sky_part"]


@pytest.mark.parametrize(
    ("function", "needed"),
    [
        ("alone", set()),
        ("with_array", {"numpy"}),
        ("with_module", {"pandas"}),
        ("with_used_function", {"pandas", "xmltodict"}),
        ("with_late_imports", {"scikit-learn", "pyte"}),
        ("with_condition", set()),
        ("nested", {"numpy"}),
        ("with_class", {"numpy"}),
        ("attribute_of_that_name", set()),
    ],
)
def test_a_function_needs_what_travels_by_name_and_what_it_imports(main: Any, function: str, needed: set[str]) -> None:
    lack = lack_of(getattr(main, function), Image())

    assert set(lack.names) == needed
    assert lack.sure


def test_a_function_of_a_module_needs_what_nodes_import_with_that(main: Any, tmp_path: Path) -> None:
    (tmp_path / "sky_deeper").mkdir()
    (tmp_path / "sky_deeper/__init__.py").write_text("import openapi_core\n")
    (tmp_path / "sky_deeper/inner.py").write_text("import sky_part\n")
    (tmp_path / "sky_outer.py").write_text("from sky_deeper import inner\ndef f():\n    import pyte\nclass C: pass\n")
    module = importlib.import_module("sky_outer")

    assert set(lack_of(module.f, Image()).names) == {"openapi-core", "pandas", "pyte"}
    assert set(lack_of(module.C, Image()).names) == {"openapi-core", "pandas"}
    for name in ("sky_outer", "sky_deeper", "sky_deeper.inner"):
        del sys.modules[name]


def test_a_program_needs_what_its_modules_import_anywhere_but_where_it_may_lack(
    main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in own_modules():
        if not module.__name__.startswith(("sky_", "__main__")):  # left by other tests of this process
            monkeypatch.delitem(sys.modules, module.__name__)

    needs = needs_of_program(installed_distributions())

    assert needs["xmltodict"].importer == "sky_part"
    assert needs["scikit-learn"].importer == "__main__"
    assert needs["pyte"].importer == "sky_unloaded"
    assert {"pandas", "numpy", "openapi-core"} <= needs.keys()


def test_an_image_gives_what_it_lists_with_its_requirements(main: Any) -> None:
    assert lack_of(main.with_module, Image(pip=["pandas>=2"])).names == []
    assert lack_of(main.with_late_imports, Image(pip=["scikit-learn", "pyte"])).names == []
    assert not lack_of(main.with_module, Image(pip=["some-pandas-fork"])).sure
    assert lack_of(main.with_module, Image(includes=["./vendored/pandas"])).names == []
    assert not lack_of(main.with_module, Image(env={"PYTHONPATH": "/srv"})).sure


def test_a_nodes_error_names_everything_that_is_missing(main: Any) -> None:
    error = ModuleNotFoundError("No module named 'xmltodict'", name="xmltodict")
    error.add_note("raised on node 1, worker 0")

    complete = with_all_missing(error, main.with_late_imports, Image())

    assert str(complete).startswith("No module named 'xmltodict'; the call needs 3 packages that its nodes lack: ")
    assert "pip=['pyte', 'scikit-learn', 'xmltodict']" in str(complete)
    assert complete.name == "xmltodict"
    assert complete.__notes__ == ["raised on node 1, worker 0"]


def test_an_error_about_a_module_that_is_nowhere_stays_as_it_is(main: Any) -> None:
    error = ModuleNotFoundError("No module named 'sky_nowhere'", name="sky_nowhere")

    assert with_all_missing(error, main.alone, Image()) is error


def test_a_decorated_function_needs_what_its_wrapper_does(main: Any) -> None:
    import tenacity

    names = needs_of(tenacity.retry(main.alone))

    assert "tenacity" in {name.partition(".")[0] for name in names}


def test_loaded_distributions_are_those_with_an_imported_module() -> None:
    loaded = LoadedNames(installed_distributions())

    assert "pytest" in loaded
    assert "no-such" not in loaded


def test_code_of_the_standard_library_needs_nothing() -> None:
    functions: list[Callable[..., Any]] = [sorted, Path.exists]

    assert [needs_of(function) for function in functions] == [{}, {}]


def test_a_nodes_error_names_conditional_imports_too(main: Any) -> None:
    error = ModuleNotFoundError("No module named 'numpy'", name="numpy")

    assert "'numpy', 'pandas']" in str(with_all_missing(error, main.with_condition, Image()))


def test_optional_imports_of_a_notebooks_cell_are_read_from_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def f():\n    try:\n        import pandas\n    except ImportError:\n        pass\n"
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(source), None, source.splitlines(keepends=True), "<cell 1>"))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell 1>", "exec"), scope)

    assert lack_of(scope["f"], Image()).names == []


def test_an_editable_distribution_that_a_finder_imports_travels(
    main: Any, site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "sky_edited.py").write_text("")
    site.install("sky-edited", direct_url={"url": project.as_uri(), "dir_info": {"editable": True}})
    (site.installed / "sky_edited.py").unlink()
    spec = importlib.util.spec_from_file_location("sky_edited", project / "sky_edited.py")

    class Finder:  # as setuptools installs for projects without src/
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return spec if name == "sky_edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])

    assert lack_of(main.with_editable, Image()).names == []
