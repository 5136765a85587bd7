"""One node of a fleet: its machine and what it costs, the transport to it, and the connection to its supervisor."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from skyward.base.waiting import SYSTEM_CLOCK, Clock, NotYet, wait_until
from skyward.environment.bootstrap import Environment, bootstrap, let_in
from skyward.environment.includes_and_volumes import deliver_includes, deliver_volumes
from skyward.environment.local_environment import prepare_environment
from skyward.environment.supervisor_check import SUPERVISOR_GONE, supervisor_check
from skyward.errors import BootstrapError, PoolStateError, SkywardError, UnreachableError
from skyward.fleet.checkpoints import NodeCheckpoints
from skyward.fleet.control_client import ControlClient
from skyward.fleet.fresh_workers import FreshWorkers
from skyward.fleet.machine_size import MachineSize, measure_machine
from skyward.fleet.node_files import NodeFiles
from skyward.fleet.node_jobs import NodeJobs
from skyward.fleet.node_logs import keep_logs
from skyward.fleet.supervisor_start import start_supervisor
from skyward.ledger.fleet_record import KeptNode
from skyward.ledger.ownership import Moment
from skyward.machine.access import Access, Completed, Transport
from skyward.market.choose import UnfitMachineError
from skyward.market.cost import Usage
from skyward.providers.base import Instance, InstanceState, Provider
from skyward.request.image import ImageSettings
from skyward.request.volume import GrantedVolume
from skyward.wire.control import (
    Ending,
    Fetch,
    Fetched,
    Keep,
    Kill,
    Message,
    Preempting,
    PreemptionLikely,
    RunService,
    Start,
)
from skyward.wire.node_config import CHECKPOINTS, MIG_UNDO_S, RELEASE_S, NodeConfig, NodeReady

OVER = (InstanceState.STOPPING, InstanceState.GONE, InstanceState.FAILED)
"""States of a machine that is not, and will not be, a node."""
STATUS_EVERY_S = 5.0
"""Least time between two requests for the state of a machine that does not answer."""
_STATUS_TIMEOUT_S = 20.0
_LOOK_EVERY_S = 1.0
_CONNECT_TIMEOUT_S = 30.0
_RESUME_TIMEOUT_S = 60.0
_RESUME_AGAIN_S = 0.5
_HALT_TIMEOUT_S = 30.0
_JUDGE_S = 0.5
_JUDGE_TIMEOUT_S = 30.0
_BLINK_S = 3.0
_AWAY_MARGIN_S = 60.0
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """Certain loss of a node.

    Attributes:
        reason: the cause, for users.
        timed_out: True if its hard ``timeout`` is over: then no other node takes its place.
        announced: True if its provider had announced that it takes the machine back.
        preempted: True if its provider took the machine back, announced or not.
        machine_over: True if its provider reports the end of the machine.
        moves: True if it is no loss: a spot machine takes the place of one on demand.
    """

    reason: str
    timed_out: bool = False
    announced: bool = False
    preempted: bool = False
    machine_over: bool = False
    moves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """A node cannot be reached at present, for this ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """A node can be reached again, after so many ``seconds``."""

    seconds: float


@dataclass(slots=True, eq=False)
class _Look:
    """One call of ``describe``: ids requested so far, callers that wait for it, and the task that performs it."""

    ids: list[str] = field(default_factory=list[str])
    waiting: int = 0
    task: asyncio.Task[Mapping[str, Instance]] | None = None


