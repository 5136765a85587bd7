"""The blocks of the docs that need frameworks run, and print what the page says they print."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def pages_and_blocks() -> ModuleType:
    """The module that runs all the other blocks: how they are found is the same."""
    spec = importlib.util.spec_from_file_location("skyward_test_docs", ROOT / "tests/test_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DOCS = pages_and_blocks()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", [page for page in DOCS.PAGES if DOCS.program(page, "ml").strip()], ids=DOCS.name)
def test_page_runs_with_frameworks_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    text = DOCS.program(page, "ml")
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text(text, encoding="utf-8")

    completed = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # torch leaves things there
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    DOCS.assert_printed(text, completed.stdout)
