"""Zygote of a supervisor, kept running: the process that has imported everything and forks the node's others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential, wait_random

from skyward.base.descriptors import keep_from_forks
from skyward.node.plan import NodePlan
from skyward.node.processes import exit_reason
from skyward.node.supervisor.fork_server import send_environment
from skyward.node.supervisor.start_order import start_variables
from skyward.wire.control import from_frame

log = logging.getLogger("skyward.node.supervisor.zygote")

_LINE_BYTES = 1 << 24  # the ports of 1,500 workers are more than asyncio's default of 64 KiB
_UNKNOWN = 255
"""Exit code of a process that something else has waited for; multiprocessing's number for it."""


class _EndedError(Exception):
    """A process ended that has to run; any status counts."""


async def keep_process(name: str, live: Callable[[], Awaitable[str]], on_exit: Callable[[str], None]) -> None:
    """Run a process until cancelled: start it again whenever it has ended.

    Args:
        name: its name, for the log.
        live: starts the process and returns the reason of its end.
        on_exit: called with that reason, before the next start.
    """
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(_EndedError), wait=wait_exponential(0.1, 2.0) + wait_random(0, 1)
    ):
        with attempt:
            try:
                reason = await live()
            except Exception as error:
                log.exception("%s cannot be kept", name)
                reason = f"cannot be kept: {error}"
            on_exit(reason)
            raise _EndedError(f"{name} {reason}")


class Fork:
    """Connections to a forked process: commands to it, and reports from it.

    Attributes:
        exit_code: its exit code, once its reports have ended; None if it is lost, as when the zygote has ended.
    """

    def __init__(self, commands: asyncio.StreamWriter, lines: asyncio.StreamReader) -> None:
        self.exit_code: int | None = None
        self.commands = commands
        self.lines = lines

    def send(self, *commands: object) -> None:
        """Send commands, as pickles."""
        self.commands.write(b"".join(map(pickle.dumps, commands)))

    async def reports(self) -> AsyncGenerator[Any]:
        """Yield its reports to its end: messages of the control connection, and texts."""
        async for line in self.lines:
            report: Any = json.loads(line)
            if isinstance(report, int):
                self.exit_code = report
                return
            yield report if isinstance(report, str) else from_frame(report)


@asynccontextmanager
async def fork_from(orders: socket.socket, module: str) -> AsyncGenerator[Fork]:
    """Have ``main()`` of the module run in a fork of the zygote that takes ``orders``.

    Its reports end with its exit code, or without one if the zygote has ended.
    """
    commands, its_commands = map(keep_from_forks, socket.socketpair())
    reports, its_reports = map(keep_from_forks, socket.socketpair())
    with its_commands, its_reports, suppress(OSError):  # it has just ended: then the reports do, too
        socket.send_fds(orders, [b"!"], [its_commands.fileno(), its_reports.fileno()])
    with ExitStack() as unconnected:  # a cancellation in between must leave no socket open
        unconnected.enter_context(commands)
        unconnected.enter_context(reports)
        _, commands_writer = await asyncio.open_connection(sock=commands)
        unconnected.callback(commands_writer.close)
        reports_reader, reports_writer = await asyncio.open_connection(sock=reports, limit=_LINE_BYTES)
        unconnected.pop_all()
    try:
        fork = Fork(commands_writer, reports_reader)
        fork.send(module)
        yield fork
    finally:
        commands_writer.close()
        reports_writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """Zygote that was forked before its node was planned: it waits for its environment.

    Attributes:
        pid: the process.
        orders: connection to it.
        started_with: variables that count only when a program starts, as they were when its program did.
    """

    pid: int
    orders: socket.socket
    started_with: Mapping[str, str]


async def _ended(pid: int, orders: socket.socket) -> int:
    """Wait for the end of a child, which closes ``orders`` a moment before; return its exit code."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(orders, closed.set)  # it never writes there
    try:
        await closed.wait()
    finally:
        loop.remove_reader(orders)
    return _wait_for_exit_code(pid)


def _wait_for_exit_code(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return _UNKNOWN


class Zygote:
    """Process that has imported the modules of the node's others and forks them; restarted whenever it ends.

    Args:
        modules: modules to import; these may be forked.
        plan: for the environment of all of them.
        on_exit: called with the reason of its end, before it is started again; has to end its forks, which live on.
        spare: the first such process, where it was forked beforehand.
    """

    def __init__(
        self, modules: Sequence[str], plan: NodePlan, *, on_exit: Callable[[str], None], spare: Spare | None = None
    ) -> None:
        # Not "-m": multiprocessing would import the module again, as __mp_main__, in processes that calls start.
        start = "import gc; gc.disable(); from skyward.node.supervisor.fork_server import run_zygote as run"
        self._argv = (sys.executable, "-c", f"{start}; run(*{tuple(modules)!r})")
        self._plan = plan
        self._on_exit = on_exit
        self._spare = spare
        self._pid: int | None = None if spare is None else spare.pid
        self._orders: socket.socket | None = None
        self._started = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The present process, or None between two of them."""
        return self._pid

    async def keep(self) -> None:
        """Start the process, and again whenever it ends, until cancelled."""
        await keep_process("the zygote", self._live, self._on_exit)

    async def _live(self) -> str:
        self._pid, orders = await self._start(os.environ | self._plan.process_env())
        with orders:
            self._orders = orders
            self._started.set()
            exit_code = await _ended(self._pid, orders)
        self._pid = None
        self._started.clear()
        return exit_reason(exit_code)

    async def _start(self, env: Mapping[str, str]) -> tuple[int, socket.socket]:
        """Return a process with this environment, and the connection for its orders."""
        spare, self._spare = self._spare, None
        if spare is not None and start_variables(env) == spare.started_with:
            send_environment(spare.orders, env)
            return spare.pid, spare.orders
        if spare is not None:
            with spare.orders:
                spare.orders.shutdown(socket.SHUT_WR)
                await _ended(spare.pid, spare.orders)
        return self._start_program(env)

    def _start_program(self, env: Mapping[str, str]) -> tuple[int, socket.socket]:
        orders, its_orders = socket.socketpair()
        with its_orders:
            process = subprocess.Popen(self._argv, stdin=its_orders.fileno(), env=env)
        process.returncode = 0  # _ended() waits for it
        return process.pid, orders

    @asynccontextmanager
    async def fork(self, module: str) -> AsyncGenerator[Fork]:
        """Have ``main()`` of the module run in a process of its own, once there is a zygote.

        Its reports end with its exit code, or without one if the zygote has ended.
        """
        await self._started.wait()
        assert self._orders is not None
        async with fork_from(self._orders, module) as fork:
            yield fork
