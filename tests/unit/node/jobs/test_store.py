"""Jobs of a node: each call runs at most 1 + retries times and ends once, whichever process dies at whichever point."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyward.events import LogLine
from skyward.events.log_files import KeptLines
from skyward.node.jobs import __main__ as commands
from skyward.node.jobs.store import CallStage, Claim, JobExistsError, JobStore
from skyward.shipping.job_file import (
    DamagedJobFileError,
    JobEnd,
    JobOutcome,
    call_bytes,
    job_call,
    join_calls,
    outcome_value,
    read_outcome,
)
from skyward.shipping.pickling import pack_result
from skyward.submission import Invocation


def _call(retries: int = 3) -> bytearray:
    return call_bytes(job_call(Invocation(fn=abs, args=(-1,), retries=retries)))


def _value(claim: Claim, value: Any = "done") -> JobOutcome:
    result = pack_result(value, what="it")
    return JobOutcome(end=JobEnd.VALUE, node=0, worker=claim.worker, attempt=claim.attempt, result=result)


def _loss(claim: Claim) -> JobOutcome:
    return JobOutcome(end=JobEnd.LOST, node=0, worker=claim.worker, attempt=claim.attempt, message="it died")


def _store(tmp_path: Path, *retries: int) -> JobStore:
    store = JobStore(tmp_path / "jobs")
    for index, most in enumerate(retries):
        store.add("run", index, [_call(most)])
    return store


def _state(store: JobStore, index: int = 0) -> str:
    return store.states()["run"][str(index)]["state"]


def _claim(store: JobStore, incarnation: str = "a") -> Claim:
    claim = store.claim(0, incarnation)
    assert claim is not None
    return claim


def _print(store: JobStore, claim: Claim, *texts: str) -> None:
    kept = KeptLines(store.output_folder(claim), lambda write: write())
    for text in texts:
        kept(LogLine(0, "i", text, 1.0, claim.worker, claim.job))
    kept.close()


def test_a_call_waits_runs_and_ends(tmp_path: Path) -> None:
    store = _store(tmp_path, 3)
    assert (_state(store), store.unfinished()) == (CallStage.WAITING, 1)

    claim = _claim(store)
    assert (_state(store), store.unfinished()) == (CallStage.RUNNING, 1)
    assert JobStore(tmp_path / "jobs").claim(1, "b") is None, "another worker does not get it"

    assert store.finish(claim, _value(claim, {"loss": 0.5}))
    assert (_state(store), store.unfinished()) == (JobEnd.VALUE, 0)
    outcome = read_outcome(tmp_path / "jobs" / store.states()["run"]["0"]["path"])
    assert outcome_value(outcome, where="") == {"loss": 0.5}


@pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors are read in /proc")
def test_an_outcome_is_on_disk_before_its_call_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path, 3)
    claim, synced, fsync = _claim(store), list[tuple[str, CallStage]](), os.fsync

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name[:6], _state(store)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store.finish(claim, _value(claim, 1))

    assert synced == [(".part-", CallStage.RUNNING), ("0", JobEnd.VALUE)]


def test_an_outcome_has_its_copy_before_its_call_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _store(tmp_path, 1, 0)
    store, link, copies = JobStore(tmp_path / "jobs", tmp_path / "volume/sky-1"), os.link, list[list[str]]()

    def note(part: Path, path: Path) -> None:
        copies.append([str(copy.relative_to(tmp_path)) for copy in tmp_path.glob("volume/**/*") if copy.is_file()])
        link(part, path)

    lost = _claim(store)
    assert store.release(lost, _loss(lost))
    lost = _claim(store)
    assert not store.release(lost, _loss(lost))
    claim = _claim(store)
    monkeypatch.setattr(os, "link", note)
    store.finish(claim, _value(claim, 7))

    assert copies == [["volume/sky-1/run/0/end-2"]], "what was lost may run again elsewhere"
    assert outcome_value(read_outcome(tmp_path / copies[0][0]), where="") == 7


def test_a_call_that_has_exceeded_a_limit_has_a_copy_of_that(tmp_path: Path) -> None:
    _store(tmp_path, 3)
    store = JobStore(tmp_path / "jobs", tmp_path / "volume")
    claim = _claim(store)

    assert not store.release(claim, _loss(claim), final=True)

    assert read_outcome(tmp_path / "volume/run/0/end-1").end is JobEnd.LOST


def test_a_copy_is_made_where_files_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _store(tmp_path, 0)
    store = JobStore(tmp_path / "jobs", tmp_path / "volume")
    claim = _claim(store)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "rename", refuse)
    store.finish(claim, _value(claim, 7))

    assert outcome_value(read_outcome(tmp_path / "volume/run/0/end-1"), where="") == 7
    assert len([*(tmp_path / "volume/run/0").iterdir()]) == 1


def test_a_volume_that_cannot_be_written_to_costs_no_outcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _store(tmp_path, 0)
    (tmp_path / "file").touch()
    store = JobStore(tmp_path / "jobs", tmp_path / "file")
    claim = _claim(store)

    assert store.finish(claim, _value(claim))

    assert _state(store) == JobEnd.VALUE
    assert "is lost with its node" in caplog.text


def test_calls_run_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    store = _store(tmp_path, *[0] * 12)

    assert [_claim(store).index for _ in range(12)] == [*range(12)]
    assert store.claim(0, "a") is None


def test_each_loss_uses_up_a_retry_and_the_last_one_is_the_outcome(tmp_path: Path) -> None:
    store = _store(tmp_path, 2)

    again = [store.release(claim, _loss(claim)) for claim in (_claim(store) for _ in range(3))]

    assert again == [True, True, False]
    assert store.states()["run"]["0"]["runs"] == 3
    assert _state(store) == JobEnd.LOST


def test_a_call_that_exceeded_its_limit_does_not_run_again(tmp_path: Path) -> None:
    store = _store(tmp_path, 2)
    claim = _claim(store)

    late = JobOutcome(end=JobEnd.TIMEOUT, node=0, worker=0, attempt=claim.attempt, message="too long", timeout_s=1)

    assert not store.release(claim, late, final=True)
    assert _state(store) == JobEnd.TIMEOUT


def test_a_call_that_could_not_begin_costs_no_retry(tmp_path: Path) -> None:
    store = _store(tmp_path, 0)

    store.give_back(_claim(store))

    assert _claim(store).attempt == 1


def test_only_the_claims_of_the_dead_process_are_released(tmp_path: Path) -> None:
    store = _store(tmp_path, 3, 3)
    dead, alive = _claim(store, "dead"), _claim(store, "alive")

    assert store.claims("dead") == [dead]
    assert store.claims() == [dead, alive]


def test_a_worker_that_was_taken_for_dead_cannot_end_its_call(tmp_path: Path) -> None:
    store = _store(tmp_path, 3)
    claim = _claim(store)
    store.release(claim, _loss(claim))

    assert not store.finish(claim, _value(claim))
    assert _state(store) == CallStage.WAITING


def test_a_waiting_call_that_is_cancelled_never_runs(tmp_path: Path) -> None:
    store = _store(tmp_path, 3)

    assert not store.cancel("run", 0)
    assert not store.cancel("run", 0), "again: the answer may be lost"

    assert store.claim(0, "a") is None
    assert (_state(store), store.states()["run"]["0"]["runs"]) == (JobEnd.CANCELLED, 0)


def test_a_running_call_that_is_cancelled_ends_with_its_worker(tmp_path: Path) -> None:
    store = _store(tmp_path, 3)
    claim = _claim(store)

    assert store.cancel("run", 0)
    assert store.is_to_end(claim)
    assert not store.release(claim, _loss(claim))

    assert _state(store) == JobEnd.CANCELLED
    assert not store.is_to_end(claim)


def test_a_call_that_is_over_stays_as_it_is_when_it_is_cancelled(tmp_path: Path) -> None:
    store = _store(tmp_path, 3)
    claim = _claim(store)
    store.finish(claim, _value(claim))

    assert not store.cancel("run", 0)
    assert _state(store) == JobEnd.VALUE


def test_the_same_call_may_be_added_again_and_another_may_not(tmp_path: Path) -> None:
    store, content = JobStore(tmp_path / "jobs"), _call()

    store.add("run", 0, [content])
    store.add("run", 0, [content])
    with pytest.raises(JobExistsError, match="run"):
        store.add("run", 0, [_call()])

    assert store.unfinished() == 1


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "a b", "ü", "x" * 101])
def test_a_name_with_odd_characters_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name has letters"):
        JobStore(tmp_path).add(name, 0, [_call()])


def test_runs_on_other_nodes_count(tmp_path: Path) -> None:
    store, content = JobStore(tmp_path / "jobs"), _call(retries=2)
    store.add("run", 0, [content], runs=2)
    store.add("run", 0, [content], runs=2)

    claim = _claim(store)

    assert claim.attempt == 3
    assert not store.release(claim, _loss(claim)), "it was the last one"


def test_the_lines_of_all_runs_are_read_from_where_one_stopped(tmp_path: Path) -> None:
    store = _store(tmp_path, 3)
    for _ in range(2):
        claim = _claim(store)
        _print(store, claim, f"run {claim.attempt}", "…")
        store.release(claim, _loss(claim))

    first, at, more = store.lines("run", 0, "", 5)
    rest, end, _ = store.lines("run", 0, at, 1000)

    assert ([line.line for line in first], more) == (["run 1"], True)
    assert [line.line for line in rest] == ["…", "run 2", "…"]
    assert store.lines("run", 0, end, 1000) == ([], end, False)


def test_files_that_lost_their_content_hide_no_other_job_and_no_end(tmp_path: Path) -> None:
    store = _store(tmp_path, 3, 0, 0, 3)
    again, lost, over, waiting = (tmp_path / "jobs/run" / str(index) for index in range(4))
    for name in ("dead", "dead", "dead"):
        claim = _claim(store, name)
        if claim.index == 2:
            store.finish(claim, _value(claim))
    for path in (again / "claim-1", lost / "call", over / "end-1"):  # as after a machine's loss of power
        path.write_bytes(b"")
    waiting.joinpath("claim-1.bak").touch()

    assert [store.release(claim, _loss(claim)) for claim in store.claims()] == [True, False]
    states = JobStore(tmp_path / "jobs").states()["run"]
    assert [facts["state"] for facts in states.values()] == ["waiting", "lost", "lost", "waiting"]
    with pytest.raises(DamagedJobFileError, match="no file of a job"):
        read_outcome(tmp_path / "jobs" / states["2"]["path"])
    assert JobStore(tmp_path / "jobs").unfinished() == 2


# --- processes that die ----------------------------------------------------------------------------------------------


def _dies_at(point: int, act: Callable[[], object]) -> bool:
    """Run ``act`` in a fork that is killed before its file operation number ``point``; return True if it was."""
    pid = os.fork()
    if pid == 0:
        left = point

        def count(event: str, _arguments: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if not left:
                    signal.raise_signal(signal.SIGKILL)

        try:
            sys.addaudithook(count)
            act()
        finally:
            sys.stdout.flush()
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _work(folder: Path, incarnation: str, ran: Path) -> None:
    store = JobStore(folder)
    while (claim := store.claim(0, incarnation)) is not None:
        descriptor = os.open(ran, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{claim.index}\n".encode())  # the side effect
        os.close(descriptor)
        store.finish(claim, _value(claim))


def _release(folder: Path, incarnation: str) -> None:
    store = JobStore(folder)
    for claim in store.claims(incarnation):
        store.release(claim, _loss(claim))


def _until_it_lives(act: Callable[[int], bool]) -> int:
    """Let ``act`` die at each point in turn; return the number of points."""
    point = 1
    while act(point):
        point += 1
    return point


def test_workers_that_die_at_any_point_repeat_no_call_more_often_than_its_retries(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def die(point: int) -> bool:
        folder = tmp_path / str(point) / "jobs"
        store = _store(folder.parent, 0, 1)
        ran.write_text("")
        died = _dies_at(point, lambda: _work(folder, "first", ran))
        _release(folder, "first")
        _work(folder, "second", ran)
        calls = store.states()["run"]
        runs = [ran.read_text().split().count(index) for index in "01"]
        assert runs[0] <= 1
        assert 1 <= runs[1] <= 2
        assert calls["0"]["state"] in ("value", "lost")
        assert runs[0] == 1 or calls["0"]["state"] == "lost"
        assert calls["1"]["state"] == "value"
        assert store.unfinished() == 0
        return died

    assert _until_it_lives(die) > 10


def test_supervisors_that_die_at_any_point_release_each_claim_once(tmp_path: Path) -> None:
    def die(point: int) -> bool:
        folder = tmp_path / str(point) / "jobs"
        store = _store(folder.parent, 1, 0)
        assert {_claim(store, "dead").attempt, _claim(store, "dead").attempt} == {1}
        died = _dies_at(point, lambda: _release(folder, "dead"))
        _release(folder, "dead")
        assert [_state(store, index) for index in (0, 1)] == ["waiting", "lost"]
        return died

    assert _until_it_lives(die) > 5


def test_a_cancellation_that_dies_at_any_point_is_completed_by_the_next(tmp_path: Path) -> None:
    def die(point: int) -> bool:
        folder = tmp_path / str(point) / "jobs"
        store = _store(folder.parent, 3)
        died = _dies_at(point, lambda: JobStore(folder).cancel("run", 0))
        store.cancel("run", 0)
        assert _state(store) == "cancelled"
        assert store.claim(0, "a") is None
        return died

    assert _until_it_lives(die) > 3


def test_a_call_whose_adding_died_is_added_whole_by_the_next(tmp_path: Path) -> None:
    def die(point: int) -> bool:
        store, content = JobStore(tmp_path / str(point)), _call()
        died = _dies_at(point, lambda: store.add("run", 0, [content[:9], content[9:]]))
        store.add("run", 0, [content])
        assert store.call_file(_claim(store)).read_bytes() == content
        return died

    assert _until_it_lives(die) > 3


# --- commands --------------------------------------------------------------------------------------------------------


class _Commands:
    """The commands, as a client runs them on a node."""

    def __init__(self, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._workdir, self._monkeypatch, self._capsys = workdir, monkeypatch, capsys

    def __call__(self, *words: str, stdin: bytes | bytearray = b"") -> dict[str, Any]:
        self._monkeypatch.setattr(sys, "argv", ["jobs", str(self._workdir), *words])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = commands.main()
        answer = json.loads(self._capsys.readouterr().out)
        assert status == ("error" in answer)
        return answer


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> _Commands:
    return _Commands(tmp_path, monkeypatch, capsys)


def test_the_commands_add_show_and_fetch_a_job(tmp_path: Path, command: _Commands) -> None:
    store = JobStore(tmp_path / "jobs")
    assert command("states") == {"jobs": {}}
    assert command("add", "run", stdin=join_calls([(0, _call()), (4, _call())])) == {"added": 2, "served": False}
    claim = _claim(store)
    _print(store, claim, "hello")
    store.finish(claim, _value(claim))

    states = command("states", "run")["jobs"]["run"]
    output = command("output", "run", "0")

    assert {index: facts["state"] for index, facts in states.items()} == {"0": "value", "4": "waiting"}
    assert LogLine(*output["lines"][0]).line == "hello"
    assert command("output", "run", "0", output["at"]) == {"lines": [], "at": output["at"], "more": False}
    assert states["0"]["outcome_bytes"] == (tmp_path / "jobs" / states["0"]["path"]).stat().st_size
    assert command("cancel", "run") == {"running": []}
    assert command("states")["jobs"]["run"]["4"]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("output", "run", "1"), "unknown"),
        (("output", "other", "0"), "unknown"),
        (("cancel", "run", "9"), "unknown"),
        (("output", "../run", "0"), "invalid"),
    ],
)
def test_a_refused_command_says_why(tmp_path: Path, command: _Commands, words: tuple[str, ...], kind: str) -> None:
    JobStore(tmp_path / "jobs").add("run", 0, [_call()])

    assert command(*words)["kind"] == kind


def test_a_second_job_of_a_name_and_half_a_call_are_refused(command: _Commands) -> None:
    command("add", "run", stdin=join_calls([(0, _call())]))

    assert command("add", "run", stdin=join_calls([(0, _call())]))["kind"] == "exists"
    assert command("add", "other", stdin=join_calls([(0, _call())])[:-1])["kind"] == "damaged"
    assert command("states", "other")["jobs"] == {}
