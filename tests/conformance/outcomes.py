"""What became of the cases, and what of it should not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]
Cases = dict[str, Case]
"""By id; ``counting.py`` says what is known of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The same cases on two backends: Skyward's, and the one it takes the place of."""

    skyward: Cases
    control: Cases

    def lost(self, races: Collection[str] = ()) -> list[str]:
        """Return what passes on the control and not on Skyward, except ``races``."""
        ours = {*passed(self.skyward), *races}
        return [case for case in passed(self.control) if case not in ours]

    def failing(self) -> list[str]:
        """What fails on both."""
        theirs = set(failed(self.control))
        return [case for case in failed(self.skyward) if case in theirs]


def passed(cases: Cases) -> list[str]:
    return [name for name, case in cases.items() if case["outcome"] in {"passed", "xpassed"}]


def failed(cases: Cases) -> list[str]:
    return [name for name, case in cases.items() if case["outcome"] == "failed"]


def count(cases: Cases) -> Counter[str]:
    """How many cases there are of each kind that the page tells apart."""
    kinds = Counter(_kind(case) for case in cases.values())
    kinds["cases"] = len(cases)
    kinds["remote"] = sum(bool(cases[name].get("remote")) for name in passed(cases))
    kinds["seconds"] = round(sum(case["seconds"] for case in cases.values()))
    return kinds


def _kind(case: Case) -> str:
    return "pinned" if case.get("reason", "").startswith("Skipped: pinned") else case["outcome"]
