"""The logo: the operator `>>`, turned to the sky."""

from __future__ import annotations

BLUE, SKY = "#2563eb", "#38bdf8"
INKS = {"light": "#0f172a", "dark": "#f1f5f9"}
"""Colour of the name, by the theme of the page around it."""

FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
STROKE = 'fill="none" stroke-width="9" stroke-linecap="round" stroke-linejoin="round"'


def draw_mark() -> str:
    """Return the two chevrons, in a square of 64 units."""
    return (
        f'<path d="M12 34 L32 14 L52 34" {STROKE} stroke="{SKY}"/>'
        f'<path d="M12 54 L32 34 L52 54" {STROKE} stroke="{BLUE}"/>'
    )


def draw_logo(ink: str) -> str:
    """Return the mark with the name in the colour ``ink``."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 280 68" role="img" aria-label="Skyward">'
        f'{draw_mark()}<text x="74" y="51" font-family="{FONT}" font-size="48" font-weight="700" '
        f'letter-spacing="-1.5" textLength="198" fill="{ink}">skyward</text></svg>\n'
    )


def draw() -> dict[str, str]:
    """Return the logo for light and for dark pages, and the icon of a browser's tab."""
    mark = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 68">{draw_mark()}</svg>\n'
    return {f"logo-{theme}.svg": draw_logo(ink) for theme, ink in INKS.items()} | {"favicon.svg": mark}
