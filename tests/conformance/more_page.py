"""The text of the second part of ``docs/conformance.md``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import groupby

from outcomes import Cases, Control, count

ROWS = {
    "cases": "cases",
    "passed": "passed",
    "skipped": "skipped by the suite",
    "pinned": "left out, see below",
    "failed": "failed",
    "seconds": "seconds",
}

BOTH = """\
The {number} that fail on both count a task's attempts in one process, expect a cluster of their own, or were written
for older versions of Dask:"""

LIBRARIES = {
    "test_xgboost_dask": "xgboost-cpu",
    "test_lightgbm_dask": "lightgbm",
    "test_dask_ml": "dask-ml",
    "test_optuna": "optuna",
    "test_imbalanced_learn": "imbalanced-learn",
    "test_tsfresh": "tsfresh",
}
"""The distribution that each test of ``libraries.py`` is about."""

TEXT = """\
The sections below were written with {versions}, on {cores} cores. A suite whose tests are not at hand keeps the
outcomes of its last run.

## CPython's tests of executors

CPython's own tests of `ThreadPoolExecutor`, from the interpreter's package `test`, with an executor of one `Local()`
pool of five workers in place of each thread pool. The control is `ThreadPoolExecutor`. An interpreter that was
installed without its tests runs none: `make conformance PYTHON=python3.13` names another.

{cpython}

## distributed's tests

distributed's wheel and source archive have no tests: `DISTRIBUTED` names a checkout of its repository, and without it
these are left out. The figures are from the tests of 2024.12.1, the newest at hand, on distributed {distributed}. The
control is `LocalCluster` with workers in processes. The client's tests share one cluster of two workers; those that use
the scheduler or a worker as an object of their own process are not run.

### Client

{client}

### Deployment

{deploy}

## Libraries

Each solves a small problem, on a fleet of two local nodes and on `LocalCluster` (`loky` for imbalanced-learn), and
both must reach the same quality. tsfresh is given the cluster's address alone. dask-ml's linear models are fitted by
gradient descent: with the default solver they fail on any cluster, since SciPy has no `iprint`.

{libraries}
"""


def more_page(controls: Mapping[str, Control], pins: Mapping[str, Mapping[str, str]]) -> str:
    """Return the second part of the page; ``pins`` are the cases left out, by plugin."""
    return TEXT.format(
        versions=", ".join([f"Python {platform.python_version()}", *map(_versioned, ("distributed", "dask"))]),
        cores=os.cpu_count(),
        distributed=version("distributed"),
        cpython=_suite(controls["cpython"], pins["cpython"]),
        client=_suite(controls["client"], pins["distributed"]),
        deploy=_suite(controls["deploy"], pins["distributed"]),
        libraries="\n".join(_libraries(controls["libraries"])),
    )


def _versioned(name: str) -> str:
    return f"{name} {version(name)}"


def _suite(control: Control, pins: Mapping[str, str]) -> str:
    if not control.skyward or not control.control:
        return "Not run: the tests were not at hand."
    ours, theirs = count(control.skyward), count(control.control)
    lines = ["| | skyward | control |", "|---|--:|--:|"]
    lines += [f"| {text} | {ours[row]} | {'' if row == 'pinned' else theirs[row]} |" for row, text in ROWS.items()]
    both = control.failing()
    if both:
        lines += [
            "",
            BOTH.format(number=len(both)),
            "",
            *(f"- `{_short(name)}`" for name in both),
        ]
    return "\n".join([*lines, *_left_out(control.skyward, pins)])


def _left_out(cases: Cases, pins: Mapping[str, str]) -> Iterator[str]:
    for reason, group in groupby(pins.items(), key=lambda pin: pin[1]):
        names = [name for name, _ in group if any(_is_case(case, name) for case in cases)]
        if names:
            yield f"\n**{reason}**\n"
            yield from (f"- `{name}`" for name in names)


def _is_case(case: str, pin: str) -> bool:
    return case.endswith(f"::{pin}") or case.partition("[")[0].endswith(f"::{pin}")


def _short(case: str) -> str:
    return case.rpartition("::")[2]


def _libraries(control: Control) -> Iterator[str]:
    yield "| library | skyward | control |"
    yield "|---|---|---|"
    for test, package in LIBRARIES.items():
        yield f"| {_versioned(package)} | {_told(control.skyward, test)} | {_told(control.control, test)} |"


def _told(cases: Cases, test: str) -> str:
    for name, case in cases.items():
        if name.endswith(f"::{test}"):
            return f"{case['outcome']}, {case['seconds']:.1f} s"
    return "not run"
