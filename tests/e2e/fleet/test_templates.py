"""Nodes of ``Local()`` are forked from one process that the client keeps: what they share, and what they do not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.nodes import node_config

import skyward as sky
from skyward.base.waiting import wait_until
from skyward.fleet.template_process import fork_supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each node is a program of its own")

DEADLINE_S = 60.0

CLIENT = """
import os, sys
import skyward as sky

@sky.compute
def origin():
    from skyward.node.worker import worker
    return id(worker)

def node():
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        return origin() >> pool
"""


@sky.compute
def origin() -> int:
    """Return where an imported module lies in memory: the same in all forks of one program, and in no other one."""
    from skyward.node.worker import worker

    return id(worker)


@sky.compute
def value_of(expression: str) -> Any:
    return eval(expression, {"os": os, "sys": sys})


def local_pool(**parameters: Any) -> sky.ComputePool:
    return sky.ComputePool(provider=sky.Local(), display="quiet", **parameters)


def in_pool(call: sky.PendingCompute[Any], **parameters: Any) -> Any:
    with local_pool(**parameters) as pool:
        return call >> pool


def templates(of: int | None = None) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children() if is_template(child)]


def is_template(process: psutil.Process) -> bool:
    try:
        return process.name() == "sky-template"
    except psutil.NoSuchProcess:
        return False


def node_processes(pool: sky.ComputePool) -> list[psutil.Process]:
    instance = value_of("os.environ['SKYWARD_INSTANCE']") >> pool
    return [process for process in psutil.process_iter() if carries(process, instance)]


def carries(process: psutil.Process, instance: str) -> bool:
    try:
        return process.environ().get("SKYWARD_INSTANCE") == instance
    except psutil.Error:
        return False


def sockets(process: psutil.Process) -> set[str]:
    folder = Path(f"/proc/{process.pid}/fd")
    links = [os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()]
    return {link for link in links if link.startswith("socket:")}


def run_client(script: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", CLIENT + script], capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


async def until(probe: Callable[[], bool], what: str) -> None:
    async def once() -> bool | None:
        return probe() or None

    await wait_until(once, deadline_s=DEADLINE_S, interval_s=0.05, what=what)


def test_pools_of_a_process_share_what_one_process_has_imported() -> None:
    with local_pool(nodes=2) as pool:
        first = set(origin() @ pool)
    assert first == {in_pool(origin(), nodes=2)}


def test_a_node_is_found_by_its_processes_entries_below_proc() -> None:
    with local_pool() as pool:
        names = {process.name() for process in node_processes(pool)}
        pid = value_of("os.getpid()") >> pool
        supervisors = [each for each in psutil.Process(pid).parents() if "skyward.node.supervisor" in each.cmdline()]
        above = {each.pid for each in supervisors[0].parents()}
        assert [each.name() for each in supervisors] == ["sky-supervisor"]
    assert names >= {"sky-supervisor", "sky-zygote", "sky-worker"}
    assert not above & {os.getpid(), *(template.pid for template in templates())}


def test_a_node_holds_no_connection_of_its_client_or_template() -> None:
    with local_pool() as pool:
        others = set[str]().union(*map(sockets, [psutil.Process(), *templates()]))
        held = [sockets(process) for process in node_processes(pool)]
    assert held
    assert [each & others for each in held] == [set[str]()] * len(held)


@pytest.mark.parametrize("name", ["PYTHONOPTIMIZE", pytest.param("PYTHONDEVMODE", marks=pytest.mark.full)])
def test_variables_that_count_at_a_programs_start_are_obeyed(name: str) -> None:
    usual = in_pool(origin())
    expression = {"PYTHONOPTIMIZE": "sys.flags.optimize", "PYTHONDEVMODE": "sys.flags.dev_mode"}[name]
    with local_pool(env={name: "1"}) as pool:
        assert value_of(expression) >> pool
        assert origin() >> pool != usual
    assert not in_pool(value_of(expression))


@pytest.mark.full
def test_a_variable_of_the_clients_that_counts_at_a_programs_start_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = in_pool(origin())
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    assert in_pool(value_of("sys.flags.optimize")) == 2
    monkeypatch.undo()
    assert in_pool(origin()) == usual


def test_other_variables_of_the_client_are_those_of_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = in_pool(origin())
    monkeypatch.setenv("SAID_LATER", "yes")
    with local_pool() as pool:
        assert value_of("os.environ['SAID_LATER']") >> pool == "yes"
        assert origin() >> pool == usual


@pytest.mark.full
def test_nodes_outlive_the_process_they_were_forked_from() -> None:
    with local_pool() as pool:
        first = origin() >> pool
        for template in templates():
            template.kill()
            template.wait(DEADLINE_S)
        assert origin() >> pool == first
        assert in_pool(origin()) != first
        assert origin() >> pool == first


TROUBLES: dict[str, Callable[[psutil.Process], object]] = {
    "stopped": lambda template: template.suspend(),
    "killed": lambda template: template.kill(),
    "without descriptors": lambda template: template.rlimit(psutil.RLIMIT_NOFILE, (3, 3)),
    "with few descriptors": lambda template: template.rlimit(psutil.RLIMIT_NOFILE, (14, 14)),
    "without processes": lambda template: template.rlimit(psutil.RLIMIT_NPROC, (0, 0)),
    "without memory": lambda template: template.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20)),
}


@pytest.mark.parametrize(
    "trouble",
    [
        *("stopped", "with few descriptors"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("killed", "without descriptors")),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("without processes", "without memory")),
    ],
)
def test_a_template_in_trouble_delays_a_pool_by_seconds_and_the_log_says_so(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual = in_pool(origin())
    began_s = time.monotonic()
    for template in templates():
        TROUBLES[trouble](template)

    assert in_pool(origin()) != usual
    assert time.monotonic() - began_s < DEADLINE_S
    assert "starts from its program" in caplog.text
    caplog.clear()
    assert in_pool(origin()) == in_pool(origin())
    assert not caplog.text


async def test_a_template_ends_with_its_client(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT + "print(node(), flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline()
        (template,) = templates(of=client.pid)
        client.send_signal(signal.SIGKILL)
    await until(lambda: not template.is_running(), "the template to end")


async def test_a_start_that_is_cancelled_returns_once_its_processes_are_found_by_their_instance(tmp_path: Path) -> None:
    in_pool(origin())  # the template has imported everything
    instance = f"local-{uuid.uuid4().hex[:12]}"
    config = node_config(instance_id=instance, workdir=str(tmp_path))
    for template in templates():
        template.suspend()
    start = asyncio.create_task(fork_supervisor(config, {"LARGE": "x" * 20_000_000}))
    await asyncio.sleep(0.05)
    start.cancel()
    for template in templates():
        template.resume()
    with pytest.raises(asyncio.CancelledError):
        await start
    found = {process for process in psutil.process_iter() if carries(process, instance)}
    ends_s = time.monotonic() + 3
    while time.monotonic() < ends_s:
        assert {process for process in psutil.process_iter() if carries(process, instance)} <= found
        await asyncio.sleep(0.05)
    assert not any(process.is_running() for process in found)


# In `make test`: test_exits.py, whose programs leave no process.
@pytest.mark.full
def test_a_template_has_ended_when_its_client_has_exited() -> None:
    script = "node(); import psutil; print(*[child.pid for child in psutil.Process().children()])"
    pids = [int(word) for word in run_client(script).split()]
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.full
def test_a_forked_client_has_a_template_of_its_own() -> None:
    script = """
first = node()
if (pid := os.fork()) == 0:
    other = node()
    print(other != first, node() == other, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(node() == first)
"""
    assert run_client(script).split() == ["True"] * 3


@pytest.mark.full
@pytest.mark.parametrize(
    "oddity",
    [
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "os.environ.pop('HOME'); import pwd; pwd.getpwuid = {}.__getitem__  # a container's user without an entry",
    ],
    ids=["ignores_ended_children", "has_no_home"],
)
def test_nodes_of_an_odd_client_share_what_one_process_has_imported(oddity: str, tmp_path: Path) -> None:
    places = f"os.environ.update(XDG_STATE_HOME={str(tmp_path)!r}, XDG_CACHE_HOME={str(tmp_path)!r})"
    assert run_client(f"{places}\n{oddity}\nprint(node() == node())").split() == ["True"]
