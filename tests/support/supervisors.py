"""Nodes in memory that start workers, lose them, are cut off and die: real handles, no machine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.environment import supervisor_check
from skyward.errors import UnreachableError
from skyward.fleet import node as nodes
from skyward.fleet.control_client import ControlClient
from skyward.fleet.node import Node
from skyward.machine.access import Completed
from skyward.wire.control import (
    Command,
    Ending,
    Kill,
    Message,
    Preempting,
    Start,
    WorkerExit,
    WorkerRunning,
)
from skyward.wire.node_config import NodeConfig
from support.faults import NO_FAULT, Fault, suffer
from support.nodes import FakeNode, FakeNodes, Phase
from support.workers import SimulatedNetwork, SimulatedWorker, Work

__all__ = ["SimulatedNode", "SimulatedNodes", "Startup"]

_RESTART_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """How a worker's process starts.

    Attributes:
        delay_s: how long it takes.
        fails: whether it ends instead of taking calls.
    """

    delay_s: float = 0.1
    fails: bool = False


@dataclass(slots=True, kw_only=True)
class _Surroundings:
    """What the nodes of a fleet share.

    Attributes:
        network: how their workers are reached.
        work: what calls do.
        control_s: how long a message takes from supervisor to client.
        phases: what happens to the nodes' phases, in order of time; nothing to those after them.
        puts: what happens to files that are put onto nodes, likewise.
        startups: how workers start, likewise; well, those after them.
    """

    network: SimulatedNetwork
    work: Work
    control_s: float
    phases: Mapping[Phase, deque[Fault]] = field(default_factory=dict[Phase, deque[Fault]])
    puts: deque[Fault] = field(default_factory=deque[Fault])
    startups: deque[Startup] = field(default_factory=deque[Startup])

    def fault(self, phase: Phase) -> Fault:
        """What happens to the next node that enters ``phase``."""
        faults = self.phases.get(phase)
        return faults.popleft() if faults else NO_FAULT


class _Control(ControlClient):
    """The connection to a simulated supervisor."""

    def __init__(self, supervisor: _Supervisor) -> None:
        self._supervisor = supervisor
        self._closed = False
        self.standing: Start | None = None

    @property
    def connected(self) -> bool:
        return not self._closed and self._supervisor.linked

    async def send(self, command: Command) -> None:
        await self._supervisor.link.wait()
        self._refuse_if_over()
        if isinstance(command, Kill):
            self._supervisor.kill(command)

    def keep_saying(self, command: Command) -> None:
        self._refuse_if_over()
        if isinstance(command, Start):
            self.standing = command
            if self.connected:
                self._supervisor.obey()

    async def stop_node(self, timeout_s: float, *, restart: bool = False) -> None:
        if self._closed or self._supervisor.said_farewell:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await suffer(self._supervisor.around.fault("stop"))
                await self._supervisor.link.wait()
        except TimeoutError as error:
            raise UnreachableError("the node did not end in time") from error
        self._supervisor.end("stopped")

    async def close(self) -> None:
        self._closed = True
        self._supervisor.link.set()  # who waits for it is to go on

    def _refuse_if_over(self) -> None:
        if self._closed or self._supervisor.said_farewell:
            raise UnreachableError("the node has ended")


class _Supervisor:
    """What runs on a node.

    Attributes:
        link: set while the client is connected.
        said_farewell: whether the client knows from it that it has ended.
        runs: whether it still does.
        workers: the process in each slot, if there is one.
    """

    def __init__(self, node: SimulatedNode, config: NodeConfig, around: _Surroundings) -> None:
        self.around = around
        self.link = asyncio.Event()
        self.link.set()
        self.said_farewell = False
        self.runs = True
        self.workers: list[SimulatedWorker | None] = [None] * config.workers
        self.addresses = [f"{node.instance.id}:{9200 + worker}" for worker in range(config.workers)]
        self._node = node
        self._keeping: list[asyncio.Task[None]] = []
        self._processes = 0
        self._taken_at: float | None = None

    @property
    def linked(self) -> bool:
        return self.link.is_set()

    def obey(self) -> None:
        """The client has said that the workers are to start."""
        if not self._keeping and self.runs:
            self._keeping = [asyncio.ensure_future(self._keep(worker)) for worker in range(len(self.workers))]

    def kill(self, command: Kill) -> None:
        worker = self.workers[command.worker]
        if worker is not None and worker.incarnation == command.incarnation:
            worker.die("ended by signal 9")

    def be_preempted(self, seconds_left: float) -> None:
        """The metadata service says when the machine is taken back."""
        self._taken_at = SYSTEM_CLOCK.monotonic() + seconds_left
        self._say_how_long()

    def end(self, reason: str) -> None:
        """Everything on the node is over. Idempotent."""
        self.runs = False
        for worker in self.workers:
            if worker is not None:
                worker.die(reason)
        for task in self._keeping:
            task.cancel()
        for address in self.addresses:
            self.around.network.listen(address, None)

    def unlink(self) -> None:
        """The client's connection is gone."""
        if self.linked:
            self.link.clear()
            self._node.hear_of_lost_connection()

    def relink(self) -> None:
        """The client is connected again, and told of what runs."""
        self.link.set()
        if self._node.standing:
            self.obey()
        for worker, process in enumerate(self.workers):
            if process is not None:
                self._running(worker, process)
        self._say_how_long()

    def _say_how_long(self) -> None:
        if self._taken_at is not None:
            self._report(Preempting(seconds_left=max(0.0, self._taken_at - SYSTEM_CLOCK.monotonic())))

    async def _keep(self, worker: int) -> None:
        while True:
            startups = self.around.startups
            startup = startups.popleft() if startups else Startup()
            self._processes += 1
            process = SimulatedWorker(self._node.instance.id, worker, self._processes, self.around.work)
            await SYSTEM_CLOCK.sleep(startup.delay_s)
            if startup.fails:
                process.die("exit code 1")
            reason = await self._live(worker, process)
            self._report(
                WorkerExit(
                    worker=worker,
                    incarnation=process.incarnation,
                    exit_code=None,
                    signal=None,
                    reason=reason,
                    memory_limit_bytes=None,
                    begun=process.begun,
                )
            )
            await SYSTEM_CLOCK.sleep(_RESTART_S)

    async def _live(self, worker: int, process: SimulatedWorker) -> str:
        if not process.alive:
            return await process.died
        self.workers[worker] = process
        self.around.network.listen(self.addresses[worker], process)
        self._running(worker, process)
        try:
            return await process.died
        finally:
            self.workers[worker] = None
            self.around.network.listen(self.addresses[worker], None)

    def _running(self, worker: int, process: SimulatedWorker) -> None:
        self._report(WorkerRunning(worker=worker, incarnation=process.incarnation, pid=1))

    def _report(self, message: Message) -> None:
        if self.linked:
            asyncio.get_running_loop().call_later(self.around.control_s, self._node.hear, message)


