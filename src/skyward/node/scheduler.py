"""The program of a head node's scheduler process: Dask's scheduler, serving no web page."""

from __future__ import annotations

import asyncio
from typing import Any

import dask.config as dask_config
from distributed import Scheduler

from skyward.node._program import Program, dask_security, read_plan, run_program, take_standard_output
from skyward.node.control import SchedulerRunning

__all__ = ["NodeScheduler", "main"]


class NodeScheduler(Scheduler):
    """Dask's scheduler without its HTTP server, whose status pages ask nobody who they are."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Start none."""


async def _serve(program: Program) -> None:
    config = program.plan.config
    dask_config.set({"distributed.scheduler.worker-ttl": None})
    scheduler = NodeScheduler(
        host=config.address,
        port=int(program.plan.ready.scheduler.rpartition(":")[2]),
        protocol="tls",
        security=dask_security(config),
        dashboard=False,
    )
    async with scheduler:
        program.report(SchedulerRunning(address=program.plan.ready.scheduler))
        await asyncio.shield(scheduler.finished())


def main() -> None:
    """Run the scheduler until the supervisor's end of standard input closes."""
    run_program(_serve, read_plan(), take_standard_output())
