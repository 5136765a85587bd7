"""Lines of a display, independent of their drawing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Line", "PoolTag", "Tone"]


class Tone(enum.Enum):
    """Kind of a line; the value is its style on a terminal."""

    STEP = "dim"
    """A step of the pool."""
    OUTPUT = ""
    """A line that a call printed, in its own colours."""
    WARNING = "yellow"
    """A loss, or an expected loss."""
    ERROR = "bold red"
    """A failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        source: the node or instance that the line is about, else ``"pool"``.
        node: the rank of that node, which selects the colour; None for other lines.
        text: the text without control characters; with colours (SGR) if a call printed it.
        tone: the kind of the line.
        origin: worker and stream that printed it; empty for other lines.
        state: True for a state that the next line of its origin replaces, where the output can change.
    """

    source: str
    node: int | None = None
    text: str
    tone: Tone
    origin: tuple[str, str] = ("", "")
    state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTag:
    """Features that distinguish a pool's lines from those of other open pools.

    Attributes:
        provider: the provider's name.
        made: serial number; greater for a pool that was made later.
        pool_id: name of the pool for commands such as ``skyward logs``; empty if it has none.
    """

    provider: str = "pool"
    made: int = 0
    pool_id: str = ""
