"""Public bug reports of similar projects do not happen here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.parametrize(
    "command",
    [["public_reports.py"], ["-c", "import public_reports; raise SystemExit(public_reports.main())"]],
    ids=["as a script", "as a module"],
)
def test_public_reports_end_as_their_reporters_expected(command: list[str]) -> None:
    program = [sys.executable, *command]
    done = subprocess.run(program, cwd=SUPPORT, capture_output=True, text=True, timeout=110, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
