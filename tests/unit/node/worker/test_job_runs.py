"""A worker runs the client's calls first, and stores what became of a job's call, or why it could not."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from skyward.distributed.grace import checkpoint_folder
from skyward.distributed.runtime import FreshProcessNeeded
from skyward.node.jobs.store import JobStore
from skyward.node.plan import make_plan
from skyward.node.worker.call_runner import CallRunner, ReceivedCall, SentFunction
from skyward.node.worker.job_runs import WorkerJobs
from skyward.node.worker.output import CallOutput
from skyward.shipping.job_file import call_bytes, job_call, outcome_value, read_outcome
from skyward.shipping.pickling import pack
from skyward.submission import Invocation
from skyward.wire.control import JobRunning
from skyward.wire.messages import Payload, ToClient
from support.nodes import node_config


class EndedError(Exception):
    """Stands for the end of the process."""


class Worker:
    """A runner with an outlet that keeps nothing, until it has nothing to do; and the node's jobs."""

    kept_bytes = 0

    def __init__(self, workdir: Path) -> None:
        config = node_config(workdir=str(workdir))
        plan = make_plan(config, control_port=4711, blob_port=4712, ports=range(4713, 4813))
        self.told: list[str] = []
        self.store = JobStore(workdir / "jobs")
        self.workdir = workdir
        self._plan = plan
        self.runner = self.made_runner()

    def made_runner(self) -> CallRunner:
        runner = CallRunner(self, CallOutput(lambda *_: None), ())
        runner.jobs = WorkerJobs(self._plan, 0, "first", self.tell, self.end)
        return runner

    def tell(self, report: JobRunning) -> None:
        self.told.append(report.job)

    def end(self, reason: str) -> NoReturn:
        raise EndedError(reason)

    def add(self, job: str, fn: Callable[..., Any], *args: Any) -> None:
        self.store.add(job, 0, [call_bytes(job_call(Invocation(fn=fn, args=args)))])

    def send(self, fn: Callable[[], Any]) -> None:
        """A call of the client's."""
        function = SentFunction("it", Payload(data=pack(fn, what="it").data))
        self.runner.add([ReceivedCall(1, function, 1, final=False, data=pack(((), {}), what="none").data)])

    def value(self, job: str) -> Any:
        path = self.workdir / "jobs" / self.store.states()[job]["0"]["path"]
        return outcome_value(read_outcome(path), where=job)

    # --- Outlet ---

    def push(self, item: ToClient, *, bulk: bool = False) -> None: ...

    def flush(self) -> None: ...

    def flush_soon(self) -> None: ...

    def flush_later(self) -> None: ...

    def wake(self) -> None: ...

    def wait(self, timeout_s: float | None, *, eager: bool = False) -> None:
        del timeout_s, eager
        self.runner.close()


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_the_clients_calls_come_before_jobs(worker: Worker, tmp_path: Path) -> None:
    def note(text: str) -> None:
        with (tmp_path / "order").open("a") as file:
            file.write(text)

    worker.add("train", note, "job ")
    worker.send(lambda: note("call "))

    worker.runner.work()

    assert (tmp_path / "order").read_text() == "call job "
    assert worker.told == ["train/0", ""]


def test_a_worker_that_is_told_that_calls_wait_lets_them_come_between_two_jobs(worker: Worker, tmp_path: Path) -> None:
    def note(text: str) -> None:
        with (tmp_path / "order").open("a") as file:
            file.write(text)

    def wait(timeout_s: float | None, *, eager: bool = False) -> None:
        del timeout_s, eager
        worker.send(lambda: note("call "))
        worker.wait = close  # type: ignore[method-assign]

    worker.add("first", note, "job ")
    worker.add("second", note, "job")
    close, worker.wait = worker.wait, wait  # type: ignore[method-assign]
    end = worker.runner.jobs.end
    worker.runner.jobs.end = lambda *outcome: (end(*outcome), setattr(worker.runner, "calls_wait", True))

    worker.runner.work()

    assert (tmp_path / "order").read_text() == "job call job"


def test_a_result_without_room_on_the_disk_becomes_the_reason(worker: Worker) -> None:
    worker.add("large", bytes, 8 << 20)
    worker.add("small", abs, -1)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        worker.runner.work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(OSError, match="File too large") as raised:
        worker.value("large")
    assert any("large/0 could not be stored on node 0" in note for note in raised.value.__notes__)
    assert worker.value("small") == 1


def test_a_damaged_call_fails_and_the_next_one_runs(worker: Worker) -> None:
    worker.store.add("damaged", 0, [call_bytes(job_call(Invocation(fn=abs, args=(-1,))))[:-5]])
    worker.add("sound", abs, -1)

    worker.runner.work()

    with pytest.raises(ValueError, match="incomplete"):
        worker.value("damaged")
    assert worker.value("sound") == 1


@pytest.mark.parametrize("used", [False, True])
def test_a_call_that_needs_a_fresh_process_gets_one_unless_this_one_is(worker: Worker, used: bool) -> None:
    def begin() -> None:
        raise FreshProcessNeeded("it is in use")

    if used:
        worker.add("first", abs, -1)
    worker.add("second", begin)

    if used:
        with pytest.raises(EndedError, match="second/0 needed a fresh process: it is in use"):
            worker.runner.work()
        claim = worker.store.claim(1, "next")
        assert claim is not None
        assert claim.attempt == 1
    else:
        worker.runner.work()
        with pytest.raises(FreshProcessNeeded):
            worker.value("second")


def test_calls_that_are_added_while_it_waits_are_seen_once_it_is_told(worker: Worker) -> None:
    looks: list[int] = []

    def wait(timeout_s: float | None, *, eager: bool = False) -> None:
        del timeout_s, eager
        looks.append(len(looks))
        if len(looks) > 1:
            worker.runner.close()
            return
        worker.add("late", abs, -1)
        worker.runner.look_for_jobs()

    worker.wait = wait  # type: ignore[method-assign]

    worker.runner.work()

    assert worker.value("late") == 1


def test_a_job_finds_no_checkpoint_of_an_earlier_one_of_its_name(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def save() -> tuple[Path, list[Path]]:
        folder = checkpoint_folder()
        return folder, [*folder.iterdir()]

    worker.add("train", save)
    worker.runner.work()
    left_behind, found = worker.value("train")
    assert not found
    (left_behind / "step-1").mkdir(parents=True)  # as by a run that was killed
    shutil.rmtree(worker.workdir / "jobs")  # the next fleet on this machine has no jobs of the last one
    later = Worker(worker.workdir)
    later.add("train", save)
    later.runner.work()
    assert later.value("train")[1] == []
