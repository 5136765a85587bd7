"""Long-lived loops: a failure is reported and the loop starts again, as others depend on it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock, NotYet, wait_until

__all__ = ["keep"]

_logger = logging.getLogger("skyward")

_FIRST_PAUSE_S = 0.1


async def keep(
    live: Callable[[], Awaitable[None]],
    *,
    what: str,
    report: Callable[[str], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Run ``live`` until it returns; after a failure, run it again.

    Any exception counts as a failure: a lack of descriptors or memory passes, and one bad item or a ``SystemExit`` of
    user code must not end a loop that others depend on. The pause before the next run grows from 0.1 s to 1 s. Only
    the cancellation of the present task ends this.

    Args:
        live: the loop; it is called again for every run.
        what: the loop in words, for the log and the report: ``"the lane to node 0"``.
        report: called with each failure that differs from the previous one, in words; must not block.
        clock: clock for pauses.
    """
    last = ""

    async def run() -> bool | NotYet:
        nonlocal last
        try:
            await live()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | GeneratorExit) and _is_ending():
                raise
            text = f"{what} failed and was started again: {type(error).__name__}: {error}"
            if text != last:  # a lack of memory would fill the log with one message a second
                last = text
                _logger.error("%s", text, exc_info=error)
                if report is not None:
                    report(text)
            return NotYet(text)
        return True

    await wait_until(run, deadline_s=math.inf, interval_s=_FIRST_PAUSE_S, what=what, clock=clock)


def _is_ending() -> bool:
    """Return True if this task is cancelled or closed."""
    # CancelledError alone does not show it: an awaited future may have been cancelled by itself.
    try:
        task = asyncio.current_task()
    except RuntimeError:  # closed after its loop
        return True
    return task is None or task.cancelling() > 0
