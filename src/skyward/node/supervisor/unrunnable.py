"""Dask tasks that no worker of the pool can ever run: they fail with the reason, instead of waiting for ever."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import ConfigurationError

__all__ = ["WorkerOffer", "fail_unrunnable", "unmet_demand"]

_EVERY_S = 1.0
_GRACE_S = 5.0
"""Workers of a pool that opens or grows register one after the other."""
_SHOWN = 8
log = logging.getLogger("skyward.node.scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOffer:
    """A worker as tasks may ask for it.

    Attributes:
        name: its name, such as ``node0-worker1``. A worker that takes its place has the same.
        address: its address.
        host: the host in that.
        resources: quantity of each resource.
    """

    name: str
    address: str
    host: str = ""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])

    def has(self, demanded: Mapping[str, float]) -> bool:
        """Return True if it has as much of each resource."""
        return all(self.resources.get(name, 0) >= quantity for name, quantity in demanded.items())


def unmet_demand(resources: Mapping[str, float], places: Collection[str], offers: Iterable[WorkerOffer]) -> str:
    """Return why none of the workers can run a task, and the next step; empty if one can. Pure.

    Args:
        resources: quantity of each resource that the task requires.
        places: names, addresses or hosts of workers that may run it; empty for all.
        offers: the workers.
    """
    offers = sorted(offers, key=lambda offer: offer.name)
    named = [each for each in offers if not places or not {each.name, each.address, each.host}.isdisjoint(places)]
    if not named:
        return (
            f"workers={sorted(places)} names no worker of this pool. It has {_listed(each.name for each in offers)}; "
            "names stay when a worker is replaced, addresses do not"
        )
    if any(each.has(resources) for each in named):
        return ""
    among = " of those in workers=" if places else ""
    return f"resources={dict(resources)}: no worker{among} has that. {_offered(named)}. {_advice(resources, named)}"


def _offered(offers: Collection[WorkerOffer]) -> str:
    by_resources: dict[str, list[str]] = {}
    for offer in offers:
        words = ", ".join(f"{name}={quantity:g}" for name, quantity in sorted(offer.resources.items())) or "none"
        by_resources.setdefault(words, []).append(offer.name)
    return "Offered: " + "; ".join(f"{words} by {_listed(names)}" for words, names in by_resources.items())


def _advice(resources: Mapping[str, float], offers: Collection[WorkerOffer]) -> str:
    known = {name.casefold(): name for offer in offers for name in offer.resources}
    for name in resources:
        meant = known.get(name.casefold(), name)
        if meant != name:
            return f"Write {meant!r} instead of {name!r}"
    if any(name not in known.values() and name != "GPU" for name in resources):
        return "Workers of a pool have no other resources than 'GPU': leave the others out, or choose workers by name"
    if "GPU" not in known.values():
        return "Workers have 'GPU' on nodes with accelerators: open the pool with accelerator=, or leave resources= out"
    return (
        "A worker has as many as its node's GPUs for each worker, a fraction where they share one: require no more, or "
        "change accelerator= or concurrency= of the pool"
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fail_unrunnable(scheduler: Scheduler, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Make tasks fail that require a worker which the pool does not have, and has not had, a few seconds after."""
    scheduler.add_plugin(_Unrunnable(scheduler, clock), name="skyward-unrunnable")


class _Unrunnable(SchedulerPlugin):
    """Watches tasks that wait for a worker, while there are any.

    A worker that is away counts with what it had: it restarts, or another takes its place.
    """

    def __init__(self, scheduler: Any, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._offers: dict[str, WorkerOffer] = {}
        self._since: dict[Any, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        del scheduler
        self._note(self._scheduler.workers[worker])

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        del key, start, args, kwargs
        if finish == "no-worker" and self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    def _note(self, worker: Any) -> None:
        self._offers[worker.name] = WorkerOffer(
            name=worker.name, address=worker.address, host=worker.host, resources=dict(worker.resources)
        )

    async def _look(self) -> None:
        try:
            while self._scheduler.unrunnable:
                await self._clock.sleep(_EVERY_S)
                for worker in self._scheduler.workers.values():
                    self._note(worker)
                self._fail_all()
        except Exception:
            log.exception("tasks that no worker can run are not reported")
        finally:
            self._looking = None
            self._since.clear()

    def _fail_all(self) -> None:
        now = self._clock.monotonic()
        waiting = {task.key: task for task in self._scheduler.unrunnable}
        self._since = {key: self._since.get(key, now) for key in waiting}
        if not self._scheduler.workers:
            return
        for key, since in list(self._since.items()):
            if now - since >= _GRACE_S and key in waiting:
                self._fail(waiting[key])

    def _fail(self, task: Any) -> None:
        places = {*(task.worker_restrictions or ()), *(task.host_restrictions or ())}
        reason = unmet_demand(task.resource_restrictions or {}, places, self._offers.values())
        if not reason or task not in self._scheduler.unrunnable:
            return
        log.info("task %s fails: %s", task.key, reason)
        error = ConfigurationError(f"Dask's task {task.key!r} cannot run: {reason}")
        stimulus = f"skyward-unrunnable-{task.key}"
        recommended = self._scheduler.transition(
            task.key, "erred", exception=pickle.dumps(error), cause=task.key, stimulus_id=stimulus
        )
        self._scheduler.transitions(recommended, stimulus_id=stimulus)
