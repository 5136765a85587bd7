"""How a supervisor keeps a worker: it looks at it ten times a second while it may run calls, else once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import pytest

from skyward.node.jobs.store import JobStore
from skyward.node.plan import NodePlan, make_plan
from skyward.node.supervisor.worker_restarts_and_limits import WorkerSlot
from skyward.node.worker.call_mark import HEEDS, RUNNING, WATCHED, enter, mark_path, open_mark
from skyward.wire.control import EndComing, RunService, Start
from support.nodes import node_config


class Forks:
    """Zygote, and its only fork, which reports what it is told to."""

    exit_code = None

    def __init__(self) -> None:
        self.incarnations: asyncio.Queue[str] = asyncio.Queue()
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.ends: list[EndComing] = []

    @asynccontextmanager
    async def fork(self, _program: str) -> AsyncGenerator[Forks]:
        yield self

    def send(self, *orders: Any) -> None:
        for order in orders:
            if isinstance(order, tuple):
                self.incarnations.put_nowait(cast("Any", order)[2])
            elif isinstance(order, EndComing):
                self.ends.append(order)

    async def reports(self) -> AsyncGenerator[None]:
        while (report := await self.said.get()) != "its end":
            yield report


@pytest.fixture
def plan(tmp_path: Path) -> NodePlan:
    config = node_config(instance_id=f"unit-{os.getpid()}", workdir=str(tmp_path))
    plan = make_plan(config, control_port=4711, blob_port=4712, ports=range(4713, 4813))
    rmtree(plan.ready.blob_dir)
    return replace(plan, ready=replace(plan.ready, blob_dir=str(tmp_path)))


@asynccontextmanager
async def running(plan: NodePlan, asked: asyncio.Event) -> AsyncGenerator[tuple[WorkerSlot, memoryview, Forks]]:
    """Yield a slot whose worker is this very process, the mark that it shares with it, and its zygote."""
    forks: Any = Forks()
    jobs = JobStore(Path(plan.config.workdir, "jobs"))
    slot = WorkerSlot(plan, 0, zygote=forks, jobs=jobs, report=lambda _: None, watch=asked.set)
    slot.follow(Start(head_addr="", total_nodes=1))
    keeping = asyncio.create_task(slot.keep())
    mark = open_mark(mark_path(plan.ready.blob_dir, await forks.incarnations.get()))
    assert mark is not None
    empty = bytes(mark)
    try:
        yield slot, mark, forks
    finally:
        mark.cast("B")[:] = empty  # or the slot would end the session of this process
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_worker_is_looked_at_more_often_from_its_call_on_until_a_second_after_it(plan: NodePlan) -> None:
    async with running(plan, asyncio.Event()) as (slot, mark, _):
        assert not slot.look(0.0)  # it is not up yet
        enter(mark)
        looks: list[tuple[bool, int]] = []
        for now, runs in ((1.0, 0), (2.0, 1), (2.1, 1), (2.2, 0), (3.0, 0), (3.2, 0), (4.2, 0)):
            mark[RUNNING] = runs
            looks.append((slot.look(now), mark[WATCHED]))
        assert looks == [(False, 0), *[(True, 1)] * 4, (False, 0), (False, 0)]


async def test_a_worker_of_a_service_is_looked_at_all_the_time(plan: NodePlan) -> None:
    asked = asyncio.Event()
    async with running(plan, asked) as (slot, mark, _):
        slot.follow(RunService(name="it", module="it", address="127.0.0.1:1"))
        assert asked.is_set()
        assert slot.look(0.0)  # it is not up yet
        enter(mark)
        assert slot.look(1.0)
        assert slot.look(9.0)


async def test_a_worker_that_begins_to_run_calls_asks_for_a_look(plan: NodePlan) -> None:
    asked = asyncio.Event()
    async with running(plan, asked) as (_, _, forks):
        forks.said.put_nowait(None)
        await asyncio.wait_for(asked.wait(), 30)


async def test_an_end_that_is_coming_is_told_to_a_worker_and_to_those_after_it(plan: NodePlan) -> None:
    first, second = EndComing(kind="pool_timeout", at=9.0), EndComing(kind="preemption", at=5.0)
    async with running(plan, asyncio.Event()) as (slot, _, forks):
        slot.follow(first)
        slot.follow(second)
        assert forks.ends == [first, second]
        forks.said.put_nowait("its end")
        await asyncio.wait_for(forks.incarnations.get(), 30)
        assert forks.ends == [first, second] * 2


async def test_a_worker_says_whether_its_call_handles_notices(plan: NodePlan) -> None:
    async with running(plan, asyncio.Event()) as (slot, mark, _):
        assert not slot.heeds
        mark[HEEDS] = 1
        assert slot.heeds
