"""Machines launched and prepared while those that they take the place of still run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.events import Error, SkywardEvent
from skyward.provision.fleet.machines import Machine, Machines
from skyward.provision.fleet.node_setup import Starter

__all__ = ["Spares"]


@dataclass(frozen=True, slots=True)
class _Spare:
    """A machine on its way.

    Attributes:
        known: how many machines there had been before it.
        launching: gets it.
        preparing: prepares it.
    """

    known: int
    launching: asyncio.Task[Machine]
    preparing: asyncio.Task[None]


class Spares:
    """One machine in advance for each rank that needs it. Not thread-safe: one event loop runs it.

    Args:
        machines: gets them.
        starter: prepares them.
        present: the present machine of each rank; whoever owns the mapping keeps it true.
        publish: hears what went wrong; must not block.
    """

    def __init__(
        self,
        machines: Machines,
        starter: Starter,
        present: Mapping[int, Machine],
        *,
        publish: Callable[[SkywardEvent], None],
    ) -> None:
        self._machines = machines
        self._starter = starter
        self._present = present
        self._publish = publish
        self._spares: dict[int, _Spare] = {}
        self._taken: dict[Machine, asyncio.Task[None]] = {}

    def begin(self, rank: int) -> None:
        """Have a machine for ``rank``, in the background; that there is none to be had is told."""
        if rank not in self._spares:
            launching = asyncio.ensure_future(self._launch_one(rank))
            preparing = asyncio.ensure_future(self._prepare_once_there(launching))
            self._spares[rank] = _Spare(len(self._machines.all), launching, preparing)

    async def launch(self, ranks: Sequence[int]) -> Mapping[int, Machine]:
        """Machines for these ranks, by rank: those that were launched in advance, and new ones for the others.

        Raises what the provider does.
        """
        taken = {rank: machine for rank in ranks if (machine := await self._take(rank)) is not None}
        if missing := [rank for rank in ranks if rank not in taken]:
            beside = [*taken.values(), *(each for each in self._present.values() if each.rank not in ranks)]
            return taken | {each.rank: each for each in await self._machines.launch(missing, beside=beside)}
        return taken

    async def prepare(self, machine: Machine) -> None:
        """Prepare a machine, or wait until that is done where it began in advance; raises what went wrong then."""
        began = self._taken.pop(machine, None)
        await (self._starter.prepare(machine) if began is None else began)

    async def settle(self, ranks: Sequence[int]) -> list[Machine]:
        """Go on with nothing for these ranks; the machines that nobody took. Wait for its end: do not cancel it."""
        spares = {rank: spare for rank in ranks if (spare := self._spares.pop(rank, None)) is not None}
        taken = [self._taken.pop(machine) for machine in tuple(self._taken) if machine.rank in ranks]
        tasks: list[asyncio.Task[Any]] = [*taken, *(spare.preparing for spare in spares.values())]
        tasks += [spare.launching for spare in spares.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Not the tasks' results: a launch that is cancelled comes to its end all the same.
        return [
            machine
            for rank, spare in spares.items()
            for machine in self._machines.all[spare.known :]
            if machine.rank == rank and machine is not self._present.get(rank)
        ]

    async def _take(self, rank: int) -> Machine | None:
        if (spare := self._spares.get(rank)) is None:
            return None
        await asyncio.wait((spare.launching,))
        if spare.launching.cancelled() or spare.launching.exception() is not None:
            return None
        del self._spares[rank]
        machine = spare.launching.result()
        self._taken[machine] = spare.preparing
        return machine

    async def _launch_one(self, rank: int) -> Machine:
        beside = [machine for machine in self._present.values() if machine.rank != rank]
        try:
            (machine,) = await self._machines.launch([rank], beside=beside)
        except Exception as error:
            self._publish(Error(f"no machine could be had in advance for node {rank}: {error}"))
            raise
        return machine

    async def _prepare_once_there(self, launching: asyncio.Task[Machine]) -> None:
        await self._starter.prepare(await asyncio.shield(launching))
