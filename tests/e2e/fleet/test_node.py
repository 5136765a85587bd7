"""One real node: its supervisor, service and workers, as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import psutil
import pytest

from skyward.base.waiting import NotYet, wait_until
from skyward.fleet.control_client import ControlClient
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport
from skyward.scheduling.certificates import issue
from skyward.wire.control import (
    Ending,
    Kill,
    Message,
    NodeMetrics,
    RunService,
    ServiceExit,
    ServiceRunning,
    Start,
    TimeoutWarning,
    WorkerExit,
    WorkerRunning,
)
from skyward.wire.frames import TlsIdentity, client_context
from skyward.wire.node_config import NodeConfig, NodeReady
from support import task_service
from support.task_service import guests_at, run_task

M = TypeVar("M", bound=Message)

WORKERS = 2
DEADLINE_S = 30.0
MIB = 1 << 20

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


@pytest.fixture
def config(tmp_path: Path, identity: TlsIdentity) -> NodeConfig:
    return NodeConfig(
        pool_id="pool",
        instance_id=f"e2e-{uuid.uuid4().hex[:12]}",
        node=0,
        total_nodes=1,
        workers=WORKERS,
        head=True,
        address="127.61.7.1",
        workdir=str(tmp_path / "node"),
        env={"COLOUR": "blue", "PYTHONPATH": task_service.FOLDER},
        tls_ca=identity.ca,
        tls_cert=identity.cert,
        tls_key=identity.key,
        metrics_interval_s=0.2,
    )


class Node:
    """A running node and its client."""

    def __init__(self, config: NodeConfig, ready: NodeReady) -> None:
        self.config = config
        self.ready = ready
        self.workers: dict[int, WorkerRunning] = {}
        self.service: ServiceRunning | None = None
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        identity = config.identity
        self.control = ControlClient(
            ready.control, identity, on_message=self._messages.put_nowait, on_lost=lambda: None
        )

    async def next(self, kind: type[M]) -> M:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self._messages.get()
                if isinstance(message, WorkerRunning):
                    self.workers[message.worker] = message
                if isinstance(message, ServiceRunning):
                    self.service = message
                if isinstance(message, kind):
                    return message

    async def all_running(self) -> None:
        while len(self.workers) < self.config.workers:
            await self.next(WorkerRunning)

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.config.instance_id, self.ready.pid)

    def process_running(self, role: str) -> psutil.Process:
        (process,) = (p for p in self.processes() if p.name() == f"sky-{role}")
        return process


def processes_of(instance_id: str, supervisor: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid == supervisor or process.environ().get("SKYWARD_INSTANCE") == instance_id:
                found.append(process)
    return found


async def run_supervisor(config: NodeConfig) -> Completed:
    transport = LocalTransport(LocalAccess(address=config.address, workdir=config.workdir))
    argv = [sys.executable, "-m", "skyward.node.supervisor", config.workdir]
    return await transport.run(argv, stdin=config.to_json().encode(), timeout_s=DEADLINE_S)


@contextlib.asynccontextmanager
async def running(config: NodeConfig, *, connected: bool = True) -> AsyncIterator[Node]:
    completed = await run_supervisor(config)
    assert completed.exit_code == 0, completed.stderr
    node = Node(config, NodeReady.from_json(completed.stdout))
    try:
        if connected:
            await node.control.connect(DEADLINE_S)
        yield node
    finally:
        await node.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.ready.pid, signal.SIGTERM)
        await nothing_left(node)


async def nothing_left(node: Node) -> None:
    async def probe() -> bool | NotYet:
        left = node.processes()
        return NotYet(f"{left}") if left else True

    await wait_until(probe, deadline_s=DEADLINE_S, interval_s=0.02, what="the node's processes to end")
    assert_only_logs_left(node)


def assert_only_logs_left(node: Node) -> None:
    assert not Path(node.ready.blob_dir).exists()
    assert {path.suffix for path in Path(node.config.workdir).iterdir()} == {".log"}
    listening = {c.laddr for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert not {place for place in listening if place.ip == node.config.address}


async def run_service(node: Node, address: str = "") -> None:
    """Have the node run the service for tests, or join another one at an address."""
    order = RunService(name=task_service.NAME, module=task_service.MODULE, address=address or node.ready.service)
    await node.control.send(order)


def kind_of_worker() -> dict[str, Any]:
    import numpy as np
    import numpy.random

    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "colour": os.environ["COLOUR"],
        "threads": os.environ["OMP_NUM_THREADS"],
        "draw": float(np.random.random()),  # noqa: NPY002 - the state that forked processes would share
        "hash": hash("text"),
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "heavy": sorted(sys.modules.keys() & {"dask", "distributed", "rich", "paramiko"}),
        "cwd": os.getcwd(),
    }


@pytest.mark.parametrize("from_the_start", [True, False])
async def test_both_workers_run_and_join_the_service(config: NodeConfig, from_the_start: bool) -> None:
    if from_the_start:
        config = replace(config, service=task_service.MODULE, service_name=task_service.NAME)
    async with running(config) as node:
        await node.all_running()
        if not from_the_start:
            assert not [process for process in node.processes() if process.name() == "sky-tasks"]
            await run_service(node)
        serving = node.service or await node.next(ServiceRunning)
        assert serving.address == node.ready.service
        kinds = [await run_task(guest, kind_of_worker) for guest in node.ready.guests]
        assert await guests_at(node.ready.service) == ["node0-worker0", "node0-worker1"]
        for i, kind in enumerate(kinds):
            assert kind["pid"] == kind["session"] == node.workers[i].pid
            assert kind["colour"] == "blue"
            assert kind["threads"] == str(max(1, node.ready.cpu_count // WORKERS))
            assert kind["sigint"]
            assert kind["heavy"] == []
            assert kind["cwd"] == config.workdir
        assert kinds[0]["draw"] != kinds[1]["draw"]
        assert kinds[0]["hash"] == kinds[1]["hash"]
        metrics = await node.next(NodeMetrics)
        assert metrics.memory_used_mb > 0


async def test_killed_worker_comes_back_as_another_incarnation_at_its_port(config: NodeConfig) -> None:
    async with running(config) as node:
        await node.all_running()
        first = node.workers[0]
        await node.control.send(Kill(worker=0, incarnation=first.incarnation))
        ended = await node.next(WorkerExit)
        second = await node.next(WorkerRunning)
        assert replace(ended, last_words_at=0) == WorkerExit(
            worker=0,
            incarnation=first.incarnation,
            exit_code=None,
            signal=9,
            reason="killed by signal 9 (SIGKILL)",
            memory_limit_bytes=None,
            begun=0,
        )
        assert second.incarnation != first.incarnation
        assert second.pid != first.pid

        await node.control.send(Kill(worker=0, incarnation=first.incarnation))
        await node.control.send(Kill(worker=1, incarnation=node.workers[1].incarnation))
        assert (await node.next(WorkerExit)).worker == 1
        assert psutil.pid_exists(second.pid)


def exit_with(status: int) -> None:
    os._exit(status)


def fork_a_sleeper() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


@pytest.mark.full
async def test_exit_status_is_reported(config: NodeConfig) -> None:
    async with running(config) as node:
        await run_service(node)
        await node.all_running()
        with contextlib.suppress(EOFError, ConnectionError):
            await run_task(node.ready.guests[1], exit_with, 3)
        ended = await node.next(WorkerExit)
        assert (ended.worker, ended.exit_code, ended.reason) == (1, 3, "exited with status 3")


async def test_a_guest_that_ends_its_worker_gives_the_reason(config: NodeConfig) -> None:
    async with running(config) as node:
        await run_service(node)
        await node.all_running()
        with contextlib.suppress(EOFError, ConnectionError):
            await run_task(node.ready.guests[1], task_service.Ending, "it was restarted")
        ended = await node.next(WorkerExit)
        assert (ended.worker, ended.exit_code, ended.ended_for) == (1, 0, "it was restarted")
        assert (await node.next(WorkerRunning)).worker == 1


@pytest.mark.full
async def test_forked_child_of_a_dead_worker_does_not_keep_its_port(config: NodeConfig) -> None:
    async with running(config) as node:
        await run_service(node)
        await node.all_running()
        child = await run_task(node.ready.guests[0], fork_a_sleeper)
        assert psutil.pid_exists(child)
        os.kill(node.workers[0].pid, signal.SIGKILL)
        await node.next(WorkerExit)
        assert (await node.next(WorkerRunning)).worker == 0
        assert await run_task(node.ready.guests[0], os.getpid) == node.workers[0].pid
        await gone([child])


async def gone(pids: list[int]) -> None:
    async def probe() -> bool | None:
        return None if any(psutil.pid_exists(pid) for pid in pids) else True

    await wait_until(probe, deadline_s=DEADLINE_S, interval_s=0.02, what=f"{pids} to end")


def eat_memory() -> int:
    return len(bytearray(os.urandom(MIB)) * 600)


async def test_worker_over_its_memory_limit_is_reported_so(config: NodeConfig) -> None:
    async with running(replace(config, bought_memory_bytes=WORKERS * 400 * MIB)) as node:
        await run_service(node)
        await node.all_running()
        with contextlib.suppress(EOFError, ConnectionError):
            await run_task(node.ready.guests[0], eat_memory)
        ended = await node.next(WorkerExit)
        assert ended.memory_limit_bytes == 400 * MIB
        assert ended.reason == "exceeded its memory limit of 0.4 GiB"


async def test_a_worker_that_is_stopped_for_ten_seconds_is_replaced(config: NodeConfig) -> None:
    async with running(config) as node:
        await node.all_running()
        os.kill(node.workers[1].pid, signal.SIGSTOP)
        ended = await node.next(WorkerExit)
        assert (ended.worker, ended.signal) == (1, 9)
        assert ended.reason == "it was stopped, as by SIGSTOP, for 10 s, and was killed"


def keep_memory() -> str:
    """Leave named memory, which outlives its process."""
    return SharedMemory(create=True, size=MIB).name


async def test_shared_memory_of_a_killed_worker_is_removed(config: NodeConfig) -> None:
    async with running(config) as node:
        await run_service(node)
        await node.all_running()
        name = await run_task(node.ready.guests[0], keep_memory)
        assert Path("/dev/shm", name).exists()
        os.kill(node.workers[0].pid, signal.SIGKILL)

        async def removed() -> bool | None:
            return None if Path("/dev/shm", name).exists() else True

        await wait_until(removed, deadline_s=DEADLINE_S, interval_s=0.02, what="the memory to be removed")


def put_file(path: str) -> None:
    Path(path).write_bytes(b"large")


def log_of(node: Node) -> str:
    return Path(node.config.workdir, "supervisor.log").read_text()


def remove_folder(path: str) -> None:
    shutil.rmtree(path)


def leave_a_daemon() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True).pid


# In `make test`: test_exits.py, and the killed supervisor below.
@pytest.mark.full
async def test_stop_leaves_nothing_not_even_what_calls_have_spawned(config: NodeConfig) -> None:
    async with running(config) as node:
        await run_service(node)
        await node.all_running()
        daemon = await run_task(node.ready.guests[0], leave_a_daemon)
        memory = Path("/dev/shm", await run_task(node.ready.guests[1], keep_memory))
        put_file(f"{node.ready.blob_dir}/blob")
        await node.control.stop_node(DEADLINE_S)
        assert (await node.next(Ending)).reason == "the client asked for it"
        assert not psutil.pid_exists(daemon)
        assert not memory.exists()
        await nothing_left(node)


async def test_node_whose_client_is_gone_ends_after_its_lease(config: NodeConfig) -> None:
    async with running(replace(config, lease_s=1.0)) as node:
        await node.control.close()
        await nothing_left(node)
        assert "no client has been connected for 1 s" in log_of(node)


async def test_node_ends_at_its_timeout_and_warns_before(config: NodeConfig) -> None:
    async with running(replace(config, timeout_s=3.0)) as node:
        warning = await node.next(TimeoutWarning)
        assert 0 <= warning.seconds_left <= 0.3
        assert (await node.next(Ending)).reason == "its timeout of 3 s is over"
        await nothing_left(node)


async def test_workers_end_with_the_process_that_they_were_forked_from_and_come_back(config: NodeConfig) -> None:
    async with running(config) as node:
        await node.all_running()
        before = dict(node.workers)
        node.process_running("zygote").kill()
        ended = [await node.next(WorkerExit) for _ in range(WORKERS)]
        assert {report.incarnation for report in ended} == {worker.incarnation for worker in before.values()}
        assert ended[0].reason == "ended with the process that it was forked from"
        node.workers.clear()
        await node.all_running()


async def test_dead_service_is_replaced_at_its_address_and_joined_again(config: NodeConfig) -> None:
    async with running(config) as node:
        await run_service(node)
        await node.next(ServiceRunning)
        node.process_running("tasks").kill()
        assert "SIGKILL" in (await node.next(ServiceExit)).reason
        assert (await node.next(ServiceRunning)).address == node.ready.service
        await joined(node.ready.service, 0, 1)


async def joined(service: str, *workers: int, node: int = 0) -> None:
    expected = {f"node{node}-worker{worker}" for worker in workers}

    async def all_there() -> bool | NotYet:
        try:
            guests = set(await guests_at(service))
        except ConnectionRefusedError:
            return NotYet("the service")
        return True if guests >= expected else NotYet(f"{guests}")

    await wait_until(all_there, deadline_s=DEADLINE_S, interval_s=0.02, what=f"{expected} to join")


@pytest.mark.parametrize("and_the", ["", pytest.param("sky-zygote", marks=pytest.mark.full)])
async def test_nothing_outlives_a_killed_supervisor(config: NodeConfig, and_the: str) -> None:
    completed = await run_supervisor(config)
    node = Node(config, NodeReady.from_json(completed.stdout))
    await node.control.connect(DEADLINE_S)
    await node.all_running()
    await run_service(node)
    assert psutil.pid_exists(await run_task(node.ready.guests[0], leave_a_daemon))
    doomed = [node.ready.pid, *(process.pid for process in node.processes() if process.name() == and_the)]
    assert len(doomed) == (2 if and_the else 1)
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    await node.control.close()

    async def probe() -> bool | NotYet:
        left = node.processes()
        return NotYet(f"{left}") if left else True

    await wait_until(probe, deadline_s=DEADLINE_S, interval_s=0.02, what="the node's processes to end")
    remove_folder(node.ready.blob_dir)


async def test_workers_of_another_node_start_when_told_and_follow_the_service_to_another_address(
    config: NodeConfig,
) -> None:
    other = replace(
        config,
        node=1,
        head=False,
        address="127.61.7.3",
        bind="127.61.7.2",
        instance_id=config.instance_id + "b",
        workdir=config.workdir + "b",
    )
    async with running(config) as head, running(other) as node:
        await run_service(head)
        await run_service(node, head.ready.service)
        await node.control.send(Start(head_addr=config.address, total_nodes=2))
        await node.all_running()
        await joined(head.ready.service, 0, 1, node=1)
        assert not [process for process in node.processes() if process.name() == "sky-tasks"]

        await run_service(node)  # behind NAT, it reaches its own ports where they are bound
        assert (await node.next(ServiceRunning)).address == node.ready.service
        await joined(node.ready.service.replace(other.address, other.bind), 0, 1, node=1)
        await joined(head.ready.service, 0, 1)
        assert await guests_at(head.ready.service) == ["node0-worker0", "node0-worker1"]


async def test_node_that_cannot_start_says_why(config: NodeConfig) -> None:
    completed = await run_supervisor(replace(config, address="192.0.2.1"))

    assert completed.exit_code == 1
    assert completed.stdout == ""
    assert "192.0.2.1" in completed.stderr
    assert "supervisor.log" in completed.stderr


def strangers(identity: TlsIdentity) -> Iterator[tuple[str, ssl.SSLContext | None]]:
    nobody = ssl.create_default_context(cadata=identity.ca)
    nobody.check_hostname = False
    yield "in plain text", None
    yield "without a certificate", nobody
    other = issue()
    yield "with another pool's certificate", client_context(replace(other, ca=identity.ca))


async def answer_to(place: tuple[str, int], context: ssl.SSLContext | None) -> bytes:
    """What a stranger reads after saying something; an alert of the TLS library is no answer."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(*place, ssl=context)
    except OSError:
        return b""
    try:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(1):
            return await reader.read()
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.transport.abort()


def is_tls_alert(answer: bytes) -> bool:
    return len(answer) == 7 and answer[0] == 0x15


async def test_strangers_get_no_answer_from_any_port(config: NodeConfig, identity: TlsIdentity) -> None:
    async with running(config) as node:
        await node.all_running()
        pids = {process.pid for process in node.processes()}
        places = {
            (connection.laddr.ip, connection.laddr.port)
            for connection in psutil.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN and connection.pid in pids
        }
        assert len(places) == 1 + 1 + WORKERS
        assert {ip for ip, _ in places} == {config.address}
        for who, context in strangers(identity):
            answers = await asyncio.gather(*(answer_to(place, context) for place in places))
            assert not [answer for answer in answers if answer and not is_tls_alert(answer)], who
