"""Commands by which the client reaches a node's jobs, through the node's transport: one JSON object on stdout.

Every one may be repeated, as after a link that broke before the answer.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

from skyward.node.jobs.store import JOBS_FOLDER, JobExistsError, JobStore, UnknownJobError
from skyward.shipping.job_file import DamagedJobFileError, split_calls

_LINES_BYTES: Final = 1 << 20
_RESULTS_BYTES: Final = 8 << 20
_KINDS: Final[Mapping[type[Exception], str]] = {
    JobExistsError: "exists",
    UnknownJobError: "unknown",
    DamagedJobFileError: "damaged",
    ValueError: "invalid",
    OSError: "disk",
}
Answer = dict[str, Any]


def _add(store: JobStore, order: argparse.Namespace) -> Answer:
    added = 0
    for index, pieces in split_calls(sys.stdin.buffer):
        store.add(order.job, index, pieces, runs=order.runs)
        added += 1
    return {"added": added, "served": store.wake()}


def _states(store: JobStore, order: argparse.Namespace) -> Answer:
    return {"jobs": store.states(order.job)}


def _output(store: JobStore, order: argparse.Namespace) -> Answer:
    lines, at, more = store.lines(order.job, order.index, order.at, _LINES_BYTES)
    return {"lines": [astuple(line) for line in lines], "at": at, "more": more}


def _results(store: JobStore, order: argparse.Namespace) -> Answer:
    """Return the outcomes and lines of calls that are over, in order, as many as fit."""
    results: dict[int, Answer] = {}
    room = _RESULTS_BYTES
    for index in json.load(sys.stdin):
        path = store.outcome(order.job, index)
        lines, _, more = store.lines(order.job, index, "", _LINES_BYTES)
        room -= path.stat().st_size + sum(len(line.line) for line in lines)
        if more or room < 0:
            break
        outcome = base64.b64encode(path.read_bytes()).decode()
        results[index] = {"outcome": outcome, "lines": [astuple(line) for line in lines]}
    return {"results": results}


def _cancel(store: JobStore, order: argparse.Namespace) -> Answer:
    indices = [order.index] if order.index is not None else [*map(int, store.states(order.job).get(order.job, {}))]
    running = [index for index in indices if store.cancel(order.job, index)]
    store.wake()
    return {"running": running}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m skyward.node.jobs")
    parser.add_argument("workdir", type=Path)
    verbs = parser.add_subparsers(required=True)

    def verb(act: Callable[[JobStore, argparse.Namespace], Answer], *names: str) -> argparse.ArgumentParser:
        command = verbs.add_parser(act.__name__[1:])
        command.set_defaults(act=act)
        for name in names:
            command.add_argument(name, type=int if name == "index" else str)
        return command

    verb(_add, "job").add_argument("--runs", type=int, default=0)
    verb(_states).add_argument("job", nargs="?", default="")
    verb(_output, "job", "index").add_argument("at", nargs="?", default="")
    verb(_results, "job")
    verb(_cancel, "job").add_argument("index", nargs="?", type=int)
    return parser


def main() -> int:
    """Carry out one command; return 1 if it was refused."""
    order = _parser().parse_args()
    try:
        answer: Answer = order.act(JobStore(order.workdir / JOBS_FOLDER), order)
    except tuple(_KINDS) as error:
        kind = next(kind for known, kind in _KINDS.items() if isinstance(error, known))
        answer = {"error": str(error), "kind": kind}
    json.dump(answer, sys.stdout)
    return int("error" in answer)


if __name__ == "__main__":
    raise SystemExit(main())
