from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TASKS = """
import multiprocessing, os, sys

IMPORTED_BY = os.getpid()

def look(answer):
    answer.send((IMPORTED_BY, os.getppid(), "skyward.node.worker.worker" in sys.modules))

def look_from_below(answer):
    below = multiprocessing.get_context("forkserver").Process(target=look, args=(answer,))
    below.start()
    below.join()
"""

PROGRAM = """
import multiprocessing.forkserver, os, sys
from skyward.node.worker import nannies
import tasks

report, reports = os.pipe()
nannies._start_fork_server()
context = multiprocessing.get_context("forkserver")

def ask(task):
    here, there = context.Pipe()
    process = context.Process(target=task, args=(there,))
    process.start()
    answer = here.recv()
    process.join()
    assert process.exitcode == 0, process.exitcode
    return answer

first, second = ask(tasks.look), ask(tasks.look)
assert first == second, (first, second)
imported_by, server, has_worker = first
assert imported_by == os.getpid(), "the server imported it again"
assert server != os.getpid()
assert has_worker

imported_by, below, _ = ask(tasks.look_from_below)
assert below not in (server, os.getpid()), "a process of a worker's fork server"

def connection(pid, descriptor):
    return os.readlink(f"/proc/{pid}/fd/{descriptor}")

held = [connection(server, descriptor) for descriptor in os.listdir(f"/proc/{server}/fd")]
alive = multiprocessing.forkserver._forkserver._forkserver_alive_fd
assert held.count(connection("self", alive)) == 1, "it would not see that nobody needs it any more"
assert connection("self", reports) not in held, "the supervisor would not see that the nannies have ended"

os.kill(server, 9)
os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
imported_by, _, has_worker = ask(tasks.look)
assert imported_by not in (server, os.getpid()), "the next one is a new program: this one may have threads by now"
assert has_worker
print("passed", end="", flush=True)
os._exit(0)
"""


def test_workers_are_forked_from_what_the_nannies_have_imported(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)

    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "passed"
