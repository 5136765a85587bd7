"""A node between the notice that its machine is taken back and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from skyward._concurrency.waiting import Clock
from skyward.provision.preparing.node_handle import NodeHandle, NodeLoss

__all__ = ["wait_lost"]

_GRACE_S = 10.0
"""How long after its time a machine is still believed to be there."""


async def wait_lost(
    node: NodeHandle, empty: Callable[[], Coroutine[Any, Any, None] | None], *, clock: Clock
) -> NodeLoss:
    """Return once the node is gone, or has to be given up since its machine is taken back.

    That is when it has nothing left to do, at the latest when its time is over: by then it may not be gone by any sign,
    and is for its user to end.

    Args:
        node: the node.
        empty: called when the provider has said that it takes the machine back. What it returns comes to an end when
            the node has nothing left to do; None if somebody else ends the node.
        clock: the time.
    """
    gone, notice = asyncio.ensure_future(node.wait_gone()), asyncio.ensure_future(node.wait_notice())
    waiting: list[asyncio.Future[Any]] = [gone, notice]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        emptying = None if gone.done() else empty()
        if emptying is None:
            return await gone
        waiting += [asyncio.ensure_future(emptying), asyncio.ensure_future(clock.sleep(notice.result() + _GRACE_S))]
        await asyncio.wait({*waiting} - {notice}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return replace(gone.result(), announced=True)
        return NodeLoss(reason="its provider takes its machine back", announced=True)
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
