"""Test runs in several processes, forked from the one that collected: ``pytest --processes 5``.

pytest-xdist's processes each import and collect every test: 8 s of processor time apiece, up to 16 s where two share a
core's caches, of 1,100 s that the whole of `make test` took. Here it happens once, and what was imported is shared.

``--at-most 10`` starts further processes while processors idle: tests of clouds and of losses wait for six sevenths of
their time, and those that compute would be slowed down by twice as many beside them.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

LOOK_S = 1.0
"""Interval between looks at the processors, and at whether a process has died while a child holds its pipe open."""
IDLE, BUSY = 25.0, 5.0
"""Percentages of the processors' time that idles: above one a process more is started, below the other one ends."""
END_S = 30.0
"""How long an interrupted process may take to end what it started."""

Message = tuple[str, Any]
"""Its kind, and what it brings."""


@dataclass(eq=False)
class _Process:
    """One forked process.

    Attributes:
        items: indices of the tests that were sent to it and have not ended.
        under_way: the first of them has begun.
        last: no other will be sent.
    """

    pid: int
    channel: Any
    items: deque[int] = field(default_factory=deque[int])
    under_way: bool = False
    last: bool = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--processes`` and ``--at-most``."""
    parser.addoption("--processes", type=int, default=0, help="run files in this many processes; 0: in this one")
    parser.addoption("--at-most", type=int, default=0, help="and in up to this many while processors idle")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in processes where the option asks for them."""
    processes = session.config.getoption("--processes")
    if not processes or session.config.option.collectonly or session.testsfailed:
        return None
    _Run(session, processes, session.config.option.at_most).run()
    return True


def wanted(running: int, *, idle: float, least: int, most: int) -> int:
    """Return how many processes there should be, where ``running`` are and a percentage of the processors idles."""
    if idle > IDLE and running < most:
        return running + 1
    if idle < BUSY and running > least:
        return running - 1
    return running


class _Run:
    """Processes and what each of them runs: files whole, in the order of collection."""

    def __init__(self, session: pytest.Session, least: int, most: int) -> None:
        self._session = session
        self._least, self._most = least, most
        self._wanted = least
        self._looked_at = time.monotonic()
        files = groupby(range(len(session.items)), key=lambda index: session.items[index].path)
        self._waiting = deque([*indices] for _, indices in files)
        self._processes: list[_Process] = []

    def run(self) -> None:
        """Run every test; raise as pytest's own loop does where the run is to stop early."""
        gc.collect()
        gc.freeze()  # no pass of a child's collector copies the pages that all of them share
        try:
            psutil.cpu_times_percent()  # since when the next call counts
            for _ in range(min(self._least, len(self._waiting))):
                self._start()
            while self._processes:
                self._step()
        except BaseException:
            self._interrupt()
            raise

    def _start(self) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            ours.close()
            for other in self._processes:
                other.channel.close()
            _serve(self._session, theirs)
        theirs.close()
        self._processes.append(_Process(pid, ours))

    def _step(self) -> None:
        channels: list[Any] = [process.channel for process in self._processes]
        wait(channels, LOOK_S)
        for process in [*self._processes]:
            pid, status = os.waitpid(process.pid, os.WNOHANG)  # before its last messages are taken
            self._take_all(process)
            if pid:
                self._ended(process, status)
        self._adapt()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _adapt(self) -> None:
        """Start a process more where processors idle; one too many ends when it has run its file."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        idle: float = psutil.cpu_times_percent().idle
        self._wanted = wanted(len(self._processes), idle=idle, least=self._least, most=self._most)
        if self._waiting and self._wanted > len(self._processes):
            self._start()

    def _take_all(self, process: _Process) -> None:
        with suppress(EOFError, OSError):  # it is ending
            while process.channel.poll():
                self._take(process, process.channel.recv())

    def _take(self, process: _Process, message: Message) -> None:
        kind, content = message
        hook = self._session.config.hook
        match kind:
            case "next":
                surplus = sum(not each.last for each in self._processes) > self._wanted
                group = self._waiting.popleft() if self._waiting and not surplus else []
                process.last = not group
                process.items += group
                process.channel.send(group)
            case "begun":
                process.under_way = True
            case "over":
                process.under_way = False
                process.items.popleft()
            case _:
                for data in content:
                    report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
                    hook.pytest_runtest_logreport(report=report)

    def _ended(self, process: _Process, status: int) -> None:
        """Forget a process; if tests of it are left it died, which fails the test under way and no other."""
        self._processes.remove(process)
        process.channel.close()
        if status and not process.items:
            name, reason = f"process {process.pid}", f"it ended with status {status} after its tests, see above"
            report = pytest.TestReport(name, (name, None, name), {}, "failed", reason, "teardown")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        if process.under_way:
            item = self._session.items[process.items.popleft()]
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", f"process {process.pid} died during {item.nodeid}", "call"
            )
            self._session.config.hook.pytest_runtest_logreport(report=report)
        if process.items:
            self._waiting.appendleft([*process.items])
            self._start()

    def _interrupt(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + END_S
        for process in self._processes:
            process.channel.close()
            while os.waitpid(process.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.02)


def _serve(session: pytest.Session, channel: Any) -> None:
    """Run what is sent, in the forked process; never return."""
    code = 1
    config: Any = session.config
    exits: Any = atexit
    try:
        with suppress(KeyboardInterrupt, BrokenPipeError):
            _detach_output(config)
            _Served(session, channel).run()
            config._ensure_unconfigure()
            code = 0
        exits._run_exitfuncs()
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        os._exit(code)


def _detach_output(config: pytest.Config) -> None:
    """Show nothing on the terminal, and capture in files of this process: the position in them is shared by a fork."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    writer: Any = config.get_terminal_writer()
    writer._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # for the process's life


class _Served:
    """What a forked process runs and reports."""

    def __init__(self, session: pytest.Session, channel: Any) -> None:
        self._session = session
        self._channel = channel
        self._reports: list[Any] = []
        session.config.pluginmanager.register(self)

    def run(self) -> None:
        """Run files until there is none, then end what outlives them.

        A file's last test is followed by the session: asked for before that test, the next file would wait for it.
        """
        session: Any = self._session
        while indices := self._next():
            items = [session.items[index] for index in indices]
            for item, following in zip(items, [*items[1:], session], strict=True):
                self._channel.send(("begun", None))
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                self._report()
                self._channel.send(("over", None))
        session._setupstate.teardown_exact(None)

    def _next(self) -> Sequence[int]:
        self._channel.send(("next", None))
        indices: Sequence[int] = self._channel.recv()
        return indices

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report until the test is over, unless it failed: a message takes both processes half a millisecond."""
        hook = self._session.config.hook
        self._reports.append(hook.pytest_report_to_serializable(config=self._session.config, report=report))
        if report.failed:  # this process may die before the test is over
            self._report()

    def _report(self) -> None:
        self._channel.send(("reports", self._reports))
        self._reports.clear()
