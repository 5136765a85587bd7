"""Output of a pool that stays: its calls' lines are written to its folder as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from skyward.events import Notice
from skyward.events.bus import EventBus
from skyward.events.kept_lines import KeptLines
from skyward.provision.buying.pool_folder import PoolFolder

__all__ = ["keep_output"]

# A write for each line doubles its cost (7 µs). A killed process loses the lines of this time, except those of calls
# whose results it has.
_WRITE_EVERY_S: Final = 0.05


def keep_output(pool_id: str, bus: EventBus, loop: asyncio.AbstractEventLoop, closing: ExitStack) -> Path | None:
    """Keep the lines on ``bus`` in the pool's folder until ``closing``; return the folder.

    Without room or rights for it, publish a notice and return None: the pool works without.
    """

    def later(write: Callable[[], object]) -> None:
        # The event thread writes: the loop must not wait for a disk.
        loop.call_soon_threadsafe(loop.call_later, _WRITE_EVERY_S, bus.run, write)

    try:
        folder = PoolFolder(pool_id)
        closing.callback(folder.close)
        kept = KeptLines(folder.logs, later)
    except OSError as error:
        bus.publish(Notice(f"output of calls is not kept for `skyward logs`: {error}"))
        return None
    closing.callback(kept.close)
    bus.recorder = kept
    return folder.path
