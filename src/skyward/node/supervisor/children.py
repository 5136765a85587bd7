"""The processes of the node that its supervisor keeps alive: one imports all they need, the others are its forks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import stamina

from skyward.node.processes import exit_reason
from skyward.node.supervisor.plan import NodePlan
from skyward.wire.control import Command, Message, from_frame, to_frame

__all__ = ["Child", "Zygote"]

log = logging.getLogger("skyward.node.supervisor.children")


class _EndedError(Exception):
    """The process ended, whatever its status: it should not have."""


async def _keep(name: str, live: Callable[[], Awaitable[str]], on_exit: Callable[[str], None]) -> None:
    async for attempt in stamina.retry_context(
        on=_EndedError, attempts=None, timeout=None, wait_initial=0.1, wait_max=2.0
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
class _Fork:
    """Both ends that the supervisor has of a forked process: what it is told, and what it reports."""

    commands: asyncio.StreamWriter
    reports: asyncio.StreamReader


class Zygote:
    """Keeps one process that has imported what the others of the node need, and has them forked from it.

    Args:
        modules: what it imports; these may be forked.
        plan: for the environment of all of them.
        on_exit: called with why it ended, before it is started again. Its forks live on: they are to be ended here.
    """

    def __init__(self, modules: Sequence[str], plan: NodePlan, *, on_exit: Callable[[str], None]) -> None:
        # Not "-m": multiprocessing would import the module again, as __mp_main__, in every worker.
        self._argv = (sys.executable, "-c", f"from skyward.node.supervisor.zygote import main; main(*{modules!r})")
        self._plan = plan
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._orders: socket.socket | None = None
        self._started = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The present process, or None between two of them."""
        return self._process.pid if self._process is not None else None

    async def keep(self) -> None:
        """Start the process, and again whenever it ends, until cancelled."""
        await _keep("the zygote", self._live, self._on_exit)

    async def _live(self) -> str:
        self._orders, orders = socket.socketpair()
        with self._orders:
            with orders:
                process = await asyncio.create_subprocess_exec(
                    *self._argv, stdin=orders.fileno(), env=os.environ | self._plan.process_env()
                )
            self._process = process
            self._started.set()
            exit_code = await process.wait()
            self._process = None
            self._started.clear()
            return exit_reason(exit_code)

    @asynccontextmanager
    async def fork(self, module: str) -> AsyncGenerator[_Fork]:
        """Have ``main()`` of the module run in a process of its own, once there is a zygote.

        Its reports end with its exit code, or without one if the zygote has ended.
        """
        await self._started.wait()
        assert self._orders is not None
        commands, its_commands = socket.socketpair()
        reports, its_reports = socket.socketpair()
        with its_commands, its_reports, suppress(OSError):  # it has just ended: then the reports do, too
            socket.send_fds(self._orders, [b"!"], [its_commands.fileno(), its_reports.fileno()])
        _, commands_writer = await asyncio.open_connection(sock=commands)
        reports_reader, reports_writer = await asyncio.open_connection(sock=reports)
        try:
            commands_writer.write(f"{module}\n".encode())
            yield _Fork(commands=commands_writer, reports=reports_reader)
        finally:
            commands_writer.close()
            reports_writer.close()


class Child:
    """Runs ``main()`` of a module in a process of its own, again and again.

    Args:
        module: a module whose ``main`` is a program of :mod:`skyward.node.program`.
        plan: its first line of input.
        zygote: has it forked.
        on_report: called with every message it reports.
        on_exit: called with why it ended, before it is started again.
    """

    def __init__(
        self,
        module: str,
        plan: NodePlan,
        *,
        zygote: Zygote,
        on_report: Callable[[Message], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._module = module
        self._plan = plan
        self._zygote = zygote
        self._on_report = on_report
        self._on_exit = on_exit
        self._commands: asyncio.StreamWriter | None = None
        self._command: Command | None = None

    def send(self, command: Command) -> None:
        """Give the process a command that replaces those before it. Again with the same: nothing."""
        if command == self._command:
            return
        self._command = command
        if self._commands is not None:
            _write(self._commands, to_frame(command))

    async def keep(self) -> None:
        """Start the process, and again whenever it ends, until cancelled."""
        await _keep(self._module, self._live, self._on_exit)

    async def _live(self) -> str:
        async with self._zygote.fork(self._module) as fork:
            fork.commands.write(f"{self._plan.to_json()}\n".encode())
            if self._command is not None:
                _write(fork.commands, to_frame(self._command))
            self._commands = fork.commands
            reason = "ended with the process that it was forked from"
            async for line in fork.reports:
                match json.loads(line):
                    case int(exit_code):
                        reason = exit_reason(exit_code)
                    case report:
                        self._on_report(from_frame(report))
            self._commands = None
            return reason


def _write(commands: asyncio.StreamWriter, frame: dict[str, object]) -> None:
    commands.write(f"{json.dumps(frame)}\n".encode())
