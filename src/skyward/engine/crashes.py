"""Stacks that Python prints when it crashes: each is shown once, not again for every retry."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from skyward.events import LogLine

__all__ = ["ShownCrashes"]

_BEGINNING = "Fatal Python error: "
_VARYING = re.compile(r"0x[0-9a-f]+")  # ids of threads
_REMEMBERED = 64


class ShownCrashes:
    """Stacks of the workers of one pool that were shown."""

    def __init__(self) -> None:
        self._shown: deque[str] = deque(maxlen=_REMEMBERED)

    def once(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the last lines of a worker; of a stack that was shown before, the first line only."""
        lines = list(lines)
        start = next((index for index, line in enumerate(lines) if line.line.startswith(_BEGINNING)), len(lines))
        stack = lines[start:]
        text = _VARYING.sub("", "\n".join(line.line for line in stack))
        yield from lines[:start]
        if not stack or text not in self._shown:
            self._shown.append(text)
            yield from stack
            return
        yield replace(stack[0], line=f"{stack[0].line}, with the same stack as before")
