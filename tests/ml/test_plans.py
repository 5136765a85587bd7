"""The first pool of each example with a framework opens as planned; see tests/e2e/examples/test_plans.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import gallery
from support.openings import WITH_FRAMEWORKS, open_as_planned

pytestmark = [pytest.mark.example, pytest.mark.timeout(240)]


@pytest.mark.parametrize("example", sorted(WITH_FRAMEWORKS))
def test_the_first_pool_of_a_training_opens_as_planned(
    example: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    open_as_planned(example, gallery.shown()[example].arguments, monkeypatch, tmp_path)