class _Transport:
    """The way to a simulated machine."""

    def __init__(self, node: SimulatedNode, around: _Surroundings) -> None:
        self._node = node
        self._around = around

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | memoryview = b"",
        timeout_s: float,
    ) -> Completed:
        """The one thing that is asked this way is whether the supervisor lives."""
        await SYSTEM_CLOCK.sleep(self._around.control_s)
        self._refuse_if_cut_off()
        gone = supervisor_check.SUPERVISOR_GONE
        return Completed(exit_code=0 if self._node.runs else gone, stdout="", stderr="")

    async def put(
        self,
        data: bytes | memoryview | Sequence[memoryview],
        path: str,
        *,
        mode: int = 0o600,
    ) -> None:
        self._refuse_if_cut_off()
        await suffer(self._around.puts.popleft() if self._around.puts else NO_FAULT)
        self._refuse_if_cut_off()

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    async def close(self) -> None: ...

    def _refuse_if_cut_off(self) -> None:
        if self._node.instance.id in self._around.network.down:
            raise UnreachableError("no route to the host")


class SimulatedNode(FakeNode):
    """A node whose machine does not exist, with workers that do calls.

    Attributes:
        lost: whether it is dead, or said that it will be.
    """

    def __init__(self, maker: SimulatedNodes, **record: Any) -> None:
        super().__init__(maker, **record)
        self.lost = False
        self._supervisor: _Supervisor | None = None
        self._around = maker.around

    def open(self) -> None:
        """See :meth:`Node.open`."""
        super().open()
        self.transport = _Transport(self, self._around)

    @property
    def runs(self) -> bool:
        """Whether its supervisor runs."""
        return self._supervisor is not None and self._supervisor.runs

    @property
    def unreachable(self) -> bool:
        """Whether its machine does not answer."""
        return self.instance.id in self._around.network.down

    @property
    def standing(self) -> bool:
        """Whether it was told to start its workers."""
        return isinstance(self._control, _Control) and self._control.standing is not None

    async def start(self, config: NodeConfig) -> None:
        """See :meth:`Node.start`."""
        await super().start(config)
        self._supervisor = _Supervisor(self, config, self._around)
        self._ready = replace(self.ready, call_ports=(1, 2))
        self.lanes = tuple(self._supervisor.addresses)
        self._longest_absence_s = nodes.longest_absence_s(config)
        self._control = _Control(self._supervisor)

    def join(self, order: Start) -> None:
        """See :meth:`Node.join`."""
        super().join(order)
        Node.join(self, order)

    async def stop(self, timeout_s: float) -> None:
        """See :meth:`Node.stop`."""
        self.log.append("stop")
        await Node.stop(self, timeout_s)

    def hear(self, message: Message) -> None:
        """The supervisor says something."""
        if isinstance(self._control, _Control) and self._control.connected:
            self._receive(message)

    def hear_of_lost_connection(self) -> None:
        """The control connection is lost."""
        if self._control is not None:
            self._connection_lost()

    # --- what befalls it --------------------------------------------------------------------------------------------

    def say_farewell(self, reason: str, *, timed_out: bool = False) -> None:
        """It ends, and says so."""
        if self._supervisor is not None and self.runs:
            self.lost = True
            if self._control is not None and self._supervisor.linked:
                self._supervisor.said_farewell = True
                self._receive(Ending(reason=reason, timed_out=timed_out))
            self.crash()

    def kill_process(self, worker: int) -> None:
        """The process in a slot dies, if there is one."""
        if self._supervisor is not None and (process := self._supervisor.workers[worker]) is not None:
            process.die("ended by signal 9")

    def be_preempted(self, seconds_left: float) -> None:
        """It says that its machine is taken back; who has the machine does that."""
        if self._supervisor is not None and self.runs:
            self.lost = True
            self._supervisor.be_preempted(seconds_left)

    def crash(self) -> None:
        """Its supervisor ends without a word, with all it started; the machine is still there."""
        self.lost = True
        if self._supervisor is not None:
            self._supervisor.end("its node crashed")
            self._supervisor.unlink()

    def vanish(self) -> None:
        """Its machine is no more."""
        self.cut_off(silently=True)
        self.crash()

    def cut_off(self, *, silently: bool) -> None:
        """It cannot be reached."""
        self._around.network.part(self.instance.id, silently=silently)
        if self._supervisor is not None:
            self._supervisor.unlink()

    def reconnect(self) -> None:
        """It can be reached again."""
        self._around.network.mend(self.instance.id)
        if self._supervisor is not None and self.runs:
            self._supervisor.relink()


class SimulatedNodes(FakeNodes):
    """Makes simulated nodes: pass it to a fleet as ``make_node``."""

    def __init__(self, network: SimulatedNetwork, work: Work, *, control_s: float = 0.001) -> None:
        super().__init__()
        self.around = _Surroundings(network=network, work=work, control_s=control_s)

    @property
    def simulated(self) -> list[SimulatedNode]:
        """The nodes whose machines ran, in order."""
        return [node for node in self.opened if isinstance(node, SimulatedNode)]

    def __call__(self, **record: Any) -> SimulatedNode:
        """Make a node; see :class:`Node`."""
        return SimulatedNode(self, **record)

    def fault(self, node: FakeNode, phase: Phase) -> Fault:
        """What happens to the next node that enters ``phase``; only its first order to join may fail."""
        return NO_FAULT if phase == "join" and node.log.count("join") > 1 else self.around.fault(phase)

    def trouble(
        self,
        phases: Mapping[Phase, Iterable[Fault]],
        *,
        puts: Iterable[Fault] = (),
        startups: Iterable[Startup] = (),
    ) -> None:
        """What happens from now on, in order of time, to all nodes together; nothing after that."""
        self.around.phases = {phase: deque(faults) for phase, faults in phases.items()}
        self.around.puts = deque(puts)
        self.around.startups = deque(startups)

    def mend(self) -> None:
        """From now on nothing goes wrong, and all that runs can be reached."""
        self.trouble({})
        for node in self.simulated:
            if node.runs:
                node.reconnect()

    def vanish(self, instance_id: str) -> None:
        """The machine is no more."""
        for node in self.simulated:
            if node.instance.id == instance_id:
                node.vanish()
