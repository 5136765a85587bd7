"""A call learns of every end that is coming for it, once, and of its timeout by an exception in its own thread."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import skyward
from skyward.distributed import grace as grace_module
from skyward.distributed.grace import CallGrace, EndNotice, checkpoint_folder, notice, on_notice
from skyward.errors import NotInPoolError, TimeLimit

PLACE = (
    '{"pool_id": "p", "instance_id": "i", "node": 2, "total_nodes": 3, "worker": 1, "workers_per_node": 2, '
    '"head_addr": "", "address": "", "accelerators": [], "memory_limit_bytes": 1, "node_accelerators": 0}'
)
PREEMPTION = EndNotice(kind="preemption", at=time.monotonic() + 36_000)
WITHIN_S = 20.0


class Worker:
    """A worker process: the call that runs in it, and what was reported of it."""

    def __init__(self, folder: Path) -> None:
        self.running = 1
        self.reports: list[tuple[int, str]] = []
        self.reported = threading.Semaphore(0)
        self.heeds: list[bool] = []
        self.grace = CallGrace(folder, running=lambda: self.running, report=self.report, heed=self.heeds.append)

    def report(self, call_id: int, name: str) -> None:
        self.reports.append((call_id, name))
        self.reported.release()

    def begin(self, call_id: int = 1, *, timeout_s: float = 0, grace_s: float = 0, checkpoint: str = "") -> None:
        self.running = call_id
        self.grace.begin(timeout_s=timeout_s, grace_s=grace_s, checkpoint=checkpoint)
        self.grace.enter()


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setenv("SKYWARD_WORKER", PLACE)
    worker = Worker(tmp_path / "checkpoints")
    with worker.grace:
        yield worker
        worker.grace.end()


class Handler:
    def __init__(self) -> None:
        self.ends: list[EndNotice] = []
        self.called = threading.Semaphore(0)

    def __call__(self, end: EndNotice) -> None:
        self.ends.append(end)
        self.called.release()

    def wait(self) -> EndNotice:
        assert self.called.acquire(timeout=WITHIN_S)
        return self.ends[-1]


# --- notices ----------------------------------------------------------------------------------------------------------


def test_a_handler_is_called_for_ends_known_before_and_after_it_was_registered_each_once(worker: Worker) -> None:
    first, second = Handler(), Handler()
    assert on_notice(first) is first, "it works as a decorator"
    worker.grace.announce(PREEMPTION)
    assert first.wait() is PREEMPTION
    on_notice(second)
    assert second.wait() is PREEMPTION
    worker.grace.announce(PREEMPTION)
    down = EndNotice(kind="down", at=time.monotonic() + 5)
    worker.grace.announce(down)
    assert (first.wait(), second.wait()) == (down, down)
    assert len(first.ends) == len(second.ends) == 2
    assert notice() is down, "the nearest one"
    assert 0 < down.seconds_left <= 5


def test_the_next_call_is_told_of_the_nodes_end_but_not_by_the_last_ones_handlers(worker: Worker) -> None:
    last, next_one = Handler(), Handler()
    on_notice(last)
    worker.grace.end()
    worker.grace.announce(PREEMPTION)
    worker.running = 2
    on_notice(next_one)
    assert next_one.wait() is PREEMPTION
    assert last.ends == []


def test_a_handler_that_raises_keeps_no_other_from_its_notice(
    worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    @on_notice
    def fail(_end: EndNotice) -> None:
        raise RuntimeError("no space left")

    after = Handler()
    on_notice(after)
    worker.grace.announce(PREEMPTION)
    after.wait()
    assert "RuntimeError: no space left" in capsys.readouterr().err


def test_a_node_that_ends_waits_for_handlers_until_they_have_returned(worker: Worker) -> None:
    handler = Handler()
    on_notice(handler)
    assert worker.heeds == [True]
    worker.grace.announce(EndNotice(kind="down", at=time.monotonic() + 5))
    handler.wait()
    threads = [thread for thread in threading.enumerate() if thread.name == "skyward-notice"]
    for thread in threads:
        thread.join(WITHIN_S)
    assert worker.heeds == [True, False]


@pytest.mark.parametrize(
    ("limits", "passed_s", "is_due"),
    [((100, 0), 89, False), ((100, 0), 91, True), ((100, 30), 69, False), ((100, 30), 71, True), ((0, 0), 1000, False)],
)
def test_the_notice_of_a_timeout_is_given_in_its_last_tenth_or_when_the_grace_begins(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, limits: tuple[float, float], passed_s: float, is_due: bool
) -> None:
    began = time.monotonic()
    worker.begin(timeout_s=limits[0], grace_s=limits[1])
    monkeypatch.setattr(grace_module.time, "monotonic", lambda: began + passed_s)
    end = notice()
    assert (end is not None and end.kind == "call_timeout") == is_due


def test_a_handler_is_told_of_the_timeout_also_when_it_comes_late(worker: Worker) -> None:
    early, late = Handler(), Handler()
    worker.begin(timeout_s=0.3)
    on_notice(early)
    assert early.wait().kind == "call_timeout"
    on_notice(late)
    assert late.wait().kind == "call_timeout"


# --- the exception ----------------------------------------------------------------------------------------------------


WAITS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(60),
    "event": lambda: threading.Event().wait(60),
    "lock": lambda: threading.Semaphore(0).acquire(),
    "asyncio": lambda: asyncio.run(asyncio.sleep(60)),
    "program": lambda: subprocess.run(["sleep", "60"], check=True),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_the_time_limit_ends_a_wait_of_the_thread_that_runs_the_call(
    worker: Worker, wait: Callable[[], object]
) -> None:
    worker.begin(timeout_s=60, grace_s=59.8)
    began = time.monotonic()
    with pytest.raises(TimeLimit, match=r"59\.8 s are left of the call's timeout of 60 s") as caught:
        wait()
    assert time.monotonic() - began < WITHIN_S
    assert caught.value.timeout_s == 60
    time.sleep(0.05)  # once only: the call is saving its work now


def test_a_limit_that_passes_before_the_function_begins_is_raised_at_its_beginning(worker: Worker) -> None:
    worker.running = 1
    worker.grace.begin(timeout_s=60, grace_s=59.99, checkpoint="")
    time.sleep(0.1)
    with pytest.raises(TimeLimit):
        worker.grace.enter()


def test_nothing_is_raised_after_the_call_that_had_the_limit(worker: Worker) -> None:
    worker.begin(timeout_s=60, grace_s=59.9)
    worker.grace.end()
    worker.begin(2, timeout_s=60)
    time.sleep(0.2)


@pytest.mark.parametrize("waits", ["outside", "inside"])
def test_the_limit_of_a_generator_is_raised_in_it_and_not_between_its_items(worker: Worker, waits: str) -> None:
    def numbers() -> Generator[int]:
        for number in itertools.count():
            time.sleep(0.4 if waits == "inside" else 0)
            yield number

    source = numbers()
    worker.begin(timeout_s=60, grace_s=59.8)
    worker.grace.enter(source.gi_frame)
    if waits == "inside":
        with pytest.raises(TimeLimit):
            next(source)
        return
    time.sleep(0.4)
    assert next(source) == 0
    with pytest.raises(TimeLimit):
        worker.grace.enter(source.gi_frame)


def test_a_library_that_tries_again_after_errors_does_not_swallow_the_limit(worker: Worker) -> None:
    worker.begin(timeout_s=60, grace_s=59.9)
    with pytest.raises(TimeLimit):
        while True:
            try:
                time.sleep(60)
            except Exception:  # such as a lost connection
                continue


@pytest.mark.parametrize("grace_s", [0, 30])
def test_time_in_which_a_generator_waits_for_its_reader_brings_its_timeout_no_nearer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(grace_module.time, "monotonic", lambda: now[0])
    worker.begin(timeout_s=100, grace_s=grace_s)
    with worker.grace.paused():
        now[0] += 1000
    assert notice() is None
    now[0] += 95
    end = notice()
    assert end is not None
    assert end.seconds_left == pytest.approx(5, abs=1)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_reported_when_its_folder_is_made_and_when_its_content_is_at_rest(worker: Worker) -> None:
    folder = checkpoint_folder()
    assert checkpoint_folder() == folder
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert worker.reports == [(1, folder.name)]
    (folder / "step").write_text("1")
    assert worker.reported.acquire(timeout=WITHIN_S)
    assert worker.reported.acquire(timeout=WITHIN_S)
    assert set(worker.reports) == {(1, folder.name)}


def test_a_later_run_finds_the_folder_and_its_end_removes_it(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "abc").mkdir(parents=True)
    (tmp_path / "checkpoints" / "abc" / "step").write_text("7")
    worker.begin(checkpoint="abc")
    worker.grace.end()
    worker.begin(checkpoint="abc")
    assert (checkpoint_folder() / "step").read_text() == "7", "a run that did not begin has removed nothing"
    worker.grace.end()
    assert (tmp_path / "checkpoints" / "abc").exists(), "its answer is not on its way yet"
    worker.grace.remove_checkpoint()
    assert list((tmp_path / "checkpoints").iterdir()) == []


# --- elsewhere --------------------------------------------------------------------------------------------------------


def test_outside_a_pool_nothing_is_coming_and_there_is_no_checkpoint() -> None:
    assert notice() is None
    handler = Handler()
    assert on_notice(handler) is handler
    with pytest.raises(NotInPoolError, match="only in a call on a node: to run here, pass a folder"):
        checkpoint_folder()


def test_between_calls_and_in_processes_that_a_call_started_there_are_no_handlers(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.running = 0
    for use in (checkpoint_folder, lambda: on_notice(Handler())):
        with pytest.raises(NotInPoolError, match="no call runs in this process"):
            use()
    monkeypatch.setattr(grace_module, "_grace", None)
    for use in (skyward.notice, checkpoint_folder, lambda: on_notice(Handler())):
        with pytest.raises(NotInPoolError, match="in the process that runs the call, not in one that the call has"):
            use()
