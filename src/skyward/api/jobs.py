"""Jobs: calls that outlive their program, read from it or from any later one of the same user."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from html import escape
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from skyward.base.loop import acquire_loop
from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import ConfigurationError, PoolStateError, SerializationError, SkywardError
from skyward.events import LogLine, Progress
from skyward.fleet.node_jobs import RUNNING, UNFINISHED, WAITING, JobCallState, NodeJobs
from skyward.fleet.recorded_nodes import recorded_nodes
from skyward.ledger.fleet_record import FleetFolder, no_such_fleet
from skyward.ledger.job_folders import (
    JobFolder,
    JobRecord,
    checked_job_name,
    find_job,
    job_folders,
    job_name_of,
    loads,
    make_folder,
)
from skyward.request.checks import positive_number
from skyward.scheduling.jobs import (
    UNKNOWN,
    FleetJobs,
    States,
    attached_jobs,
    cancel_unplaced,
    choose_places,
    fetch_copies,
    fetch_over,
    hand_over,
    kept_lines,
    state_of,
    states_on,
)
from skyward.shipping.job_file import JobEnd, call_bytes, job_call, outcome_value, read_outcome
from skyward.submission import Invocation

__all__ = ["Job", "JobState", "job", "jobs"]

T = TypeVar("T")

Reach = Callable[[JobFolder], AbstractAsyncContextManager[Sequence[NodeJobs]]]
"""Opens the way to the nodes of a job's fleet; there are none once that has ended."""

_logger = logging.getLogger("skyward")
_NONE: Final[States] = {}
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0


