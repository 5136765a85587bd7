"""Ctrl-C at every line of Skyward's own that a pool's opening runs before it asks for machines."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import skyward as sky
from skyward.base.loop import LoopThread
from skyward.errors import CapacityError
from skyward.ledger import ownership as pool_folder
from skyward.providers.base import Offer
from skyward.request.request import PoolRequest
from skyward.testing.provider import FakeProvider

PLACES = (str(Path(sky.__file__).parent), contextlib.__file__)


class SoldOut(FakeProvider):
    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        raise CapacityError("sold out")


class CtrlC:
    """Tracer that presses Ctrl-C before the n-th line of the opening."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""
        self._opens = LoopThread.call.__code__

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is self._opens:
            self.left = 0
        if not self.left or not frame.f_code.co_filename.startswith(PLACES):
            return None
        latest = frame.f_lineno

        def trace_line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal latest
            if event != "line":
                return trace_line
            latest, before = frame.f_lineno, latest
            # A jump back to a `with` line runs its exit. Python handles no signals there, else locks would stay locked.
            leaves = latest < before and getline(frame.f_code.co_filename, latest).strip().startswith("with ")
            if self.left and not leaves:
                self.left -= 1
                if not self.left:
                    self.where = f"{frame.f_code.co_qualname}, line {latest}"
                    signal.raise_signal(signal.SIGINT)
            return trace_line

        return trace_line


@pytest.fixture
def sigterm() -> Iterator[None]:
    """SIGTERM with its default effect; coverage, for example, sets a handler."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.filterwarnings("ignore:.* was never awaited", "ignore:Exception ignored in. <coroutine")
def test_ctrl_c_at_any_line_of_the_opening_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_folder, "KEPT_POOLS", 0)  # else folders pile up, and every line about each is tried
    pool = sky.ComputePool(provider=SoldOut(), image=sky.Image(), display="quiet")
    with pytest.raises(CapacityError):
        pool.open()
    threads, before = threading.enumerate(), sys.gettrace()

    lines = 0
    while True:
        lines += 1
        keys = CtrlC(lines)
        try:
            with pytest.raises((KeyboardInterrupt, CapacityError)) as raised:
                sys.settrace(keys.trace)
                pool.open()
        finally:
            sys.settrace(before)
        if not keys.where:
            break
        assert raised.type is KeyboardInterrupt, keys.where
        assert "not open" in repr(pool), keys.where
        assert threading.enumerate() == threads, keys.where
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, keys.where
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, keys.where
        assert not any(map(pool_folder.is_in_use, pool_folder.known_folders())), keys.where

    assert lines > 100
    assert raised.type is CapacityError
