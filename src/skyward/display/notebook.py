"""Screen in a notebook: steps and progress in one output that changes in place, printed lines on the cell's own."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final, Protocol, TextIO, cast

from skyward._concurrency.waiting import Clock
from skyward.display.screens import Layout, Line, Tone, progress_bar
from skyward.display.tables import FleetLoad
from skyward.display.words import Work
from skyward.wire.terminal import cleaned

__all__ = ["Notebook", "NotebookScreen", "as_data", "running_notebook"]

_REDRAW_EVERY_S: Final = 0.5
_LINES_KEPT: Final = 12
"""Steps that the output shows; earlier ones scroll out."""

Update = Callable[[str], None]
"""Replaces the text of an output."""


class Notebook(Protocol):
    """Cells of a notebook: the output that changes in place, and the standard streams."""

    def cell(self) -> object:
        """Return the identity of the cell that runs, or ran last."""
        ...

    def output(self, text: str) -> Update:
        """Add an output with this text to that cell; return the function that replaces it."""
        ...

    def write(self, text: str, *, error: bool) -> None:
        """Write to the standard output of that cell, or its standard error, which notebooks show in red."""
        ...


class NotebookScreen:
    """One output per cell for steps, phases and progress; lines that calls print go to the cell's standard output.

    Only errors go to standard error. Progress is drawn twice a second at most: each drawing is a message to the
    browser.
    """

    shows_load = True

    def __init__(self, notebook: Notebook, layout: Layout, load: FleetLoad, *, clock: Clock) -> None:
        self._notebook = notebook
        self._layout = layout
        self._load = load
        self._clock = clock
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._phase = ""
        self._works: tuple[Work, ...] = ()
        self._cell: object = None
        self._update: Update | None = None
        self._drawn = ""
        self._next_s = 0.0

    def line(self, line: Line) -> None:
        """See :meth:`Screen.line <skyward.display.screens.Screen.line>`."""
        now, source, text = self._layout.columns(line)
        whole = f"{now} {source} │ {cleaned(text, colours=line.tone is Tone.OUTPUT)}"
        if line.tone is Tone.STEP:
            self._turn_to_cell()
            self._lines.append(whole)
            self._draw()
        else:
            self._notebook.write(f"{whole}\n", error=line.tone is Tone.ERROR)

    def phase(self, line: Line | None) -> None:
        """See :meth:`Screen.phase <skyward.display.screens.Screen.phase>`."""
        self._phase = f"… {line.source}: {line.text}" if line else ""
        self._draw()

    def status(self, works: Sequence[Work]) -> None:
        """See :meth:`Screen.status <skyward.display.screens.Screen.status>`."""
        ended = len(works) < len(self._works)
        self._works = tuple(works)
        if ended or self._clock.monotonic() >= self._next_s:
            self._draw()

    def close(self) -> None:
        """See :meth:`Screen.close <skyward.display.screens.Screen.close>`."""
        self._phase, self._works = "", ()
        self._draw()

    def _turn_to_cell(self) -> None:
        """Leave the last cell's output with its lines, and begin another one, if another cell runs now."""
        cell = self._notebook.cell()
        if cell != self._cell:
            if self._update is not None and self._drawn != (left := "\n".join(self._lines)):
                self._update(left)
            self._cell, self._update, self._drawn = cell, None, ""
            self._lines.clear()

    def _draw(self) -> None:
        now_s = self._clock.monotonic()
        self._next_s = now_s + _REDRAW_EVERY_S
        if self._phase or self._works:
            self._turn_to_cell()
        text = "\n".join([*self._lines, *self._changing(now_s)])
        if text == self._drawn:
            return
        self._drawn = text
        if self._update is None:
            self._update = self._notebook.output(text)
        else:
            self._update(text)

    def _changing(self, now_s: float) -> list[str]:
        if not (self._phase or self._works):
            return []
        works = [f"{progress_bar(work, '█░')}{work.ongoing(now_s)}" for work in self._works]
        load = ["   ".join(row) for row in self._load.rows()]
        return [*([self._phase] if self._phase else []), *works, *load, *self._load.footer(self._clock.elapsed())]


class _Kernel:
    """Notebook of the IPython kernel that runs this process."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def cell(self) -> object:
        # Also in threads, where it is that of the cell that runs now, and all outputs go.
        return self._shell.display_pub.parent_header.get("msg_id")

    def output(self, text: str) -> Update:
        from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        handle: Any = cast("Any", display)(as_data(text), raw=True, display_id=True)

        def update(text: str) -> None:
            handle.update(as_data(text), raw=True)

        return update

    def write(self, text: str, *, error: bool) -> None:
        stream = cast("TextIO", sys.stderr if error else sys.stdout)
        stream.write(text)
        stream.flush()


def as_data(text: str) -> dict[str, str]:
    """Return a text in the forms that a notebook's output may have, escaped in its HTML."""
    style = "margin:0;white-space:pre-wrap;opacity:.75"
    return {"text/plain": text, "text/html": f'<pre style="{style}">{escape(text)}</pre>'}


def running_notebook() -> Notebook | None:
    """Return the notebook whose kernel this process is; None elsewhere, as in IPython on a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return _Kernel(shell) if getattr(shell, "kernel", None) is not None else None
