"""The demos of ``make demo`` and ``make demo-ssh``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = [ROOT / "examples" / name for name in ("demo.py", "demo_ssh.py")]


@pytest.mark.full
@pytest.mark.example
@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", path],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=tmp_path,
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr
