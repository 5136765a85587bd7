"""The thread that runs a worker's calls outlives every one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.node.worker.call_mark import RUNNING, WATCHED, Mark, blank_mark
from skyward.node.worker.call_runner import CallRunner, ReceivedCall, ReceivedSources, SentFunction, kept_block_bytes
from skyward.node.worker.output import CallOutput
from skyward.node.worker.shared_results import SharedResults
from skyward.shipping.pickling import LARGE_BYTES, LARGE_HERE_BYTES, pack
from skyward.wire.messages import CallResult, Payload, ResultChunk, SmallResults, ToClient

NO_ARGUMENTS = pack(((), {}), what="no arguments").data


class Outlet:
    """Keeps what is sent; runs ``fail`` for chunks. Closes its runner when nothing is left to do."""

    kept_bytes = 0

    def __init__(self, fail: Callable[[], None] = lambda: None, mark: Mark | None = None) -> None:
        self.items: list[ToClient] = []
        self.flushed_soon = self.flushed_later = 0
        self.fail = fail
        self.asked = 0
        output = CallOutput(lambda *_: None)
        self.runner = CallRunner(self, output, (), mark, ask_for_watch=self.ask_for_watch)

    def ask_for_watch(self) -> None:
        self.asked += 1

    def push(self, item: ToClient, *, bulk: bool = False) -> None:
        del bulk
        if isinstance(item, ResultChunk):
            self.fail()
        self.items.append(item)

    def flush(self) -> None: ...

    def flush_soon(self) -> None:
        self.flushed_soon += 1

    def flush_later(self) -> None:
        self.flushed_later += 1

    def wait(self, timeout_s: float | None, *, eager: bool = False) -> None:
        del timeout_s, eager
        self.runner.close()

    def wake(self) -> None: ...

    def run(self, *functions: Callable[[], Any]) -> None:
        for number, function in enumerate(functions, start=1):
            self.runner.functions[str(number)] = SentFunction("it", Payload(data=pack(function, what="it").data))
            self.runner.add([ReceivedCall(number, self.runner.functions[str(number)], number, False, NO_ARGUMENTS)])
        self.runner.work()

    def error(self, call_id: int) -> Any:
        (result,) = [item for item in self.items if isinstance(item, CallResult) and item.call_id == call_id]
        return result.outcome.error

    @property
    def succeeded(self) -> list[int]:
        return [call_id for item in self.items if isinstance(item, SmallResults) for call_id in item.call_ids]


def large() -> bytes:
    return bytes(LARGE_BYTES)


def small() -> int:
    return 1


class DeadlyError(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(1)

    def __str__(self) -> str:
        raise SystemExit(2)


def deadly() -> None:
    raise DeadlyError


def test_results_before_another_call_gather_for_a_moment() -> None:
    outlet = Outlet()
    outlet.run(small, small)
    assert outlet.flushed_later
    assert not outlet.flushed_soon


def test_an_error_waits_for_no_other_result() -> None:
    outlet = Outlet()
    outlet.run(deadly, small)
    assert outlet.flushed_soon


def test_a_call_begins_in_the_folder_of_all_calls_although_an_earlier_one_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def leave() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    outlet = Outlet()
    outlet.run(leave, lambda: Path("here").touch())

    assert outlet.succeeded == [1, 2]
    assert (tmp_path / "here").exists()


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("no room"), SystemExit("no room")], ids=repr)
def test_a_result_that_cannot_be_sent_fails_its_call_only(error: BaseException) -> None:
    def fail() -> None:
        raise error

    outlet = Outlet(fail)
    outlet.run(large, small)
    packed = outlet.error(1)
    assert packed.type_name == f"builtins.{type(error).__name__}"
    assert packed.message.endswith("no room")
    assert outlet.succeeded == [2]


def test_an_exception_that_exits_when_it_is_pickled_fails_its_call_only() -> None:
    outlet = Outlet()
    outlet.run(deadly, small)
    assert outlet.error(1).type_name.endswith("DeadlyError")
    assert outlet.succeeded == [2]


def test_sources_that_cannot_be_taken_leave_the_calls_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_sources: object) -> None:
        raise OSError("a damaged archive is on the path")

    monkeypatch.setattr("skyward.node.worker.call_runner.take_sources", fail)
    outlet = Outlet()
    outlet.runner.add([ReceivedSources(())])
    outlet.run(small)
    assert outlet.succeeded == [1]


def test_a_shared_result_for_a_client_that_is_gone_is_removed(tmp_path: Path) -> None:
    outlet = Outlet()

    class NewClientMeanwhile(SharedResults):
        def store(self, parts: Sequence[memoryview], memory_limit_bytes: int = 0) -> str:
            outlet.runner.reset()
            self.clear()
            name = super().store(parts, memory_limit_bytes)
            assert (tmp_path / name).exists()
            return name

    outlet.runner.shared_results = NewClientMeanwhile(tmp_path, "result-0-")
    outlet.run(lambda: bytes(LARGE_BYTES))
    assert outlet.items == []
    assert [*tmp_path.iterdir()] == []


def test_a_result_lies_in_memory_that_the_client_shares_where_there_is_some(tmp_path: Path) -> None:
    for shared, segments in ((SharedResults(tmp_path, "result-0-"), 1), (None, 0)):
        outlet = Outlet()
        outlet.runner.shared_results = shared
        outlet.run(lambda: bytes(LARGE_HERE_BYTES))
        assert len([*tmp_path.iterdir()]) == segments
        assert [type(item) for item in outlet.items] == ([CallResult] if segments else [SmallResults])
        SharedResults(tmp_path, "result-0-").clear()


@pytest.mark.parametrize(("limit_gib", "block_mib"), [(0, 32), (1, 32), (4, 64), (12, 192), (1000, 192)])
def test_a_worker_keeps_freed_blocks_by_its_memory(limit_gib: int, block_mib: int) -> None:
    assert kept_block_bytes(limit_gib << 30) == block_mib << 20


def test_a_call_of_a_client_that_is_gone_answers_nobody() -> None:
    outlet = Outlet()
    outlet.fail = outlet.runner.reset  # a new client comes while a piece is sent
    outlet.run(large)
    assert [type(item) for item in outlet.items] == [ResultChunk]


def test_the_running_call_is_shown_by_its_function_and_a_batch_of_joblib_as_such() -> None:
    outlet, shown = Outlet(), list[str]()

    def look() -> None:
        shown.append(outlet.runner.shown())

    def batch() -> None:
        shown.append(outlet.runner.shown())

    batch.__module__ = "skyward_joblib.on_node"
    for number, function in enumerate((look, batch), start=1):
        sent = SentFunction(f"Model.{function.__name__}", Payload(), loaded=function)
        outlet.runner.add([ReceivedCall(number, sent, number, False, NO_ARGUMENTS)])
    outlet.runner.work()

    assert (shown, outlet.runner.shown()) == (["look, 0 s", "joblib, 0 s"], "")


@pytest.mark.parametrize(("watched", "asked"), [(0, 1), (1, 0)])
def test_the_first_of_several_calls_asks_for_a_watch_unless_there_is_one(watched: int, asked: int) -> None:
    mark, seen = blank_mark(), list[int]()
    mark[WATCHED] = watched
    outlet = Outlet(mark=mark)
    for number in (1, 2):
        sent = SentFunction("look", Payload(), loaded=lambda: seen.append(mark[RUNNING]))
        outlet.runner.add([ReceivedCall(number, sent, number, False, NO_ARGUMENTS)])
    outlet.runner.work()

    assert (outlet.asked, seen, mark[RUNNING]) == (asked, [1, 1], 0)


def test_without_a_mark_that_another_process_reads_nothing_asks_for_a_watch() -> None:
    outlet = Outlet()
    outlet.run(small)
    assert outlet.succeeded == [1]
    assert outlet.asked == 0
