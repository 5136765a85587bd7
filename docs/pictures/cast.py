"""Animated picture of a terminal in which ``first.py`` runs: a real pool, recorded in a pseudo-terminal.

The lines appear in their order and at their pace, except that no wait is longer than ``LONGEST_WAIT_S``. A recording
that differs from the last one in numbers and in the order of its lines only is thrown away, or every build of the site
would change the picture.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char

PROGRAM = Path(__file__).with_name("first.py")
COMMAND = "python first.py"
COLUMNS, LINES = 74, 60
TIME_LIMIT_S = 120
FRAME_S = 0.15
LONGEST_WAIT_S = 1.0

CELL_WIDTH, CELL_HEIGHT, BAR, EDGE = 8.4, 20, 34, 14
INK, PAPER = "#e2e8f0", "#0f172a"
COLOURS = {
    "default": INK,
    "brightblack": "#94a3b8",
    "cyan": "#67e8f9",
    "magenta": "#f0abfc",
    "green": "#86efac",
    "brown": "#fde68a",
    "red": "#fca5a5",
    "blue": "#93c5fd",
}
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }
.run { visibility: hidden; animation: show 1ms forwards, hide 1ms forwards }
@keyframes show { to { visibility: visible } }
@keyframes hide { to { visibility: hidden } }
@media (prefers-reduced-motion: reduce) { .run { animation: none } .last { visibility: visible } }
.bold { font-weight: 700 }
""" + "".join(f".{name} {{ fill: {colour} }}\n" for name, colour in COLOURS.items())


@dataclass(slots=True, kw_only=True)
class Version:
    """One row's content from one moment to another. ``until`` is None for the content that stays."""

    row: int
    cells: tuple[Char, ...]
    since: float
    until: float | None = None


@dataclass(slots=True)
class Recording:
    """Rows of a terminal over time."""

    screen: pyte.Screen = field(default_factory=lambda: pyte.Screen(COLUMNS, LINES))
    versions: list[Version] = field(default_factory=list[Version])

    def look(self, now: float) -> None:
        """Note the rows that have changed since the last look."""
        current = {version.row: version for version in self.versions if version.until is None}
        for row in sorted(self.screen.dirty):
            cells = tuple(self.screen.buffer[row][column] for column in range(COLUMNS))
            before = current.get(row)
            if before is not None and before.cells == cells:
                continue
            if before is not None:
                before.until = now
            if any(cell.data != " " for cell in cells):
                self.versions.append(Version(row=row, cells=cells, since=now))
        self.screen.dirty.clear()

    def text(self) -> list[str]:
        """Return the lines that are there in the end."""
        last = [version for version in self.versions if version.until is None]
        return ["".join(cell.data for cell in version.cells).rstrip() for version in sorted(last, key=lambda v: v.row)]


def run() -> Recording:
    """Run the program in a pseudo-terminal and return its screen over time; fail if the program fails."""
    recording = Recording()
    stream = pyte.ByteStream(recording.screen)
    stream.feed(b"$ " + COMMAND.encode() + b"\r\n")
    recording.look(0.0)
    terminal, program_end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [sys.executable, PROGRAM]
    process = subprocess.Popen(command, stdin=program_end, stdout=program_end, stderr=program_end)
    os.close(program_end)
    try:
        follow(terminal, stream, recording)
    finally:
        process.terminate()  # one that still runs closes its pool
        process.wait()
        os.close(terminal)
    if process.returncode:
        output = "\n".join(recording.text())
        message = f"{PROGRAM} ended with {process.returncode}, so there is nothing to show:\n{output}"
        raise RuntimeError(message)
    return recording


def follow(terminal: int, stream: pyte.ByteStream, recording: Recording) -> None:
    """Feed the program's output into the terminal's screen until the program ends."""
    started = time.monotonic()
    looked = shown = 0.0
    while (now := time.monotonic() - started) < TIME_LIMIT_S:
        if select.select([terminal], [], [], FRAME_S)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # Linux reports the end of the other side so
                break
            stream.feed(chunk.replace(b"\x1b[2m", b"\x1b[90m"))  # pyte has no faint text
        if recording.screen.dirty and now - looked >= FRAME_S:
            shown += min(now - looked, LONGEST_WAIT_S)
            looked = now
            recording.look(shown)
    else:
        message = f"{PROGRAM} still runs after {TIME_LIMIT_S} s; it should take ten: run it by itself"
        raise TimeoutError(message)
    recording.look(shown + FRAME_S)


def draw(recording: Recording) -> str:
    """Return the animated picture."""
    rows = 1 + max(version.row for version in recording.versions)
    width, height = round(COLUMNS * CELL_WIDTH + 2 * EDGE), BAR + rows * CELL_HEIGHT + EDGE
    dots = "".join(f'<circle cx="{20 + 18 * n}" cy="17" r="5.5" fill="#475569"/>' for n in range(3))
    body = "\n".join(draw_version(version) for version in recording.versions)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>A terminal: a pool of two nodes opens, runs calls, and closes</title>\n"
        f"<desc>{escape(mask(recording))}</desc>\n<style>{STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" rx="9" fill="{PAPER}"/>{dots}\n{body}\n</svg>\n'
    )


def draw_version(version: Version) -> str:
    """Return a row's text, in runs of one colour, each as wide as its cells whatever the font."""
    y = BAR + 14 + version.row * CELL_HEIGHT
    delays = f"{version.since:.2f}s" + ("" if version.until is None else f",{version.until:.2f}s")
    names = "run last" if version.until is None else "run"
    animation = ";animation-name:show" if version.until is None else ""
    runs: list[str] = []
    column = 0
    for (colour, bold), cells in groupby(version.cells, key=lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in cells)
        if text.strip():
            start = column + len(text) - len(text.lstrip())
            shown = text.strip()
            runs.append(
                f'<tspan x="{EDGE + start * CELL_WIDTH:.1f}" textLength="{len(shown) * CELL_WIDTH:.1f}" '
                f'class="{colour}{" bold" if bold else ""}">{escape(shown)}</tspan>'
            )
        column += len(text)
    return f'<text y="{y}" class="{names}" style="animation-delay:{delays}{animation}">{"".join(runs)}</text>'


def mask(recording: Recording) -> str:
    """Return the last screen's lines sorted, with numbers and generated names taken out."""
    lines = [re.sub(r"\b[0-9a-f]{10,}\b|\d+(?:[.:,]\d+)*", "0", line) for line in recording.text()]
    return "\n".join(sorted(re.sub(r"\s+", " ", line) for line in lines))


def record_into(path: Path) -> None:
    """Record, and write the picture unless the one at ``path`` shows the same lines with other numbers."""
    recording = run()
    known = re.search(r"<desc>(.*?)</desc>", path.read_text(encoding="utf-8"), re.DOTALL) if path.exists() else None
    if known is None or unescape(known[1]) != mask(recording):
        path.write_text(draw(recording), encoding="utf-8")