class JobState(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    """None of its calls has begun."""
    RUNNING = "running"
    """A call has begun, and not all are over."""
    FINISHED = "finished"
    """All its calls have returned."""
    FAILED = "failed"
    """A call has raised, was lost, or exceeded a limit."""
    CANCELLED = "cancelled"
    """It was cancelled."""
    UNREACHABLE = "unreachable"
    """A node that has a call does not answer now."""
    GONE = "gone"
    """Its fleet has ended, and a result with it that was not fetched."""


@dataclass(frozen=True, slots=True)
class _JobLook:
    """States of a job's calls at one moment; ``over`` if its fleet has ended."""

    calls: tuple[JobCallState, ...]
    over: bool

    def count(self, *states: str) -> int:
        return sum(call.state in states for call in self.calls)

    @property
    def state(self) -> JobState:
        unknown = self.count(UNKNOWN)
        if self.count(JobEnd.ERROR, JobEnd.LOST, JobEnd.TIMEOUT):
            return JobState.FAILED
        if unknown:
            return JobState.GONE if self.over else JobState.UNREACHABLE
        if self.count(*UNFINISHED):
            return JobState.WAITING if self.count(WAITING) == len(self.calls) else JobState.RUNNING
        return JobState.CANCELLED if self.count(JobEnd.CANCELLED) else JobState.FINISHED


class Job:
    """A call, or a gather of calls, that goes on without its program. Made by :meth:`ComputePool.spawn`.

    It is the same in every program of the same user: ``sky.job("run-7")``. Everything that it tells is read when it is
    asked for: from this machine if it was fetched, otherwise from the nodes.

    Args:
        folder: what this machine keeps of it.
        reach: opens the way to its nodes; by default through the pool that is open here, or the fleet's record.
    """

    def __init__(self, folder: JobFolder, reach: Reach | None = None) -> None:
        self._folder = folder
        self._reach = reach or nodes_of
        self._told = False

    @property
    def id(self) -> str:
        """The job's id: its name, or one that was made for it."""
        return self._folder.record.job

    @property
    def pool(self) -> str:
        """Name of the pool that it was spawned on."""
        return self._folder.fleet

    @property
    def label(self) -> str:
        """Name of its function."""
        return self._folder.record.label

    @property
    def spawned_at(self) -> float:
        """Time at which it was spawned, in seconds since the epoch."""
        return self._folder.record.spawned_at

    @property
    def state(self) -> JobState:
        """Its present state."""
        return self.status()[0]

    @property
    def progress(self) -> Progress:
        """The number of its calls that are over, run and wait."""
        return self.status()[1]

    def status(self) -> tuple[JobState, Progress]:
        """Return its state and progress at one moment."""
        look = _run(self._look())
        return look.state, Progress(
            label=self.id,
            done=look.count(JobEnd.VALUE),
            total=len(look.calls),
            failed=look.count(JobEnd.ERROR, JobEnd.LOST, JobEnd.TIMEOUT),
            running=look.count(RUNNING),
            cancelled=look.count(JobEnd.CANCELLED),
        )

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end, and return the result, or raise the exception, as ``>>`` does.

        It may be read as often as one likes, also after the fleet has ended if it was fetched before: by this method,
        by ``skyward result``, or by the program that was attached when the job ended.

        Args:
            timeout: seconds to wait; None waits until the job is over.

        Raises:
            TimeoutError: it is not over yet.
            PoolStateError: the fleet has ended, and the result was not fetched.
            SerializationError: the result refers to something that this program does not have.
            CancelledError: it was cancelled.
            WorkerLostError: a call lost its worker more often than its ``retries`` allow.
        """
        limit_s = math.inf if timeout is None else (positive_number("timeout", timeout) if timeout else 0.0)
        _run(self._wait(limit_s))
        record = self._folder.record
        if record.single:
            return self._value(0)
        if record.return_exceptions:
            return tuple(map(self._value_or_error, range(record.calls)))
        return tuple(map(self._value, range(record.calls)))

    def logs(self, *, follow: bool = False) -> Iterator[LogLine]:
        """Yield the lines that its calls have printed and logged so far.

        Args:
            follow: go on with new lines until the job is over.
        """
        return _iterated(lambda: self._lines(follow=follow))

    def cancel(self) -> None:
        """End it: calls that wait do not begin, running ones are ended with their worker. Idempotent.

        Raises:
            PoolStateError: its fleet has ended.
            UnreachableError: a node that has a call does not answer.
        """
        _run(self._cancel())

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self.label} on {self.pool}>"

    def _repr_html_(self) -> str:
        return f"<div><b>{escape(self.id)}</b> · {escape(self.label)} on {escape(self.pool)}</div>"

    @property
    def _attached(self) -> FleetJobs | None:
        """What looks after the job, if this program has its pool open."""
        folder = self._folder
        attached = attached_jobs(folder.fleet)
        return attached if attached is not None and attached.pool_id == folder.record.pool_id else None

    # --- on the loop --------------------------------------------------------------------------------------------------

    async def _look(self, nodes: Sequence[NodeJobs] | None = None) -> _JobLook:
        folder = self._folder
        folder.refresh()
        if folder.unfetched() and nodes is None:
            async with self._reach(folder) as reached:
                return await self._look(reached)
        nodes = nodes or ()
        states = await states_on(nodes, folder.record.job) if folder.unfetched() else _NONE
        calls = [state_of(folder, index, states) or JobCallState(state=WAITING) for index in range(folder.record.calls)]
        return _JobLook(tuple(calls), over=not nodes and self._attached is None)

    async def _wait(self, limit_s: float) -> None:
        """Return once every outcome is here."""
        folder, deadline = self._folder, SYSTEM_CLOCK.monotonic() + limit_s
        while folder.unfetched():
            places = folder.record.places
            async with self._reach(folder) as nodes:
                pause_s = _FIRST_PAUSE_S
                while await self._fetch(nodes) and places == folder.record.places:
                    if SYSTEM_CLOCK.monotonic() >= deadline:
                        raise TimeoutError(f"job {self.id} is not over after {limit_s:g} s; it goes on")
                    wait_s = min(pause_s, max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
                    attached = self._attached
                    await (SYSTEM_CLOCK.sleep(wait_s) if attached is None else attached.wait_for_look(wait_s))
                    pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    async def _fetch(self, nodes: Sequence[NodeJobs]) -> bool:
        """Fetch the calls that are over; return True while there is something to wait for."""
        folder = self._folder
        folder.refresh()
        if not folder.unfetched():
            return False
        if (attached := self._attached) is not None:  # also while an elastic pool has no node
            await attached.look()
            return bool(folder.unfetched())
        states = await states_on(nodes, folder.record.job)
        await fetch_over(folder, nodes, states)
        known = {index: state_of(folder, index, states) for index in folder.unfetched()}
        await fetch_copies(folder, [index for index, call in known.items() if call is None or call.state == UNKNOWN])
        if (missing := folder.unfetched()) and not nodes and not self._has_fleet():
            raise PoolStateError(
                f"the fleet {folder.fleet!r} of job {self.id} has ended, and {len(missing)} of its "
                f"{folder.record.calls} results with it: they were not fetched before"
            )
        self._tell_unreachable(states)
        return bool(missing)

    def _tell_unreachable(self, states: States) -> None:
        """Log once that a wait may not end by itself."""
        places = {self._folder.record.places[index] for index in self._folder.unfetched()} - states.keys() - {""}
        if places and not self._told:
            self._told = True
            _logger.warning(
                "job %s: its nodes %s do not answer; if they are lost, the next program that opens the pool %r runs it "
                "elsewhere",
                *(self.id, ", ".join(sorted(places)), self.pool),
            )

    async def _cancel(self) -> None:
        folder = self._folder
        if not folder.unfetched():
            return
        folder.refresh()
        if waiting := [index for index in folder.unfetched() if not folder.record.places[index]]:
            await asyncio.to_thread(cancel_unplaced, folder, waiting)
            folder.refresh()  # the fleet's client may have placed them meanwhile
        async with self._reach(folder) as nodes:
            places = {folder.record.places[index] for index in (*folder.unfetched(), *waiting)} - {""}
            if places and not nodes:
                raise PoolStateError(f"the fleet {folder.fleet!r} of job {self.id} has ended, and the job with it")
            await asyncio.gather(*(node.cancel(folder.record.job) for node in nodes if node.instance_id in places))

    async def _lines(self, *, follow: bool) -> AsyncIterator[LogLine]:
        """Yield the lines of all calls, of each in order."""
        folder = self._folder
        at = dict.fromkeys(range(folder.record.calls), "")
        count = dict.fromkeys(at, 0)
        pause_s, places = _FIRST_PAUSE_S, folder.record.places
        while at:
            folder.refresh()
            for index in at:
                if places[index] != folder.record.places[index]:  # it begins again, on another node
                    at[index], count[index] = "", 0
            places = folder.record.places
            async with self._reach(folder) as nodes:
                while at and places == folder.record.places:
                    before = sum(count.values())
                    over = set(at).difference(folder.unfetched())
                    live = await states_on(nodes, folder.record.job) if set(at) - over else _NONE
                    for index in [*at]:
                        state = state_of(folder, index, live)
                        async for line in self._news(index, nodes, at, count, fetched=index in over):
                            yield line
                        if not (follow and self._goes_on(state, nodes)):
                            del at[index]
                    if at:
                        news = sum(count.values()) > before
                        pause_s = _FIRST_PAUSE_S if news else min(1.5 * pause_s, _LONGEST_PAUSE_S)
                        await SYSTEM_CLOCK.sleep(pause_s)
                        folder.refresh()

    def _has_fleet(self) -> bool:
        """Return whether its fleet still exists, perhaps without a node for now."""
        return FleetFolder(self.pool).pool_id() == self._folder.record.pool_id

    def _goes_on(self, state: JobCallState | None, nodes: Sequence[NodeJobs]) -> bool:
        """Return whether more lines of a call may come: also before it has a node, and while that is replaced."""
        if state is not None and state.state not in {*UNFINISHED, UNKNOWN}:
            return False
        if self._attached is not None:
            return True
        if state is None or not nodes:  # the client of its fleet, in another program, has yet to hand it over
            return self._has_fleet()
        return state.state != UNKNOWN

    async def _news(
        self, index: int, nodes: Sequence[NodeJobs], at: dict[int, str], count: dict[int, int], *, fetched: bool
    ) -> AsyncIterator[LogLine]:
        """Yield the lines of one call since the last ones."""
        folder = self._folder
        if fetched:
            for line in kept_lines(folder.output(index))[count[index] :]:
                count[index] += 1
                yield line
            return
        place = folder.record.places[index]
        node = next((node for node in nodes if node.instance_id == place), None)
        more = node is not None
        while more and node is not None:
            lines, at[index], more = await node.output(folder.record.job, index, at[index])
            count[index] += len(lines)
            for line in lines:
                yield line

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, index: int) -> Any:
        folder = self._folder
        outcome = read_outcome(folder.outcome(index))
        where = f"node {outcome.node}, worker {outcome.worker} (job {self.id})"
        try:
            return outcome_value(outcome, where=where)
        except (ImportError, AttributeError, SerializationError) as error:
            if outcome.end is not JobEnd.VALUE:
                raise
            raise SerializationError(
                f"the result of job {self.id} refers to something that this program does not have: "
                f"{error.__cause__ or error}. Read it in a program that defines it or can import it, such as that of "
                f"{self.label}, or one in its project's folder; the result stays in {folder.outcome(index)}"
            ) from error

    def _value_or_error(self, index: int) -> Any:
        try:
            return self._value(index)
        except Exception as error:
            return error


def spawn_calls(
    calls: Sequence[Invocation],
    *,
    fleet: str,
    pool_id: str,
    name: str | None = None,
    single: bool = True,
    return_exceptions: bool = False,
    results: str = "",
) -> Job:
    """Hand calls to the nodes of a kept fleet as one job.

    Args:
        calls: the calls.
        fleet: the fleet's name.
        pool_id: id of its pool.
        name: the job's id; None makes one.
        single: whether it is one call, and no gather.
        return_exceptions: whether its result has exceptions in place of results.
        results: location in a bucket where nodes keep copies of outcomes; empty for none.

    Raises:
        ConfigurationError: the name cannot be one, or is taken.
        PoolStateError: the fleet has ended.
        SerializationError: a call cannot be pickled.
        UnreachableError: a node did not answer. The job exists, and is handed over by the next client of the fleet.
    """
    if not calls:
        raise ConfigurationError("a job needs at least one call")
    job = checked_job_name(name) if name is not None else job_name_of(calls[0].label)
    names = [job if single else f"{job}[{index}]" for index in range(len(calls))]
    packed = [call_bytes(job_call(call, name=name)) for call, name in zip(calls, names, strict=True)]
    record = JobRecord(
        job=job,
        pool_id=pool_id,
        label=calls[0].label,
        calls=len(calls),
        single=single,
        return_exceptions=return_exceptions,
        spawned_at=time.time(),
        runs=(0,) * len(calls),
        results=results,
    )
    return _run(_spawn(fleet, record, packed))


async def _spawn(fleet: str, record: JobRecord, packed: Sequence[bytearray]) -> Job:
    async with _nodes_of(fleet, record.pool_id) as nodes:
        attached = attached_jobs(fleet)
        if not nodes and attached is None:
            raise PoolStateError(f"the fleet {fleet!r} has no node: it has ended")
        load = loads(job_folders(fleet), [node.instance_id for node in nodes])
        places = choose_places(record.calls, load) if nodes else ("",) * record.calls
        folder = await asyncio.to_thread(make_folder, fleet, replace(record, places=places), packed)
        await hand_over(folder, nodes, range(record.calls))
        if attached is not None:
            attached.look_soon()
    return Job(folder)


def job(name: str, *, pool: str | None = None) -> Job:
    """Return the job of this id, spawned by this or another program of this user.

    Args:
        name: its id.
        pool: name of its pool, if jobs of several have that id.

    Raises:
        ConfigurationError: there is none, or there are several.
    """
    return Job(find_job(name, pool))


def jobs(pool: str | None = None) -> list[Job]:
    """Return this user's jobs, those of ended fleets included, in the order in which they were spawned.

    Args:
        pool: name of the pool; None returns those of all.

    Raises:
        PoolStateError: no kept pool has this name, and there are no jobs of an earlier one.
    """
    if pool is not None and not isinstance(pool, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"pool must be the name of a pool, got {type(pool).__name__}")
    if pool is not None and not is_known(pool):
        raise no_such_fleet(pool)
    return [Job(folder) for folder in job_folders(pool)]


def is_known(pool: str) -> bool:
    """Return whether a kept fleet of this name exists, or has left jobs."""
    return bool(job_folders(pool) or FleetFolder(pool).pool_id())


def fetch_results(pool: str) -> list[Job]:
    """Fetch the results of a kept fleet that is to end; return its jobs that are not over, which end with it."""
    pool_id = FleetFolder(pool).pool_id()
    folders = [folder for folder in job_folders(pool) if folder.record.pool_id == pool_id and folder.unfetched()]

    async def fetch() -> None:
        async with _nodes_of(pool, pool_id) as nodes:
            states = await states_on(nodes)
            for folder in folders:
                try:
                    await fetch_over(folder, nodes, states)
                except (SkywardError, OSError) as error:
                    _logger.warning("results of job %s were not fetched: %s", folder.record.job, error)

    if folders:
        _run(fetch())
    return [Job(folder) for folder in folders if folder.unfetched()]


def nodes_of(folder: JobFolder) -> AbstractAsyncContextManager[Sequence[NodeJobs]]:
    """Return the nodes of a job's fleet: of the pool that is open here, else by its record; none once it has ended."""
    return _nodes_of(folder.fleet, folder.record.pool_id)


@asynccontextmanager
async def _nodes_of(fleet: str, pool_id: str) -> AsyncGenerator[Sequence[NodeJobs]]:
    attached = attached_jobs(fleet)
    if attached is not None and attached.pool_id == pool_id:
        yield attached.reached()
        return
    async with recorded_nodes(fleet, pool_id) as nodes:
        yield nodes


def _run(work: Coroutine[Any, Any, T]) -> T:
    loop = acquire_loop()
    try:
        return loop.call(work)
    finally:
        loop.release()


def _iterated(make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
    """Yield what an asynchronous iterator yields on the loop."""
    items: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()

    async def produce() -> None:
        try:
            async for item in make():
                items.put((item,))
            items.put(None)
        except BaseException as error:
            items.put(error)
            raise

    loop = acquire_loop()
    try:
        task = asyncio.run_coroutine_threadsafe(produce(), loop.loop)
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item[0]
        finally:
            task.cancel()
            with suppress(BaseException):
                task.result(1.0)
    finally:
        loop.release()