class SharedLooks:
    """Present records of machines; any number of callers cost one call of ``describe`` an interval.

    Requests that arrive before a call begins are part of it. An error of a call reaches every caller that waits for it,
    and nobody else. Belongs to the event loop.

    Args:
        provider: the provider of the machines; its own pace counts where that is slower than a call a second.
        clock: the time between two calls.
    """

    def __init__(self, provider: Provider, *, clock: Clock) -> None:
        self.provider = provider
        self.clock = clock
        self._interval_s = max(_LOOK_EVERY_S, provider.look_interval_s)
        self._due_at = -math.inf
        self._next: _Look | None = None

    async def at(self, instance_id: str) -> Instance:
        """Return a record of the machine that is read after this call. Raises the provider's errors."""
        look = self._next
        if look is None:
            look = self._next = _Look()
            look.task = asyncio.ensure_future(self._perform(look))
        assert look.task is not None
        look.ids.append(instance_id)
        look.waiting += 1
        try:
            seen = await asyncio.shield(look.task)  # the other callers' too
        finally:
            look.waiting -= 1
            if not look.waiting and not look.task.done():
                await self._abandon(look, look.task)
        return seen[instance_id]

    async def _perform(self, look: _Look) -> Mapping[str, Instance]:
        if (early_s := self._due_at - self.clock.monotonic()) > 0:
            await self.clock.sleep(early_s)
        self._next = None  # later requests are the next call's, even if this one never returns
        self._due_at = self.clock.monotonic() + self._interval_s
        ids = list(dict.fromkeys(look.ids))
        return dict(zip(ids, await self.provider.describe(ids), strict=True))

    async def _abandon(self, look: _Look, task: asyncio.Task[Mapping[str, Instance]]) -> None:
        """End a call without a waiting caller: it may never return."""
        if self._next is look:
            self._next = None
        task.cancel()
        await asyncio.wait((task,))


def _ignore(_node: Node, _message: object) -> None:
    """Listen to nothing."""


class NodeState(enum.Enum):
    """State of a node."""

    LAUNCHING = "launching"
    """Its machine is being requested from the provider."""
    PREPARING = "preparing"
    """Its machine exists and is being started, reached and given its environment."""
    PREPARED = "prepared"
    """It has its environment."""
    STARTING = "starting"
    """Its supervisor is being started; its ports are not chosen yet."""
    JOINING = "joining"
    """Its supervisor runs and waits for the order to start its workers, which names the head."""
    READY = "ready"
    """Its supervisor has that order: the engine uses the node."""
    ENDING = "ending"
    """Its machine is being terminated and may still bill."""


