"""Jobs of a kept fleet: handed to nodes, looked at, fetched, and run elsewhere when their node is lost.

A node runs its jobs without a client. This module is what a client does for them: while it is attached, and in any
other program of the same user that asks for one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, Final, cast

from skyward.errors import SkywardError
from skyward.events import LogLine
from skyward.fleet.node_jobs import RUNNING, UNFINISHED, WAITING, JobCallState, JobRefusedError, NodeJobs
from skyward.ledger.job_folders import JobFolder, job_folders, loads, write_private
from skyward.market.autoscale import Workload
from skyward.providers.storage import Store, store_kind
from skyward.request.volume import GrantedVolume, volume_at
from skyward.scheduling.job_checkpoints import EVERY_S, JobCheckpoints
from skyward.shipping.job_file import JobEnd, JobOutcome, join_calls, outcome_parts, read_end, read_head

UNKNOWN: Final = "unknown"
"""State of a call whose node cannot be asked, or is gone."""
_LOOK_S = 30.0  # besides reports of the nodes; for jobs that another program has spawned, too
_LAST_LOOK_S = 10.0
_LEAVING_LOOK_S = 2.0
"""Seconds between two looks while a node that is taken back runs jobs: their calls may save their work."""
_NAMED = 5
_COPYING_S = 3600.0
_COPY = re.compile(r"(\d+)/end-(\d+)")
_IN_MEMORY = 64 << 20
_PIECE = 1 << 20
_logger = logging.getLogger("skyward")

States = Mapping[str, Mapping[str, Mapping[int, JobCallState]]]
"""States of calls by instance, job and index; without the instances that did not answer."""


def choose_places(calls: int, load: Mapping[str, int]) -> tuple[str, ...]:
    """Return the instance for each of so many calls: the one with the fewest unfinished calls, in their order."""
    counts = Counter(load)
    places: list[str] = []
    for _ in range(calls):
        place = min(load, key=lambda instance_id: counts[instance_id])
        counts[place] += 1
        places.append(place)
    return tuple(places)


async def hand_over(folder: JobFolder, nodes: Iterable[NodeJobs], indices: Iterable[int]) -> None:
    """Add calls of a job to the nodes that they are placed on. Idempotent.

    Raises:
        UnreachableError: a node does not answer.
    """
    record = folder.record
    by_place: dict[tuple[str, int], list[int]] = {}
    for index in indices:
        by_place.setdefault((record.places[index], record.runs[index]), []).append(index)
    reached = {node.instance_id: node for node in nodes}

    async def add(node: NodeJobs, calls: Sequence[int], runs: int) -> None:
        contents = ((index, folder.call(index).read_bytes()) for index in calls)
        content = await asyncio.to_thread(join_calls, contents)
        await node.add(record.job, memoryview(content), runs=runs)

    orders = [add(reached[place], calls, runs) for (place, runs), calls in by_place.items() if place in reached]
    for error in await asyncio.gather(*orders, return_exceptions=True):
        if isinstance(error, BaseException) and not isinstance(error, FileNotFoundError):  # it is over by now
            raise error


async def states_on(nodes: Iterable[NodeJobs], *job: str) -> States:
    """Return the states of all calls, or of one ``job``, on the nodes that answer."""

    async def ask(node: NodeJobs) -> tuple[str, Mapping[str, Mapping[int, JobCallState]]] | None:
        try:
            return node.instance_id, await node.states(*job)
        except JobRefusedError as refusal:
            return (node.instance_id, {}) if refusal.kind == "unknown" else None
        except SkywardError as error:
            _logger.debug("node %d does not tell the states of its jobs: %s", node.node, error)
            return None

    return dict(filter(None, await asyncio.gather(*map(ask, nodes))))


def state_of(folder: JobFolder, index: int, states: States) -> JobCallState | None:
    """Return the state of a call: from its outcome here, or from its node; None if that has never seen it."""
    with suppress(OSError, ValueError):
        end = read_end(folder.outcome(index))
        return JobCallState(state=end.end, runs=end.attempt, seconds=end.seconds)
    record = folder.record
    if not record.places[index]:
        return JobCallState(state=WAITING)
    known = states.get(record.places[index])
    if known is None:
        return JobCallState(state=UNKNOWN, runs=record.runs[index])
    return known.get(record.job, {}).get(index)


async def fetch_over(folder: JobFolder, nodes: Iterable[NodeJobs], states: States) -> None:
    """Copy outcome and output of those calls of a job that are over from their nodes. Idempotent.

    Raises:
        UnreachableError: a node does not answer.
        FetchError: an outcome cannot be read there.
        OSError: there is no room here.
    """
    for node in nodes:
        known = states.get(node.instance_id, {}).get(folder.record.job, {})
        over = [
            index
            for index in folder.unfetched()
            if folder.record.places[index] == node.instance_id
            and (state := known.get(index)) is not None
            and state.state not in UNFINISHED
        ]
        while over:
            results = await node.results(folder.record.job, over)
            for index, (outcome, lines) in results.items():
                await asyncio.to_thread(_keep, folder, index, outcome, lines)
            if not results:  # the first one is large
                lines = [line async for line in lines_of(node, folder.record.job, over[0])]
                await asyncio.to_thread(_keep, folder, over[0], None, lines)
                await node.fetch_outcome(known[over[0]].path, folder.outcome(over[0]))
                await asyncio.to_thread(_forget_call, folder, over[0])
            over = over[len(results) or 1 :]


async def fetch_copies(folder: JobFolder, indices: Sequence[int]) -> None:
    """Copy outcomes of calls whose node cannot be asked from the bucket of ``results``, if they are there. Idempotent.

    Raises:
        SkywardError: the bucket cannot be read.
        OSError: there is no room here.
    """
    record = folder.record
    if not record.results or not indices:
        return
    volume = volume_at(f"{record.results}{record.pool_id}/{record.job}/")
    kind = store_kind(volume)
    (access,) = await kind.grant([volume], lifetime_s=_COPYING_S, here=True)
    await asyncio.to_thread(_download, kind.open_store(GrantedVolume(volume=volume, access=access)), folder, indices)


def _download(store: Store, folder: JobFolder, indices: Sequence[int]) -> None:
    last: dict[int, tuple[int, str]] = {}
    for entry in store.listing():
        if (match := _COPY.fullmatch(entry.name)) is not None:
            index, attempt = map(int, match.groups())
            last[index] = max(last.get(index, (0, "")), (attempt, entry.name))
    for index in last.keys() & set(indices):
        with SpooledTemporaryFile(_IN_MEMORY) as file:
            store.download(last[index][1], cast("BinaryIO", file))
            file.seek(0)
            write_private(folder.outcome(index), iter(lambda: file.read(_PIECE), b""))
        _forget_call(folder, index)


def _keep(folder: JobFolder, index: int, outcome: bytes | None, lines: Iterable[LogLine]) -> None:
    write_private(folder.output(index), map(_text, lines))
    if outcome is not None:
        write_private(folder.outcome(index), [outcome])  # last: it says that all is here
        _forget_call(folder, index)


def _forget_call(folder: JobFolder, index: int) -> None:
    """Remove what only a call that is not over needs."""
    folder.call(index).unlink(missing_ok=True)
    shutil.rmtree(folder.checkpoint(index), ignore_errors=True)


def cancel_unplaced(folder: JobFolder, indices: Iterable[int]) -> None:
    """Cancel calls that have no node yet: their outcome says so, and no node gets them."""
    message = f"job {folder.record.job} was cancelled"
    outcome = JobOutcome(end=JobEnd.CANCELLED, node=-1, worker=0, attempt=0, message=message)
    for index in indices:
        write_private(folder.outcome(index), outcome_parts(outcome))
        _forget_call(folder, index)


async def lines_of(node: NodeJobs, job: str, index: int) -> AsyncGenerator[LogLine]:
    """Yield the lines of a call that its node has now."""
    at, more = "", True
    while more:
        lines, at, more = await node.output(job, index, at)
        for line in lines:
            yield line


def kept_lines(path: Path) -> list[LogLine]:
    """Return the lines of a call that were fetched."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        return [LogLine(*json.loads(line)) for line in file]
    return []


