"""Standard input of calls and of their children is empty, and no channel of the node reaches a program they start."""

from __future__ import annotations

import getpass
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import psutil
import pytest

import skyward as sky

DEADLINE_S = 60


@pytest.fixture(scope="module")
def pool(start_callbacks: Callable[[sky.ComputePool], None]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        start_callbacks(pool)
        yield pool


def read_descriptor() -> bytes:
    return os.read(0, 100)


def read_stream() -> bytes:
    return sys.stdin.read().encode()


def ask() -> bytes:
    try:
        return input().encode()
    except EOFError:
        return b""


def ask_for_a_password() -> bytes:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it would be echoed
            return getpass.getpass().encode()
    except EOFError:
        return b""


def run_program() -> bytes:
    os.set_blocking(0, False)  # as ssh, node and ffmpeg do; it must disturb nobody else
    return subprocess.run(["cat"], check=True, capture_output=True, timeout=20).stdout


def fork() -> bytes:
    child = os.fork()
    if child:
        return bytes(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(len(os.read(0, 100)))


def answer(pipe: multiprocessing.connection.Connection) -> None:
    pipe.send(read_descriptor())


def start_process(method: str) -> bytes:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(there,))  # type: ignore[attr-defined]
    process.start()
    assert here.poll(20)
    process.join()
    return here.recv()


def start_forked_process() -> bytes:
    return start_process("fork")


def start_spawned_process() -> bytes:
    return start_process("spawn")


@pytest.mark.parametrize(
    "read",
    [
        read_descriptor,
        read_stream,
        ask,
        ask_for_a_password,
        run_program,
        fork,
        start_forked_process,
        start_spawned_process,
    ],
)
def test_standard_input_has_ended(pool: sky.ComputePool, read: Callable[[], bytes]) -> None:
    assert pool.submit(read).result(DEADLINE_S) == b""


def test_standard_input_of_a_dask_task_has_ended(pool: sky.ComputePool) -> None:
    with pool.dask_client() as client:
        assert client.submit(run_program, pure=False).result(DEADLINE_S) == b""


LOOK = "import os; print(*sorted(set(os.listdir('/proc/self/fd')) - {'3'}))"


def look_from_a_program() -> str:
    command = [sys.executable, "-c", LOOK]
    return subprocess.run(command, check=True, close_fds=False, capture_output=True, text=True).stdout


def look_from_a_fork() -> str:
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        os.execv(sys.executable, [sys.executable, "-c", LOOK])
    os.close(write)
    with open(read) as lines:
        return lines.read()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are listed in /proc")
@pytest.mark.parametrize("look", [look_from_a_program, look_from_a_fork])
def test_a_program_started_without_closing_anything_gets_the_standard_streams_only(
    pool: sky.ComputePool, look: Callable[[], str]
) -> None:
    assert pool.submit(look).result(DEADLINE_S).split() == ["0", "1", "2"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are listed in /proc")
def test_no_process_of_a_node_has_a_channel_as_standard_input(pool: sky.ComputePool) -> None:
    instance = pool.submit(os.getenv, "SKYWARD_INSTANCE").result(DEADLINE_S)

    def of_node(process: psutil.Process) -> bool:
        try:
            return process.environ().get("SKYWARD_INSTANCE") == instance
        except psutil.Error:
            return False

    found = {process.name(): process.pid for process in psutil.process_iter() if of_node(process)}
    expected = {"sky-supervisor", "sky-zygote", "sky-worker"}
    assert expected <= set(found)
    assert {name: os.readlink(f"/proc/{pid}/fd/0") for name, pid in found.items()} == dict.fromkeys(found, os.devnull)
