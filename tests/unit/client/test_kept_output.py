"""Ctrl-C while a pool's folder is made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType

import pytest

from skyward._concurrency.loop import LoopThread, acquire_loop
from skyward.client.kept_output import keep_output
from skyward.events.bus import EventBus
from skyward.provision.buying import pool_folder

PATIENCE_S = 10


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = acquire_loop()
    yield loop
    loop.release()


@pytest.fixture
def interrupted() -> Iterator[threading.Event]:
    """Set once the main thread was interrupted."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, interrupt)
    yield interrupted
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [None, OSError("the disk is full")], ids=["looks", "fails"])
def test_ctrl_c_is_raised_after_the_look_through_all_folders(
    monkeypatch: pytest.MonkeyPatch, loop: LoopThread, interrupted: threading.Event, error: OSError | None
) -> None:
    seen: list[str] = []
    main = threading.get_ident()

    def look() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(PATIENCE_S)
        seen.append(threading.current_thread().name)
        if error is not None:
            raise error

    monkeypatch.setattr(pool_folder, "_forget_old", look)
    with pytest.raises(KeyboardInterrupt), ExitStack() as closing:
        keep_output("sky-interrupted", EventBus(), loop, closing)

    assert len(seen) == 1
    assert threading.main_thread().name not in seen
    [folder] = [each for each in pool_folder.known_folders() if each.name == "sky-interrupted"]
    assert not pool_folder.is_in_use(folder)
