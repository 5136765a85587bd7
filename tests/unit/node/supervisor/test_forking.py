"""Real processes of small programs, which take no part in a node."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from skyward.node.plan import NodePlan, make_plan
from skyward.node.processes import exit_reason
from skyward.node.supervisor.forking import Fork, Zygote, fork_from, keep_process
from support.nodes import node_config

DEADLINE_S = 30.0

AFTERWARDS = """
import os, signal, socket

from skyward.node.supervisor.forking import _ForkServer

wakers = []
set_wakeup_fd = signal.set_wakeup_fd
signal.set_wakeup_fd = lambda number, **options: wakers.append(number) or set_wakeup_fd(number, **options)
here, orders = socket.socketpair()
here.close()
_ForkServer(orders).serve()
read, write = os.pipe()
os.dup2(write, wakers[0])
os.kill(os.getpid(), signal.SIGCHLD)
os.set_blocking(read, False)
try:
    print("written:", os.read(read, 10))
except BlockingIOError:
    print("nothing written")
"""

SHARED = """
import json, os

from skyward.node.processes import read_commands

IMPORTED_BY = os.getpid()

def say(reports, number):
    print(json.dumps(str(number)), file=reports)
"""

FAITHFUL = """
import shared

def main(commands, reports):
    shared.say(reports, shared.IMPORTED_BY)
    for number in shared.read_commands(commands):
        shared.say(reports, number)
"""


class Running:
    """A zygote and its forks: what they have said, in turn, and why anything ended."""

    def __init__(self, programs: tuple[str, ...], plan: NodePlan) -> None:
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.zygote_ended: asyncio.Queue[str] = asyncio.Queue()
        self.doomed: list[psutil.Process] = []
        self.zygote = Zygote(("shared", *programs), plan, on_exit=self._end_forks)
        self.present: Fork | None = None

    async def keep(self, program: str) -> None:
        await keep_process(program, lambda: self._live(program), self.ended.put_nowait)

    async def _live(self, program: str) -> str:
        async with self.zygote.fork(program) as self.present:
            async for number in self.present.reports():
                self.numbers.put_nowait(int(number))
            return exit_reason(self.present.exit_code)

    async def number(self) -> int:
        return await self.numbers.get()

    def forks(self) -> list[psutil.Process]:
        return psutil.Process(self.zygote.pid).children()

    def kill_zygote(self) -> None:
        if self.zygote.pid is not None:
            self.doomed = self.forks()
            os.kill(self.zygote.pid, signal.SIGKILL)

    def _end_forks(self, reason: str) -> None:
        for fork in self.doomed:
            fork.kill()
        self.zygote_ended.put_nowait(reason)


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[NodePlan]:
    """Of a node that nobody starts."""
    folder = str(tmp_path)
    config = node_config(instance_id=f"unit-{os.getpid()}", workdir=folder, env={"PYTHONPATH": folder})
    plan = make_plan(config, control_port=4711, blob_port=4712, ports=range(4713, 4813))
    yield plan
    for folder in {plan.ready.blob_dir, plan.ready.blob_dir_disk}:
        Path(folder).rmdir()


@asynccontextmanager
async def running(plan: NodePlan, **programs: str) -> AsyncGenerator[Running]:
    write_modules(Path(plan.config.workdir), {"shared": SHARED, **programs})
    running = Running(tuple(programs), plan)
    keeping = asyncio.create_task(running.zygote.keep())
    tasks = [asyncio.create_task(running.keep(program)) for program in programs]
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield running
    finally:
        forks = running.forks() if running.zygote.pid is not None else []
        await cancelled(*tasks)
        _, alive = await asyncio.to_thread(psutil.wait_procs, forks, DEADLINE_S)
        running.kill_zygote()
        await running.zygote_ended.get()
        await cancelled(keeping)
    assert not alive, "nobody gives them commands any more"


async def cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def write_modules(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


async def test_what_processes_need_is_imported_once(plan: NodePlan) -> None:
    async with running(plan, one=FAITHFUL, other=FAITHFUL) as node:
        assert {await node.number(), await node.number()} == {node.zygote.pid}
        assert len(node.forks()) == 2


async def test_commands_reach_the_process_and_its_end_is_reported(plan: NodePlan) -> None:
    async with running(plan, one=FAITHFUL) as node:
        assert await node.number() == node.zygote.pid
        assert node.present is not None
        node.present.send(7)
        assert await node.number() == 7
        node.forks()[0].kill()
        assert await node.ended.get() == "killed by signal 9 (SIGKILL)"
        assert await node.number() == node.zygote.pid


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pass", "exited with status 0"),
        ("import os; os._exit(3)", "exited with status 3"),
        ("raise ValueError('expected by the test')", "exited with status 1"),
        ("import os; os.kill(os.getpid(), 6)", "killed by signal 6 (SIGABRT)"),
    ],
)
async def test_a_process_that_ends_is_replaced_and_its_status_is_known(plan: NodePlan, body: str, reason: str) -> None:
    async with running(plan, one=f"def main(commands, reports): {body}") as node:
        assert [await node.ended.get(), await node.ended.get()] == [reason, reason]


INHERITING = """
import os, subprocess, sys, shared

