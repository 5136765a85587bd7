"""The text of ``docs/conformance.md``."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from itertools import groupby

from outcomes import Control, count

JOBLIB_ROWS = {
    "cases": "cases that name the backend or none",
    "passed": "passed",
    "xpassed": "passed, where joblib expects loky to fail",
    "remote": "of these, sent work to a pool",
    "xfailed": "failed, as joblib expects",
    "skipped": "skipped by joblib",
    "pinned": "left out, see below",
    "failed": "**failed**",
    "seconds": "seconds",
}

SKLEARN_ROWS = {
    "cases": "tests",
    "passed": "passed",
    "remote": "of these, sent work to a pool",
    "skipped": "skipped by scikit-learn: packages that are not installed, data to download",
    "failed": "failed",
    "seconds": "seconds",
}

TEXT = """\
# Conformance

joblib and scikit-learn are installed with their own tests. Here these run on the backend `skyward` and, as control, on
joblib's own default, `loky`:

```console
$ make conformance
```

writes this page, and fails where Skyward differs from loky. It was written with {versions}, on {cores} cores.

## joblib

`joblib.test.test_parallel` holds joblib's tests of its parallel loops. Wherever a test lists the backends that it is to
run on and loky is among them, `skyward` is added. Where it names none, or loky inside its code, Skyward takes loky's
place. Cases of the other backends (threads, multiprocessing) are not run. One `Local()` pool of four workers serves
them all. `make test-full` runs the left column as well.

| | skyward | loky |
|---|--:|--:|
{joblib}

A case that sent nothing to a pool tests joblib in the caller's process: checking parameters, a loop of one
job, a loop in threads. Where joblib's table marks a combination as beyond loky (two generators at a time, loops
below threads), the case on Skyward expects it to work.

### Exceptions

{pins}

## scikit-learn

Every test of {modules}. They run under `parallel_config("skyward")`, with a `Local()` pool of two workers, and under
`parallel_config("loky", n_jobs=2)`: where code gives no number of jobs, Skyward's default is all workers,
loky's is one. Where a test names loky, Skyward takes its place. A test that sent nothing to a pool runs no loop of more
than one job, or one that asks for threads.

| | skyward | loky |
|---|--:|--:|
{sklearn}

The last row leaves out a test in which several tasks fail at once and the error of a certain one is expected. Which is
seen first is chance on both backends, so that it passes now and then:

{races}

{failing}
"""

FAILING = """\
The {number} tests that fail on both look in their own process for the effects of a task in another (a counter, a
warning, a printed line), or pass objects that cannot be pickled. They run once more with one job where they do not ask
for more, under `parallel_config("skyward", n_jobs=1)` and `parallel_config("loky")`: {ours} and {theirs} of them pass
then.

{tests}"""


def page(
    joblib: Control,
    pins: Mapping[str, str],
    sklearn: Control,
    again: Control,
    *,
    modules: Collection[str],
    races: set[str],
) -> str:
    """The page: both suites on both backends; ``again`` is what failed on both, with one job."""
    packages = ("joblib", "scikit-learn", "NumPy")
    lost = len([*sklearn.lost(races), *again.lost()])
    return TEXT.format(
        versions=", ".join([*(f"{name} {version(name)}" for name in packages), f"Python {platform.python_version()}"]),
        cores=os.cpu_count(),
        joblib="\n".join(_table(joblib, JOBLIB_ROWS)),
        pins="\n\n".join(_pins(pins)),
        modules=", ".join(f"`{name}`" for name in modules),
        sklearn="\n".join([*_table(sklearn, SKLEARN_ROWS), f"| **passed on loky, not on skyward** | {lost} | |"]),
        races="\n".join(_races(races, sklearn)),
        failing=_failing(sklearn.failing(), again),
    )


def _table(control: Control, rows: Mapping[str, str]) -> Iterator[str]:
    ours, theirs = count(control.skyward), count(control.control)
    for row, text in rows.items():
        yield f"| {text} | {ours[row]} | {'' if row in {'remote', 'pinned'} else theirs[row]} |"


def _pins(pins: Mapping[str, str]) -> Iterator[str]:
    for reason, group in groupby(pins.items(), key=lambda pin: pin[1]):
        yield f"**{reason}**\n\n" + "\n".join(f"- `{name}`" for name, _ in group)


def _races(races: set[str], control: Control) -> Iterator[str]:
    for race in control.skyward.keys() & control.control.keys() & races:
        ours, theirs = control.skyward[race]["outcome"], control.control[race]["outcome"]
        yield f"- `{race}`: {ours} on skyward, {theirs} on loky"


def _failing(cases: Collection[str], again: Control) -> str:
    if not cases:
        return ""
    tests = Counter(case.partition("[")[0] for case in cases)
    return FAILING.format(
        number=len(cases),
        ours=count(again.skyward)["passed"],
        theirs=count(again.control)["passed"],
        tests="\n".join(f"- `{test}`" + (f", {number} cases" if number > 1 else "") for test, number in tests.items()),
    )
