"""What the check after every test sees: `tests/conftest.py`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

CHILD_OF_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def started() -> Iterator[subprocess.Popen[bytes]]:
    """A process that was started by another thread, which has ended."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        made.append(subprocess.Popen([sys.executable, "-c", CHILD_OF_A_CHILD], stdin=subprocess.PIPE))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with made[0] as process:
        yield process


def test_children_and_theirs_are_seen(started: subprocess.Popen[bytes], request: pytest.FixtureRequest) -> None:
    conftest: Any = request.config.pluginmanager.getplugin(str(request.config.rootpath / "tests/conftest.py"))
    own = psutil.Process(started.pid)
    while not (below := own.children()):
        assert started.poll() is None
    seen = {process.pid for process in conftest._descendants(psutil.Process())}
    assert {started.pid, below[0].pid} <= seen
