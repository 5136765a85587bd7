"""Presence of recorded machines at their providers, requested within a bounded time."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from skyward.providers.base import Instance, InstanceState, Provider
from skyward.providers.registry import make_provider
from skyward.provision.buying.ledger import Ledger, LedgerEntry
from skyward.provision.buying.sweep import MakeProvider, Place, Unknown, attributed, by_place, reason_of, unaccounted

__all__ = ["Presence", "look_up"]

_LIMIT_S = 15.0
# A provider's records may miss a machine for so long after its launch, and still have it for so long after its end.
_LISTED_S = 300.0
_logger = logging.getLogger("skyward")


@dataclass(slots=True, kw_only=True)
class Presence:
    """Answers of providers.

    Attributes:
        states: states of the machines of open entries, by ledger key; one without an answer is absent.
        unknown: machines with Skyward's tag that no open entry accounts for, of providers whose lists were requested.
        silent: reasons for which providers gave no answer.
    """

    states: dict[str, InstanceState] = field(default_factory=dict[str, InstanceState])
    unknown: list[Unknown] = field(default_factory=list[Unknown])
    silent: list[str] = field(default_factory=list[str])


async def look_up(
    ledger: Ledger,
    entries: Iterable[LedgerEntry],
    *,
    listed: Collection[Place] = (),
    make: MakeProvider = make_provider,
    limit_s: float = _LIMIT_S,
) -> Presence:
    """Request the state of every machine with an open entry, from all providers at once; ends none.

    The ends of machines that are gone are recorded in the ledger. Their entries stay open: a sweep closes them.

    Args:
        ledger: the record of the machines.
        entries: its entries.
        listed: providers whose tagged machines are listed as well.
        make: maker of providers.
        limit_s: limit of each provider's answer.

    Raises :class:`~skyward.errors.LedgerError`.
    """
    places = by_place(entry for entry in entries if entry.closed_at is None)
    for place in listed:
        places.setdefault(place, [])
    answers = await asyncio.gather(
        *(_answer(place, known, place in listed, make, limit_s) for place, known in places.items())
    )
    presence = Presence(silent=[each for each in answers if isinstance(each, str)])
    found = [(name, each) for (name, _), each in zip(places, answers, strict=True) if not isinstance(each, str)]
    ours, now = {entry.key: entry for known in places.values() for entry in known}, time.time()
    ends: dict[str, float | None] = {}
    for machine in (each for _, machines in found for each in machines):
        entry = ours.get(machine.key)
        if entry is None or entry.instance_id not in {None, machine.id}:
            continue
        presence.states[entry.key] = machine.state
        if machine.state is not InstanceState.GONE:
            ends[entry.key] = None
        elif machine.ended_at is not None or now - entry.created_at > _LISTED_S:
            ends[entry.key] = machine.ended_at or now
    await asyncio.to_thread(ledger.note_presence, ends)
    entries = await asyncio.to_thread(ledger.entries)
    just_ended = {each.key for each in entries if each.closed_at is not None and now - each.closed_at < _LISTED_S}
    presence.unknown = [
        Unknown(provider=name, instance_id=each.id, key=each.key)
        for name, machines in found
        for each in unaccounted(name, machines, entries)
        if each.state is not InstanceState.GONE and each.key not in just_ended
    ]
    return presence


async def _answer(
    place: Place,
    entries: Sequence[LedgerEntry],
    lists: bool,  # noqa: FBT001 - passed on
    make: MakeProvider,
    limit_s: float,
) -> Sequence[Instance] | str:
    """Return a provider's records, or the reason for which there are none."""
    name, settings = place
    try:
        async with asyncio.timeout(limit_s):
            provider = make(name, json.loads(settings))
            try:
                return await _records(provider, entries, lists=lists)
            finally:
                await provider.close()
    except TimeoutError:
        return f"{name}: no answer within {limit_s:g} s"
    except Exception as error:
        _logger.debug("no records of %s", name, exc_info=True)
        return attributed(name, reason_of(error))


async def _records(provider: Provider, entries: Sequence[LedgerEntry], *, lists: bool) -> Sequence[Instance]:
    """Return the records of these entries' machines; with ``lists`` also of the others with Skyward's tag."""
    lost = {entry.key for entry in entries if entry.instance_id is None}
    named = {entry.instance_id: entry.key for entry in entries if entry.instance_id is not None}
    found: dict[str, Instance] = {}
    if provider.supports("tagged") and (lists or lost):
        found = {each.id: each for each in await provider.tagged() if lists or each.key in lost}
    if named:
        found |= {each.id: replace(each, key=named[each.id]) for each in await provider.describe(list(named))}
    return [*found.values()]
