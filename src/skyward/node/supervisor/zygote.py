"""Zygote of a supervisor, kept running: the process that has imported everything and forks the node's others."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential, wait_random

from skyward.base.descriptors import keep_from_forks
from skyward.node.processes import exit_reason
from skyward.node.supervisor.fork_server import ForkedZygote
from skyward.node.supervisor.plan import NodePlan
from skyward.node.supervisor.start_order import start_variables

log = logging.getLogger("skyward.node.supervisor.zygote")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Connections of a supervisor to a forked process: commands to it and reports from it."""

    commands: asyncio.StreamWriter
    reports: asyncio.StreamReader


@asynccontextmanager
async def fork_from(orders: socket.socket, module: str) -> AsyncGenerator[Fork]:
    """Have ``main()`` of the module run in a fork of the zygote that takes ``orders``.

    The reports end with the exit code, or without one if the zygote has ended.
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
        reports_reader, reports_writer = await asyncio.open_connection(sock=reports)
        unconnected.pop_all()
    try:
        commands_writer.write(f"{module}\n".encode())
        yield Fork(commands=commands_writer, reports=reports_reader)
    finally:
        commands_writer.close()
        reports_writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """Zygote that was forked before its node was planned.

    Attributes:
        zygote: the process.
        started_with: variables that count only when a program starts, as they were when its program did.
    """

    zygote: ForkedZygote
    started_with: Mapping[str, str]

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether a program that starts with ``env`` would be no different."""
        return start_variables(env) == self.started_with


async def _ended(zygote: ForkedZygote) -> int:
    """Wait for the end of the process and return its exit code."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(zygote.orders, closed.set)  # it never writes there
    try:
        await closed.wait()
    finally:
        loop.remove_reader(zygote.orders)
    return _exit_code(zygote.pid)


def _exit_code(pid: int) -> int:
    """Wait for a child that has closed its connections, as it does a moment before it ends."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return _UNKNOWN


async def _dismiss(zygote: ForkedZygote) -> None:
    with zygote.orders:
        zygote.orders.shutdown(socket.SHUT_WR)
        await _ended(zygote)


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
        program = f"{start}; run(*{tuple(modules)!r})"
        self._argv = (sys.executable, "-c", program)
        self._plan = plan
        self._on_exit = on_exit
        self._spare = spare
        self._pid: int | None = None if spare is None else spare.zygote.pid
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
        env = os.environ | self._plan.process_env()
        spare, self._spare = self._spare, None
        if spare is not None and spare.fits(env):
            return await self._live_forked(spare.zygote, env)
        if spare is not None:
            await _dismiss(spare.zygote)
        return await self._live_started(env)

    async def _live_started(self, env: Mapping[str, str]) -> str:
        here, orders = socket.socketpair()
        with here:
            with orders:
                process = await asyncio.create_subprocess_exec(*self._argv, stdin=orders.fileno(), env=env)
            return await self._serve(process.pid, here, process.wait())

    async def _live_forked(self, zygote: ForkedZygote, env: Mapping[str, str]) -> str:
        with zygote.orders:
            zygote.start(env)
            return await self._serve(zygote.pid, zygote.orders, _ended(zygote))

    async def _serve(self, pid: int, orders: socket.socket, ended: Awaitable[int]) -> str:
        self._pid, self._orders = pid, orders
        self._started.set()
        exit_code = await ended
        self._pid = None
        self._started.clear()
        return exit_reason(exit_code)

    @asynccontextmanager
    async def fork(self, module: str) -> AsyncGenerator[Fork]:
        """Have ``main()`` of the module run in a process of its own, once there is a zygote.

        Its reports end with its exit code, or without one if the zygote has ended.
        """
        await self._started.wait()
        assert self._orders is not None
        async with fork_from(self._orders, module) as fork:
            yield fork
