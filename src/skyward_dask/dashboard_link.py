"""Link to the dashboard of a pool's scheduler, which starts on the first request."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from skyward.errors import UnreachableError

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["DashboardLink", "NotebookView", "without_token"]

_logger = logging.getLogger("skyward.dask")
_TOKEN = re.compile(r"\?token=[\w-]+")


def without_token(html: str) -> str:
    """Return a notebook's view of a cluster with a link that asks for the token: a notebook's file is passed on."""
    return _TOKEN.sub("", html)


class NotebookView:
    """Extension of a new Dask client that leaves the token out of the client's view in a notebook.

    Dask adds it to every client; it ignores clients of other clusters.
    """

    def __init__(self, client: Client) -> None:
        if isinstance(getattr(cast("Any", client).cluster, "_dashboard", None), DashboardLink):
            view = client._repr_html_  # pyright: ignore[reportPrivateUsage]
            cast("Any", client)._repr_html_ = lambda: without_token(view())  # the class is Dask's


class DashboardLink:
    """Link to the dashboard, requested once and cached. For use on one event loop; ``link`` may be read in any thread.

    Attributes:
        link: the link; empty while it is unknown.

    Args:
        forward: returns a local address for an address of the head node; may block.
    """

    def __init__(self, forward: Callable[[str], str]) -> None:
        self.link = ""
        self._forward = forward
        self._asking: asyncio.Task[str] | None = None

    @property
    def is_asking(self) -> bool:
        """True while a request is pending."""
        return self._asking is not None and not self._asking.done()

    def start(self, ask: Callable[[], Awaitable[object]]) -> asyncio.Task[str]:
        """Request the link, or return the pending request, which all callers share.

        Args:
            ask: queries the scheduler; its answer has ``address`` and ``token``, or ``error``.
        """
        if self._asking is None or (self._asking.done() and not self.link):
            self._asking = asyncio.ensure_future(self._find(ask))
            self._asking.add_done_callback(_log_failure)
        return self._asking

    async def find(self, ask: Callable[[], Awaitable[object]]) -> str:
        """Return the link; ``ask`` as in :meth:`start`.

        Raises:
            UnreachableError: the scheduler has no dashboard; the message gives the reason.
        """
        return await asyncio.shield(self.start(ask))

    def forget(self) -> None:
        """Drop the link: the next scheduler has another dashboard."""
        self.link = ""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _find(self, ask: Callable[[], Awaitable[object]]) -> str:
        answer = await ask()
        reply = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        if "address" not in reply:
            reason = reply.get("error", "its version of Skyward does not serve one")
            raise UnreachableError(f"the pool's scheduler has no dashboard: {reason}")
        here = await asyncio.to_thread(self._forward, reply["address"])
        self.link = f"http://{here}/status?token={reply['token']}"
        return self.link


def _log_failure(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.info("no dashboard: %s", error)
