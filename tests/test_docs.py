"""Every Python block of the README and the docs runs, and prints what the page says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = ("no-run", "ml")
"""What a fence says of blocks that do not run here: they need what is not there, or frameworks (see tests/ml)."""

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
def test_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, {})


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ON_HOSTS, ids=name)
def test_page_runs_on_hosts_and_prints_what_it_says(page: Path, tmp_path: Path, lab: Path) -> None:
    run(page, tmp_path, {"HOME": str(lab)})


def run(page: Path, folder: Path, env: dict[str, str]) -> None:
    text = program(page, "")
    script = folder / f"page_{page.stem.replace('-', '_')}.py"  # no library's name
    script.write_text(text, encoding="utf-8")

    completed = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=folder,
        # Dask's own clusters leave a folder for temporary files.
        env=os.environ | {"DASK_TEMPORARY_DIRECTORY": str(folder / "dask")} | env,
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert_printed(text, completed.stdout)


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