def _text(line: LogLine) -> bytes:
    return json.dumps([*asdict(line).values()]).encode() + b"\n"


def runs_used(placed: int, seen: JobCallState | None, *, preempted: bool, retries: int) -> int:
    """Return how many runs of a call are used up once its node is lost.

    A call that waited there when it was last seen may have begun since. A preemption uses up no retry of a call that
    may be repeated (docs/decisions/021).

    Args:
        placed: runs used up when the node got the call.
        seen: its state there when it was last seen; None if it never was.
        preempted: whether the provider took the machine back.
        retries: runs that it may have after the first.
    """
    known = placed if seen is None else max(placed, seen.runs)
    begun = known if seen is not None and seen.state == RUNNING else known + 1
    return begun - 1 if preempted and retries else begun


class FleetJobs:
    """What an attached client does for the jobs of its fleet. Belongs to the event loop.

    It hands over calls that a node does not have, fetches what is over, and runs calls of lost nodes elsewhere.

    Args:
        fleet: the fleet's name.
        pool_id: the pool's id.
        nodes: returns the nodes that can be asked.
        present: returns the instances of all nodes, reached or not.
        publish: receiver of what the user should know, in words.

    Attributes:
        fleet: the fleet's name.
        pool_id: the pool's id.
    """

    def __init__(
        self,
        fleet: str,
        pool_id: str,
        *,
        nodes: Callable[[], Sequence[NodeJobs]],
        present: Callable[[], Iterable[str]],
        publish: Callable[[str], None],
    ) -> None:
        self.fleet = fleet
        self.pool_id = pool_id
        self._nodes = nodes
        self._present = present
        self._publish = publish
        self._changed = asyncio.Event()
        self._looked = asyncio.Event()
        self._preempted: set[str] = set()
        self._seen: dict[tuple[str, int], JobCallState] = {}
        self._unfinished: Counter[int] = Counter()
        self._unplaced = 0
        self._checkpoints = JobCheckpoints()
        self._copying: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def reached(self) -> Sequence[NodeJobs]:
        """Return the nodes that can be asked."""
        return self._nodes()

    def open(self) -> None:
        """Begin to look after the fleet's jobs."""
        _attached[self.fleet] = self
        self._task = asyncio.get_running_loop().create_task(self._look_after())

    async def close(self) -> None:
        """Fetch what is over, and leave the other jobs to their nodes; tell the user which. Idempotent."""
        if _attached.get(self.fleet) is self:
            del _attached[self.fleet]
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with suppress(TimeoutError, SkywardError, OSError):
            async with asyncio.timeout(_LAST_LOOK_S):
                await self.look()
                if self._copying is not None:
                    await self._copying
        if self._copying is not None:
            self._copying.cancel()
        if names := [folder.record.job for folder in self.folders() if folder.unfetched()]:
            others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
            self._publish(
                f"not over: {', '.join(names[:_NAMED])}{others}. Nodes go on with their jobs; `skyward jobs "
                f"{self.fleet}` lists them"
            )

    def look_soon(self) -> None:
        """Look at the jobs now: one was spawned, has ended, or a node came or went."""
        self._changed.set()

    def note_loss(self, instance_id: str, *, preempted: bool) -> None:
        """Note that a machine is lost, or will be; look what becomes of its jobs."""
        if preempted:
            self._preempted.add(instance_id)
        self.look_soon()

    def folders(self) -> Sequence[JobFolder]:
        """Return the jobs of this fleet."""
        return [folder for folder in job_folders(self.fleet) if folder.record.pool_id == self.pool_id]

    def unfetched_on(self, rank: int) -> int:
        """Return the number of calls whose outcome is on a node only, or that are not over there."""
        places = [node.instance_id for node in self._nodes() if node.node == rank]
        return sum(loads(self.folders(), places).values())

    def added_to(self, load: Workload) -> Workload:
        """Return the work of the pool with its jobs: a node with one is not idle, and one without a node needs it."""
        idle_s = {rank: 0.0 if self._unfinished[rank] else idle_s for rank, idle_s in load.idle_s.items()}
        return replace(load, calls=load.calls + self._unplaced, idle_s=idle_s)

    async def wait_for_look(self, within_s: float) -> None:
        """Return after the next look that a report of a node leads to, or after so many seconds."""
        looked = self._looked
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await looked.wait()

    async def _look_after(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self.look()
            except Exception:
                _logger.exception("the jobs of %s could not be looked at", self.fleet)
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()

    async def look(self) -> None:
        """Hand over, fetch and move what is due, once."""
        async with self._looking:
            due = [(folder, indices) for folder in self.folders() if (indices := folder.unfetched())]
            self._unplaced = sum(not folder.record.places[index] for folder, indices in due for index in indices)
            if not due:
                self._unfinished.clear()
                return
            nodes = {node.instance_id: node for node in self._nodes()}
            states = await states_on(nodes.values())
            self._unfinished = Counter(nodes[place].node for place in _unfinished_in(states))
            if self._copying is None or self._copying.done():  # apart: it may take long
                self._copying = asyncio.ensure_future(self._copy_checkpoints([*_running_in(due, nodes, states)]))
            for folder, indices in due:
                try:
                    await self._look_at(folder, indices, nodes, states)
                except (SkywardError, OSError) as error:
                    _logger.warning("job %s: %s", folder.record.job, error)

    async def _look_at(
        self, folder: JobFolder, indices: Sequence[int], nodes: Mapping[str, NodeJobs], states: States
    ) -> None:
        absent, moves, load = list[int](), dict[int, tuple[str, int]](), dict[str, int]()
        known = {index: state_of(folder, index, states) for index in indices}
        lost = self._lost(folder, known)
        absent_or_lost = [index for index, state in known.items() if index in lost or state is None]
        await fetch_copies(folder, absent_or_lost)  # if it fails, these wait: they may be over
        for index, state in known.items():
            if folder.outcome(index).exists():
                continue
            place, is_lost = folder.record.places[index], index in lost
            if nodes and (is_lost or not place):
                load = load or dict(loads(self.folders(), nodes))
                target = min(load, key=lambda instance_id: load[instance_id])
                used = await self._used_up(folder, index) if is_lost else 0
                if used is not None:
                    moves[index] = target, used
                    load[target] += 1
            elif state is None:
                absent.append(index)
            elif state.state in UNFINISHED:
                self._seen[folder.record.job, index] = state
        await fetch_over(folder, nodes.values(), states)
        if moves:
            await self._move(folder, moves, nodes)
        if absent := [index for index in (*absent, *moves) if not folder.outcome(index).exists()]:
            await hand_over(folder, nodes.values(), absent)

    def _lost(self, folder: JobFolder, known: Mapping[int, JobCallState | None]) -> frozenset[int]:
        """Return the calls whose node has left the fleet."""
        present = set(self._present())
        unknown = [index for index, state in known.items() if state is not None and state.state == UNKNOWN]
        return frozenset(index for index in unknown if present and folder.record.places[index] not in present)

    async def _used_up(self, folder: JobFolder, index: int) -> int | None:
        """Return how many runs of a call are used up, as its node is lost; None if it may not run again, and ends."""
        record = folder.record
        retries = (await asyncio.to_thread(read_head, folder.call(index)))["retries"]
        before = record.places[index]
        seen = self._seen.pop((record.job, index), None)
        used = runs_used(record.runs[index], seen, preempted=before in self._preempted, retries=retries)
        if used <= retries:
            return used
        name = record.job if record.single else f"{record.job}[{index}]"
        message = f"job {name} ended with its node, {before}, and may not run again: retries={retries}"
        outcome = JobOutcome(
            end=JobEnd.LOST, node=-1, worker=0, attempt=used, message=message, reason="its node was lost"
        )
        await asyncio.to_thread(write_private, folder.outcome(index), outcome_parts(outcome))
        self._publish(message)
        return None

    async def _move(
        self, folder: JobFolder, moves: Mapping[int, tuple[str, int]], nodes: Mapping[str, NodeJobs]
    ) -> None:
        """Place calls on other nodes, with their checkpoints, and tell the user which run again."""
        record = folder.record
        lost = [index for index in moves if record.places[index]]
        how = Counter([await self._checkpoints.put(folder, index, nodes[moves[index][0]]) for index in lost])
        await asyncio.to_thread(folder.move, moves)
        for words, count in how.items():
            calls = f"job {record.job} runs" if record.single else f"{count} calls of job {record.job} run"
            self._publish(f"{calls} again {words}, as the node was lost")

    async def _copy_checkpoints(self, running: Sequence[tuple[JobFolder, Mapping[int, NodeJobs]]]) -> None:
        have = [await self._checkpoints.refresh(folder, calls, leaving=self._preempted) for folder, calls in running]
        leaving = any(node.instance_id in self._preempted for _, calls in running for node in calls.values())
        if leaving or any(have):
            asyncio.get_running_loop().call_later(_LEAVING_LOOK_S if leaving else EVERY_S, self.look_soon)


def _unfinished_in(states: States) -> Iterator[str]:
    """Yield the instance of each call that is not over."""
    for instance_id, known in states.items():
        yield from (instance_id for calls in known.values() for call in calls.values() if call.state in UNFINISHED)


def _running_in(
    due: Iterable[tuple[JobFolder, Sequence[int]]], nodes: Mapping[str, NodeJobs], states: States
) -> Iterator[tuple[JobFolder, Mapping[int, NodeJobs]]]:
    """Yield jobs of which calls run, with the node of each of these calls."""
    for folder, indices in due:
        running: dict[int, NodeJobs] = {}
        for index in indices:
            place, state = folder.record.places[index], state_of(folder, index, states)
            if state is not None and state.state == RUNNING and place in nodes:
                running[index] = nodes[place]
        if running:
            yield folder, running


_attached: dict[str, FleetJobs] = {}


def attached_jobs(fleet: str) -> FleetJobs | None:
    """Return what looks after the jobs of a fleet whose client this process is."""
    return _attached.get(fleet)