class Node:
    """One machine of a fleet from its launch until it is confirmed gone, and the node on it.

    Methods are called in order: ``open``, ``reach``, ``prepare``, ``start``, ``join``; ``stop`` at any time.

    Args:
        rank: the rank it is launched for, 0-based.
        instance: the provider's record of its machine.
        launched_at: ``elapsed`` reading of the clock before its create call.
        looks: the present records of the fleet's machines.
        on_message: receives the node's reports; must not block.
        logs_to: folder into which the node's logs are copied when it is stopped; None copies none.

    Attributes:
        instance: the provider's record of its machine, as last taken over.
        usage: its billed time.
        ready_by: ``monotonic`` reading of the clock by which a sound machine admits a login.
        state: its state.
        has_rank: False once it was found unfit, or lost: it is ended in the background.
        preempted_at: ``elapsed`` reading of the clock when its provider took the machine back or announced that; None
            before.
        end_tried: set after the first attempt to end it.
        secret_due_at: ``elapsed`` reading of the clock at which it needs another secret; infinite for never.
        access: present address and kind of access of the machine, once it is open.
        transport: the transport to the machine, once it is open.
        lanes: ``host:port`` at which this process reaches each worker's lane, by index; empty before it has started.
        volumes: the volumes available on it.
        cap: the pool's parameter that limits the node's life: ``"timeout"`` or ``"max_cost"``.
    """

    access: Access
    transport: Transport

    def __init__(
        self,
        *,
        rank: int,
        instance: Instance,
        launched_at: float,
        looks: SharedLooks,
        on_message: NodeListener = _ignore,
        logs_to: Path | None = None,
    ) -> None:
        self.rank = rank
        self.instance = instance
        self.usage = Usage.of(instance.offer, launched_at).charged(instance.price_per_hour)
        self.ready_by = looks.clock.monotonic() + instance.offer.ready_within_s
        self.state = NodeState.PREPARING
        self.has_rank = True
        self.preempted_at: float | None = None
        self.end_tried = asyncio.Event()
        self.secret_due_at = math.inf
        self._looks = looks
        self._looked_at = -math.inf
        self._opened: Transport | None = None  # `transport` may be wrapped later; the access moves its own
        self._on_message = on_message
        self._logs_to = logs_to
        self._environment = Environment(python="")
        self._ready: NodeReady | None = None
        self._config: NodeConfig | None = None
        self._started = Moment.after()
        self._fresh_workers: FreshWorkers | None = None
        self._is_used = False
        self._control: ControlClient | None = None
        self._unlinked = asyncio.Event()
        self._loss: NodeLoss | None = None
        self._attributed = False
        self._ending = False
        self._longest_absence_s = math.inf
        self._partitions_undone_s = 0.0
        self.lanes: tuple[str, ...] = ()
        self.volumes: tuple[GrantedVolume, ...] = ()
        self.cap = "timeout"
        self._lasts_s = self._over_at = math.inf
        self._fetching: dict[str, asyncio.Future[Fetched | None]] = {}
        self._noticed = asyncio.Event()
        self._seconds_left = math.inf
        self._warned = False

    @property
    def is_open(self) -> bool:
        """True once its machine has run and been given a transport."""
        return self._opened is not None

    @property
    def ended(self) -> bool:
        """True once its machine is confirmed gone."""
        return self.usage.ended_at is not None

    def mark_ended(self, now: float) -> None:
        """Note that its machine is confirmed gone at ``now``, an ``elapsed`` reading of the clock."""
        self.usage = replace(self.usage, ended_at=now)

    def allow_boot(self) -> None:
        """Count the time in which its machine has to admit a login from now on: no one has tried it before."""
        self.ready_by = self._looks.clock.monotonic() + self.instance.offer.ready_within_s

    @property
    def left_s(self) -> float:
        """Seconds within which its machine must admit a login."""
        return max(0.0, self.ready_by - self._looks.clock.monotonic())

    @property
    def linked(self) -> bool:
        """True while its supervisor is connected and has not announced its end."""
        return self._loss is None and self._control is not None and self._control.connected

    @property
    def bind(self) -> str:
        """Address to which its ports bind; empty for :attr:`address`."""
        return self.access.bind

    @property
    def address(self) -> str:
        """Address at which the nodes of its network reach it, itself included."""
        # An island is reached by itself only, which behind NAT may not work at the machine's address for others.
        return self.access.address if self.instance.network else self.bind or self.access.address

    @property
    def files(self) -> str:
        """Working folder of calls on the machine, with the image's files."""
        return f"{self.access.workdir}/files"

    def working_files(self) -> NodeFiles:
        """Return the reader of the files in that folder."""
        return NodeFiles(self.transport, python=self._environment.python, folder=self.files, node=self.rank)

    def checkpoints(self) -> NodeCheckpoints:
        """Return the folder of the checkpoints of its calls."""
        return NodeCheckpoints(
            transport=self.transport,
            python=self._environment.python,
            folder=f"{self.access.workdir}/{CHECKPOINTS}",
            instance_id=self.instance.id,
            node=self.rank,
        )

    def jobs(self) -> NodeJobs:
        """Return the way to its jobs."""
        return NodeJobs(self.transport, self.access, self._environment, instance_id=self.instance.id, node=self.rank)

    @property
    def ready(self) -> NodeReady:
        """The node's ports and size; raises :class:`~skyward.errors.PoolStateError` before it has started."""
        if self._ready is None:
            raise PoolStateError(f"node {self.rank} has not started")
        return self._ready

    @property
    def fresh(self) -> bool:
        """True if the machine was made for the pool: it may refuse logins until its first boot is over."""
        return self.access.boot_s > 0

    def open(self) -> None:
        """Open the transport to its machine, which runs; nothing is sent to it yet."""
        if self.instance.access is None:
            raise PoolStateError(f"instance {self.instance.id} of node {self.rank} cannot be reached yet")
        self.access = self.instance.access
        self.transport = self._opened = self.access.open()

    async def machine_status(self, *, at_once: bool = False) -> NodeLoss | None:
        """Return how its machine was lost by its provider's report; None if it was not, or without an answer.

        The provider is asked every five seconds at most, or ``at_once``; in between the answer is None too. The node
        follows its machine to another address. An error of the provider is no sign of the machine's end: taking it for
        one would buy a machine in vain.
        """
        clock, name = self._looks.clock, self._looks.provider.name
        if not at_once and clock.monotonic() - self._looked_at < STATUS_EVERY_S:
            return None
        self._looked_at = clock.monotonic()
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                seen = await self._looks.at(self.instance.id)
        except Exception as error:
            _logger.debug("%s gives no status of %s: %r", name, self.instance.id, error)
            return None
        if seen.state is InstanceState.RUNNING and seen.access is not None:
            self._follow(seen.access)
        if seen.state not in OVER:
            return None
        reason = f"{name} reports that it is {seen.state.value}" + (f": {seen.reason}" if seen.reason else "")
        return NodeLoss(reason=reason, preempted=seen.preempted, machine_over=True)

    def _follow(self, access: Access) -> None:
        """Take over the machine's present access: where its SSH server has moved, it is dialled there from now on."""
        if self._opened is None:
            return
        before, self.access = self.access, self.access.move(access, self._opened)
        if self.access != before:
            _logger.info("node %d has moved from %s to %s", self.rank, before, self.access)

    async def reach(self, within_s: float) -> MachineSize | None:
        """Wait until a fresh machine admits a login, and return its size; None if it is not to be measured.

        Raises:
            AuthenticationError: it refused the login for longer than a boot may take, or after ``within_s`` seconds.
            HostKeyError: it went on showing another host key than ordered.
            UnreachableError: after those it still did not answer.
        """
        if not self.fresh:
            return None
        await let_in(
            self.transport,
            within_s=max(1.0, within_s),
            node=self.rank,
            refused_s=self.access.boot_s,
            other_key_s=self.access.other_key_s,
        )
        return await measure_machine(self.transport)

    async def prepare(self, image: ImageSettings, progress: Callable[[str], None]) -> None:
        """Give the node its Python environment and files; ``progress`` receives each bootstrap step as it begins.

        Raises :class:`~skyward.errors.BootstrapError`.
        """
        if self.access.on_this_machine:
            python = await prepare_environment(image, self.transport, node=self.rank, progress=progress)
            self._environment = Environment(python=python, isolated=python != sys.executable)
        else:
            self._environment = await bootstrap(
                image, self.transport, cache=self.access.cache, node=self.rank, progress=progress
            )
        await deliver_includes(
            image, self.transport, folder=self.files, python=self._environment.python, node=self.rank
        )

    async def provide(self, volumes: Sequence[GrantedVolume]) -> Sequence[str]:
        """Make volumes available on the prepared node; return notes for the user.

        Raises :class:`~skyward.errors.BootstrapError`.
        """
        self.volumes = tuple(volumes)
        return await deliver_volumes(
            volumes,
            self.transport,
            environment=self._environment,
            workdir=self.access.workdir,
            instance_id=self.instance.id,
            node=self.rank,
        )

    async def start(self, config: NodeConfig) -> None:
        """Start the supervisor and connect to it; returns once its ports are known.

        Raises :class:`~skyward.errors.BootstrapError` with the supervisor's output.
        """
        self._started = Moment.after()
        self._take_limits(config)
        self._ready = await start_supervisor(
            self.transport,
            self._environment,
            config,
            on_this_machine=self.access.on_this_machine,
            is_used=self._is_used,
        )
        await self._connect(config, self._ready)

    def _take_limits(self, config: NodeConfig) -> None:
        self._config = config
        self._longest_absence_s = longest_absence_s(config)
        self._lasts_s, self._over_at = (
            config.timeout_s,
            SYSTEM_CLOCK.elapsed() + config.timeout_s + self._started.left_s,
        )
        self._partitions_undone_s = MIG_UNDO_S if config.mig and config.own_machine else 0.0

    async def _connect(self, config: NodeConfig, ready: NodeReady, *, may_be_gone: bool = False) -> None:
        self.lanes = tuple([await self.forward(lane) for lane in ready.lanes])
        address = await self.forward(ready.control)
        control = ControlClient(address, config.identity, on_message=self._receive, on_lost=self._connection_lost)
        self._control = control
        if may_be_gone:
            self._unlinked.set()  # its end is looked for from now on
        await control.connect(_CONNECT_TIMEOUT_S)

    # --- kept nodes -------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> KeptNode | None:
        """The node as another client finds it; None before its start."""
        if self._ready is None or self._config is None:
            return None
        return KeptNode(
            rank=self.rank,
            instance=self.instance,
            launched=Moment.after(self.usage.launched_at - self._looks.clock.elapsed()),
            started=self._started,
            environment=self._environment,
            config=self._config,
            ready=self._ready,
        )

    def take_over(self, kept: KeptNode) -> None:
        """Become the kept node that another client has set up; nothing is sent to it yet."""
        self._started, self._environment, self._ready = kept.started, kept.environment, kept.ready
        self.volumes, self.cap = kept.config.volumes, kept.config.cap
        self.secret_due_at = self._looks.clock.elapsed()  # the last one may expire at any time
        self._take_limits(kept.config)
        self._fresh_workers = FreshWorkers(kept.config.workers)

    async def resume(self) -> None:
        """Connect to the supervisor of a node that was taken over, whose transport is open, and learn what it does.

        Raises :class:`~skyward.errors.UnreachableError` if it does not answer within a minute.
        """
        assert self._config is not None
        assert self._fresh_workers is not None
        config, ready = self._config, self.ready

        async def connect() -> bool | NotYet:
            try:
                await self._connect(config, ready, may_be_gone=True)
            except UnreachableError as error:
                if self._control is not None:
                    await self._control.close()
                return NotYet(str(error))
            return True

        what = f"node {self.rank} of the kept fleet to answer"
        await wait_until(connect, deadline_s=_RESUME_TIMEOUT_S, interval_s=_RESUME_AGAIN_S, what=what)
        await self._fresh_workers.told.wait()

    @property
    def unfinished_jobs(self) -> int:
        """Number of jobs for which the kept node stayed when it was resumed."""
        return self._fresh_workers.unfinished_jobs if self._fresh_workers is not None else 0

    async def renew_workers(self) -> None:
        """Replace the worker processes of a node that was resumed, except of those that run a job."""
        assert self._fresh_workers is not None
        await self._fresh_workers.replace(partial(self.kill_worker, spare_jobs=True))
        self._fresh_workers = None

    async def keep_for(self, seconds: float) -> None:
        """Have the node wait for so many seconds for the next client, from now on."""
        assert self._config is not None
        self._config = replace(self._config, keep_s=seconds)
        await self._connection.send(Keep(seconds=seconds))

    async def halt(self) -> None:
        """End the supervisor of a kept node, for another one on the same machine.

        Raises :class:`~skyward.errors.UnreachableError` if it does not end in time.
        """
        control, self._control = self._connection, None
        leaving_s = RELEASE_S if any(not each.volume.read_only for each in self.volumes) else 0.0
        try:
            await control.stop_node(_HALT_TIMEOUT_S + leaving_s + self._partitions_undone_s, restart=True)
        finally:
            await control.close()
        await self.begin_again()

    async def begin_again(self, *, is_used: bool = False) -> None:
        """Return to the state of a machine without a supervisor, since the last one has ended.

        With ``is_used``, another client may have started one there before it was killed; that one ends first.
        """
        await self.transport.close()
        self._ending, self._loss, self._ready, self.lanes = False, None, None, ()
        self._fresh_workers, self._is_used = None, is_used
        self._unlinked.clear()
        self.state = NodeState.PREPARING

    async def leave(self) -> None:
        """Close the connections to the node, which stays for the next client."""
        control, self._control = self._control, None
        if control is not None:
            await control.close()
        self._forget_fetches()
        if self.is_open:
            await self.transport.close()

    # --- a node in use ----------------------------------------------------------------------------------------------

    def join(self, order: Start) -> None:
        """Have the supervisor start the workers. Running workers take over the fleet's new size.

        While the connection is lost, the order waits for it.
        """
        self._connection.keep_saying(order)

    def run_service(self, *, name: str, module: str, address: str) -> None:
        """Have the node run a service, from now on and on every new connection; see :class:`RunService`."""
        self._connection.keep_saying(RunService(name=name, module=module, address=address))

    async def wait_gone(self) -> NodeLoss:
        """Return once the node is certainly gone.

        Either it reports its end itself, or two independent signals agree: the control connection is lost, and a check
        on the machine finds no supervisor; or the machine does not answer, and its provider reports its end. A machine
        without these signals is only away, until it must have ended by itself.
        """
        while self._loss is None:
            await self._unlinked.wait()
            self._unlinked.clear()
            away = _Away(self, self._longest_absence_s)
            try:
                verdict = await wait_until(
                    lambda away=away: self._judge(away),
                    deadline_s=math.inf,
                    interval_s=_JUDGE_S,
                    what=f"node {self.rank} to come back",
                )
            except BaseException:
                self._unlinked.set()  # the next waiter judges again
                raise
            finally:
                away.is_over()
            if isinstance(verdict, NodeLoss) and self._loss is None:
                self._loss = self._explained(verdict)
        if self.instance.offer.spot and not (self._loss.timed_out or self._attributed or self._noticed.is_set()):
            # A machine that is taken back without notice may still end its processes in order.
            reported = await self.machine_status(at_once=True)
            self._attributed = True  # not before: after a cancelled request the next waiter repeats it
            if reported is not None:
                self._loss = replace(self._loss, preempted=reported.preempted, machine_over=True)
        return self._loss

    async def wait_notice(self) -> float:
        """Wait until the provider announces that it takes the machine back; return the seconds until then."""
        await self._noticed.wait()
        return self._seconds_left

    def report(self, change: LinkDown | LinkUp) -> None:
        """Report a change of the link to the node's listener."""
        self._on_message(self, change)

    async def forward(self, address: str) -> str:
        """Return the ``host:port`` through which this process reaches ``host:port`` of the node."""
        host, _, port = address.rpartition(":")
        return "{}:{}".format(*await self.transport.forward(host, int(port)))

    async def kill_worker(self, worker: int, incarnation: str, *, spare_jobs: bool = False) -> None:
        """Send SIGKILL to one worker, unless it is another incarnation by now; its supervisor restarts it."""
        await self._connection.send(Kill(worker=worker, incarnation=incarnation, spare_jobs=spare_jobs))

    async def fetch(self, order: Fetch) -> Fetched:
        """Have the node fetch a large argument from other nodes; return the result. Idempotent.

        Raises :class:`~skyward.errors.UnreachableError` when the connection is lost meanwhile: the result is unknown
        then, and the same order may be sent again.
        """
        answer = self._fetching.get(order.path)
        if answer is None and self.linked:
            answer = self._fetching[order.path] = asyncio.get_running_loop().create_future()
            await self._connection.send(order)
        fetched = await asyncio.shield(answer) if answer is not None else None
        if fetched is None:
            raise UnreachableError(f"the connection to node {self.rank} was lost while it got a large argument")
        return fetched

    async def stop(self, timeout_s: float) -> None:
        """Have the supervisor end all processes, wait for it, and close the connection in any case. Idempotent.

        The wait includes the time for writing back volumes and for restoring GPUs, also of a node that ends by itself.

        Raises :class:`~skyward.errors.UnreachableError` when the node did not end in time: the termination of its
        machine then ends it. A node whose machine its provider reports as over has ended.
        """
        control, self._control = self._control, None
        leaving_s = RELEASE_S if any(not each.volume.read_only for each in self.volumes) else 0.0
        leaving_s += self._partitions_undone_s
        keeping = asyncio.ensure_future(self._keep_logs(control))
        try:
            if control is not None and (self._loss is None or (self._ending and leaving_s)):
                await self._stop_over(control, timeout_s + leaving_s)
        finally:
            if control is not None:
                await control.close()
            self._forget_fetches()
            await keeping  # while the processes end, and for 3 s at most
            await self.transport.close()

    async def _stop_over(self, control: ControlClient, timeout_s: float) -> None:
        if not control.connected and await self.machine_status(at_once=True) is not None:  # else it may have moved
            return
        try:
            await control.stop_node(timeout_s)
        except UnreachableError:  # a machine that was ended from outside may have closed no connection
            if await self.machine_status(at_once=True) is None:
                raise

    async def _keep_logs(self, control: ControlClient | None) -> None:
        """Copy the newest part of the node's logs to this machine, if it can be reached. Never fails."""
        reachable = self.access.on_this_machine or (control is not None and control.connected)
        if self._logs_to is not None and reachable:
            await keep_logs(self.transport, self.access, self._logs_to, f"node-{self.rank}-{self.instance.id}")

    @property
    def _connection(self) -> ControlClient:
        if self._control is None:
            raise PoolStateError(f"node {self.rank} is not connected")
        return self._control

    def _receive(self, message: Message) -> None:
        if isinstance(message, Ending):
            self._ending = True
            self._loss = self._explained(NodeLoss(reason=message.reason, timed_out=message.timed_out))
            self._unlinked.set()
        if isinstance(message, Fetched) and (answer := self._fetching.pop(message.path, None)) is not None:
            answer.set_result(message)
        if self._fresh_workers is not None:
            self._fresh_workers.take(message)
        if not self._is_old(message):
            self._on_message(self, message)

    def _explained(self, loss: NodeLoss) -> NodeLoss:
        """Return a loss with the cap that ended the node as its reason, if one did.

        After its time a node without a report has ended by itself: the client slept, or the machine was faster.
        """
        if loss.timed_out and self.cap == "timeout":
            return loss
        if not loss.timed_out and SYSTEM_CLOCK.elapsed() < self._over_at:
            return loss
        own = f"its timeout of {self._lasts_s:g} s is over"
        reason = own if self.cap == "timeout" else f"the {self._lasts_s:g} s that {self.cap} allows it are over"
        return replace(loss, reason=reason, timed_out=True)

    def _is_old(self, message: Message) -> bool:
        """Return True for an announcement that the node repeats on a new connection, and that arrived before."""
        if isinstance(message, Preempting):
            known, self._seconds_left = self._noticed.is_set(), message.seconds_left
            self._noticed.set()
            return known
        known = isinstance(message, PreemptionLikely) and self._warned
        self._warned = self._warned or isinstance(message, PreemptionLikely)
        return known

    async def _judge(self, away: _Away) -> NodeLoss | bool | None:
        """Return the node's loss; True if it is back; None while there is no verdict."""
        if self._loss is not None or self._control is None or self._control.connected:
            return True
        if away.too_long:
            return NodeLoss(reason=f"it could not be reached for {away.seconds:.0f} s, after which it ends by itself")
        checking = asyncio.ensure_future(self._check())
        reported = await self._reported_during(checking)
        try:
            completed = checking.result()
        except (SkywardError, OSError) as error:  # includes a refusal by, or of, another machine at its address
            _logger.debug("no verdict on node %d, which may be gone: %s", self.rank, error)
            away.reason = str(error)
            reported = reported or await self.machine_status()
            self._attributed = reported is not None
            return reported and replace(reported, reason=f"it cannot be reached, and {reported.reason}")
        if completed.exit_code == SUPERVISOR_GONE:
            return NodeLoss(reason="its supervisor is gone")
        if completed.exit_code:
            away.reason = f"the check for its supervisor fails on the machine: {completed.stderr.strip()[-200:]}"
            _logger.debug("node %d: %s", self.rank, away.reason)
        return None

    async def _reported_during(self, checking: asyncio.Future[Completed]) -> NodeLoss | None:
        """Wait for a check of the machine to end; return how the machine was lost by its provider's report meanwhile.

        The machine's record is read because it may name another address, which is dialled then.
        """
        reported: NodeLoss | None = None
        try:
            while not (await asyncio.wait((checking,), timeout=_BLINK_S))[0]:
                reported = await self.machine_status() or reported
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
        return reported

    async def _check(self) -> Completed:
        """Look for the supervisor on the machine."""
        check = supervisor_check(self._environment, self.ready.pid, self.instance.id, may_be_wiped=self.fresh)
        return await self.transport.run(check, timeout_s=_JUDGE_TIMEOUT_S)

    def _connection_lost(self) -> None:
        self._unlinked.set()
        self._forget_fetches()
        level = logging.DEBUG if self._ending or self._control is None else logging.INFO  # expected when a node ends
        _logger.log(level, "lost the control connection to node %d", self.rank)

    def _forget_fetches(self) -> None:
        waiting, self._fetching = self._fetching, {}
        for answer in waiting.values():
            answer.set_result(None)


