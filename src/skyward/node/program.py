"""Frame of the programs that a supervisor starts: plan in, reports out, end with the supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TextIO

from skyward.node.supervisor.plan import NodePlan
from skyward.wire.control import Message, Report, from_frame, to_frame
from skyward.wire.dask_parts import check_parts

__all__ = ["Program", "read_plan", "run_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Process under the supervisor.

    Attributes:
        plan: the first line from the supervisor.
        commands: the lines after it.
        report: sends the supervisor a message.
    """

    plan: NodePlan
    commands: asyncio.Queue[Message]
    report: Callable[[Report], None]


def read_plan(commands: TextIO) -> NodePlan:
    """Return the plan in the supervisor's first line, and make the node's folder that of temporary files."""
    plan = NodePlan.from_json(commands.readline())
    # They go with the node then. One is the fork server's socket, whose path must be short: Linux allows 107 bytes.
    tempfile.tempdir = plan.ready.blob_dir
    return plan


# Intervals of Dask's measurements of itself. The defaults are fractions of a second and cost an idle node a sixth of a
# core. The profiler's findings would be shown on one page of a dashboard that few open.
_DASK_SETTINGS = {
    "distributed.worker.profile.interval": "100ms",
    "distributed.worker.memory.monitor-interval": "200ms",
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None,  # see NodePlan
}


def run_program(
    serve: Callable[[Program], Coroutine[Any, Any, None]],
    plan: NodePlan,
    commands: TextIO,
    reports: TextIO,
    *,
    on_end: Callable[[], object] = lambda: None,
) -> None:
    """Run ``serve`` until it returns, or until the supervisor ends or closes ``commands``.

    Args:
        serve: the program.
        plan: its plan.
        commands: stream from the supervisor, after the plan.
        reports: stream to the supervisor.
        on_end: called in a thread once ``commands`` has closed; the process ends after it.
    """

    def report(message: Report) -> None:
        reports.write(json.dumps(to_frame(message)) + "\n")

    asyncio.run(_run(serve, plan, commands, report, on_end))


async def _run(
    serve: Callable[[Program], Coroutine[Any, Any, None]],
    plan: NodePlan,
    lines: TextIO,
    report: Callable[[Report], None],
    on_end: Callable[[], object],
) -> None:
    import dask.config as dask_config

    check_parts()
    dask_config.set({"temporary-directory": plan.worker_folder, **_DASK_SETTINGS})
    commands: asyncio.Queue[Message] = asyncio.Queue()
    following = asyncio.create_task(asyncio.to_thread(_follow, lines, asyncio.get_running_loop(), commands, on_end))
    try:
        await serve(Program(plan=plan, commands=commands, report=report))
    finally:
        following.cancel()


def _follow(
    lines: TextIO, loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Message], on_end: Callable[[], object]
) -> None:
    status = 1
    try:
        for line in lines:
            loop.call_soon_threadsafe(commands.put_nowait, from_frame(json.loads(line)))
        on_end()
        status = 0
    finally:  # after an error, too: a program that receives no more commands is useless, and is started again
        # No cleaning up: workers end with their nanny, and the supervisor removes the node's folders.
        os._exit(status)
