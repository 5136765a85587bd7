"""Every Python block of the README and the docs runs, and prints what the page says it prints."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dask.config
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = ("no-run", "ml")
"""What a fence says of blocks that do not run here: they need what is not there, or frameworks (see tests/ml)."""

ALONE = ("docs/images.md", "docs/migration/joblib.md", "docs/telemetry.md")
"""Pages that are programs of their own: what a program has imported, or keeps to its end, is in what they do.

The others share a process. Each as a program took 1.7 s of processor time more, and 3 s with scikit-learn.
"""

FENCE = re.compile(r"^```(\w*) *(.*)$")
PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its 0-based first line, its lines, and what the fence says."""

    start: int
    lines: tuple[str, ...]
    language: str
    remark: str


def blocks(page: Path) -> Iterator[Block]:
    fence: re.Match[str] | None = None
    start = 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if fence is None and (fence := FENCE.match(line)):
            start = number + 1
        elif fence is not None and line == "```":
            yield Block(start=start, lines=tuple(lines[start:number]), language=fence[1], remark=fence[2])
            fence = None


def program(page: Path, remark: str) -> str:
    """The page's blocks with this remark as one script, each on the lines where it stands in the page."""
    script: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.remark == remark:
            script += [""] * (block.start - len(script)) + list(block.lines)
    return "\n".join(script) + "\n"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUNNABLE = [page for page in PAGES if program(page, "").strip()]
ON_HOSTS = [page for page in RUNNABLE if "gpu1" in program(page, "")]


# In `make test`: the behaviours on the pages have tests of their own, and every block is compiled below.
@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", [page for page in RUNNABLE if page not in ON_HOSTS], ids=name)
def test_page_runs_and_prints_what_it_says(page: Path, run: Callable[[Path], None]) -> None:
    run(page)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ON_HOSTS, ids=name)
def test_page_runs_on_hosts_and_prints_what_it_says(
    page: Path, lab: Path, run: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(lab))
    run(page)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], None]:
    """Runs a page as a program of its own, or in this process, and compares what it prints."""

    def run(page: Path) -> None:
        text = program(page, "")
        script = tmp_path / f"page_{page.stem.replace('-', '_')}.py"  # no library's name
        script.write_text(text, encoding="utf-8")
        if name(page) in ALONE:
            assert_printed(text, printed_by_program(script))
            return
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script)])
        with dask.config.set(temporary_directory=str(tmp_path / "dask")):
            runpy.run_path(str(script), run_name="__main__")
        assert_printed(text, capsys.readouterr().out)

    return run


def printed_by_program(script: Path) -> str:
    completed = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=script.parent,
        # Dask's own clusters leave a folder for temporary files.
        env=os.environ | {"DASK_TEMPORARY_DIRECTORY": str(script.parent / "dask")},
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def assert_printed(text: str, output: str) -> None:
    """What the blocks say after ``print(...)  #`` is in the output, in that order."""
    printed = iter(output.splitlines())
    assert [line for line in PRINTED.findall(text) if line not in printed] == [], output


def test_blocks_that_are_not_run_are_valid_python() -> None:
    for page in PAGES:
        for remark in NOT_RUN:
            compile(program(page, remark), str(page), "exec")


def test_python_blocks_say_how_they_are_treated() -> None:
    remarks = {name(page): {each.remark for each in blocks(page) if each.language == "python"} for page in PAGES}

    assert {page: found for page, found in remarks.items() if not found <= {"", *NOT_RUN}} == {}


def test_links_between_pages_lead_somewhere() -> None:
    link = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
    targets = [(page, target) for page in PAGES for target in link.findall(page.read_text(encoding="utf-8"))]

    assert [(name(page), target) for page, target in targets if not (page.parent / target).exists()] == []
