"""Run joblib's and scikit-learn's own tests on Skyward and, as control, on loky; write ``docs/conformance.md``.

usage: python tests/conformance/suite.py                              everything, and the page
       python tests/conformance/suite.py SUITE BACKEND OUTCOMES.json  one suite on one backend, its outcomes into a file
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from outcomes import Cases, Control, failed
from page import page

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/conformance.md"
PARTS = ("suite", "more", "clouds/judges")
"""The programs that write the page's parts, in their order."""
DIVIDER = "<!-- tests/conformance/{}.py writes what follows -->"
CASE_TIMEOUT_S = 120

SUITES = {
    "joblib": ("joblib.test.test_parallel",),
    "sklearn": (
        "sklearn.utils.tests.test_parallel",
        "sklearn.model_selection",
        "sklearn.inspection",
        "sklearn.feature_selection.tests.test_rfe",
        "sklearn.ensemble.tests.test_voting",
        "sklearn.ensemble.tests.test_forest",
        "sklearn.compose",
    ),
}
"""The tests of each; its plugin, ``joblib_plugin.py`` or ``sklearn_plugin.py``, puts them on a backend."""

RACES = {
    "sklearn/model_selection/tests/test_validation.py::test_learning_curve_params",  # the error of the second of five
}
"""Tests that expect the error of one failing task where several fail at once: chance decides, on every backend."""


@cache
def read_pins(suite: str) -> dict[str, str]:
    """Return the cases of a suite that do not count, by their id or their test's name, each with its reason."""
    pins: dict[str, str] = {}
    reason = ""
    for line in (HERE / "skips" / f"{suite}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            pins[line.strip()] = reason
        elif line and not line.startswith("#"):
            reason = line
    return pins


def run(suite: str, backend: str, outcomes: Path, *extra: str | Path, targets: Sequence[str | Path] = ()) -> int:
    """Run a suite in a pytest of its own, away from this repository's settings; return its exit status.

    Args:
        suite: its name; ``<suite>_plugin.py`` puts it on a backend.
        backend: the backend.
        outcomes: file for what becomes of every case.
        extra: further options of pytest.
        targets: modules or files to run, where :data:`SUITES` does not list them.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pytest.ini")
        settings.write_text(f"[pytest]\ntimeout = {CASE_TIMEOUT_S}\n", encoding="utf-8")
        options = ["-c", settings, "--rootdir", sysconfig.get_path("purelib"), "-q", "-p", "no:cacheprovider"]
        options += ["-p", "counting", "-p", f"{suite}_plugin", "--backend", backend]
        options += ["--outcomes", outcomes.absolute(), "--basetemp", Path(folder, "tests"), *extra]
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--pyargs", *(targets or SUITES[suite])],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        ).returncode


def run_both(suite: str, *extra: str | Path) -> Control:
    """Run a suite on Skyward and on loky.

    Raises:
        FileNotFoundError: a pytest came to no end.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, Cases] = {}
        for backend in ("skyward", "loky"):
            outcomes = Path(folder, f"{backend}.json")
            run(suite, backend, outcomes, *extra)
            cases[backend] = json.loads(outcomes.read_text(encoding="utf-8"))
    return Control(skyward=cases["skyward"], control=cases["loky"])


def run_again(cases: Sequence[str]) -> Control:
    """scikit-learn's tests that fail with two jobs wherever they run: once more, on both backends, with one."""
    if not cases:
        return Control(skyward={}, control={})
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as only:
        only.write("\n".join(cases))
        only.flush()
        return run_both("sklearn", "--one-job", "--only", only.name)


def write_part(text: str, *, part: str) -> None:
    """Write the page's part of one program, of :data:`PARTS`, and keep the others."""
    rest = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = {PARTS[0]: ""}
    for before, name in pairwise(PARTS):
        parts[before], _, rest = rest.partition(DIVIDER.format(name))
        parts[name] = rest
    parts[part] = text
    blocks = [DIVIDER.format(name) + "\n\n" + parts[name].strip() for name in PARTS[1:] if parts[name].strip()]
    PAGE.write_text("\n\n".join(filter(None, [parts[PARTS[0]].strip(), *blocks])) + "\n", encoding="utf-8")


def main() -> int:
    """Do what the arguments say; the exit status."""
    if arguments := sys.argv[1:]:
        suite, backend, outcomes = arguments
        return run(suite, backend, Path(outcomes))
    joblib = run_both("joblib")
    sklearn = run_both("sklearn")
    again = run_again(sklearn.failing())
    text = page(joblib, read_pins("joblib"), sklearn, again, modules=SUITES["sklearn"], races=RACES)
    write_part(text, part="suite")
    wrong = [*failed(joblib.skyward), *sklearn.lost(RACES), *again.lost()]
    print("\n".join(["conformance: " + ("what loky does and Skyward does not:" if wrong else "as loky"), *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
