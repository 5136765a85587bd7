"""The backend's name is known to joblib once a pool is open, whichever of the two was imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPEN = """
import skyward

skyward.ComputePool(provider=skyward.Local(), display="quiet").__enter__().__exit__(None, None, None)
"""
USE = "import joblib; joblib.parallel_backend('skyward'); print(type(joblib.parallel.get_active_backend()[0]).__name__)"


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "before",
    [
        "import joblib, skyward",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("import skyward, joblib", "import skyward")),
    ],
)
def test_an_open_pool_makes_the_name_known(before: str) -> None:
    assert run(f"{before}\n{OPEN}\n{USE}") == "SkywardBackend"


def test_without_joblib_the_error_names_both_extras() -> None:
    without = "import sys; sys.modules['joblib'] = sys.modules['sklearn'] = None"
    use = "try:\n    from skyward.integrations import ScikitLearnPool\nexcept ImportError as error:\n    print(error)"

    message = run(f"{without}\n{use}")

    assert "pip install 'skyward-fleet[joblib]'" in message
    assert "'skyward-fleet[sklearn]'" in message


def test_a_pool_loads_no_joblib() -> None:
    assert run(f"import skyward\n{OPEN}\nimport sys; print('joblib' in sys.modules)") == "False"
