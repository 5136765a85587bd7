"""Closing a pool: nodes are ended at once, whoever else takes their time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.engine.running import RunningPool
from skyward.errors import TerminationError


class Fleet:
    """Ends what is there; one machine comes up late, one may never end."""

    def __init__(self, *, hopeless: tuple[str, ...] = ()) -> None:
        self.there = {"a", *hopeless}
        self.stops = 0
        self.stopped = asyncio.Event()
        self._hopeless = hopeless

    def unended(self) -> tuple[str, ...]:
        return tuple(self.there)

    async def stop(self) -> None:
        self.stops += 1
        self.there &= set(self._hopeless)
        self.stopped.set()
        if self._hopeless:
            raise TerminationError("does not answer", instance_ids=self._hopeless)


async def test_healthy_nodes_are_not_kept_running_by_one_that_is_still_being_ended() -> None:
    fleet: Any = Fleet()
    settling: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ending = asyncio.ensure_future(RunningPool._end_nodes(SimpleNamespace(), fleet, settling))  # type: ignore[arg-type]
    await fleet.stopped.wait()
    fleet.there.add("late")  # somebody was just getting it
    settling.set_result(None)
    await ending
    assert (fleet.stops, fleet.unended()) == (2, ())


async def test_a_machine_that_does_not_end_is_named_and_not_tried_for_twice_as_long() -> None:
    fleet: Any = Fleet(hopeless=("b",))
    settling: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    settling.set_result(None)
    with pytest.raises(TerminationError, match="does not answer"):
        await RunningPool._end_nodes(SimpleNamespace(), fleet, settling)  # type: ignore[arg-type]
    assert (fleet.stops, fleet.unended()) == (1, ("b",))
