"""Done-callbacks that exit, or never return, cost nobody else theirs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import skyward as sky


def test_a_callback_that_exits_or_blocks_costs_no_other_its_turn() -> None:
    release, heard = threading.Event(), SimpleQueue[int]()

    def leave(_: Future[Any]) -> None:
        raise SystemExit(3)

    def block(_: Future[Any]) -> None:
        release.wait(60)

    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        try:
            for callback in (leave, block, lambda future: heard.put(future.result())):
                pool.submit(time.sleep, 0.2).add_done_callback(callback)
            assert heard.get(timeout=30) is None
        finally:
            release.set()
