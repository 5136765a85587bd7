"""joblib's own tests pass on Skyward, but for the pinned ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 400  # it takes about a minute

SKIPPED_BY_JOBLIB = {
    "Skipped: Need OpenMP helper compiled",
    "Skipped: Only without multiprocessing",
    "Skipped: This test requires dask",  # it means: requires that dask is absent
}


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_joblibs_own_suite_passes_but_for_what_is_pinned(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"

    completed = subprocess.run(
        [sys.executable, Path(__file__).with_name("suite.py"), "joblib", "skyward", outcomes],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert completed.returncode == 0, completed.stdout[-20_000:] + completed.stderr
    cases = json.loads(outcomes.read_text(encoding="utf-8"))
    reasons = {case["reason"] for case in cases.values() if case["outcome"] not in {"passed", "xpassed"}}
    assert {reason for reason in reasons if not reason.startswith("Skipped: pinned")} <= SKIPPED_BY_JOBLIB
    assert sum(case["outcome"] == "passed" and case["remote"] for case in cases.values()) >= 150
