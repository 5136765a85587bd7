"""Ctrl-C while a pool's folder is made."""

from __future__ import annotations

import _thread
import threading
from contextlib import ExitStack

import pytest

from skyward._concurrency.loop import acquire_loop
from skyward.client.kept_output import keep_output
from skyward.events.bus import EventBus
from skyward.provision.buying import pool_folder


def test_ctrl_c_is_heard_after_the_look_through_all_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look() -> None:
        _thread.interrupt_main()
        seen.append(threading.current_thread().name)

    monkeypatch.setattr(pool_folder, "_forget_old", look)
    loop = acquire_loop()
    try:
        with pytest.raises(KeyboardInterrupt), ExitStack() as closing:
            keep_output("sky-interrupted", EventBus(), loop, closing)
    finally:
        loop.release()

    assert seen != [threading.main_thread().name]
    assert len(seen) == 1
    [folder] = [each for each in pool_folder.known_folders() if each.name == "sky-interrupted"]
    assert not pool_folder.is_in_use(folder)
