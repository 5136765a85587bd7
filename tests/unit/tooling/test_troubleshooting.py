"""Troubleshooting by message: the fixed parts of every quoted message are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
OTHERS = ("Frameworks' own messages", "## Laptops and systems")
"""Beginnings of parts whose messages are those of other programs."""
MEASURABLE = 6
"""Characters from which a part says which message it is."""
NEAR = r"[^\n]*?(?:\n[^\n]*?){0,2}"
"""Text between two parts of a message: the rest of a line of code, and two more."""


def pages_messages() -> Iterator[str]:
    """Code in the first cell of every row, in the parts that quote Skyward's own messages."""
    own = True
    for line in (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(("## ", *OTHERS)):
            own = not line.startswith(OTHERS)
        if own and line.startswith("| `"):
            yield from re.findall("`([^`]+)`", line.split(" | ")[0])


def code() -> str:
    """The code, with the pieces of each literal joined: parsing it would take a second."""
    return "\n".join(
        re.sub(r"""["']\s+f?["']""", "", path.read_text(encoding="utf-8"))
        for path in (ROOT / "src").rglob("*")
        if path.suffix in {".py", ".sh"}
    )


def test_every_quoted_message_is_one_of_the_code() -> None:
    text = code()
    rotten: list[str] = []
    for message in pages_messages():
        fixed = [part for part in (part.strip(" ,;:.()") for part in message.split("…")) if part]
        together = NEAR.join(map(re.escape, fixed))
        if not any(len(part) >= MEASURABLE for part in fixed) or not re.search(together, text):
            rotten.append(message)

    assert rotten == [], "the code has no such message: correct the row, or remove it"


def test_the_page_has_the_kinds_of_trouble_that_users_meet() -> None:
    messages = list(pages_messages())

    assert len(messages) > 100
    assert len(messages) == len(set(messages))


def test_questions_are_real_ones_and_have_answers() -> None:
    page = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    answers = re.split(r"^### .+\n", page, flags=re.MULTILINE)[1:]
    threads = re.findall(r"\((https://github\.com/[\w-]+/[\w-]+/issues/\d+)\)", page)

    assert len(answers) >= 25
    assert [answer for answer in answers if len(answer.split()) < 10] == []
    assert len(threads) == page.count("](https://") >= 25
    assert len(set(threads)) == len(threads)
