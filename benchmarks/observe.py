"""Looks at processes and event loops from outside, while a measurement runs."""

from __future__ import annotations

import asyncio
import cProfile
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "CELL_VARIABLE",
    "cell_processes",
    "longest_gap",
    "peak_memory",
    "processor_time",
    "pss_bytes",
    "ticking",
]

CELL_VARIABLE = "BENCHMARK_CELL"
"""Environment variable that names the cell; whatever the cell starts inherits it."""

_TICK_S = 0.005
_SAMPLE_S = 0.01
_IN_C = re.compile(r"<|>|built-in method |method | objects| at 0x\w+")


def cell_processes(cell: str, client: int) -> list[psutil.Process]:
    """All processes that carry the cell's name or descend from its client; the client itself is not among them."""
    found = {child.pid: child for child in _descendants(client)}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(CELL_VARIABLE) == cell:
                found[process.pid] = process
    found.pop(client, None)
    return list(found.values())


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


# --- processor time -----------------------------------------------------------------------------------------------


@contextmanager
def processor_time() -> Iterator[dict[str, float]]:
    """Yield seconds that the block used, once it is over: the ``client``'s, and the ``node``'s, all other processes."""
    used: dict[str, float] = {}
    client = os.getpid()
    before = {pid: _processor_seconds(pid) for pid in (*_others(), client)}
    yield used
    # The clocks are read first: looking for processes costs the client time.
    spent = {pid: max(0.0, _processor_seconds(pid) - seconds) for pid, seconds in reversed(before.items())}
    used["client"] = spent.pop(client)
    used["node"] = sum(spent.values()) + sum(_processor_seconds(pid) for pid in _others() if pid not in before)


def _others() -> list[int]:
    return [process.pid for process in cell_processes(os.environ[CELL_VARIABLE], os.getpid())]


def _processor_seconds(pid: int) -> float:
    """Return what the process has used so far; 0 if it has ended. psutil's figures have steps of 10 ms."""
    return _clock_seconds(~pid << 3 | 2)


def _clock_seconds(clock: int) -> float:
    """Return the value of a clock of Linux: of a process, as from ``clock_getcpuclockid``, or of a thread."""
    with suppress(OSError):
        return time.clock_gettime(clock)
    return 0.0


# --- memory -------------------------------------------------------------------------------------------------------


def pss_bytes(pid: int) -> int:
    """Return the process's proportional share of the memory it uses; 0 if it has ended."""
    with suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    return 0


class Peak:
    """The most memory that was seen beyond what there was at first.

    Proportional shares will not do: whoever maps a file while the others do not is charged with all of it, and they are
    not looked at in the same moment. A mapped file counts once, as much of it as the one who has most of it in memory.
    """

    def __init__(self, workers: list[psutil.Process]) -> None:
        self._workers = workers
        self._baseline = self._bytes()
        self.extra_bytes = 0

    def look(self) -> None:
        """Take another sample."""
        self.extra_bytes = max(self.extra_bytes, self._bytes() - self._baseline)

    def _bytes(self) -> int:
        private = 0
        files: dict[str, int] = {}
        for process in (psutil.Process(), *self._workers):
            with suppress(psutil.Error, OSError):
                for mapped in process.memory_maps():
                    # The client's own memory is its user's.
                    private += mapped.anonymous if process.pid != os.getpid() else 0
                    files[mapped.path] = max(files.get(mapped.path, 0), mapped.rss - mapped.anonymous)
        return private + sum(files.values())


@contextmanager
def peak_memory(workers: list[psutil.Process]) -> Iterator[Peak]:
    """Sample the memory of ``workers`` from a thread as long as the block lasts."""
    peak, over = Peak(workers), threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            peak.look()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak.look()


# --- functions ----------------------------------------------------------------------------------------------------

_profiles: list[cProfile.Profile] = []
"""One for each thread that is profiled. Python 3.12 and later allow one at a time."""


def profile_threads() -> None:
    """Profile this thread, Skyward's event loops in this process, and all threads that start from now on."""
    _profile_thread()
    threading.setprofile(_profile_thread)
    for thread in threading.enumerate():
        if loop := getattr(thread, "loop", None):
            loop.call_soon_threadsafe(_profile_thread)


def _profile_thread(*_: object) -> None:
    profile = cProfile.Profile(time.thread_time)
    _profiles.append(profile)
    profile.enable()


def profiled_seconds() -> Counter[tuple[str, str]]:
    """Return the processor time so far by module and function; a function in C has the module of its caller."""
    names = {getattr(module, "__file__", ""): name for name, module in list(sys.modules.items())}
    parts: Counter[tuple[str, str]] = Counter()
    for entry in [entry for profile in _profiles for entry in profile.getstats() if not isinstance(entry.code, str)]:
        file = entry.code.co_filename
        module = names.get(file, file.rpartition("/")[2])
        if module != __name__:
            parts[module, entry.code.co_qualname] += entry.inlinetime
            for called in entry.calls or ():
                if isinstance(called.code, str):
                    parts[module, _IN_C.sub("", called.code)] += called.inlinetime
    return parts


# --- event loops --------------------------------------------------------------------------------------------------


async def longest_gap(over: threading.Event) -> float:
    """By how much a ticker on this loop was late at most, in seconds, until ``over`` is set."""
    gap, last = 0.0, time.perf_counter()
    while not over.is_set():
        await asyncio.sleep(_TICK_S)  # noqa: TID251  # the ticker itself
        now = time.perf_counter()
        gap, last = max(gap, now - last - _TICK_S), now
    return gap


@contextmanager
def ticking(loop: Any) -> Iterator[list[float]]:
    """Yield the longest gap of ``loop`` while the block lasted, once it is over. Without a loop: nothing."""
    gaps: list[float] = []
    if loop is None:
        yield gaps
        return
    over = threading.Event()
    future = asyncio.run_coroutine_threadsafe(longest_gap(over), loop)
    try:
        yield gaps
    finally:
        over.set()
        gaps.append(future.result())