NodeListener = Callable[[Node, Message | LinkDown | LinkUp], None]
"""Listener of nodes' reports, called on the event loop."""
MakeNode = Callable[..., Node]
"""Maker of a node from the first four arguments of :class:`Node`; tests pass their own."""


def longest_absence_s(config: NodeConfig) -> float:
    """Return the seconds without contact after which a node has ended by itself, by the longest of its limits.

    A kept node may have jobs to do until its timeout.
    """
    return (config.timeout_s if config.keep_s else max(config.away_s, config.lease_s)) + _AWAY_MARGIN_S


class _Away:
    """Absence of a node that cannot be reached; reported once it lasts longer than ``_BLINK_S``."""

    def __init__(self, node: Node, limit_s: float) -> None:
        self.reason = "the connection was lost"
        self._node = node
        self._limit_s = limit_s
        self._began = SYSTEM_CLOCK.monotonic()
        self._reported = False
        self._timer = asyncio.get_running_loop().call_later(_BLINK_S, self._report)

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return SYSTEM_CLOCK.monotonic() - self._began

    @property
    def too_long(self) -> bool:
        """True once the node must have ended by itself."""
        return self.seconds > self._limit_s

    def is_over(self) -> None:
        """End the absence; report it if the node is back."""
        self._timer.cancel()
        if self._reported and self._node.linked:
            self._node.report(LinkUp(seconds=self.seconds))

    def _report(self) -> None:
        if not self._node.linked:
            self._reported = True
            self._node.report(LinkDown(reason=self.reason))


