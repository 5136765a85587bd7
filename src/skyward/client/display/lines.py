"""Lines of a display, before they are drawn."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Line", "PoolTag", "Tone"]


class Tone(enum.Enum):
    """The kind of a line; the value is its style on a terminal."""

    STEP = "dim"
    """A step of the pool."""
    OUTPUT = ""
    """A line that a call printed, in colours of its own."""
    WARNING = "yellow"
    """A loss, or one to come."""
    ERROR = "bold red"
    """A failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        source: the node or instance it concerns, else ``"pool"``.
        node: the rank of that node, which chooses the colour; None where there is none.
        text: free of control characters; with colours (SGR) if it was printed by a call.
        tone: its kind.
    """

    source: str
    node: int | None = None
    text: str
    tone: Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTag:
    """The features of a pool by which lines distinguish it from others that are open.

    Attributes:
        provider: its provider's name.
        made: greater for a pool that was made later.
    """

    provider: str = "pool"
    made: int = 0
