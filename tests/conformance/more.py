"""Run other projects' tests of executors and Dask clusters, and libraries on Dask; write the page's second part.

usage: python tests/conformance/more.py [NAME...]      the suites named, or all; the page is written when all are run

Outcomes are kept in ``build/conformance``: a suite that is not named keeps those of its last run. The variable
``DISTRIBUTED`` names a checkout of distributed's repository, whose wheel has no tests; without it they are left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from more_page import more_page
from outcomes import Control, failed
from suite import HERE, read_pins, run, write_part

OUTCOMES = HERE.parents[1] / "build/conformance"
BACKENDS = ("skyward", "control")

GONE = (
    "from dask.optimization import SubgraphCallable\n",
    "from distributed.shuffle import check_minimal_arrow_version\n",
)
"""Lines of older checkouts' tests that import what Dask no longer has; few tests use it."""

CLIENT = ("test_client.py", "test_client_executor.py", "test_as_completed.py")
DEPLOY = ("test_local.py", "test_cluster.py")


@contextmanager
def cpython_tests() -> Iterator[list[str | Path]]:
    """Find CPython's tests, where this interpreter was installed with them."""
    name = "test.test_concurrent_futures"
    yield [name] if importlib.util.find_spec(name) else []


def checkout_tests(folder: str, names: tuple[str, ...]) -> Callable[[], object]:
    """Return a context that gives files of the checkout, in a folder from which workers import them too."""

    @contextmanager
    def tests() -> Iterator[list[str | Path]]:
        if not (checkout := os.environ.get("DISTRIBUTED")):
            yield []
            return
        with tempfile.TemporaryDirectory() as made:
            place = Path(made, "deploy" if "deploy" in folder else "client")
            place.mkdir()
            for name in names:
                text = Path(checkout, "distributed", folder, name).read_text(encoding="utf-8")
                for line in GONE:
                    text = text.replace(line, f"{line.split()[-1]} = None\n")
                (place / name).write_text(text, encoding="utf-8")
            shutil.copy(HERE / "distributed_plugin.py", place)
            before = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(place), before]))
            yield [place / name for name in names]

    return tests


@contextmanager
def library_tests() -> Iterator[list[str | Path]]:
    """Give the tests of libraries on Dask, which are ours."""
    yield [HERE / "libraries.py"]


SUITES = {
    "cpython": ("cpython", cpython_tests),
    "client": ("distributed", checkout_tests("tests", CLIENT)),
    "deploy": ("distributed", checkout_tests("deploy/tests", DEPLOY)),
    "libraries": ("libraries", library_tests),
}
"""Each suite's plugin, and the context that gives its tests."""


def run_suite(name: str, backend: str, *extra: str) -> None:
    """Run one suite on one backend; its outcomes go into a file. Nothing is run where there are no tests of it."""
    plugin, tests = SUITES[name]
    with tests() as targets:  # type: ignore[attr-defined]
        if targets:
            run(plugin, backend, OUTCOMES / f"{name}-{backend}.json", "--noconftest", *extra, targets=targets)


def read(name: str) -> Control:
    """Read what became of a suite on both backends; no cases where it was not run."""
    files = {backend: OUTCOMES / f"{name}-{backend}.json" for backend in BACKENDS}
    return Control(
        **{
            backend: json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            for backend, file in files.items()
        }
    )


def main() -> int:
    """Do what the arguments say; return the exit status."""
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:2] == ["run"]:  # one suite, one backend, options for pytest
        run_suite(*sys.argv[2:])
        return 0
    if sys.argv[1:] != ["page"]:
        for name in sys.argv[1:] or SUITES:
            for backend in BACKENDS:
                run_suite(name, backend)
    controls = {name: read(name) for name in SUITES}
    write_part(more_page(controls, {plugin: read_pins(plugin) for plugin in ("cpython", "distributed")}), part="more")
    wrong = [f"{name}: {case}" for name, control in controls.items() for case in [*control.lost(_pinned(control))]]
    wrong += [f"libraries: {case}" for case in failed(controls["libraries"].skyward)]
    print(
        "\n".join(["conformance: " + ("passes on the control, not on Skyward:" if wrong else "as the control"), *wrong])
    )
    return bool(wrong)


def _pinned(control: Control) -> list[str]:
    return [case for case, told in control.skyward.items() if told.get("reason", "").startswith("Skipped: pinned")]


if __name__ == "__main__":
    sys.exit(main())
