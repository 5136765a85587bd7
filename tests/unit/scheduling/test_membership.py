"""Workers come and go with their nodes, and one by one; calls do not get lost on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from blake3 import blake3

import skyward.scheduling.scheduler
from skyward.errors import BootstrapError, ConfigurationError, UnreachableError
from skyward.events import Error, LogLine, WorkerLost, WorkerReplaced, WorkerRestarting
from skyward.machine.local import LocalAccess
from skyward.scheduling.calls import CallGang, LiveCall, RawOutcome
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.scheduling.scheduler import Scheduler
from skyward.scheduling.services import Services
from skyward.scheduling.worker_link import WorkerLink, out_of_reach
from skyward.shipping.blobs import Blob
from skyward.submission import Invocation
from skyward.wire.control import JobRunning, WorkerExit
from skyward.wire.frames import TlsIdentity
from skyward.wire.messages import (
    CallHeader,
    CallResult,
    CancelCalls,
    GangAddress,
    LoggedRecord,
    LogPiece,
    MissingBlobs,
    Outcome,
    PrintedLines,
    ResultChunk,
    RevokedCalls,
    RunCalls,
    SetLevels,
    SmallResults,
    SpentProcess,
    ToWorker,
)


class HandLink(WorkerLink):
    """A link that does what the test does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pushed: list[ToWorker] = []

    def start(self) -> None: ...

    def push(self, item: ToWorker) -> None:
        self.pushed.append(item)

    def flush(self) -> None: ...

    async def close(self) -> None: ...

    def come_up(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.functions.clear()
        self._owner.lane_linked(self, linked=True)
        self._owner.lane_up(self)


class HandTransport:
    """Puts files when it is let, and raises what it is told to."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def put(self, *_: Any, **__: Any) -> None:
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error


class Stage:
    """A cluster of two nodes with one worker each."""

    def __init__(self, folder: str) -> None:
        self.events: list[Any] = []
        self.bus = SimpleNamespace(
            publish=lambda event, *_: self.events.append(event),
            run=lambda _: None,
            delivery=lambda: None,
            together=nullcontext,
        )
        loop: Any = SimpleNamespace(loop=asyncio.get_running_loop(), is_current=True)
        nodes: Any = SimpleNamespace(started_nodes=list, head=lambda: self.handle(0))
        services = Services(nodes, tls=TlsIdentity(ca="", cert="", key=""), publish=self.events.append)
        self.scheduler = Scheduler(None, self.bus, workers_per_node=1, thread=loop, services=services)  # type: ignore[arg-type]
        self.networks = {0: "here", 1: "here"}
        self.spot = False
        self._folder = folder

    def enter(self, calls: Sequence[LiveCall]) -> None:
        """Have calls come in, as those that were submitted."""
        self.scheduler._waiting.extend(calls)
        self.scheduler._take_in()

    def handle(self, rank: int) -> Any:
        ready = SimpleNamespace(
            call_ports=(1,),
            blob_dir=self._folder,
            blob_dir_disk=self._folder,
            blob_budget_bytes=1 << 30,
        )
        killed: list[str] = []

        async def kill_worker(worker: int, incarnation: str) -> None:
            killed.append(incarnation)

        return SimpleNamespace(
            rank=rank,
            ready=ready,
            killed=killed,
            kill_worker=kill_worker,
            lanes=("127.0.0.1:1",),
            transport=HandTransport(),
            instance=SimpleNamespace(id=f"i{rank}", network=self.networks[rank], offer=SimpleNamespace(spot=self.spot)),
            access=LocalAccess(address="127.0.0.1", workdir="/w"),
            linked=True,
        )

    def lane(self, rank: int) -> Any:
        return self.scheduler.links[WorkerId(rank, 0)]

    async def attach(self, rank: int) -> Any:
        handle = self.handle(rank)
        attaching = asyncio.ensure_future(self.scheduler.attach(handle))
        await asyncio.sleep(0)
        self.lane(rank).come_up("first")
        await attaching
        return handle

    async def renew(self, handle: Any, call_id: int, incarnation: str) -> None:
        """A worker says that its process is spent, is killed, and comes back."""
        lane = self.lane(handle.rank)
        self.scheduler.lane_items(lane, [[SpentProcess.CODE, [call_id], "it is in use"]])
        await eventually(lambda: lane.incarnation in handle.killed)
        lane.exited.set()
        await self.scheduler.lane_lost(lane)
        lane.come_up(incarnation)


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> AsyncIterator[Stage]:
    monkeypatch.setattr(skyward.scheduling.scheduler, "WorkerLink", HandLink)
    stage = Stage(str(tmp_path))
    stage.scheduler.expect([0, 1])
    yield stage
    await stage.scheduler.close()


class OutcomeSink:
    def __init__(self) -> None:
        self.outcomes: list[RawOutcome] = []

    def deliver(self, index: int, raw: RawOutcome) -> None:
        self.outcomes.append(raw)


def call(number: int, *, blobs: tuple[Blob, ...] = (), pinned: WorkerId | None = None) -> Any:
    payload = SimpleNamespace(data=b"", to_wire=list)
    kept = {"sources": None, "complete": None, "payload": payload, "blobs": ()}
    function: Any = SimpleNamespace(id="f", label="f", nbytes=8, **kept)
    call: Any = LiveCall(id=number, kind="f", label="f", function=function, data=b"x", blobs=blobs, pinned=pinned)
    call.sink = OutcomeSink()
    return call


async def test_the_worker_of_a_replacement_takes_calls_although_an_earlier_one_never_started(stage: Stage) -> None:
    for rank in (0, 1):
        await stage.attach(rank)
    places = stage.scheduler.places
    stage.scheduler.detach(1, "lost", for_good=False)
    attaching = asyncio.ensure_future(stage.scheduler.attach(stage.handle(1)))
    await asyncio.sleep(0)
    for attempt in range(5):
        stage.scheduler.handle(stage.handle(1), exit_of(f"{attempt}", reason="exit code 1"))
    with pytest.raises(BootstrapError, match="does not start"):
        await attaching
    stage.scheduler.detach(1, "its workers did not answer", for_good=False)
    await stage.attach(1)
    stage.enter([call(1), call(2)])

    assert stage.scheduler.places == places
    assert all(stage.lane(rank).pushed for rank in (0, 1))


@pytest.mark.parametrize("comes", ["before the worker", "after it"])
async def test_a_worker_gets_no_calls_while_it_runs_a_job(stage: Stage, comes: str) -> None:
    handle = stage.handle(0)
    running, over = (JobRunning(worker=0, incarnation="first", job=job) for job in ("train/0", ""))
    if comes == "before the worker":
        stage.scheduler.handle(handle, running)
    await stage.attach(0)
    if comes == "after it":
        stage.scheduler.handle(handle, running)
    stage.enter([call(1)])
    assert not any(isinstance(item, RunCalls) for item in stage.lane(0).pushed)

    stage.scheduler.handle(handle, over)

    assert any(isinstance(item, RunCalls) for item in stage.lane(0).pushed)


async def test_a_call_whose_array_is_on_its_way_to_a_node_that_dies_runs_elsewhere(stage: Stage) -> None:
    handles = [await stage.attach(rank) for rank in (0, 1)]
    content = b"x" * 10
    shipped = call(1, blobs=(Blob(id=blake3(content).hexdigest(), view=memoryview(content)),))
    stage.enter([shipped])
    await asyncio.sleep(0.01)
    (doomed,) = [handle for handle in handles if handle.transport.begun.is_set()]
    (other,) = [handle for handle in handles if handle is not doomed]
    other.transport.go.set()
    doomed.linked = False
    doomed.transport.error = UnreachableError("the machine is going down")
    doomed.transport.go.set()
    await asyncio.sleep(0.02)
    stage.scheduler.detach(doomed.rank, "lost", for_good=False)
    async with asyncio.timeout(5):
        while not stage.lane(other.rank).pushed:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)

    assert shipped.sink.outcomes == []


async def test_a_spent_process_is_killed_until_its_supervisor_knows_it(stage: Stage) -> None:
    handle = await stage.attach(0)
    stage.enter([call(1)])
    stage.scheduler.lane_items(stage.lane(0), [[SpentProcess.CODE, [1], "it is in use"]])

    await eventually(lambda: handle.killed.count("first") > 1)


async def test_a_call_that_no_process_is_fresh_enough_for_fails(stage: Stage) -> None:
    handle, greedy = await stage.attach(0), call(1)
    stage.enter([greedy])
    for incarnation in ("second", "third"):
        await stage.renew(handle, 1, incarnation)
        assert greedy.sink.outcomes == []
    await stage.renew(handle, 1, "fourth")

    (outcome,) = greedy.sink.outcomes
    assert isinstance(outcome.error, ConfigurationError)
    assert "f could not begin, in 3 processes one after the other: it is in use" in str(outcome.error)


async def test_a_worker_that_is_to_go_is_renewed_for_its_last_call(stage: Stage) -> None:
    handles = [await stage.attach(rank) for rank in (0, 1)]
    stage.enter([call(1, pinned=WorkerId(1, 0))])
    stage.scheduler.retire([1])
    idle = asyncio.ensure_future(stage.scheduler.drain(1))
    await stage.renew(handles[1], 1, "second")

    assert [type(item) for item in stage.lane(1).pushed].count(RunCalls) == 2
    done, _ = await asyncio.wait([idle], timeout=0.1)
    idle.cancel()
    assert not done


async def test_a_result_that_makes_no_sense_fails_its_call_and_those_behind_it_arrive(stage: Stage) -> None:
    await stage.attach(0)
    broken, good, short, cut = call(1), call(2), call(3), call(4)
    stage.enter([short])
    stage.scheduler.lane_items(stage.lane(0), [[SmallResults.CODE, [3], [0.0], [b"pickle"]]])
    stage.enter([broken, good, cut])
    pieces_missing = [CallResult.CODE, 1, Outcome(seconds=0.1, part_bytes=(3,)).to_wire()]
    stage.scheduler.lane_items(stage.lane(0), [pieces_missing, [SmallResults.CODE, [2, 4], [0.1], [b"pickle"]]])
    assert isinstance(broken.sink.outcomes[0].error, KeyError)
    assert good.sink.outcomes[0].data == b"pickle"
    assert isinstance(cut.sink.outcomes[0].error, ValueError)


async def test_lines_of_a_dropped_call_that_runs_on_have_its_name(stage: Stage) -> None:
    await stage.attach(0)
    dropped = call(1)
    stage.enter([dropped])
    stage.scheduler.end_calls([dropped], kill=False)

    stage.scheduler.lane_items(stage.lane(0), [[PrintedLines.CODE, 1, [["still here", 1.0]], 0]])

    assert [event.call for event in stage.events if isinstance(event, LogLine)] == [dropped.name]


@pytest.mark.parametrize(
    ("log_end", "expected"),
    [
        (0, ["… 50 bytes before this are in its log only: /w/worker-0.log", "seen", "größer", "Fatal"]),
        (60, ["… 40 bytes before this are in its log only: /w/worker-0.log", "seen", "größer", "Fatal"]),
        (100, ["seen", "größer", "Fatal"]),
        (105, ["größer", "Fatal"]),
        (999, []),
    ],
)
async def test_a_crashed_workers_last_words_are_published_without_those_that_came(
    stage: Stage, log_end: int, expected: list[str]
) -> None:
    handle = await stage.attach(0)
    lane = stage.lane(0)
    words = "seen\ngrößer\nFatal".encode().decode("latin-1")
    stage.scheduler.lane_items(lane, [[PrintedLines.CODE, 0, [["before", 1.0]], log_end]])
    stage.scheduler.lane_linked(lane, linked=False)
    ended = WorkerExit(
        worker=0,
        incarnation="first",
        exit_code=None,
        signal=11,
        reason="crashed",
        memory_limit_bytes=None,
        last_words=words,
        last_words_at=100,
        omitted_bytes=50,
    )
    stage.scheduler.handle(handle, ended)

    lines = [event.line for event in stage.events if isinstance(event, LogLine)]
    assert lines == ["before", *expected]
    assert isinstance(stage.events[-1], WorkerLost)


def exit_of(incarnation: str, **how: Any) -> WorkerExit:
    described = {"exit_code": None, "signal": None, "reason": "it ended", "memory_limit_bytes": None} | how
    return WorkerExit(worker=0, incarnation=incarnation, **described)


async def test_the_end_of_a_process_is_known_although_the_next_one_answers_first(stage: Stage) -> None:
    handle = await stage.attach(0)
    lane = stage.lane(0)
    stage.scheduler.lane_linked(lane, linked=False)

    losing = asyncio.ensure_future(stage.scheduler.lane_lost(lane))
    await asyncio.sleep(0)
    stage.scheduler.handle(handle, exit_of("first", reason="ended by signal 11"))
    await losing

    (lost,) = [event for event in stage.events if isinstance(event, WorkerLost)]
    assert "signal 11" in lost.reason


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ({"signal": 9}, WorkerRestarting, "a cancelled call was ended"),
        ({}, WorkerRestarting, "a cancelled call was ended"),
        ({"signal": 11}, WorkerLost, "it ended"),
        ({"exit_code": 3}, WorkerLost, "it ended"),
        ({"signal": 9, "memory_limit_bytes": 1}, WorkerLost, "it ended"),
    ],
)
async def test_worker_that_is_ended_with_a_cancelled_call_is_restarted_not_lost(
    stage: Stage, how: dict[str, Any], kind: type[Any], reason: str
) -> None:
    handle = await stage.attach(0)
    running = call(1)
    stage.enter([running])
    stage.scheduler.end_calls([running], kill=True)
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", **how))
    of_call = {"call": "f#0", "retries": 3} if kind is WorkerLost else {}
    assert stage.events == [kind(0, 0, "i0", reason, **of_call)]


@pytest.mark.parametrize(
    ("losses", "begun", "expected", "outlook"),
    [
        (0, 1, {"call": "f#0", "runs_again": True, "retry": 1, "retries": 3}, "; f#0 is run again, retry 1 of 3"),
        (2, None, {"call": "f#0", "runs_again": True, "retry": 3, "retries": 3}, "; f#0 is run again, retry 3 of 3"),
        (3, 1, {"call": "f#0", "retries": 3}, "; f#0 ran there, and is not run again"),
        (0, 0, {}, ""),
    ],
)
async def test_the_event_of_a_lost_worker_names_its_call_and_the_retry(
    stage: Stage, losses: int, begun: int | None, expected: dict[str, Any], outlook: str
) -> None:
    handle = await stage.attach(0)
    running = call(1)
    running.losses = losses
    stage.enter([running])
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", signal=11, begun=begun))
    (event,) = [each for each in stage.events if isinstance(each, WorkerLost)]
    assert event == WorkerLost(0, 0, "i0", "it ended", **expected)
    assert event.outlook == outlook


async def test_worker_that_outlived_a_cancelled_call_is_lost_when_it_ends_later(stage: Stage) -> None:
    handle = await stage.attach(0)
    running = call(1)
    stage.enter([running])
    stage.scheduler.end_calls([running], kill=True)
    stage.scheduler.lane_items(stage.lane(0), [[SmallResults.CODE, [1], [0.1], [b"pickle"]]])
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", signal=9))
    assert stage.events == [WorkerLost(0, 0, "i0", "it ended")]


async def test_worker_that_dask_restarts_is_restarted_not_lost(stage: Stage) -> None:
    handle = await stage.attach(0)
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", exit_code=0, ended_for="Dask restarted it"))
    assert stage.events == [WorkerRestarting(0, 0, "i0", "Dask restarted it")]


async def test_worker_whose_process_is_spent_is_restarted_not_lost(stage: Stage) -> None:
    handle = await stage.attach(0)
    stage.enter([call(1)])
    await stage.renew(handle, 1, "second")
    assert stage.events == [
        WorkerRestarting(0, 0, "i0", "a call needed a fresh process"),
        WorkerReplaced(0, 0, "i0"),
    ]


OUTCOME = Outcome(seconds=0.0, data=b"a lie").to_wire()


@pytest.mark.parametrize(
    "lie",
    [
        [SmallResults.CODE, [1], [0.0], [b"a lie"]],
        [CallResult.CODE, 1, OUTCOME],
        [ResultChunk.CODE, 1, 0, 8, 0, b"a lie..."],
        [RevokedCalls.CODE, [1]],
        [MissingBlobs.CODE, 1, []],
        [SpentProcess.CODE, [1], "a lie"],
        [GangAddress.CODE, 1, "a lie"],
    ],
    ids=["results", "result", "chunk", "revoked", "missing", "spent", "meet"],
)
async def test_a_worker_that_answers_for_the_call_of_another_one_is_not_believed_and_used_no_more(
    stage: Stage, lie: list[Any]
) -> None:
    for rank in (0, 1):
        await stage.attach(rank)
    first, second = call(1, pinned=WorkerId(0, 0)), call(2, pinned=WorkerId(1, 0))
    stage.enter([first, second])
    liar = stage.lane(1)
    own = [SmallResults.CODE, [2], [0.0], [b"its own"]]
    stage.scheduler.lane_items(liar, [own, lie, [SmallResults.CODE, [1], [0.0], [b"another lie"]]])

    assert first.sink.outcomes == []
    assert [outcome.data for outcome in second.sink.outcomes] == [b"its own"]
    assert set(stage.scheduler.links) == set(stage.scheduler.places) == {WorkerId(0, 0)}
    (error,) = [event for event in stage.events if isinstance(event, Error)]
    assert "answered for call 1" in error.message
    stage.scheduler.lane_items(stage.lane(0), [[SmallResults.CODE, [1], [0.0], [b"the truth"]]])
    assert [outcome.data for outcome in first.sink.outcomes] == [b"the truth"]


async def test_answers_for_calls_that_are_over_are_ignored(stage: Stage) -> None:
    await stage.attach(0)
    late = call(1)
    stage.enter([late])
    result = [SmallResults.CODE, [1], [0.0], [b"x"]]
    stage.scheduler.lane_items(stage.lane(0), [result, result, [RevokedCalls.CODE, [1]], [CallResult.CODE, 1, OUTCOME]])
    stage.scheduler.lane_items(stage.lane(0), [result])

    assert len(late.sink.outcomes) == 1
    assert set(stage.scheduler.links) == {WorkerId(0, 0)}


def gang() -> list[Any]:
    calls = [call(rank + 1, pinned=WorkerId(rank, 0)) for rank in (0, 1)]
    for rank, each in enumerate(calls):
        each.together, each.header = True, CallHeader(world=2, rank=rank, gang=True)
    CallGang(calls)
    return calls


@pytest.mark.parametrize("networks", [{0: "a", 1: "b"}, {0: "", 1: ""}])
async def test_a_gang_is_refused_where_its_workers_do_not_reach_each_other(
    stage: Stage, networks: dict[int, str]
) -> None:
    stage.networks = networks
    for rank in (0, 1):
        await stage.attach(rank)
    with pytest.raises(ConfigurationError, match=r"train is decorated with .* reach.* nodes=1"):
        stage.scheduler.broadcast(Invocation(fn=abs, label="train", gang=True))
    stage.scheduler.join()


async def test_a_gang_one_of_whose_nodes_turns_out_to_be_elsewhere_fails_when_it_meets(stage: Stage) -> None:
    stage.networks = {0: "a", 1: "b"}
    await stage.attach(0)
    calls = gang()
    stage.enter(calls)
    await stage.attach(1)
    for rank, each in enumerate(calls):
        stage.scheduler.lane_items(stage.lane(rank), [[GangAddress.CODE, each.id, "text"]])

    assert [str(each.sink.outcomes[0].error) for each in calls] == [
        str(out_of_reach("f", stage.scheduler.separation()))
    ] * 2
    assert any(item.call_ids == [1] for item in stage.lane(0).pushed if isinstance(item, CancelCalls))


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("comes", ["preempted", "lost", "noticed", "alive"])
async def test_a_killed_worker_of_a_spot_machine_is_judged_with_the_machine(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, comes: str, retries: int
) -> None:
    monkeypatch.setattr(skyward.scheduling.scheduler, "_VERDICT_S", 0.01)
    stage.spot = True
    handle, running = await stage.attach(0), call(1, pinned=WorkerId(0, 0))
    running.retries = retries
    stage.enter([running])
    if comes == "noticed":
        stage.scheduler.retire([0], comes_back=True)
    handle.linked = comes == "alive"
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", signal=9, begun=1))
    if comes in ("preempted", "lost"):
        await asyncio.sleep(0.05)
        assert running.worker == WorkerId(0, 0), "the verdict is awaited"
        stage.scheduler.detach(0, f"node 0 is {comes}: gone", for_good=False, preempted=comes == "preempted")
    await eventually(lambda: running.worker is None)

    taken = comes in ("preempted", "noticed")
    assert running.losses == (not (taken and retries))
    errors = [str(outcome.error) for outcome in running.sink.outcomes]
    assert ["preempted" in error for error in errors] == ([] if retries else [taken])


@pytest.mark.parametrize(
    "end",
    [{"exit_code": 3}, {"signal": 11}, {"signal": 9, "memory_limit_bytes": 1}, {"signal": 9, "ended_for": "timeout"}],
    ids=["exit", "crash", "memory", "on purpose"],
)
async def test_a_process_that_ends_by_itself_is_charged_although_its_machine_is_preempted(
    stage: Stage, end: dict[str, Any]
) -> None:
    stage.spot = True
    handle, running = await stage.attach(0), call(1, pinned=WorkerId(0, 0))
    stage.enter([running])
    stage.scheduler.retire([0], comes_back=True)
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", begun=1, **end))
    assert (running.worker, running.losses) == (None, 1)


@pytest.mark.parametrize("spot", [False, True], ids=["on demand", "ended on purpose"])
async def test_the_end_of_a_worker_on_demand_or_on_purpose_waits_for_no_verdict(stage: Stage, spot: bool) -> None:
    stage.spot = spot
    handle, running = await stage.attach(0), call(1, pinned=WorkerId(0, 0))
    stage.enter([running])
    stage.scheduler.links[WorkerId(0, 0)].end_for("a restart" if spot else "")
    stage.scheduler.lane_linked(stage.lane(0), linked=False)
    stage.scheduler.handle(handle, exit_of("first", signal=9, begun=1))
    assert (running.worker, running.losses) == (None, 1)


async def test_a_node_that_came_back_or_is_to_go_for_good_is_not_taken_for_preempted(stage: Stage) -> None:
    for change in (lambda: stage.scheduler.retire([0]), lambda: stage.scheduler.detach(0, "gone", for_good=False)):
        stage.spot = False
        await stage.attach(0)
        stage.scheduler.retire([0], comes_back=True)
        change()
        if WorkerId(0, 0) not in stage.scheduler.links:
            stage.scheduler.expect([0])
            await stage.attach(0)
        running = call(1, pinned=WorkerId(0, 0))
        stage.enter([running])
        handle = stage.handle(0)
        stage.scheduler.lane_linked(stage.lane(0), linked=False)
        stage.scheduler.handle(handle, exit_of("first", signal=9, begun=1))
        assert running.losses == 1
        stage.scheduler.end_calls([running], kill=False)


async def test_lines_and_records_of_a_lost_worker_that_arrive_late_are_shown(stage: Stage) -> None:
    handle = await stage.attach(0)
    lane = stage.lane(0)
    stage.scheduler.lane_linked(lane, linked=False)
    stage.scheduler.handle(handle, exit_of("first", signal=11))
    piece = LogPiece(text="printed", stream="stdout", timestamp=1.0, writer=0)
    values = {"name": "app", "levelno": 20, "levelname": "INFO", "msg": "logged", "created": 1.0}
    late = PrintedLines(0, [piece], 0), LoggedRecord(0, "", values)
    stage.scheduler.lane_items(lane, msgpack.unpackb(msgpack.packb(late, default=methodcaller("to_wire"))))
    assert [event.line for event in stage.events if isinstance(event, LogLine)] == ["printed", "logged"]


async def test_levels_of_logging_reach_every_new_process_once(stage: Stage) -> None:
    logger = logging.getLogger("levels.app")
    logger.setLevel(logging.DEBUG)
    try:
        await stage.attach(0)
        lane = stage.lane(0)
        stage.enter([call(1)])
        stage.scheduler.lane_linked(lane, linked=False)
        stage.scheduler.handle(stage.handle(0), exit_of("first", signal=11))
        lane.come_up("second")
    finally:
        logger.setLevel(logging.NOTSET)
    sent = [item.levels["levels.app"] for item in lane.pushed if isinstance(item, SetLevels)]
    assert sent == [logging.DEBUG, logging.DEBUG]
