"""The front pages of the site: their program, numbers and links, and the pages that the specification lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FRONT = (ROOT / "README.md", DOCS / "index.md")

SPECIFIED = (
    "Getting started",
    "Your first remote function",
    "Core concepts",
    "API reference",
    "Distributed training",
    "PyTorch distributed training",
    "Providers",
    "Accelerators",
    "GPU selection guide",
    "Integrations",
    "Examples",
    "Architecture",
    "Troubleshooting",
    "FAQ",
    "Getting help",
)
"""Pages and quick links of the specification's index, and the next steps of its landing page."""

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\":]+)\"")


def first_block(page: Path) -> str:
    found = re.search(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def rows(page: Path, heading: str) -> Iterator[dict[str, str]]:
    """The rows of the table under a heading, by the names of the columns."""
    section = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip().strip("|") for line in section.splitlines() if line.startswith("|")]
    names, _, *cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    for row in cells:
        yield dict(zip(names, row, strict=True))


def test_front_pages_begin_with_the_program_of_the_cast() -> None:
    program = (DOCS / "pictures/first.py").read_text(encoding="utf-8").split('"""', 2)[2].lstrip()

    assert {page.name: first_block(page) for page in FRONT} == {page.name: program for page in FRONT}


def test_measurements_beside_other_projects_are_those_of_the_benchmarks() -> None:
    measured = {row["work"]: row for row in rows(DOCS / "benchmarks.md", "Times")}
    medians = {
        (work, name): cell.split("**")[1] if cell else ""
        for work, row in measured.items()
        for name, cell in row.items()
        if name != "work"
    }
    quoted = {
        (row["work"], name): cell
        for row in rows(DOCS / "why.md", "Measured")
        for name, cell in row.items()
        if name != "work"
    }

    assert len(quoted) >= 20
    assert {key: (cell, medians[key]) for key, cell in quoted.items() if cell != medians[key]} == {}


def test_ratios_in_the_text_about_other_projects_are_those_of_the_benchmarks() -> None:
    goals = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("\n## Times\n")[0]

    claimed = re.findall(r"calls, (\S+) times as fast as a Dask", (DOCS / "why.md").read_text(encoding="utf-8"))

    assert [number for number in claimed if f"| times as fast as dask | {number} |" not in goals] == []
    assert claimed


def test_ratios_on_all_pages_are_those_of_the_benchmarks() -> None:
    goals = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("\n## Times\n")[0]
    reached = [float(ratio) for ratio in re.findall(r"\| times as fast as \w+ \| ([\d.]+) \|", goals)]
    pages = [DOCS / "faq.md", DOCS / "why.md", *(DOCS / "migration").glob("*.md"), *(DOCS / "tutorials").glob("*.md")]
    claimed = [
        (page.name, ratio)
        for page in pages
        for ratio in re.findall(r"(\d+\.\d+)(?: times\s+as\s|\s+of loky's)", page.read_text(encoding="utf-8"))
    ]

    def is_known(ratio: str) -> bool:
        half = 0.501 * 10 ** -len(ratio.partition(".")[2])
        return any(abs(float(ratio) - value) <= half for each in reached for value in (each, 1 / each))

    assert len(claimed) >= 8
    assert [(page, ratio) for page, ratio in claimed if not is_known(ratio)] == []


def test_round_trip_in_the_readme_is_that_of_the_benchmarks() -> None:
    row = next(row for row in rows(DOCS / "benchmarks.md", "Times") if row["work"].startswith("no-op"))

    assert f"takes\n  {row['skyward'].split('**')[1]} there and back" in FRONT[0].read_text(encoding="utf-8")


def test_links_and_pictures_of_the_readme_are_in_the_checkout() -> None:
    targets = [one or other for one, other in LINK.findall(FRONT[0].read_text(encoding="utf-8"))]

    assert len(targets) > 30
    assert [target for target in targets if not (ROOT / target).is_file()] == []


def test_pages_of_the_specification_have_pages_here() -> None:
    table = {row["The specification's page"]: row["Here"] for row in rows(DOCS / "specification.md", "Pages")}
    missing = {
        name: target
        for name, here in table.items()
        for target, _ in LINK.findall(here)
        if not (DOCS / target).is_file()
    }

    assert set(table) == set(SPECIFIED)
    assert missing == {}
    assert [name for name, here in table.items() if not LINK.search(here)] == []


QUESTIONS = {
    "How do I install it?": "getting-started.md#install",
    "Do I copy my modules to the machines?": "concepts.md#your-code-goes-along",
    "How do packages get there?": "images.md",
    "How do I use machines that I have?": "machines-of-your-own.md",
    "Which provider, and what is untested?": "providers/index.md#how-to-choose",
    "How do I limit what it costs?": "concepts.md#prices-and-limits",
    "What happens when my laptop sleeps?": "concepts.md#when-your-program-dies",
    "Which GPU do I take?": "accelerators.md#choosing-one",
    "How do I train on several machines?": "training/pytorch.md",
    "Where is the output of my functions?": "logs.md",
    "What does this message mean?": "troubleshooting.md",
    "Why not Ray?": "why.md#ray",
}
"""What a newcomer asks, and the section that answers it."""


def clicks() -> dict[str, int]:
    """The pages that can be reached from the landing page, with the number of links to follow."""
    found = {"index.md": 0}
    queue = ["index.md"]
    for page in queue:
        text = (DOCS / page).read_text(encoding="utf-8")
        links = [(DOCS / page).parent / target for target, _ in LINK.findall(text) if target.endswith(".md")]
        for path in links:
            name = path.resolve().relative_to(ROOT).as_posix().removeprefix("docs/")
            if path.is_file() and path.resolve().is_relative_to(DOCS) and name not in found:
                found[name] = found[page] + 1
                queue.append(name)
    return found


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_questions_of_newcomers_are_answered_within_three_clicks() -> None:
    distance = clicks()
    targets = {question: (*answer.split("#"), "")[:2] for question, answer in QUESTIONS.items()}

    assert {question: page for question, (page, _) in targets.items() if distance.get(page, 9) > 3} == {}
    assert {
        question: anchor
        for question, (page, anchor) in targets.items()
        if anchor and anchor not in anchors(DOCS / page)
    } == {}


def test_pages_that_the_search_ranks_exist() -> None:
    pages = [page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")]
    starts = re.findall(r"/\^\((.*)\)/", (DOCS / "style/scorer.js").read_text(encoding="utf-8"))

    assert len(starts) == 2
    ranked = [start.replace("\\/", "/") for group in starts for start in group.split("|")]
    assert [start for start in ranked if not any(page.startswith(start) for page in pages)] == []
