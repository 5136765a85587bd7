"""Run joblib's own tests on Skyward and, as control, on loky; write ``docs/conformance.md``.

usage: python tests/conformance/suite.py                        both, and the page
       python tests/conformance/suite.py BACKEND OUTCOMES.json  one, its outcomes into a file
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/conformance.md"
CASE_TIMEOUT_S = 60

Cases = dict[str, dict[str, Any]]

ROWS = {
    "cases": "cases that name the backend or none",
    "passed": "passed",
    "remote": "of these, sent work to a pool",
    "xfailed": "failed as joblib expects",
    "skipped": "skipped by joblib",
    "pinned": "left out, see below",
    "failed": "**failed**",
}

TEXT = """\
# Conformance

joblib tests its parallel loops with a module that every installation has, `joblib.test.test_parallel`. Here it runs on
the backend `skyward`, and on joblib's own default, `loky`, as control:

```console
$ make conformance
```

writes this page. Wherever a test lists the backends that it is to run on and loky is among them, `skyward` is added.
Where it names none, or loky inside its code, Skyward takes loky's place. Cases of the other backends (threads,
multiprocessing) are not run. One `Local()` pool of four workers serves all of them.

| | skyward | loky |
|---|--:|--:|
{table}

joblib {joblib}, NumPy {numpy}, Python {python}, {cores} cores. A case that sent nothing to a pool tests what joblib
does before it sends anything, such as checking parameters, or a loop of one job. Where joblib's table says that a
combination is beyond loky (two generators at a time, loops below threads), the case on Skyward expects it to work.

## What is left out

{pins}
"""


@cache
def read_pins() -> dict[str, str]:
    """The cases that do not count, by their id or their test's name, each with its reason."""
    pins: dict[str, str] = {}
    reason = ""
    for line in (HERE / "joblib_skips.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            pins[line.strip()] = reason
        elif line and not line.startswith("#"):
            reason = line
    return pins


def run(backend: str, outcomes: Path) -> int:
    """Run the suite in a pytest of its own, away from this repository's settings; its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pytest.ini")
        settings.write_text(f"[pytest]\ntimeout = {CASE_TIMEOUT_S}\n", encoding="utf-8")
        options = ["-c", settings, "--rootdir", folder, "-q", "-p", "no:cacheprovider", "-p", "joblib_plugin"]
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        options += ["--backend", backend, "--outcomes", outcomes.absolute(), "--pyargs", "joblib.test.test_parallel"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        ).returncode


def count(cases: Cases) -> dict[str, int]:
    """How many cases there are of each kind that the page tells apart."""
    kinds = [_kind(case) for case in cases.values()]
    remote = sum(bool(case.get("remote")) for case in cases.values() if case["outcome"] == "passed")
    return {row: kinds.count(row) for row in ROWS} | {"cases": len(kinds), "remote": remote}


def _kind(case: dict[str, Any]) -> str:
    return "pinned" if case.get("reason", "").startswith("Skipped: pinned") else case["outcome"]


def page(skyward: Cases, loky: Cases) -> str:
    """The text of docs/conformance.md."""
    ours, control = count(skyward), count(loky)
    only_ours = {"remote", "pinned"}
    table = [f"| {text} | {ours[row]} | {'' if row in only_ours else control[row]} |" for row, text in ROWS.items()]
    table.append(f"| seconds | {_seconds(skyward)} | {_seconds(loky)} |")
    pins = [
        f"**{reason}**\n\n" + "\n".join(f"- `{name}`" for name, _ in group)
        for reason, group in groupby(read_pins().items(), key=lambda pin: pin[1])
    ]
    return TEXT.format(
        table="\n".join(table),
        pins="\n\n".join(pins),
        joblib=version("joblib"),
        numpy=version("numpy"),
        python=platform.python_version(),
        cores=os.cpu_count(),
    )


def _seconds(cases: Cases) -> int:
    return round(sum(case["seconds"] for case in cases.values()))


def main() -> int:
    if arguments := sys.argv[1:]:
        backend, outcomes = arguments
        return run(backend, Path(outcomes))
    with tempfile.TemporaryDirectory() as folder:
        files = {backend: Path(folder, f"{backend}.json") for backend in ("skyward", "loky")}
        statuses = [run(backend, file) for backend, file in files.items()]
        cases = {backend: json.loads(file.read_text(encoding="utf-8")) for backend, file in files.items()}
    PAGE.write_text(page(**cases), encoding="utf-8")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
