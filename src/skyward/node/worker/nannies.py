"""The program of a node's nanny process, and of the fork server that it has its workers from."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn, cast

from skyward.node.processes import end_all, has_ended, name_process
from skyward.node.program import read_plan, run_program, take_standard_output
from skyward.node.worker.nanny import keep_slots

__all__ = ["main"]

log = logging.getLogger("skyward.node.worker.nannies")

_DEATH_S = 1.0
_END_S = 15.0


def main() -> None:
    """Run the node's nannies until the supervisor's end of standard input closes."""
    zygote = os.getppid()
    plan, reports = read_plan(), take_standard_output()
    _start_fork_server()
    run_program(keep_slots, plan, reports, on_end=lambda: _end_after(plan.ready.pid, zygote, plan.config.instance_id))


def _end_after(supervisor: int, zygote: int, instance_id: str) -> None:
    """End the node's processes if the supervisor was killed, and the zygote, which ends them then, was killed too."""
    if has_ended(supervisor, within_s=_DEATH_S) and has_ended(zygote, within_s=_END_S):
        asyncio.run(end_all(instance_id))


def _start_fork_server() -> None:
    """Have the fork server be a fork of this process, before it has threads: workers need what it has imported.

    multiprocessing starts a new program, which would import it again. It still does should this server end.
    """

    def fork(_path: bytes, argv: Sequence[str], kept: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            starting.spawnv_passfds = stock  # workers are forks of this process: their children are programs
            _serve_forks(argv[-1], kept)
        return pid

    multiprocessing.get_context("forkserver").set_forkserver_preload(["skyward.node.worker.worker"])
    resource_tracker.ensure_running()
    starting = cast("Any", util)
    stock, starting.spawnv_passfds = starting.spawnv_passfds, fork
    try:
        forkserver.ensure_running()
    finally:
        starting.spawnv_passfds = stock


def _serve_forks(code: str, kept: Sequence[int]) -> NoReturn:
    """Do in this process what was meant for a new one: run ``code`` with no descriptors but ``kept``."""
    status = 1
    try:
        name_process("forkserver")
        _close_all_but({0, 1, 2, *kept})
        # Both are those of the process this was forked from, the first one locked; user code may want its own.
        cast("Any", forkserver)._forkserver.__init__()  # noqa: SLF001
        cast("Any", resource_tracker)._resource_tracker.__init__()  # noqa: SLF001
        exec(code)  # noqa: S102  # "from multiprocessing.forkserver import main; main(…)"
    except SystemExit:
        status = 0
    except BaseException:  # past the fork nobody else would report it
        log.exception("the fork server failed")
    finally:
        os._exit(status)


def _close_all_but(kept: Collection[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # the one that the listing itself had open
                os.close(descriptor)
