"""Owner of a node: starts, watches and ends everything on it.

It needs neither a worker nor the client to be alive, and imports nothing heavy: it is up in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock, keep
from skyward.node.gpu.devices import NodeDevices
from skyward.node.gpu.driver import Device
from skyward.node.processes import (
    SUPERVISOR_LOG,
    end_all,
    kill_all,
    reap_orphans,
)
from skyward.node.storage.blob_port import BlobPort
from skyward.node.storage.write_back import VolumeKeeper
from skyward.node.supervisor.children import Child, Spare, Zygote
from skyward.node.supervisor.control_server import ControlServer
from skyward.node.supervisor.lease import Lease
from skyward.node.supervisor.plan import NodePlan
from skyward.node.supervisor.preemption_watcher import PreemptionWatcher
from skyward.node.supervisor.sampling import open_sampler
from skyward.node.supervisor.survey import claim_ports, make_plan, port_count
from skyward.node.worker.begun import mark_path, process_at
from skyward.transport.access import TAGS_FILE
from skyward.wire.control import (
    Command,
    Ending,
    Fetch,
    Kill,
    Message,
    MetricsReport,
    Ping,
    Pong,
    Preempting,
    Report,
    SchedulerExit,
    SchedulerRunning,
    Start,
    Stop,
    SupervisorTrouble,
    TasksReport,
    TimeoutWarning,
    VolumeTrouble,
    WorkerExit,
    WorkerRunning,
    WorkerStale,
)
from skyward.wire.node_config import NodeConfig, NodeReady

__all__ = ["Supervisor"]

log = logging.getLogger("skyward.node.supervisor")

_SCHEDULER = "skyward.node.supervisor.scheduler"
_NANNIES = "skyward.node.worker.nannies"
_TICK_S = 0.25
_FAILED_STARTS = 3
_LOG_CHARS = 2000
_POWER_OFF_S = 30.0


class Supervisor:
    """One node, from its configuration to its end.

    Args:
        config: the node's configuration.
        clock: the time, for the lease and the timeout.
        spare: zygote that was forked beforehand; None where there is none.
    """

    def __init__(self, config: NodeConfig, *, clock: Clock = SYSTEM_CLOCK, spare: Spare | None = None) -> None:
        self._config = config
        self._clock = clock
        self._booted = self._clock.elapsed()
        self._lease = Lease(
            timeout_s=config.timeout_s, lease_s=config.lease_s, away_s=config.away_s, now=self._clock.monotonic()
        )
        self._ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._identity = config.identity
        self._server = ControlServer(self)
        self._blobs = BlobPort(self._identity)
        self._workers: dict[int, WorkerRunning] = {}
        self._stale: dict[int, WorkerStale] = {}
        self._scheduler: SchedulerRunning | None = None
        self._came_up = False
        self._failed_starts = 0
        self._hopeless = ""
        self._has_client = False
        self._spare = spare
        self._zygote: Zygote | None = None
        self._nannies: Child | None = None
        self._plan: NodePlan | None = None
        self._order: Start | None = None
        self._leads = asyncio.Event()
        if config.head:
            self._leads.set()
        self._volumes = VolumeKeeper(config, lambda reason: self._server.broadcast(VolumeTrouble(reason=reason)))
        self._preemption = PreemptionWatcher(config.watch, tell=self._taken_back) if config.watch else None
        self._devices = NodeDevices(config)

    async def run(self, announce: Callable[[NodeReady], None]) -> None:
        """Bring the node up, announce it, and return when everything of it has ended."""
        devices = await self._devices.prepare()
        try:
            with claim_ports(self._config.binds_to, port_count(self._config)) as ports:
                await self._live(announce, devices, ports)
        finally:
            await self._devices.release()

    async def _live(
        self, announce: Callable[[NodeReady], None], devices: tuple[Device, ...], ports: tuple[int, ...]
    ) -> None:
        address = self._config.binds_to
        port = await self._server.listen(address, self._identity)
        blob_port = await self._blobs.listen(address)
        plan = make_plan(self._config, control_port=port, blob_port=blob_port, ports=ports, devices=devices)
        self._blobs.folders = (plan.ready.blob_dir, plan.ready.blob_dir_disk)
        tasks = [asyncio.create_task(work) for work in self._work(plan)]
        reason = "it failed"
        try:
            announce(plan.ready)
            await asyncio.wait((self._ending, *tasks), return_when=asyncio.FIRST_COMPLETED)
            reason = self._ending.result() if self._ending.done() else "a task of its supervisor failed"
        finally:
            log.info("ending: %s", reason)
            self._server.broadcast(Ending(reason=reason, timed_out=self._lease.timed_out(self._age_s)))
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await self._blobs.close()
            all_ended = await end_all(self._config.instance_id)
            await self._devices.release()  # while the client waits: next, it may kill this process
            await self._volumes.release()
            _remove_folders(plan)
            await self._server.close()
            if all_ended:
                _untag(self._config.workdir)
            _power_off(self._config.power_off)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    @property
    def _age_s(self) -> float:
        """Return the seconds since the node's start, asleep or awake."""
        return self._clock.elapsed() - self._booted

    def end(self, reason: str) -> None:
        """End everything; the first reason counts. Idempotent."""
        if not self._ending.done():
            self._ending.set_result(reason)

    def joined(self) -> None:
        """See :class:`~skyward.node.supervisor.control_server.ControlHandler`."""
        self._lease.joined(self._clock.monotonic())
        self._has_client = True
        self._end_if_hopeless()

    def left(self) -> None:
        """See :class:`~skyward.node.supervisor.control_server.ControlHandler`."""
        self._lease.left(self._clock.monotonic())

    def state(self) -> list[Report]:
        """See :class:`~skyward.node.supervisor.control_server.ControlHandler`."""
        scheduler = [self._scheduler] if self._scheduler else []
        preemption = self._preemption.news() if self._preemption else []
        return [*scheduler, *self._workers.values(), *self._stale.values(), *preemption]

    def told(self, command: Command, reply: Callable[[Report], None]) -> None:
        """See :class:`~skyward.node.supervisor.control_server.ControlHandler`."""
        self._lease.heard(self._clock.monotonic())
        match command:
            case Ping(n=n):
                reply(Pong(n=n))
            case Start():
                self._order = command
                self._start_workers(command)
            case Kill():
                self._kill_worker(command)
            case Fetch():
                self._blobs.fetch(command, self._server.broadcast)
            case Stop():
                self.end("the client asked for it")
            case _:
                assert_never(command)

    def _work(self, plan: NodePlan) -> list[Coroutine[Any, Any, None]]:
        """Return the supervisor's loops, each of which starts again after a failure: none of them ends the node."""

        def report(reason: str) -> None:
            self._server.broadcast(SupervisorTrouble(reason=reason))

        return [keep(live, what=what, report=report) for what, live in self._loops(plan).items()]

    def _loops(self, plan: NodePlan) -> dict[str, Callable[[], Awaitable[None]]]:
        self._plan = plan
        programs = [_SCHEDULER, _NANNIES]
        self._zygote = zygote = Zygote(programs, plan, on_exit=self._on_zygote_exit, spare=self._spare)
        scheduling = Child(_SCHEDULER, plan, zygote=zygote, on_report=self._on_report, on_exit=self._on_scheduler_exit)
        self._nannies = Child(_NANNIES, plan, zygote=zygote, on_report=self._on_report, on_exit=self._on_nannies_exit)
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "keeping the zygote": zygote.keep,
            "keeping the scheduler": lambda: self._keep_scheduler(scheduling),
            "keeping the nannies": self._nannies.keep,
            "watching the lease": self._watch,
            "watching the GPUs": self._guard,
        }
        if self._config.collect_metrics:
            loops["measuring"] = self._measure
        if self._volumes.writable:
            loops["keeping the volumes"] = self._volumes.keep
        if self._preemption is not None:
            loops["watching for preemption"] = self._preemption.run
        return loops

    async def _keep_scheduler(self, scheduling: Child) -> None:
        """Start the node's own scheduler once its workers are to join it; from then on it stays."""
        await self._leads.wait()
        await scheduling.keep()

    def _taken_back(self, news: Report) -> None:
        if isinstance(news, Preempting):
            self._volumes.hurry()
        self._server.broadcast(news)

    async def _measure(self) -> None:
        sampler = open_sampler()
        try:
            while not self._ending.done():
                await asyncio.wait((self._ending,), timeout=self._config.metrics_interval_s)
                self._server.broadcast(MetricsReport(values=sampler.sample().to_dict()))
        finally:
            sampler.close()

    async def _watch(self) -> None:
        while not self._ending.done():
            if reason := self._lease.end_reason(self._clock.monotonic(), self._age_s):
                self.end(reason)
            if (left_s := self._lease.due_warning_s(self._age_s)) is not None:
                self._server.broadcast(TimeoutWarning(seconds_left=left_s))
            reap_orphans(self._own_pids())
            await asyncio.wait((self._ending,), timeout=_TICK_S)

    async def _guard(self) -> None:
        """End the node when one of its GPUs fails, so that its calls move to another."""
        await self._devices.watch(self.end)
        await asyncio.wait((self._ending,))

    def _own_pids(self) -> list[int]:
        pid = self._zygote.pid if self._zygote is not None else None
        return [*self._volumes.pids, *([pid] if pid is not None else [])]

    def _first_order(self, scheduler: str) -> Start:
        """Return the order with which the workers of a node with ``head`` start before the client has sent one."""
        config = self._config
        return Start(scheduler=scheduler, head_addr=config.address, total_nodes=config.total_nodes)

    def _start_workers(self, order: Start) -> None:
        """Have the workers join the scheduler of ``order``, once it runs if it is the node's own."""
        if self._nannies is None or self._plan is None:
            return
        if order.scheduler == self._plan.ready.scheduler:
            self._leads.set()
            if self._scheduler is None:  # its report that it runs leads here again
                return
            order = replace(order, scheduler=self._plan.here(order.scheduler))
        self._nannies.send(order)

    def _kill_worker(self, order: Kill) -> None:
        worker = self._workers.get(order.worker)
        if worker is not None and worker.incarnation == order.incarnation:
            pid = worker.pid
        else:  # it may accept calls already
            pid = process_at(mark_path(self._plan.ready.blob_dir, order.incarnation)) if self._plan else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_report(self, message: Message) -> None:
        match message:
            case WorkerRunning():
                self._came_up = True
                self._workers[message.worker] = message
            case WorkerExit():
                self._workers.pop(message.worker, None)
                self._stale.pop(message.worker, None)
            case WorkerStale():
                self._stale[message.worker] = message
            case SchedulerRunning():
                self._scheduler = message
                self._start_workers(self._order or self._first_order(message.address))
            case TasksReport():
                pass
            case unexpected:
                raise TypeError(f"a process of the node reported {unexpected!r}")
        self._server.broadcast(message)

    def _count_failed_start(self, program: str, reason: str) -> None:
        """End the node if its programs end again and again before its first worker runs: it will not come up."""
        self._failed_starts += not self._came_up
        if self._failed_starts >= _FAILED_STARTS:
            self._hopeless = f"{program} {reason}, {self._failed_starts} times; the end of its log:\n{_end_of_log()}"
            self._end_if_hopeless()

    def _end_if_hopeless(self) -> None:
        if self._hopeless and self._has_client:  # who else would learn the reason?
            self.end(self._hopeless)

    def _on_scheduler_exit(self, reason: str) -> None:
        self._count_failed_start("the scheduler", reason)
        self._scheduler = None
        self._server.broadcast(SchedulerExit(reason=reason))

    def _on_zygote_exit(self, reason: str) -> None:
        log.error("the process that the node's others are forked from %s: they end with it", reason)
        self._count_failed_start("the process that the node's others are forked from", reason)
        kill_all(self._config.instance_id)

    def _on_nannies_exit(self, reason: str) -> None:
        self._count_failed_start("the process of the workers' nannies", reason)
        kill_all(self._config.instance_id, keep=self._own_pids())
        lost, self._workers, self._stale = self._workers, {}, {}
        for worker in lost.values():
            self._server.broadcast(
                WorkerExit(
                    worker=worker.worker,
                    incarnation=worker.incarnation,
                    exit_code=None,
                    signal=None,
                    reason=f"ended with its nanny process, which {reason}",
                    memory_limit_bytes=None,
                )
            )


def _end_of_log() -> str:
    """Return the last lines of this program's own log, which is in its working folder."""
    try:
        return Path(SUPERVISOR_LOG).read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:].strip()
    except OSError as error:
        return str(error)


def _remove_folders(plan: NodePlan) -> None:
    for folder in {plan.ready.blob_dir, plan.ready.blob_dir_disk, plan.worker_folder}:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError:
            log.exception("could not remove %s", folder)


def _power_off(command: Sequence[str]) -> None:
    """Switch the machine off, where that ends its bill: its client may be dead, and nobody else would."""
    if not command:
        return
    try:
        subprocess.run(command, check=True, timeout=_POWER_OFF_S, stdin=subprocess.DEVNULL, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.error("the machine cannot be switched off, and lives on until its time-to-live: %s", error)


def _untag(workdir: str) -> None:
    """Remove the file by which providers recognise an instance in this folder, now that nothing runs here."""
    Path(workdir, TAGS_FILE).unlink(missing_ok=True)
