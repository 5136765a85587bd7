"""Numbers that pages give as facts are those of the code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import skyward as sky
from skyward.distributed import _gang
from skyward.fleet import node_logs as kept_logs
from skyward.ledger import ledger
from skyward.ledger import ownership as pool_folder
from skyward.providers import local

DOCS = Path(__file__).parents[4] / "docs"
WORDS = ["no", "one", "two", "three", "four", "five"]
LEASE_S = int(inspect.signature(sky.ComputePool).parameters["lease"].default)
FIRST, LAST = _gang._UNASSIGNED_PORTS

SENTENCES = [
    ("trust.md", f"port between {FIRST} and {LAST},"),
    ("trust.md", f"to any port {FIRST}:{LAST} proto tcp"),
    ("trust.md", f"| {ledger._KEPT_S / 86400:.0f} days after a machine's end |"),
    ("trust.md", f"| the newest {pool_folder.KEPT_POOLS} closed pools, {pool_folder.KEPT_BYTES >> 30} GiB |"),
    ("trust.md", f"| those of the newest {local._KEPT_POOLS} pools |"),
    ("logs.md", f"the newest {kept_logs._POOL_BYTES >> 20} MiB are kept"),
    ("logs.md", f"closed pools the newest {pool_folder.KEPT_POOLS}, together {pool_folder.KEPT_BYTES >> 30} GiB"),
    ("faq.md", f"by themselves {WORDS[LEASE_S // 60]} minutes after it"),
]


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_a_page_has_the_number_of_the_code(page: str, sentence: str) -> None:
    assert sentence in " ".join((DOCS / page).read_text(encoding="utf-8").split())
