"""Diagram of a pool's life and of a call's way, drawn narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
WIDTH = 420


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one picture."""

    ink: str
    faint: str
    line: str
    box: str
    inside: str


THEMES = {
    "light": Theme(ink="#0f172a", faint="#475569", line="#2563eb", box="#eff6ff", inside="#ffffff"),
    "dark": Theme(ink="#f1f5f9", faint="#cbd5e1", line="#38bdf8", box="#1e293b", inside="#0f172a"),
}

OPENS = (
    ("with ComputePool(…) as pool:", "the block begins"),
    ("machines", "the provider starts them; their prices and the limits are checked first"),
    ("preparation", "Python and the packages that your program imports"),
    ("workers", "processes, as many as nodes times concurrency, wait for calls"),
)
CALL = (
    ("your program", "f(x) >> pool sends the function and its arguments"),
    ("lane", "one encrypted connection per worker; it resumes after a broken link"),
    ("worker", "runs the call; printed lines come back while it runs"),
    ("your program", "the result, or the same exception"),
)
CLOSES = (
    ("end of the block", "also after an exception, Ctrl-C or SIGTERM"),
    ("machines are ended", "and looked for again, until they are gone"),
)
LEASE = ("if your program dies", "the nodes end by themselves after the lease, two minutes")


def wrap(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def draw_step(theme: Theme, y: float, name: str, remark: str, *, x: float = 20, dashes: str = "none") -> Iterator[str]:
    """Yield a box with a name and a remark of at most two lines."""
    fill, font = (theme.inside, MONO if "(" in name else FONT)
    yield (
        f'<rect x="{x}" y="{y}" width="{WIDTH - 2 * x}" height="58" rx="8" fill="{fill}" '
        f'stroke="{theme.line}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'
        f'<text x="{x + 12}" y="{y + 19}" font-family="{font}" font-size="14" font-weight="700" '
        f'fill="{theme.ink}">{escape(name)}</text>'
    )
    for number, line in enumerate(wrap(remark, 52)):
        yield (
            f'<text x="{x + 12}" y="{y + 36 + 15 * number}" font-family="{FONT}" font-size="12.5" '
            f'fill="{theme.faint}">{escape(line)}</text>'
        )


def draw_arrow(theme: Theme, y: float) -> str:
    """Return an arrow that leads from a box to the one below."""
    middle = WIDTH / 2
    return (
        f'<path d="M{middle} {y} v13 m-5 -6 l5 6 l5 -6" fill="none" stroke="{theme.line}" stroke-width="2" '
        'stroke-linecap="round" stroke-linejoin="round"/>'
    )


def draw_steps(theme: Theme, y: float, steps: tuple[tuple[str, str], ...], *, x: float = 20) -> Iterator[str]:
    """Yield boxes below each other, with arrows between."""
    for number, (name, remark) in enumerate(steps):
        yield from draw_step(theme, y + 76 * number, name, remark, x=x)
        if number:
            yield draw_arrow(theme, y + 76 * number - 16)


def draw_life(theme: Theme) -> str:
    """Return the diagram in the colours of ``theme``."""
    opened = 12.0
    called = opened + 76 * len(OPENS) + 34
    closed = called + 76 * len(CALL) + 28
    height = closed + 76 * len(CLOSES) + 66
    calls = (
        f'<rect x="8" y="{called - 28}" width="{WIDTH - 16}" height="{76 * len(CALL) + 20}" rx="12" '
        f'fill="{theme.box}" stroke="{theme.line}" stroke-dasharray="5 4"/>'
        f'<text x="26" y="{called - 8}" font-family="{FONT}" font-size="13" font-weight="700" '
        f'fill="{theme.line}">every call, as often as you like</text>'
    )
    steps = (
        *draw_steps(theme, opened, OPENS),
        draw_arrow(theme, called - 44),
        calls,
        *draw_steps(theme, called, CALL, x=26),
        draw_arrow(theme, closed - 30),
        *draw_steps(theme, closed, CLOSES),
        *draw_step(theme, height - 66, *LEASE, dashes="2 4"),
    )
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    return "\n".join((frame, "<title>The life of a pool and the way of a call</title>", *steps, "</svg>\n"))


def draw() -> dict[str, str]:
    """Return the diagram for light and for dark pages."""
    return {f"life-{name}.svg": draw_life(theme) for name, theme in THEMES.items()}
