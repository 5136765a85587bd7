"""The scripts of examples/joblib run unchanged on loky and on a fleet."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sklearn
from joblib import parallel_config

import gallery
import skyward as sky
import skyward_joblib  # noqa: F401  # registers the backend

FOLDER = Path(__file__).parents[3] / "examples/joblib"
NAMES = sorted(script.stem for script in FOLDER.glob("*.py"))
ON_LOKY = """
import importlib, json, sys, contextlib, io
from joblib import parallel_config

printed = {}
for name in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as output, parallel_config("loky", n_jobs=2):
        importlib.import_module(name).main()
    printed[name] = output.getvalue()
print(json.dumps(printed))
"""


def run(*arguments):
    completed = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
    )
    assert completed.returncode == 0, completed.stderr
    assert "Traceback" not in completed.stderr
    return completed.stdout


@pytest.fixture(scope="module")
def on_loky():
    """What each prints there, in a process of its own: loky's processes live as long as that."""
    return json.loads(run("-c", ON_LOKY, *NAMES))


@pytest.fixture(scope="module")
def pool(start_callbacks):
    with sky.ComputePool(provider=sky.Local(), concurrency=2, display="quiet") as pool:
        start_callbacks(pool)
        yield pool


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("pool")
def test_example_prints_the_same_on_loky_and_on_a_fleet(name, on_loky, capsys, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    assert on_loky[name]
    with parallel_config("skyward"):
        importlib.import_module(name).main()
    assert capsys.readouterr().out == on_loky[name]
    # The page has the numbers of this release; those of an older one differ a little.
    gallery.compare(
        f"joblib/{name}.py", on_loky[name], exactly=tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 9)
    )


@pytest.mark.full
@pytest.mark.example
def test_examples_are_scripts_that_take_the_backend():
    """Its tasks never end: were they not consumed while they are made, the timeout would."""
    assert "simulations" in run(FOLDER / "stream_results.py", "skyward")


def test_there_are_five_of_them():
    assert len(NAMES) >= 5
