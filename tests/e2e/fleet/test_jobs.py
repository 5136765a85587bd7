"""Jobs of a kept fleet: spawned by a program that is gone, read by others, moved when their node is lost."""

from __future__ import annotations

import itertools
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.ledger.fleet_record import FleetFolder
from skyward.ledger.job_folders import find_job
from support.eventually import eventually
from support.kept import end_kept_fleet

NAME = "llm"

SPAWNER = """
import os, signal, sys
import skyward as sky

@sky.compute(retries=0)
def note(path, number):
    print("call", number)
    with open(path, "a") as file:
        file.write(f"{number}\\n")
    if number == 3:
        raise ValueError("three")
    return number

with sky.ComputePool(provider=sky.Local(), nodes=2, name="llm", keep="1m", display="quiet") as pool:
    pool.spawn(sky.gather(*(note(sys.argv[1], n) for n in range(200)), return_exceptions=True), name="many")
    pool.spawn(note(sys.argv[1], 200), name="one")
    os.kill(os.getpid(), signal.SIGKILL)
"""
# A program that ignores SIGHUP, as those that nohup starts, hands that on to its children.
IN_TERMINAL = """
import os, signal, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.login_tty(0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
TRAINS = """
import os, sys, time
from data import total

print("begun", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print(total, "modules")
sys.exit(7)
"""
RUNS = "import sys, helpers\nprint(helpers.x, *sys.argv[1:])\nsys.exit(3)\n"


@sky.compute(retries=1)
def wait_for(path: str) -> int:
    import os
    import threading

    print("begun")
    with open(f"{path}.pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    while not os.path.exists(path):
        threading.Event().wait(0.05)
    return os.getpid()


@sky.compute(retries=1)
def save(path: str) -> str:
    """Return what the last run has saved; the first one saves and waits."""
    import os
    import threading

    state = sky.checkpoint_folder() / "state"
    if state.exists():
        return state.read_text()
    state.write_text(f"saved by {os.getpid()}")
    with open(f"{path}.pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    threading.Event().wait()
    return ""


def kept_pool(**options: Any) -> sky.ComputePool:
    given: dict[str, Any] = {"nodes": 2, "name": NAME, "keep": "1m", "display": "quiet"} | options
    return sky.ComputePool(provider=sky.Local(), **given)


@pytest.fixture(autouse=True)
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    end_kept_fleet(NAME)


def skyward(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyward", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=cwd)


def begun(path: Path, count: int = 1) -> list[int]:
    """Return the processes that have begun a call, once there are so many."""
    Path(f"{path}.pids").touch()
    for attempt in eventually(30.0):
        with attempt:
            assert len(Path(f"{path}.pids").read_text().split()) == count
    return [*map(int, Path(f"{path}.pids").read_text().split())]


def switch_off_node_of(worker: int) -> None:
    """Kill a worker's node with all of its programs, as a machine that is switched off."""
    record = FleetFolder(NAME).read()
    assert record is not None
    above = {process.pid for process in psutil.Process(worker).parents()}
    (supervisor,) = [psutil.Process(node.ready.pid) for node in record.nodes if node.ready.pid in above]
    for process in [supervisor, *supervisor.children(recursive=True)]:
        process.kill()


def test_jobs_of_a_killed_program_are_read_by_others_and_stay_when_the_fleet_has_ended(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    killed = subprocess.run([sys.executable, "-c", SPAWNER, str(ran)], check=False, timeout=90)
    assert killed.returncode == -9

    many, one = sky.job("many"), sky.job("one")
    *values, last = many.result(timeout=60)
    assert one.result(timeout=60) == 200

    assert [value for value in (*values, last) if not isinstance(value, ValueError)] == [*range(3), *range(4, 200)]
    assert isinstance(values[3], ValueError)
    assert sorted(map(int, ran.read_text().split())) == [*range(201)]
    assert sorted(line.line for line in many.logs()) == sorted(f"call {number}" for number in range(200))
    assert (many.state, many.progress.done, many.progress.failed) == ("failed", 199, 1)

    (tmp_path / "project").mkdir()
    for name, text in {"train.py": RUNS, "helpers.py": "x = 7\n", "setup.cfg": ""}.items():
        (tmp_path / "project" / name).write_text(text)
    script = skyward("run", "train.py", "--on", NAME, "--name", "script", "--lr", "1", cwd=tmp_path / "project")
    assert (script.returncode, script.stdout) == (3, "7 --lr 1\n")
    for name in ("later", "last"):
        started = skyward("run", "train.py", "--on", NAME, "--name", name, "-d", cwd=tmp_path / "project")
        assert started.returncode == 0
        for attempt in eventually(60.0):
            with attempt:  # the first is fetched without a program that asks for it
                assert not find_job("later").unfetched() if name == "later" else sky.job(name).state == "failed"
    down = skyward("down", NAME)
    assert down.returncode == 0
    assert [(job.id, job.state.value) for job in sky.jobs(NAME)] == [
        ("many", "failed"),
        ("one", "finished"),
        ("script", "failed"),
        ("later", "failed"),
        ("last", "failed"),
    ]
    assert sky.job("one").result() == 200
    assert skyward("logs", NAME, "last").stdout.endswith("| 7\n")


def test_a_script_of_six_modules_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    project, gate = tmp_path / "project", tmp_path / "gate"
    project.mkdir()
    names = ("data", "model", "loss", "optimizer", "report")
    for name, later in itertools.pairwise((*names, "")):
        chain = f"from {later} import total\ntotal += 1\n" if later else "total = 1\n"
        (project / f"{name}.py").write_text(chain)
    (project / "train.py").write_text(TRAINS)
    (project / "pyproject.toml").write_text("")
    with kept_pool(nodes=1):
        pass
    command = ["-m", "skyward", "run", "train.py", "--on", NAME, "--name", "train", str(gate)]
    terminal, its_end = pty.openpty()
    shell = subprocess.Popen([sys.executable, "-c", IN_TERMINAL, *command], cwd=project, stdin=its_end)
    os.close(its_end)
    shown = b""
    while b"begun" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)  # the kernel sends SIGHUP to what runs in it
    assert shell.wait(30) == -signal.SIGHUP
    gate.touch()
    followed = skyward("logs", NAME, "train", "-f")
    result = skyward("result", "train", "--wait")

    assert [line.rpartition("| ")[2] for line in followed.stdout.splitlines()] == ["begun", "5 modules"]
    assert "exit status 7" in result.stdout
    assert sky.job("train").state == "failed"
    assert skyward("run", "train.py", "--on", NAME, str(gate), cwd=project).returncode == 7


def test_a_job_goes_on_on_another_node_and_is_cancelled_from_another_terminal(tmp_path: Path) -> None:
    with kept_pool() as pool:
        with pytest.raises(sky.ConfigurationError, match="has a job 'run-7' already"):
            for _ in range(2):
                pool.spawn(wait_for(str(tmp_path / "end")), name="run-7")
        (worker,) = begun(tmp_path / "end")
        switch_off_node_of(worker)
        first, second = begun(tmp_path / "end", 2)
        assert sky.job("run-7").state == "running"
    (tmp_path / "end").touch()
    assert sky.job("run-7").result(timeout=60) == second != first

    with sky.attach(NAME, display="quiet") as pool:
        long = pool.spawn(wait_for(str(tmp_path / "never")), name="long")
        begun(tmp_path / "never")
        assert skyward("cancel", "long").returncode == 0
        with pytest.raises(CancelledError):
            long.result(timeout=30)
        assert pool.submit(os.getpid).result(timeout=60) > 0


def test_a_job_whose_node_is_lost_continues_from_its_checkpoint(tmp_path: Path) -> None:
    with kept_pool() as pool:
        job = pool.spawn(save(str(tmp_path / "end")), name="run-8")
        (worker,) = begun(tmp_path / "end")
        pool.spawn(wait_for(str(tmp_path)), name="another").result(timeout=60)  # its end has the client look
        for attempt in eventually(60.0):
            with attempt:
                assert [*FleetFolder(NAME).jobs.glob("run-8/0/checkpoint/*/*/state")]
        switch_off_node_of(worker)
        assert job.result(timeout=60) == f"saved by {worker}"
    assert [*FleetFolder(NAME).jobs.glob("run-8/0/checkpoint")] == []


def test_a_pool_that_is_not_kept_has_no_jobs() -> None:
    with (
        sky.ComputePool(provider=sky.Local(), display="quiet") as pool,
        pytest.raises(sky.ConfigurationError, match="spawn needs a pool that outlives this program"),
    ):
        pool.spawn(wait_for(""))
