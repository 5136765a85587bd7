"""What both plugins need: their options, a pool that counts, and a record of what became of every case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from suite import read_pins

import skyward as sky
from skyward.submission import ArgumentMemo, CallFuture, Invocation


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=["control", "loky", "skyward"], required=True)
    parser.addoption("--outcomes", type=Path, required=True, help="where to write what became of each case, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class CountingPool(sky.ComputePool):
    """A pool that knows how many calls joblib gave it."""

    calls = 0

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        self.calls += len(calls)
        return super().submit_calls(calls, memo=memo)


def skip_pinned(items: Sequence[pytest.Item], suite: str) -> None:
    """Skip what ``skips/<suite>.txt`` lists, each with its reason.

    Raises:
        UsageError: a name in it is that of no case, although its test was collected.
    """
    pins = read_pins(suite)
    collected = {_test_name(item) for item in items}
    unused = {name for name in pins if name.partition("[")[0] in collected}
    for item in items:
        for name in {_test_name(item), item.name, f"{_test_name(item).rpartition('::')[0]}::{item.name}"} & pins.keys():
            item.add_marker(pytest.mark.skip(reason=f"pinned: {pins[name]}"))
            unused.discard(name)
    if unused:
        raise pytest.UsageError(f"pinned, and among no collected cases: {', '.join(sorted(unused))}")


def _test_name(item: pytest.Item) -> str:
    """The test's name without its parameters; that of a method begins with its class's."""
    name: str = getattr(item, "originalname", None) or item.name
    return f"{item.cls.__name__}::{name}" if getattr(item, "cls", None) else name


class Outcomes:
    """Writes what became of every case, and what its plugin found worth noting about it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self._cases.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        case |= {"seconds": case["seconds"] + report.duration, **dict(report.user_properties)}
        expected_to_fail = hasattr(report, "wasxfail")
        if report.outcome == "passed":
            case["outcome"] = "xpassed" if expected_to_fail else case["outcome"]
            return
        case["outcome"] = "xfailed" if expected_to_fail else report.outcome
        case["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._cases, indent=1), encoding="utf-8")
