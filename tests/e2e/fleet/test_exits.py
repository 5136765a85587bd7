"""Programs that end with a pool open, in every way a program can: nothing of the pool outlives them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import skyward.ledger.ledger as ledger_module

SETUP = """
import os, signal, sys, threading, time
import skyward as sky

@sky.compute
def double(number):
    return 2 * number

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

pool = sky.ComputePool(provider=sky.Local(), display="quiet")
"""

PROGRAMS: Mapping[str, tuple[str, int]] = {
    "SIGTERM in the block": ("with pool: send('SIGTERM')", 143),
    "SIGHUP while it opens": (
        "pool.on(sky.BootstrapStarting, lambda _: send('SIGHUP'))\nwith pool: time.sleep(60)",
        129,
    ),
    "SIGTERM in a running event loop": (
        """
import asyncio
async def main():
    async with pool:
        asyncio.get_running_loop().call_later(0.1, send, "SIGTERM")
        await asyncio.sleep(60)
asyncio.run(main())
""",
        143,
    ),
    "never closed": ("pool.open(); assert double(1) >> pool == 2", 0),
    "left to a thread": (
        """
def work():
    with pool:
        time.sleep(0.5)
        assert double(1) >> pool == 2
        sys.exit(3)
threading.Thread(target=work).start()
""",
        0,
    ),
    "SIGTERM while a thread has it open": (
        """
def work():
    with pool:
        send("SIGTERM")
        time.sleep(60)
thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
        -15,
    ),
    "SIGQUIT in the block": ("with pool:\n    send('SIGQUIT')\n    time.sleep(60)", -3),
    "three times Ctrl-C while it closes": (
        """
pool.__enter__()
pool.on(sky.PoolStopping, lambda event: [send("SIGINT") for _ in range(3)] and None)
try:
    pool.__exit__(None, None, None)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(0 if not pool.is_active else 1)
""",
        0,
    ),
    "an error in the block and callbacks that fail": (
        """
pool.on(sky.PoolStopping, lambda event: 1 / 0)
try:
    with pool:
        pool.submit(double, 1).add_done_callback(lambda _: 1 / 0)
        raise LookupError
except LookupError:
    sys.exit(5)
""",
        5,
    ),
}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert living(tmp_path) == []


def living(state: Path) -> list[str]:
    """The processes of every node that was ever tagged in this state folder."""
    instances = {path.name for path in (state / "skyward" / "local").glob("*/*")}
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SKYWARD_INSTANCE") in instances and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


REPEATED = (
    "SIGTERM in a running event loop",
    "left to a thread",
    "SIGTERM while a thread has it open",
    "SIGQUIT in the block",
    "SIGHUP while it opens",
    "three times Ctrl-C while it closes",
)
"""Endings that repeat a behaviour of another one, at another point."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in REPEATED else name for name in PROGRAMS]
)
def test_nothing_is_left_when_a_program_ends_with(name: str, state: Path) -> None:
    program, status = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"XDG_STATE_HOME": str(state)},
        preexec_fn=restore_signals,
    )

    assert done.returncode == status, done.stderr
    assert living(state) == []
    ledger = ledger_module.Ledger(state / "skyward" / "ledger.db")
    assert ledger.open_entries() == ()
    assert len(ledger.entries()) <= 1
    assert not list(state.rglob("instance.json"))


def restore_signals() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
