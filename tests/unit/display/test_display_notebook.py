"""What a pool shows in a notebook: one output per cell that changes, printed lines on the cell's standard output."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skyward.display import Display, DisplayKind
from skyward.display.notebook import Notebook, as_data
from skyward.events import Error, InfraCreating, LogLine, Notice, PoolStarted, PoolStopping, Progress
from support.clock import FakeClock
from support.displays import InlineBus


class FakeNotebook(Notebook):
    """Cells that keep what they show.

    Attributes:
        running: the cell that runs.
        outputs: the texts of each output so far, by cell.
        written: what was written to the streams, and whether it is an error.
    """

    def __init__(self) -> None:
        self.running = 1
        self.outputs: list[tuple[int, list[str]]] = []
        self.written: list[tuple[str, bool]] = []

    def cell(self) -> int:
        """The one that runs."""
        return self.running

    def output(self, text: str) -> Callable[[str], None]:
        """Keep it."""
        texts = [text]
        self.outputs.append((self.running, texts))
        return texts.append

    def write(self, text: str, *, error: bool) -> None:
        """Keep it."""
        self.written.append((text, error))


class NotebookShow:
    """A display in a notebook."""

    def __init__(self, kind: DisplayKind) -> None:
        self.notebook, self.clock, self.bus = FakeNotebook(), FakeClock(100.0), InlineBus()
        wall = self.clock.monotonic
        self.display = Display(kind, self.bus, notebook=self.notebook, clock=self.clock, wall=wall)

    @property
    def last(self) -> str:
        """What the last output shows, without times."""
        return "\n".join(line.partition("│ ")[2] or line for line in self.notebook.outputs[-1][1][-1].splitlines())


@pytest.fixture
def show() -> NotebookShow:
    return NotebookShow(DisplayKind.LOG)


def test_steps_are_one_output_that_changes(show: NotebookShow) -> None:
    show.bus.publish(InfraCreating())
    show.bus.publish(PoolStarted(nodes=1, workers=2))

    assert len(show.notebook.outputs) == 1
    assert show.last == "preparing\nopen: 1 node, 2 workers"
    assert show.notebook.written == []


def test_printed_lines_and_notices_are_no_errors(show: NotebookShow) -> None:
    show.bus.publish(LogLine(0, "i-0", "\x1b[31mhello\x1b[0m", 0.0))
    show.bus.publish(Notice("slow"))
    show.bus.publish(Error("lost"))

    assert [(text.partition("│ ")[2], error) for text, error in show.notebook.written] == [
        ("\x1b[31mhello\x1b[0m\x1b[0m\n", False),
        ("note: slow\n", False),
        ("error: lost\n", True),
    ]
    assert show.notebook.outputs == []


def test_progress_is_drawn_twice_a_second_at_most_and_its_end_at_once(show: NotebookShow) -> None:
    show.bus.publish(Progress("fit", 0, 100))
    show.clock.advance(2)
    for done in range(1, 100):
        show.bus.publish(Progress("fit", done, 100))
        show.clock.advance(0.01)
    ((_, texts),) = show.notebook.outputs

    assert 2 <= len(texts) <= 4
    assert "█" in texts[-1]
    show.bus.publish(Progress("fit", 100, 100))
    assert "█" not in show.last
    assert "100" in show.last


def test_another_cell_gets_an_output_of_its_own_and_the_first_keeps_its_lines(show: NotebookShow) -> None:
    show.bus.publish(PoolStarted(nodes=1, workers=1))
    show.notebook.running = 2
    show.bus.publish(PoolStopping())
    show.display.close()
    (_, first), (_, second) = show.notebook.outputs

    assert first[-1].endswith("open: 1 node, 1 worker")
    assert "open" not in second[0]
    assert "closing" in second[-1]
    assert "closed after" in second[-1]


def test_a_spinner_shows_the_present_step_only() -> None:
    show = NotebookShow(DisplayKind.SPINNER)
    show.bus.publish(InfraCreating())
    assert show.last == "… pool: preparing"
    show.bus.publish(PoolStarted(nodes=1, workers=1))
    assert show.last == "open: 1 node, 1 worker"
    assert len(show.notebook.outputs) == 1


def test_lines_of_calls_are_no_markup_of_the_page() -> None:
    data = as_data("<script>1</script> & more")

    assert data["text/plain"] == "<script>1</script> & more"
    assert ">&lt;script&gt;1&lt;/script&gt; &amp; more</pre>" in data["text/html"]
