"""Screen in a notebook: steps and progress in one output that changes in place, printed lines on the cell's own."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final, TextIO, cast

from skyward.display.screens import Line, Screen, Tone, progress_bar
from skyward.display.words import Work

_REDRAW_EVERY_S: Final = 0.5
_LINES_KEPT: Final = 12
"""Steps that the output shows; earlier ones scroll out."""

Update = Callable[[str], None]
"""Replaces the text of an output."""


class Notebook:
    """Cells of the notebook whose IPython kernel this process is: outputs that change in place, standard streams."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def cell(self) -> object:
        """Return the identity of the cell that runs, or ran last."""
        # Also in threads, where it is that of the cell that runs now, and all outputs go.
        return self._shell.display_pub.parent_header.get("msg_id")

    def output(self, text: str) -> Update:
        """Add an output with this text to that cell; return the function that replaces it."""
        from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        handle: Any = cast("Any", display)(as_data(text), raw=True, display_id=True)
        return lambda text: handle.update(as_data(text), raw=True)

    def write(self, text: str, *, error: bool) -> None:
        """Write to the standard output of that cell, or its standard error, which notebooks show in red."""
        stream = cast("TextIO", sys.stderr if error else sys.stdout)
        stream.write(text)
        stream.flush()


@dataclass(eq=False, kw_only=True)
class NotebookScreen(Screen):
    """One output per cell for steps, phases and progress; lines that calls print go to the cell's standard output.

    Only errors go to standard error. Progress is drawn twice a second at most: each drawing is a message to the
    browser.
    """

    notebook: Notebook
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    _cell: object = None
    _update: Update | None = None
    _drawn: str = ""
    _next_s: float = 0.0

    @property
    def shows_load(self) -> bool:
        """See :attr:`Screen.shows_load`."""
        return True

    def line(self, line: Line) -> None:
        """See :meth:`Screen.line`."""
        whole = self._whole(line, colours=True)
        if line.tone is Tone.STEP:
            self._turn_to_cell()
            self._lines.append(whole)
            self._draw()
        else:
            self.notebook.write(f"{whole}\n", error=line.tone is Tone.ERROR)

    def phase(self, line: Line | None) -> None:
        """See :meth:`Screen.phase`."""
        self._phase = f"… {line.source}: {line.shown()}" if line else ""
        self._draw()

    def status(self, works: Sequence[Work]) -> None:
        """See :meth:`Screen.status`."""
        ended = len(works) < len(self._works)
        self._works = works
        if ended or self.clock.monotonic() >= self._next_s:
            self._draw()

    def close(self) -> None:
        """See :meth:`Screen.close`."""
        self._phase, self._works = "", ()
        self._draw()

    def _turn_to_cell(self) -> None:
        """Leave the last cell's output with its lines, and begin another one, if another cell runs now."""
        cell = self.notebook.cell()
        if cell != self._cell:
            if self._update is not None and self._drawn != (text := "\n".join(self._lines)):
                self._update(text)
            self._cell, self._update, self._drawn = cell, None, ""
            self._lines.clear()

    def _draw(self) -> None:
        now_s = self.clock.monotonic()
        self._next_s = now_s + _REDRAW_EVERY_S
        if self._phase or self._works:
            self._turn_to_cell()
        text = "\n".join([*self._lines, *self._changing(now_s)])
        if text == self._drawn:
            return
        self._drawn = text
        if self._update is None:
            self._update = self.notebook.output(text)
        else:
            self._update(text)

    def _changing(self, now_s: float) -> list[str]:
        if not (self._phase or self._works):
            return []
        works = [f"{progress_bar(work, '█░')}{work.ongoing(now_s)}" for work in self._works]
        load = ["   ".join(row) for row in self.load.rows()]
        return [*([self._phase] if self._phase else []), *works, *load, *self.load.footer(self.clock.elapsed())]


def as_data(text: str) -> dict[str, str]:
    """Return a text in the forms that a notebook's output may have, escaped in its HTML."""
    style = "margin:0;white-space:pre-wrap;opacity:.75"
    return {"text/plain": text, "text/html": f'<pre style="{style}">{escape(text)}</pre>'}


def running_notebook() -> Notebook | None:
    """Return the notebook whose kernel this process is; None elsewhere, as in IPython on a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return Notebook(shell) if getattr(shell, "kernel", None) is not None else None
