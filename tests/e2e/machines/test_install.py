"""The wheel in a bare environment: what users get, away from the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from uv import find_uv_bin

import skyward as sky
from skyward.environment.package_sources import package_sources, pip_settings, variables_for_uv

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
UV = (find_uv_bin(), "pip", "install", "--python", "venv/bin/python")
"""The wheel is installed with pip; for hundreds of megabytes of others, and five plans, pip takes 90 s."""
FRONT_ENDS = """
from pathlib import Path

import dask.array as da
import skyward as sky
from distributed import Client
from joblib import Parallel, delayed, parallel_config
from skyward.integrations import ScikitLearnPool
from skyward_dask import SkywardCluster
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.tree import DecisionTreeClassifier


@sky.compute
def home(number: int) -> tuple[int, str]:
    import skyward

    return number + 1, skyward.__file__


if __name__ == "__main__":
    with ScikitLearnPool(provider=sky.Local(), display="quiet") as pool:
        print("native", (home(1) >> pool) == (2, sky.__file__), "site-packages" in Path(sky.__file__).parts)
        print("joblib", Parallel(n_jobs=2)(delayed(pow)(n, 2) for n in range(4)))
        print("sklearn", len(cross_val_score(DecisionTreeClassifier(), *load_iris(return_X_y=True), n_jobs=2)))
        with SkywardCluster(pool=pool) as cluster, Client(cluster):
            print("dask", int(da.arange(100, chunks=10).sum().compute()))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of pip alone, in which the wheel is then installed without extras.

    What is not imported is not compiled, here and below: that was a third of the time.
    """
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "build", "--installer", "uv", "--wheel", "--outdir", str(folder), str(ROOT), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("skyward_fleet-")
    venv.create(folder / "venv", with_pip=True)
    run(str(folder / "venv/bin/pip"), "install", "-q", "--no-compile", str(wheel), cwd=folder)
    return folder


def run(*argv: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would: nothing of this checkout is on its path."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PIP_NO_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= variables_for_uv(package_sources(sky.Image(), pip_settings(environment)), environment)
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_wheel_runs_a_pool_and_each_front_end_in_a_bare_environment(bare: Path) -> None:
    python = str(bare / "venv/bin/python")

    assert run(python, "-m", "skyward", "--version", cwd=bare).stdout == f"skyward, version {VERSION}\n"
    without = run(python, "-c", "import skyward_joblib", cwd=bare, check=False)
    assert "pip install 'skyward-fleet[joblib]'" in without.stderr
    (wheel,) = bare.glob("*.whl")
    run(*UV, f"skyward-fleet[dask,sklearn] @ file://{wheel}", cwd=bare)
    (bare / "program.py").write_text(FRONT_ENDS, encoding="utf-8")

    lines = run(python, "program.py", cwd=bare).stdout.splitlines()

    assert lines == ["native True True", "joblib [0, 1, 4, 9]", "sklearn 5", "dask 4950"]


def test_no_text_has_users_install_the_project_of_that_name_on_the_index() -> None:
    wrong = re.compile(r"pip install [^\n]*['\" ]skyward(?!-fleet|_)\b|\bskyward\[[a-z,]+\]")
    texts = [*PROSE, *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.py"), ROOT / "pyproject.toml"]

    found = {path.name: wrong.findall(path.read_text(encoding="utf-8")) for path in texts}

    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", re.findall(r"[\d.]+", re.findall(r"^dasks := (.*)$", MAKEFILE, re.MULTILINE)[0]))
def test_the_wheel_is_installed_next_to_every_release_of_dask_in_the_matrix(bare: Path, release: str) -> None:
    (wheel,) = bare.glob("*.whl")
    wanted = [f"skyward-fleet[dask] @ file://{wheel}", f"dask=={release}"]

    done = run(*UV, "--dry-run", "--reinstall", *wanted, cwd=bare)

    assert f"+ dask=={release}\n" in done.stderr
    assert f"+ distributed=={release}\n" in done.stderr