OPEN = "import os; print(sorted(set(os.listdir('/proc/self/fd')) - {'3'}), os.path.samefile('/dev/fd/0', os.devnull))"

def main(commands, reports):
    print("what a library prints is no report", flush=True)
    shown = subprocess.run([sys.executable, "-c", OPEN], close_fds=False, capture_output=True, text=True).stdout
    shared.say(reports, int(shown.strip() == "['0', '1', '2'] True"))
    commands.read()
"""


async def test_a_program_that_a_process_starts_gets_none_of_its_connections(plan: NodePlan) -> None:
    async with running(plan, one=INHERITING, other=INHERITING) as node:
        assert [await node.number(), await node.number()] == [1, 1]


async def test_a_process_has_one_thread_and_no_connections_but_its_own(plan: NodePlan) -> None:
    async with running(plan, one=FAITHFUL, other=FAITHFUL) as node:
        await node.number()
        await node.number()
        for fork in node.forks():
            assert fork.num_threads() == 1
            assert len(fork.net_connections("unix")) == 2


async def test_processes_whose_zygote_has_ended_come_back_with_another(plan: NodePlan) -> None:
    async with running(plan, one=FAITHFUL) as node:
        first = await node.number()
        node.kill_zygote()
        assert await node.zygote_ended.get() == "killed by signal 9 (SIGKILL)"
        assert await node.ended.get() == "ended with the process that it was forked from"
        second = await node.number()
        assert first != second == node.zygote.pid


async def test_a_zygote_that_cannot_import_says_why_and_is_tried_again(
    plan: NodePlan, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(plan, one="raise ImportError('expected by the test')") as node:
        assert [await node.zygote_ended.get() for _ in range(2)] == ["exited with status 1"] * 2
        assert await node.ended.get() == "ended with the process that it was forked from"
    assert capfd.readouterr().err.count("expected by the test") >= 2


@pytest.mark.parametrize("turns", range(5))
async def test_a_fork_whose_order_is_cancelled_leaves_no_socket_open(turns: int) -> None:
    async def order(orders: socket.socket) -> None:
        async with fork_from(orders, "module"):
            await asyncio.Event().wait()

    here, zygote = socket.socketpair()
    with here, zygote:
        before = set(os.listdir("/proc/self/fd"))
        ordering = asyncio.create_task(order(here))
        for _ in range(turns):
            await asyncio.sleep(0)
        ordering.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await ordering
        for _ in range(3):  # a transport closes its socket in the next turn of the loop
            await asyncio.sleep(0)

        assert cancelled.tb is not None, "its frames keep all that it has not closed"
        assert len(set(os.listdir("/proc/self/fd"))) == len(before)


def test_a_zygote_that_has_ended_writes_to_no_descriptor_that_has_its_wakers_number() -> None:
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout == "nothing written\n", done.stderr
