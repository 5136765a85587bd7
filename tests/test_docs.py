"""Every Python block of the README and the docs runs, and prints what the page says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

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


def program(page: Path, *, no_run: bool) -> str:
    """The page's blocks as one script, each on the lines where it stands in the page."""
    script: list[str] = []
    for block in blocks(page):
        if block.language == "python" and (block.remark == "no-run") is no_run:
            script += [""] * (block.start - len(script)) + list(block.lines)
    return "\n".join(script) + "\n"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUNNABLE = [page for page in PAGES if program(page, no_run=False).strip()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    text = program(page, no_run=False)
    script = tmp_path / f"page_{page.stem.replace('-', '_')}.py"  # no library's name
    script.write_text(text, encoding="utf-8")

    completed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    printed = iter(completed.stdout.splitlines())
    assert [line for line in PRINTED.findall(text) if line not in printed] == [], completed.stdout


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_that_are_not_run_are_valid_python(page: Path) -> None:
    compile(program(page, no_run=True), str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_say_how_they_are_treated(page: Path) -> None:
    assert {block.remark for block in blocks(page) if block.language == "python"} <= {"", "no-run"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []
