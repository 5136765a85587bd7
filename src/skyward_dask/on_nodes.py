"""Dask on a pool's nodes: its scheduler beside the workers of the head, and a guest in every worker's process.

The guest is Dask's own ``Worker``, on the event loop that the process gives it. It ends with its scheduler and is
started again; the process and its calls go on. Dask's orders to restart a worker end the process, as a nanny would.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, NoReturn, Self, cast

import dask.config
import dask.sizeof
import dask.utils
from distributed import Scheduler, SchedulerPlugin, Worker
from distributed.core import Server

from skyward.base.waiting import SYSTEM_CLOCK, wait_until
from skyward.errors import ConfigurationError, UnreachableError
from skyward.node.services import ServiceProgram, WorkerHost
from skyward.shipping.definitions import main_of_tasks
from skyward.wire.control import ServiceRunning
from skyward_dask.dashboard import Dashboard
from skyward_dask.dask_parts import ThreadPoolExecutor, check_parts
from skyward_dask.modules import MODULES, KeptModules, take_modules
from skyward_dask.security import PoolSecurity
from skyward_dask.tasks import fail_unrunnable, report_tasks

log = logging.getLogger("skyward.dask")

_CLOSE_S = 5.0
_NOTICE_S = 0.05
# Intervals of Dask's measurements of itself. The defaults are fractions of a second and cost an idle node a sixth of a
# core. The profiler's findings would be shown on one page of a dashboard that few open.
_SETTINGS: dict[str, Any] = {
    "distributed.worker.profile.interval": "100ms",
    "distributed.worker.memory.monitor-interval": "200ms",
    "distributed.worker.http.routes": [],  # it serves none of the pages, whose modules are imported for nothing
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
    # A call may hold the GIL for as long as it likes.
    "distributed.scheduler.worker-ttl": None,
}


def _configure(folder: str) -> None:
    """Take over the settings of the pool's environment variables, and those of a node."""
    check_parts()
    dask.config.refresh()
    dask.config.set({"temporary-directory": folder, **_SETTINGS})
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace(",", "").isdecimal():
        # Dask's monitor takes the variable apart, and its process ends where a part of a GPU has fewer properties than
        # a whole one.
        dask.config.set({"distributed.diagnostics.nvml": False})


class NodeScheduler(Scheduler):
    """Dask's scheduler without its HTTP server, whose status pages have no authentication.

    Holders of the pool's certificate may request them (``skyward_dashboard``, see :meth:`Dashboard.open`).
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_plugin(_Pages(self), name="skyward-pages")
        pass_modules_on(self)

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Start none."""


async def serve(program: ServiceProgram) -> None:
    """Run the scheduler; see :class:`skyward.node.services.Service`."""
    plan = program.plan
    _configure(plan.worker_folder)
    if not all(device.shown_as.isdecimal() for device in plan.devices):
        dask.config.set({"distributed.diagnostics.nvml": False})
    scheduler = NodeScheduler(
        host=plan.config.binds_to,
        contact_address=f"tls://{plan.ready.service}",
        port=int(plan.ready.service.rpartition(":")[2]),
        protocol="tls",
        security=PoolSecurity(plan.config.identity),
        dashboard=False,
    )
    report_tasks(scheduler, program.report)
    fail_unrunnable(scheduler)
    async with scheduler:
        program.report(ServiceRunning(name="dask", address=plan.ready.service))
        await scheduler.finished()


class _Pages(SchedulerPlugin):
    """Dask's status pages, started on request, and ended before the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._pages = Dashboard(scheduler)
        scheduler.handlers["skyward_dashboard"] = self._pages.open

    async def before_close(self) -> None:
        await self._pages.close()


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


async def join(host: WorkerHost, address: str) -> None:
    """Run Dask's worker until it is closed; see :class:`skyward.node.services.Service`."""
    _configure(host.folder)
    # Every heartbeat estimates sizes by samples; drawn from `random`, they would shift the numbers of seeded code.
    cast("Any", dask.sizeof).random = random.Random()
    main_of_tasks()
    nanny = _Nanny(host)
    async with nanny:
        worker = _GuestWorker(host, address, nanny.contact)
        nanny.worker = worker
        try:
            await worker
            await worker.finished()
        finally:
            if worker.status.name not in ("closed", "failed"):  # cancelled, or it could not start
                nanny.keeps_process = True
                await worker.close(timeout=_CLOSE_S, executor_wait=False, nanny=False)
        if not nanny.keeps_process:
            await nanny.hang_up()
            host.end_process("Dask restarted it")


class _GuestWorker(Worker):
    """Dask's worker without its HTTP server, whose pages have no authentication."""

    def __init__(self, host: WorkerHost, scheduler: str, nanny: str) -> None:
        super().__init__(
            f"tls://{scheduler}",
            name=host.name,
            nthreads=1,
            host=host.bind,
            port=int(host.address.rpartition(":")[2]),
            contact_address=f"tls://{host.address}",
            protocol="tls",
            security=PoolSecurity(host.identity),
            memory_limit=str(host.memory_limit_bytes),
            local_directory=host.folder,
            resources={"GPU": host.accelerators} if host.accelerators else {},
            executor={role: _TaskThreadPoolExecutor(self, host, role) for role in ("default", "actor")},
            # Heartbeats bring it to the scheduler, and the dashboard shows it on its page of workers.
            metrics={"skyward_call": lambda _: host.running_call()},
            nanny=cast("Any", nanny),
        )
        self.stream_handlers[MODULES] = take_modules

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Start none."""


class _Nanny(Server):
    """What Dask takes for the worker's nanny: restarts of the worker restart its process.

    Attributes:
        worker: the worker.
        keeps_process: True if the worker's end is not meant to be followed by a fresh process.
    """

    def __init__(self, host: WorkerHost) -> None:
        self._for = host
        self._security = PoolSecurity(host.identity)
        self.keeps_process = False
        self.worker: Worker | None = None
        self._ordered_by: Any = None
        handlers = {"kill": self._kill, "close_gracefully": self._let_go}
        refused = dict.fromkeys(("run", "plugin_add", "plugin_remove", "get_logs"), self._refuse)
        super().__init__({**handlers, **refused}, connection_args=self._security.get_connection_args("worker"))

    async def __aenter__(self) -> Self:
        await self.listen(f"tls://{self._for.bind}:0", **self._security.get_listen_args("worker"))
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()

    @property
    def contact(self) -> str:
        """Address for the scheduler."""
        return f"tls://{self._for.address.rpartition(':')[0]}:{self.port}"

    async def hang_up(self) -> None:
        """Wait until the scheduler, which has the answer then, has closed the connection of its order to restart."""
        if (comm := self._ordered_by) is not None:
            with suppress(UnreachableError):
                await wait_until(
                    lambda: _true_or_none(comm.closed()), deadline_s=_CLOSE_S, interval_s=0.01, what="Dask's scheduler"
                )

    async def _kill(self, comm: Any, reason: str = "") -> None:
        """Close the worker; its process ends after this answer."""
        del reason
        self._ordered_by = comm
        if self.worker is not None:
            await self.worker.close(timeout=_CLOSE_S, executor_wait=False, nanny=False)
        # The scheduler counts its workers as soon as it has the answer: the lost connection has to arrive before.
        await SYSTEM_CLOCK.sleep(_NOTICE_S)

    async def _let_go(self, reason: str = "") -> None:
        """Note that the worker closes for another reason than a restart: its scheduler is gone, or it was retired."""
        del reason
        self.keeps_process = True

    async def _refuse(self, **_: Any) -> NoReturn:
        raise ConfigurationError("workers of a pool have no nanny of Dask's: env= and image= of the pool prepare them")


async def _true_or_none(value: object) -> Literal[True] | None:
    return True if value else None


class _TaskThreadPoolExecutor(ThreadPoolExecutor):
    """Dask's threads for tasks, which run there as the worker's calls do."""

    # Dask looks for "ThreadPoolExecutor" in the name of the class. It takes others for pools of processes, in which
    # get_worker() and get_client() find nothing.

    def __init__(self, worker: Worker, host: WorkerHost, role: str) -> None:
        super().__init__(1, thread_name_prefix=f"Dask-{role.title()}-Threads")
        self._worker = worker
        self._run_task = host.run_task

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return cast("Future[Any]", super().submit(self._run_task, self._name, fn, args, kwargs))

    def _name(self) -> str:
        """Return the name of the task that this thread runs, as Dask's dashboard shows it; empty if it runs none."""
        key = self._worker.active_threads.get(threading.get_ident())
        return str(cast("Any", dask.utils).key_split(key)) if key is not None else ""