async def unless_gone(
    node: Node, work: Coroutine[Any, Any, None], *, loss: Coroutine[Any, Any, NodeLoss] | None = None
) -> None:
    """Wait for ``work``, which needs the node.

    Args:
        node: the node.
        work: ends with the node; if it fails, the machine's end counts as the reason.
        loss: returns once the node is lost; None means :meth:`Node.wait_gone`.

    Raises:
        UnfitMachineError: its machine is over by its provider's report, or the work failed on one that has moved: then
            it was restarted, and may have lost its files.
        BootstrapError: the node was lost meanwhile for another reason.
    """
    place = node.access
    gone, working = asyncio.ensure_future(loss or node.wait_gone()), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ended(node, gone.result())
        failed = None if working.cancelled() else working.exception()
        is_judged = failed is None or isinstance(failed, UnfitMachineError) or not isinstance(failed, Exception)
        if not is_judged and (reported := await node.machine_status(at_once=True)) is not None:
            raise _ended(node, reported) from failed
        if not is_judged and node.access != place:
            raise UnfitMachineError(f"was restarted while its node started: {failed}") from failed
        working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


def _ended(node: Node, loss: NodeLoss) -> SkywardError:
    """Return the error of a node that was lost while it started."""
    if loss.machine_over:
        return UnfitMachineError(f"ended while its node started: {loss.reason}", preempted=loss.preempted)
    return BootstrapError(f"node {node.rank} ended while it started: {loss.reason}", node=node.rank, step="server")
