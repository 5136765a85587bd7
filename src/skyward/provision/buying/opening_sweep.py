"""Sweep beside the opening of a pool: ends what dead owners left where machines cannot end their own bill."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from skyward.events import Notice, SkywardEvent
from skyward.providers.base import Provider
from skyward.provision.buying.ledger import Ledger, LedgerEntry
from skyward.provision.buying.sweep import Sweep, SweepReport

__all__ = ["OpeningSweep", "notes_on_sweep"]

_SETTLE_S = 30.0
_ADVICE = "they may cost money: run `skyward sweep`"
_logger = logging.getLogger("skyward")


class OpeningSweep:
    """One sweep in the background, of the machines at a provider that only a sweep ends. Belongs to the event loop.

    Machines of living owners and of other computers stay. Nothing is asked of the provider where the ledger has no such
    machine of a dead owner. Errors are notices.

    Args:
        provider: the opening pool's provider.
        ledger: the record of the machines.
        publish: receives notices of what was ended; must not block.
    """

    def __init__(self, provider: Provider, ledger: Ledger, *, publish: Callable[[SkywardEvent], None]) -> None:
        self._provider = provider
        self._ledger = ledger
        self._publish = publish
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to sweep; does nothing for machines that the user already has."""
        if not self._provider.own_machines:
            self._running = asyncio.ensure_future(self._run())

    async def settle(self) -> None:
        """Wait up to 30 s for the sweep to end, then cancel it; its remaining entries stay open for the next one."""
        if self._running is not None:
            await asyncio.wait((self._running,), timeout=_SETTLE_S)
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        name = self._provider.name
        try:
            entrusted = self._provider.supports("secret")
            entries = await asyncio.to_thread(self._ledger.billed_entries, name, entrusted=entrusted)
            if not entries:
                return
            report = await Sweep(self._ledger, own=self._provider).end_dead(entries)
            notes = notes_on_sweep(name, report, time.time())
        except Exception as error:
            _logger.debug("the sweep of %s failed", name, exc_info=True)
            notes = [f"could not look for machines that programs left at {name} when they died: {error}; {_ADVICE}"]
        for note in notes:
            self._publish(Notice(note))


def notes_on_sweep(provider: str, report: SweepReport, now: float) -> Sequence[str]:
    """Return remarks on machines that were ended, with their cost until ``now`` (Unix time), and on those left."""
    notes: list[str] = []
    if report.ended:
        ended = ", ".join(f"{each.instance_id} ({_described(each.entry, now)})" for each in report.ended)
        notes.append(f"ended machines that programs had left at {provider} when they died: {ended}")
    if report.left:
        left = "; ".join(f"{each.entry.instance_id or each.entry.key}: {each.reason}" for each in report.left)
        notes.append(f"could not end machines that programs had left at {provider} when they died: {left}; {_ADVICE}")
    return notes


def _described(entry: LedgerEntry, now: float) -> str:
    bought = entry.purchase
    cost = "its price is not known" if bought.price_per_hour is None else f"it cost about ${entry.cost(now):.2f}"
    return f"{bought.machine} of pool {bought.pool_id}, {cost}"
