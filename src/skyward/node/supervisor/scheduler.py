"""Program of a node's scheduler process: Dask's scheduler, serving no web page unless asked for it."""

from __future__ import annotations

import asyncio
from typing import Any, TextIO

import dask.config as dask_config
from distributed import Scheduler, SchedulerPlugin

from skyward.node.program import Program, read_plan, run_program
from skyward.node.supervisor.dashboard import Dashboard
from skyward.node.supervisor.unrunnable import fail_unrunnable
from skyward.node.task_counts import report_tasks
from skyward.shipping.graph_modules import MODULES, KeptModules
from skyward.wire.control import SchedulerRunning
from skyward.wire.security import PoolSecurity

__all__ = ["NodeScheduler", "main", "pass_modules_on"]


class NodeScheduler(Scheduler):
    """Dask's scheduler without its HTTP server, whose status pages have no authentication.

    Holders of the pool's certificate may request them (``skyward_dashboard``, see :meth:`Dashboard.open`).
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._pages = Dashboard(self)
        self.handlers["skyward_dashboard"] = self._pages.open
        pass_modules_on(self)

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Start none."""

    async def close(self, *args: Any, **kwargs: Any) -> None:
        """See distributed; the pages end first."""
        await self._pages.close()
        await super().close(*args, **kwargs)


def pass_modules_on(scheduler: Scheduler) -> None:
    """Make ``scheduler`` take the sources that clients send ahead of graphs, and pass them on to every worker."""
    kept = KeptModules()

    def take(client: str, modules: bytes) -> None:
        del client
        kept.take(modules)
        for address in list(scheduler.workers):
            scheduler.worker_send(address, {"op": MODULES, "modules": modules})

    class _ForNewWorkers(SchedulerPlugin):
        def add_worker(self, scheduler: Scheduler, worker: str) -> None:
            if (modules := kept.all()) is not None:
                scheduler.worker_send(worker, {"op": MODULES, "modules": modules})

    scheduler.stream_handlers[MODULES] = take
    scheduler.add_plugin(_ForNewWorkers(), name=MODULES)


async def _serve(program: Program) -> None:
    config = program.plan.config
    dask_config.set({"distributed.scheduler.worker-ttl": None})
    scheduler = NodeScheduler(
        host=config.binds_to,
        contact_address=program.plan.ready.scheduler,
        port=int(program.plan.ready.scheduler.rpartition(":")[2]),
        protocol="tls",
        security=PoolSecurity(config.identity),
        dashboard=False,
    )
    report_tasks(scheduler, program.report)
    fail_unrunnable(scheduler)
    async with scheduler:
        program.report(SchedulerRunning(address=program.plan.ready.scheduler))
        await asyncio.shield(scheduler.finished())


def main(commands: TextIO, reports: TextIO) -> None:
    """Run the scheduler until the supervisor closes its end of ``commands``."""
    run_program(_serve, read_plan(commands), commands, reports)
