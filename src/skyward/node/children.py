"""A process of the node that the supervisor keeps alive."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable

import stamina

from skyward.node.control import Command, Message, from_frame, to_frame
from skyward.node.plan import NodePlan
from skyward.node.processes import exit_reason

__all__ = ["Child"]


class _EndedError(Exception):
    """The process ended, whatever its status: it should not have."""


class Child:
    """Runs ``main()`` of a module in a process of its own, again and again.

    Args:
        module: a module whose ``main`` is a program of :mod:`skyward.node._program`.
        plan: its first line of input.
        on_report: called with every message it reports.
        on_exit: called with why it ended, before it is started again.
    """

    def __init__(
        self, module: str, plan: NodePlan, *, on_report: Callable[[Message], None], on_exit: Callable[[str], None]
    ) -> None:
        # Not "-m": multiprocessing would import the module again, as __mp_main__, in every worker.
        self._argv = (sys.executable, "-c", f"from {module} import main; main()")
        self._module = module
        self._plan = plan
        self._on_report = on_report
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._command: Command | None = None

    @property
    def pid(self) -> int | None:
        """The present process, or None between two of them."""
        return self._process.pid if self._process is not None else None

    def send(self, command: Command) -> None:
        """Give the process a command that replaces those before it. Again with the same: nothing."""
        if command == self._command:
            return
        self._command = command
        if self._process is not None:
            _write(self._process, to_frame(command))

    async def keep(self) -> None:
        """Start the process, and again whenever it ends, until cancelled."""
        async for attempt in stamina.retry_context(
            on=_EndedError, attempts=None, timeout=None, wait_initial=0.1, wait_max=2.0
        ):
            with attempt:
                reason = await self._live()
                self._on_exit(reason)
                raise _EndedError(f"{self._module} {reason}")

    async def _live(self) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | self._plan.process_env(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{self._plan.to_json()}\n".encode())
        if self._command is not None:
            _write(process, to_frame(self._command))
        self._process = process
        async for line in process.stdout:
            self._on_report(from_frame(json.loads(line)))
        exit_code = await process.wait()
        self._process = None
        return exit_reason(exit_code)


def _write(process: asyncio.subprocess.Process, frame: dict[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(frame)}\n".encode())
