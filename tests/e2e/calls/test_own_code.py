"""The user's code does in a call what it does here: a script and a project, run once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("own_code_program.py")
FILES = {
    "shadows/yaml.py": "def safe_load(text): return 'mine'\n",
    "own/__init__.py": "",
    "own/data.txt": "hello",
    "own/assets/deep.txt": "deep",
    "own/plugins/__init__.py": "",
    "own/plugins/first.py": "NAME = 'first'\n",
    "own/settings.py": "VALUE = 1\n",
    "own/state.py": "COUNT = 0\ndef count():\n    global COUNT\n    COUNT += 1\n    return COUNT\n",
    "own/stars.py": "STAR = 7\n",
    "own/models.py": """
from sklearn.base import BaseEstimator, TransformerMixin
class ModelError(Exception): pass
class Model:
    hits = 0
    def size(self): return 1
    def hit(self):
        type(self).hits += 1
        return self.hits
class Scale(TransformerMixin, BaseEstimator):
    def fit(self, X, y=None):
        self.fitted_ = True
        return self
    def transform(self, X): return X
def hit(model): return model.hit()
def fail(): raise ModelError("no")
""",
    "own/helpers.py": """
import importlib.resources
import os
import threading
from own import around as turn, settings
from own.stars import *
LOCK = threading.Lock()
def locked():
    with LOCK: return "locked"
def data():
    with open(os.path.join(os.path.dirname(__file__), "data.txt")) as file: return file.read()
def resource(): return importlib.resources.files("own").joinpath("assets/deep.txt").read_text()
def around(): return turn.back().NAME
NAME = "around"
def starred(): return STAR
def setting(): return settings.VALUE
""",
    "own/around.py": "from own import helpers\ndef back(): return helpers\n",
}
EXPECTED = {
    "pickle in a task of Dask's": True,
    "a project in a task of Dask's": True,
    "pickle in a task of joblib's": [True, True],
    "state of a module": [1, 2, 3],
    "state of a class": [1, 2, 3],
    "state by argument": [4, 5],
    "nothing changed here": [0, 0],
    "class of a result": True,
    "class of an error": True,
    "edited, not reloaded": 1,
    "edited and reloaded": 2222,
    "state of other modules": 4,
    "a thread of an earlier call": [1, 2],
    "registry": [],
    "loky afterwards": 7,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, own_home: Any) -> dict[str, Any]:
    del own_home
    folder = tmp_path_factory.mktemp("script")
    for name, text in {**FILES, PROGRAM.name: PROGRAM.read_text(encoding="utf-8")}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, folder / PROGRAM.name], capture_output=True, text=True, check=False, timeout=110, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_code_does_in_a_call_what_it_does_here(results: dict[str, Any]) -> None:
    checks: dict[str, tuple[object, object]] = results["checks"]

    assert {name: got for name, (got, _) in checks.items()} == {name: wanted for name, (_, wanted) in checks.items()}


@pytest.mark.parametrize(("what", "value"), EXPECTED.items(), ids=EXPECTED)
def test_calls_after_each_other(what: str, value: object, results: dict[str, Any]) -> None:
    assert results[what] == value
