from __future__ import annotations

from collections.abc import Sequence

from skyward.events import LogLine
from skyward.scheduling.worker_link import ShownCrashes

STACK = ["Fatal Python error: Segmentation fault", "", "Thread 0x00007f1 (most recent call first):", "  File a.py in f"]


def once(shown: ShownCrashes, lines: Sequence[str], worker: int = 0) -> list[str]:
    return [line.line for line in shown.once(LogLine(0, "i0", text, 1.0, worker) for text in lines)]


def test_a_stack_is_shown_once_whatever_its_threads_ids_and_its_worker() -> None:
    shown = ShownCrashes()
    again = [text.replace("0x00007f1", "0x00007f2") for text in STACK]
    assert once(shown, ["working", *STACK]) == ["working", *STACK]
    assert once(shown, ["working", *again], worker=1) == [
        "working",
        "Fatal Python error: Segmentation fault, with the same stack as before",
    ]


def test_another_stack_is_shown_and_printed_lines_always_are() -> None:
    shown = ShownCrashes()
    other = [*STACK[:-1], "  File b.py in g"]
    assert [once(shown, lines) for lines in (STACK, other, ["a"], ["a"], [])] == [STACK, other, ["a"], ["a"], []]
