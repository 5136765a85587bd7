"""Tables of the site's pages, for tests that hold them to the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[4] / "docs"

Table = Sequence[dict[str, str]]
"""Rows of a table, each by the words of its head."""


@pytest.fixture(scope="session")
def tables() -> Callable[[str], dict[str, Table]]:
    """Return the tables of a page by their head, as it is written between the first and the last bar."""

    def read(page: str) -> dict[str, Table]:
        found: dict[str, Table] = {}
        lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.startswith("|---"):
                head, rows = lines[number - 1], list[dict[str, str]]()
                for row in lines[number + 1 :]:
                    if not row.startswith("|"):
                        break
                    rows.append(dict(zip(cells(head), cells(row), strict=True)))
                assert head.strip("| ") not in found, f"{page} has two tables with the head {head}"
                found[head.strip("| ")] = rows
        return found

    return read


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in line.strip().removeprefix("|").removesuffix("|").split(" |")]
