"""Owner of a node: starts, watches and ends everything on it.

It needs neither a worker nor the client to be alive, and imports nothing heavy: it is up in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from skyward.base.waiting import SYSTEM_CLOCK, Clock, keep, wait_until
from skyward.errors import UnreachableError
from skyward.events import Progress
from skyward.machine.access import TAGS_FILE
from skyward.node.gpu.devices import NodeDevices
from skyward.node.gpu.driver import Device
from skyward.node.jobs.store import JOBS_FOLDER, JobStore, LookForJobs
from skyward.node.plan import NodePlan, claim_ports, make_plan, port_count
from skyward.node.processes import (
    end_all,
    end_of_log,
    kill_all,
    reap_orphans,
)
from skyward.node.storage.blob_port import BlobPort
from skyward.node.storage.volume_program import VolumeKeeper
from skyward.node.supervisor.control_server import ControlServer
from skyward.node.supervisor.forking import Zygote
from skyward.node.supervisor.lease import Lease
from skyward.node.supervisor.load_metrics import open_sampler
from skyward.node.supervisor.preemption_watcher import PreemptionWatcher
from skyward.node.supervisor.service_process import ServiceProcess
from skyward.node.supervisor.start_order import node_programs
from skyward.node.supervisor.worker_restarts_and_limits import WorkerSlot, release_claims
from skyward.wire.control import (
    Command,
    EndComing,
    Ending,
    EndKind,
    Fetch,
    JobRunning,
    Keep,
    Kill,
    Ping,
    Pong,
    Preempting,
    Report,
    RunService,
    ServiceExit,
    ServiceRunning,
    Start,
    Stop,
    SupervisorTrouble,
    TimeoutWarning,
    UnfinishedJobs,
    VolumeTrouble,
    WorkerExit,
    WorkerRunning,
)
from skyward.wire.node_config import NodeConfig, NodeReady

log = logging.getLogger("skyward.node.supervisor")

_TICK_S = 1.0
_LOOK_S = 0.1
_WAKE_BYTES = 1 << 10
_FAILED_STARTS = 3
_POWER_OFF_S = 30.0
_HEED_S = 5.0
"""Longest wait of a node that ends for the handlers of its calls (:func:`skyward.on_notice`)."""


class Supervisor:
    """One node, from its configuration to its end.

    Args:
        config: the node's configuration.
        clock: the time, for the lease and the timeout.
        zygote: pid of one that was forked beforehand, and the connection to it; None where there is none.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        zygote: tuple[int, socket.socket] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._booted = self._clock.elapsed()
        self._lease = Lease(
            timeout_s=config.timeout_s,
            lease_s=config.lease_s,
            away_s=config.away_s,
            keep_s=config.keep_s,
            now=self._clock.monotonic(),
        )
        self._jobs = JobStore(Path(config.workdir, JOBS_FOLDER), config.results_folder)
        self._is_followed = False
        self._ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._identity = config.identity
        self._server = ControlServer(self)
        self._blobs = BlobPort(self._identity)
        self._came_up = False
        self._failed_starts = 0
        self._hopeless = ""
        self._has_client = False
        self._forked_zygote = zygote
        self._zygote: Zygote | None = None
        self._slots: list[WorkerSlot] = []
        self._calls_began = asyncio.Event()
        self._service: ServiceProcess | None = None
        self._service_running: ServiceRunning | None = None
        self._service_order: RunService | None = None
        self._plan: NodePlan | None = None
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
        release_claims(self._jobs, plan, "the node's programs were started again")
        try:
            wake = self._jobs.open_wake()
            asyncio.get_running_loop().add_reader(wake, self._jobs_changed, wake)
        except OSError:
            log.exception("no one can wake this node's workers for jobs")
        tasks = [asyncio.create_task(work) for work in self._work(plan)]
        reason = "it failed"
        try:
            announce(plan.ready)
            await asyncio.wait((self._ending, *tasks), return_when=asyncio.FIRST_COMPLETED)
            reason = self._ending.result() if self._ending.done() else "a task of its supervisor failed"
        finally:
            log.info("ending: %s", reason)
            await self._let_calls_save()
            self._server.broadcast(Ending(reason=reason, timed_out=self._lease.timed_out(self._age_s)))
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await self._blobs.close()
            all_ended = await end_all(self._config.instance_id)
            await self._devices.release()  # while the client waits: next, it may kill this process
            await self._volumes.release()
            _remove_folders(plan, checkpoints=not self._is_followed)
            self._jobs.close_wake()
            await self._server.close()
            if not self._is_followed:
                if all_ended:
                    _untag(self._config.workdir)
                _power_off(self._config.power_off)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _let_calls_save(self) -> None:
        """Tell the calls that the node ends, and wait for the handlers of those that have any."""
        if self._lease.timed_out(self._age_s) or not any(slot.heeds for slot in self._slots):  # told long ago, or none
            return

        async def saved() -> bool | None:
            return not any(slot.heeds for slot in self._slots) or None

        self._tell_calls("down", _HEED_S)
        with suppress(UnreachableError):
            await wait_until(saved, deadline_s=_HEED_S, interval_s=_LOOK_S, what="the calls' handlers")

    def _tell_calls(self, kind: EndKind, seconds_left: float) -> None:
        end = EndComing(kind=kind, at=SYSTEM_CLOCK.monotonic() + seconds_left)
        for slot in self._slots:
            slot.follow(end)

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
        service = [self._service_running] if self._service_running else []
        workers = [report for slot in self._slots for report in slot.state()]
        preemption = self._preemption.news() if self._preemption else []
        jobs = [UnfinishedJobs(count=self._unfinished_jobs())] if self._lease.keep_s else []
        return [*service, *workers, *preemption, *jobs]

    def told(self, command: Command, reply: Callable[[Report], None]) -> None:
        """See :class:`~skyward.node.supervisor.control_server.ControlHandler`."""
        self._lease.heard(self._clock.monotonic())
        match command:
            case Ping(n=n):
                reply(Pong(n=n))
            case Start():
                for slot in self._slots:
                    slot.follow(command)
            case RunService():
                self._run_service(command)
            case Kill():
                self._slots[command.worker].kill(command.incarnation, spare_jobs=command.spare_jobs)
            case Fetch():
                self._blobs.fetch(command, self._server.broadcast)
            case Keep():
                self._lease.keep_s = command.seconds
                reply(UnfinishedJobs(count=self._unfinished_jobs()))
            case Stop():
                self._is_followed = command.restart
                self.end("the client asked for it")
            case _:
                assert_never(command)

    def _work(self, plan: NodePlan) -> list[Coroutine[Any, Any, None]]:
        """Return the supervisor's loops, each of which starts again after a failure: none of them ends the node."""

        def report(reason: str) -> None:
            self._server.broadcast(SupervisorTrouble(reason=reason))

        return [keep(live, what=what, report=report) for what, live in self._loops(plan).items()]

    def _loops(self, plan: NodePlan) -> dict[str, Callable[[], Awaitable[None]]]:
        config = self._config
        self._plan = plan
        self._zygote = zygote = Zygote(
            node_programs(config.service), plan, on_exit=self._on_zygote_exit, forked=self._forked_zygote
        )
        self._service = ServiceProcess(
            plan, zygote=zygote, on_report=self._on_service_report, on_exit=self._on_service_exit
        )
        self._slots = [
            WorkerSlot(
                plan,
                worker,
                zygote=zygote,
                jobs=self._jobs,
                report=self._on_worker_report,
                watch=self._calls_began.set,
            )
            for worker in range(config.workers)
        ]
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "keeping the zygote": zygote.keep,
            "keeping the service": self._service.keep,
            **{f"keeping worker {worker}": slot.keep for worker, slot in enumerate(self._slots)},
            "watching the workers": self._watch_workers,
            "watching the lease": self._watch,
            "watching the GPUs": self._guard,
        }
        if config.head:  # all that the client would order
            if config.service:
                self._run_service(
                    RunService(name=config.service_name, module=config.service, address=plan.ready.service)
                )
            for slot in self._slots:
                slot.follow(Start(head_addr=config.address, total_nodes=config.total_nodes))
        if config.collect_metrics:
            loops["measuring"] = self._measure
        if self._volumes.writable:
            loops["keeping the volumes"] = self._volumes.keep
        if self._preemption is not None:
            loops["watching for preemption"] = self._preemption.run
        return loops

    def _taken_back(self, news: Report) -> None:
        if isinstance(news, Preempting):
            self._volumes.hurry()
            self._tell_calls("preemption", news.seconds_left)
        self._server.broadcast(news)

    async def _measure(self) -> None:
        sampler = open_sampler()
        try:
            while not self._ending.done():
                await asyncio.wait((self._ending,), timeout=self._config.metrics_interval_s)
                self._server.broadcast(sampler.sample())
        finally:
            sampler.close()

    async def _watch(self) -> None:
        while not self._ending.done():
            if self._lease.keep_s and self._unfinished_jobs():
                self._lease.worked(self._clock.monotonic())
            if reason := self._lease.end_reason(self._clock.monotonic(), self._age_s):
                self.end(reason)
            if (left_s := self._lease.due_warning_s(self._age_s)) is not None:
                self._server.broadcast(TimeoutWarning(seconds_left=left_s))
                self._tell_calls("max_cost" if self._config.cap == "max_cost" else "pool_timeout", left_s)
            reap_orphans(self._own_pids())
            await asyncio.wait((self._ending,), timeout=_TICK_S)

    async def _watch_workers(self) -> None:
        """Look at the workers ten times a second while one of them runs calls, else once a second."""
        while not self._ending.done():
            self._calls_began.clear()
            looks = [slot.look(self._clock.monotonic()) for slot in self._slots]
            if any(looks):
                await self._clock.sleep(_LOOK_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._calls_began.wait()

    async def _guard(self) -> None:
        """End the node when one of its GPUs fails, so that its calls move to another."""
        await self._devices.watch(self.end)
        await asyncio.wait((self._ending,))

    def _own_pids(self) -> list[int]:
        pid = self._zygote.pid if self._zygote is not None else None
        return [*self._volumes.pids, *([pid] if pid is not None else [])]

    def _run_service(self, order: RunService) -> None:
        """Run the service's process, if this node is its head, and have the workers join it once it runs."""
        if self._service is None or self._plan is None:
            return
        self._service_order = order
        if order.address == self._plan.ready.service:
            self._service.start(order)
            if self._service_running is None:  # its report that it runs leads here again
                return
            order = replace(order, address=self._plan.here(order.address))
        for slot in self._slots:
            slot.follow(order)

    def _unfinished_jobs(self) -> int:
        try:
            return self._jobs.unfinished()
        except Exception:  # a failing disk must not keep the node from ending in time
            log.exception("the jobs cannot be counted")
            return 0

    def _jobs_changed(self, wake: int) -> None:
        os.read(wake, _WAKE_BYTES)
        self._jobs.look_again()
        for slot in self._slots:
            slot.end_cancelled()
        self._look_for_jobs()

    def _look_for_jobs(self) -> None:
        for slot in self._slots:
            slot.follow(LookForJobs())

    def _on_worker_report(self, report: Report) -> None:
        self._came_up = self._came_up or isinstance(report, WorkerRunning)
        if isinstance(report, WorkerExit):  # a call of a job may wait again
            self._look_for_jobs()
        if self._config.results and (isinstance(report, WorkerExit) or _is_end_of_job(report)):
            self._volumes.write_soon()
        self._server.broadcast(report)

    def _on_service_report(self, report: ServiceRunning | Progress) -> None:
        if isinstance(report, ServiceRunning):
            self._service_running = report
            if self._service_order is not None:
                self._run_service(self._service_order)
        self._server.broadcast(report)

    def _on_service_exit(self, name: str, reason: str) -> None:
        if self._service_running is None:  # nobody has seen it: the log says why it does not come up
            reason = f"{reason}; the end of its log:\n{end_of_log(self._config.workdir)}"
        self._service_running = None
        self._server.broadcast(ServiceExit(name=name, reason=reason))

    def _end_if_hopeless(self) -> None:
        if self._hopeless and self._has_client:  # who else would learn the reason?
            self.end(self._hopeless)

    def _on_zygote_exit(self, reason: str) -> None:
        """End its forks. End the node if this happens again and again before its first worker: it will not come up."""
        what = f"the process that the node's others are forked from {reason}"
        log.error("%s: they end with it", what)
        self._failed_starts += not self._came_up
        if self._failed_starts >= _FAILED_STARTS:
            self._hopeless = (
                f"{what}, {self._failed_starts} times; the end of its log:\n{end_of_log(self._config.workdir)}"
            )
            self._end_if_hopeless()
        kill_all(self._config.instance_id)


def _is_end_of_job(report: Report) -> bool:
    return isinstance(report, JobRunning) and not report.job


def _remove_folders(plan: NodePlan, *, checkpoints: bool) -> None:
    folders = {plan.ready.blob_dir, plan.ready.blob_dir_disk, plan.worker_folder}
    for folder in {*folders, plan.checkpoints} if checkpoints else folders:
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
