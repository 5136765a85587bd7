"""The way to the dashboard of a pool's scheduler, which starts when somebody asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from skyward.errors import UnreachableError

__all__ = ["DashboardLink"]

_logger = logging.getLogger("skyward.dask")


class DashboardLink:
    """Asks for the link once, and remembers the answer. To be used on one event loop; ``link`` is read anywhere.

    Attributes:
        link: the link; empty while it is not known.

    Args:
        forward: how this process reaches an address of the head node; may block.
    """

    def __init__(self, forward: Callable[[str], str]) -> None:
        self.link = ""
        self._forward = forward
        self._asking: asyncio.Task[str] | None = None

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return self._asking is not None and not self._asking.done()

    def start(self, ask: Callable[[], Awaitable[object]]) -> asyncio.Task[str]:
        """Ask, unless that is under way; one answer is for all who wait.

        Args:
            ask: asks the scheduler; its answer has ``address`` and ``token``, or ``error``.
        """
        if self._asking is None or (self._asking.done() and not self.link):
            self._asking = asyncio.ensure_future(self._find(ask))
            self._asking.add_done_callback(_log_failure)
        return self._asking

    async def find(self, ask: Callable[[], Awaitable[object]]) -> str:
        """The link; ``ask`` as in :meth:`start`.

        Raises:
            UnreachableError: the scheduler has no dashboard; says why.
        """
        return await asyncio.shield(self.start(ask))

    def forget(self) -> None:
        """Another scheduler has another dashboard."""
        self.link = ""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _find(self, ask: Callable[[], Awaitable[object]]) -> str:
        answer = await ask()
        told = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if "address" not in told:
            reason = told.get("error", "its version of Skyward knows of none")
            raise UnreachableError(f"the pool's scheduler has no dashboard: {reason}")
        here = await asyncio.to_thread(self._forward, told["address"])
        self.link = f"http://{here}/status?token={told['token']}"
        return self.link


def _log_failure(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.info("no dashboard: %s", error)
