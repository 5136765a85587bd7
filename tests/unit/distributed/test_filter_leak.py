"""The filter before a port that a framework opens at every address."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from skyward.distributed._filter import only_reached_at

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux only")

LOOKS = 30


def test_looking_for_a_port_that_is_never_opened_leaves_no_file_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        before = len(os.listdir("/proc/self/fd"))
        with only_reached_at("127.0.0.1", other.getsockname()[1] ^ 1):
            for _ in range(LOOKS):
                threading.Event().wait(0.01)
            assert len(os.listdir("/proc/self/fd")) <= before + 2  # of the look that is going on
        assert len(os.listdir("/proc/self/fd")) == before
