"""What a program with a pool leaves on a terminal, and in a pipe that both its streams lead to."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pyte
import pytest

ROWS, COLUMNS = 50, 120
PATIENCE_S = 90

SCRIPT = """
import logging, sys
import skyward as sky

logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)

@sky.compute
def throw(n):
    import time
    for part in range(10):
        print(f"{n}.{part} of the points are inside")
        time.sleep(0.02)
    return n

print("opening ... ", end="", flush=True)
with sky.ComputePool(provider=sky.Local(), concurrency=2) as pool:
    for batch in range(8):
        calls = [pool.submit(throw, n) for n in range(batch * 2, batch * 2 + 2)]
        sys.stdout.write(f"own line {batch}: ")
        sys.stdout.flush()
        for call in calls:
            call.result()
        sys.stdout.write("whole")
        sys.stdout.write("\\n")
        logging.warning("warned %d", batch)
print("closed")
"""

DISPLAYED = re.compile(r"\d\d:\d\d:\d\d (pool *|node 0 *|0/[01] throw#\d+ *) │ (.*)")
INSIDE = {f"{n}.{part} of the points are inside" for n in range(16) for part in range(10)}


def shown_on_a_terminal(*options: str) -> list[str]:
    """The rows that a terminal has shown, from the first to the last."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000, ratio=1)
    stream = pyte.ByteStream(screen)
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    environment.pop("NO_COLOR", None)
    environment.pop("PYTHONUNBUFFERED", None)
    with subprocess.Popen(
        [sys.executable, *options, "-c", SCRIPT], stdin=there, stdout=there, stderr=there, env=environment
    ) as program:
        os.close(there)
        try:
            while data := read(here):
                stream.feed(data)
        finally:
            os.close(here)
        assert program.wait(PATIENCE_S) == 0
    scrolled = ["".join(row[column].data for column in range(COLUMNS)) for row in screen.history.top]
    return [row.rstrip() for row in (*scrolled, *screen.display)]


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # what a terminal says whose other end is closed
        return b""


def own_lines(rows: list[str]) -> list[str]:
    return [row for row in rows if row and not DISPLAYED.fullmatch(row)]


def texts(rows: list[str]) -> list[str]:
    return [match[2] for row in rows if (match := DISPLAYED.fullmatch(row))]


def check(rows: list[str]) -> None:
    assert set(texts(rows)) >= INSIDE
    assert len([text for text in texts(rows) if "points" in text]) == len(INSIDE)
    assert texts(rows)[0] == "preparing"
    assert texts(rows)[-1].startswith("closed after")


@pytest.mark.full
def test_lines_of_calls_and_of_the_program_share_no_row_of_a_terminal() -> None:
    rows = shown_on_a_terminal()
    check(rows)
    expected = [line for n in range(8) for line in (f"own line {n}: whole", f"warned {n}")]
    assert own_lines(rows) == ["opening ...", *expected, "closed"]


@pytest.mark.full
def test_nor_where_text_is_unbuffered() -> None:
    rows = shown_on_a_terminal("-u")
    check(rows)
    expected = [line for n in range(8) for line in (f"own line {n}: whole", f"warned {n}")]
    assert own_lines(rows) == ["opening ...", *expected, "closed"]


def test_lines_of_calls_and_of_the_program_share_no_line_of_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("opening ... ", "opening ... \\n")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
        encoding="utf-8",
        # Else Python keeps lines for a pipe back, and those on standard error come first.
        env=os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"},
        check=False,
    )
    assert "\x1b" not in done.stdout
    rows = done.stdout.splitlines()
    check(rows)
    own = own_lines(rows)
    assert (own[0], own[-1]) == ("opening ... ", "closed")
    # A line that is cut in two by lines of calls goes on below them.
    assert "".join(own[1:-1]) == "".join(f"own line {n}: wholewarned {n}" for n in range(8))


# In `make test`: unit/display/test_display.py, where a restart on purpose is one line.
@pytest.mark.full
def test_restarts_on_purpose_are_shown_as_such() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESTARTS],
        capture_output=True,
        timeout=PATIENCE_S,
        encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    lines = [text for text in texts(done.stderr.splitlines()) if "worker " in text and "open: " not in text]
    assert lines == ["call cancelled; worker restarting", "worker 0 restarted: Dask restarted it"]


RESTARTS = """
import threading, time
import skyward as sky

@sky.compute
def sleep():
    print("asleep")
    time.sleep(600)

asleep, replaced = threading.Event(), threading.Semaphore(0)
with sky.ComputePool(provider=sky.Local()) as pool:
    pool.on(sky.LogLine, lambda event: asleep.set())
    pool.on(sky.WorkerReplaced, lambda event: replaced.release())
    call = pool.submit(sleep)
    assert asleep.wait(60)
    pool.cancel_calls([call])
    assert replaced.acquire(timeout=60)
    with pool.dask_client() as client:
        client.restart()
    assert replaced.acquire(timeout=60)
"""
