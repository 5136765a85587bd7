"""``python -m benchmarks [--quick] [ROW …]``: measure, print, and write the page in the documentation."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.machine import machine, versions
from benchmarks.plot import draw
from benchmarks.report import Circumstances, duration, page, tables
from benchmarks.results import Result
from benchmarks.rows import ROWS
from benchmarks.runner import ROOT, run_rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all of them if none is named")
    parser.add_argument("--quick", action="store_true", help="one round; the page is not written")
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    rows = {key: row for key, row in ROWS.items() if not options.rows or key in options.rows}

    load, started = os.getloadavg()[0], time.monotonic()
    results: list[Result] = []
    for result in run_rows(rows, quick=options.quick):
        results.append(result)
        print(_line(result), flush=True)
    minutes = (time.monotonic() - started) / 60

    print(f"\n{tables(results, rows)}\n")
    if options.quick or len(rows) < len(ROWS):
        print("A part of the whole: docs/benchmarks.md stays as it was.")
        return
    about = {
        **machine(),
        "load before": f"{load:.1f}",
        "measured": f"{time.strftime('%Y-%m-%d')}, in {minutes:.0f} minutes",
    }
    notes = (ROOT / "benchmarks/notes.md").read_text(encoding="utf-8")
    text = page(results, rows, Circumstances(machine=about, versions=versions()), notes)
    (ROOT / "docs/benchmarks.md").write_text(text, encoding="utf-8")
    draw(results, rows, ROOT / "docs/benchmarks.svg")


def _line(result: Result) -> str:
    measured = result.measured
    outcome = duration(median(measured.seconds)) if measured and measured.seconds else result.error or "done"
    return f"{result.row:14} round {result.round + 1}  {result.peer:12} {outcome}"


if __name__ == "__main__":
    main()
