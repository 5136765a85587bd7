"""Machines that other processes left behind, found by ledger entries and tags: their end, and their presence."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import SkywardError
from skyward.events import Notice, SkywardEvent
from skyward.ledger.fleet_record import belongs_to, kept_pools
from skyward.ledger.ledger import Ledger, LedgerEntry
from skyward.ledger.termination import end_instances
from skyward.providers.base import Instance, InstanceState, Provider
from skyward.providers.registry import make_provider, provider_settings

_LONGEST_CREATE_S = 3600.0
_logger = logging.getLogger("skyward")

MakeProvider = Callable[[str, Mapping[str, Any]], Provider]
"""Maker of a provider from its name and settings; tests pass their own."""
Place = tuple[str, str]
"""Name of a provider, and its settings as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A machine that was there, and is confirmed gone now."""

    entry: LedgerEntry
    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """An entry that stays open, with the reason: its machine may still exist."""

    entry: LedgerEntry
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A machine with Skyward's tag that no open entry of this ledger accounts for.

    Attributes:
        provider: its provider's name.
        instance_id: its id there.
        key: its tag.
        ended: True if it was ended.
        reason: the error that prevented its end; empty if it was ended, or only listed.
    """

    provider: str
    instance_id: str
    key: str
    ended: bool = False
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class SweepReport:
    """Result of a sweep.

    Attributes:
        ended: machines that were there and are gone now.
        forgotten: closed entries whose machines were gone already, or never existed.
        left: entries that stay open.
        spared: entries of pools whose owner lives, or cannot be judged from here.
        unknown: tagged machines that no open entry of this ledger accounts for.
        unasked: reasons for which some providers could not list tagged machines.
    """

    ended: list[Swept] = field(default_factory=list[Swept])
    forgotten: list[LedgerEntry] = field(default_factory=list[LedgerEntry])
    left: list[Left] = field(default_factory=list[Left])
    spared: list[LedgerEntry] = field(default_factory=list[LedgerEntry])
    unknown: list[Unknown] = field(default_factory=list[Unknown])
    unasked: list[str] = field(default_factory=list[str])

    @property
    def clean(self) -> bool:
        """True if no machine is left that should have ended."""
        return not self.left and not any(each.reason for each in self.unknown)


@dataclass(slots=True, eq=False)
class Sweep:
    """One sweep: ends machines whose owners do not any more. For one use, on one event loop.

    An error of one provider or one machine does not stop the others.

    Attributes:
        ledger: the record of the machines.
        make: maker of providers.
        own: a provider in use, which is not closed. It takes the place of a made one with equal settings.
        clock: the time.
    """

    ledger: Ledger
    make: MakeProvider = field(default=make_provider, kw_only=True)
    own: Provider | None = field(default=None, kw_only=True)
    clock: Clock = field(default=SYSTEM_CLOCK, kw_only=True)
    _report: SweepReport = field(default_factory=SweepReport, init=False)
    _kept: frozenset[str] | None = field(default=None, init=False)

    async def end_pool(self, pool_id: str) -> SweepReport:
        """End a pool's machines, even if its owner lives; it gets no more.

        Raises :class:`~skyward.errors.LedgerError`.
        """
        await asyncio.to_thread(self.ledger.end_pool, pool_id)
        entries = await asyncio.to_thread(self.ledger.open_entries, pool_id=pool_id)
        self._leave_damaged(entries)
        places = by_place(entries)
        await asyncio.gather(*(self._end_all(*place, entries) for place, entries in places.items()))
        return self._report

    async def end_tagged(
        self, is_meant: Callable[[str], bool], places: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> SweepReport:
        """End tagged machines of pools that are in another computer's ledger.

        Args:
            is_meant: returns True for the id of such a pool.
            places: names and settings of the providers to ask.
        """

        async def end_at(name: str, settings: Mapping[str, Any]) -> None:
            provider = self.make(name, settings)
            try:
                tagged = await _list_tagged(provider, {}, in_full=True, clock=self.clock)
                if isinstance(tagged, str):
                    self._report.unasked.append(tagged)
                    return
                meant = [each for each in tagged if is_meant(_pool_of(each.key))]
                if meant:
                    self._report.unknown += await _treat(provider, meant, end=True)
                for pool_id in sorted({_pool_of(each.key) for each in meant}):
                    await provider.tidy(pool_id)
            finally:
                await provider.close()

        await asyncio.gather(*(end_at(*place) for place in places))
        return self._report

    async def run(
        self, *, others: bool = False, unknown: bool = False, also: Sequence[tuple[str, Mapping[str, Any]]] = ()
    ) -> SweepReport:
        """End the machines of dead owners, and look for tagged ones that the ledger does not account for.

        Args:
            others: also end machines of unknown owners and of other computers' processes; never those of a living one.
            unknown: also end tagged machines that no open entry accounts for.
            also: names and settings of providers to ask besides those in the ledger.

        Raises :class:`~skyward.errors.LedgerError`.
        """
        entries = await asyncio.to_thread(self.ledger.entries)
        self._leave_damaged(entries)
        doomed = {entry.key for entry in entries if entry.closed_at is None and self._is_left_over(entry, others)}
        places = by_place(entries)
        named = [(name, settings_text(settings)) for name, settings in also]
        busy = {*named, *by_place(entry for entry in entries if entry.closed_at is None)}
        await asyncio.gather(
            *(
                self._end_all(
                    *place,
                    [entry for entry in places.get(place, ()) if entry.key in doomed],
                    unknown=unknown,
                    busy=place in busy,
                )
                for place in {**places, **dict.fromkeys(named)}
            )
        )
        return self._report

    async def end_dead(self, entries: Sequence[LedgerEntry]) -> SweepReport:
        """End the machines of those entries whose owners are certainly dead."""
        places = by_place([entry for entry in entries if self._is_left_over(entry, others=False)])
        await asyncio.gather(*(self._end_all(*place, doomed) for place, doomed in places.items()))
        return self._report

    def _leave_damaged(self, entries: Iterable[LedgerEntry]) -> None:
        damaged = [entry for entry in entries if entry.damage and entry.closed_at is None]
        self._report.left += [Left(entry=entry, reason=entry.damage) for entry in damaged]

    def _is_left_over(self, entry: LedgerEntry, others: bool) -> bool:  # noqa: FBT001 - passed on
        lives = self._has_keeper(entry) or entry.owner_lives()
        if lives or (lives is None and not others):
            self._report.spared.append(entry)
            return False
        return True

    def _has_keeper(self, entry: LedgerEntry) -> bool:
        """Return whether a keeper ends the machine: its time may pass before that notes that jobs prolong it."""
        if entry.kept_until is None:
            return False
        if self._kept is None:
            self._kept = kept_pools()
        return entry.purchase.pool_id in self._kept

    async def _end_all(
        self,
        name: str,
        settings: str,
        entries: Sequence[LedgerEntry],
        *,
        unknown: bool | None = None,
        busy: bool = True,
    ) -> None:
        """End these entries' machines.

        Args:
            name: the provider's name.
            settings: its settings, as JSON.
            entries: the entries to end.
            unknown: True also ends tagged machines that the ledger does not account for; False lists them; None does
                not look for them.
            busy: False if no entry of it is open and the user has not named it. Other hosts of the user's own are then
                not listed: one that is gone for good would be tried for a month.
        """
        try:
            provider = self._provider(name, settings)
        except Exception as error:
            _logger.debug("no provider %s with the settings %s", name, settings, exc_info=True)
            self._report.left += [Left(entry=entry, reason=reason_of(error)) for entry in entries]
            return
        try:
            if unknown is False and not busy and provider.own_machines and not provider.this_machine:
                unknown = None
            lost = {entry.key: entry.created_at for entry in entries if entry.instance_id is None}
            tagged: Sequence[Instance] | str = ""
            if unknown is not None or lost:
                tagged = await _list_tagged(provider, lost, in_full=unknown is not None, clock=self.clock)
            await asyncio.gather(*(self._end(provider, tagged, entry) for entry in entries))
            left = {each.entry.purchase.pool_id for each in self._report.left}
            pools = {entry.purchase.pool_id for entry in entries} - left
            await asyncio.gather(*(provider.tidy(pool_id) for pool_id in sorted(pools)))
            if unknown is not None:
                await self._look_for_unknown(provider, tagged, end=unknown)
        finally:
            if provider is not self.own:
                await provider.close()

    def _provider(self, name: str, settings: str) -> Provider:
        own = self.own
        if own is not None and (own.name, settings_text(provider_settings(own))) == (name, settings):
            return own
        return self.make(name, json.loads(settings))

    async def _end(self, provider: Provider, tagged: Sequence[Instance] | str, entry: LedgerEntry) -> None:
        """End the machine of an entry; without an id, every machine with its tag. Their ends go to the ledger."""
        try:
            ids = [entry.instance_id] if entry.instance_id else _ids_by_tag(tagged, entry)
            seen = await provider.describe(ids) if ids else ()
        except Exception as error:
            _logger.debug("machine %s is left", entry.key, exc_info=True)
            self._report.left.append(Left(entry=entry, reason=reason_of(error)))
            return
        there = [each for each in seen if each.state is not InstanceState.GONE]
        ends = [each.ended_at for each in seen if each.ended_at is not None]
        if there or ends:
            await asyncio.to_thread(self.ledger.note_presence, {entry.key: None if there else max(ends)})
        failures = await _end_machines(provider, seen)
        self._report.ended += [Swept(entry=entry, instance_id=each.id) for each in there if each.id not in failures]
        if failures:
            self._report.left.append(Left(entry=entry, reason="; ".join(failures.values())))
            return
        await asyncio.to_thread(self.ledger.close, [entry.key])
        if not there:
            self._report.forgotten.append(entry)

    async def _look_for_unknown(self, provider: Provider, tagged: Sequence[Instance] | str, *, end: bool) -> None:
        if isinstance(tagged, str):
            self._report.unasked.append(tagged)
            return
        # The ledger is read after the provider was asked, so that machines launched in between have their entries.
        entries = await asyncio.to_thread(self.ledger.entries)
        ended = {each.instance_id for each in self._report.ended}
        strangers = [each for each in unaccounted(provider.name, tagged, entries) if each.id not in ended]
        if strangers:
            self._report.unknown += await _treat(provider, strangers, end=end)


def _pool_of(key: str) -> str:
    return key.rsplit("-", 2)[0]


def unaccounted(provider: str, machines: Iterable[Instance], entries: Iterable[LedgerEntry]) -> list[Instance]:
    """Return the machines of a provider's list that no open entry accounts for.

    An entry accounts for the machine with its id, whatever its tag is by now. As long as its create call has not
    answered, it accounts for every machine with its key.
    """
    entries = [entry for entry in entries if entry.closed_at is None]
    ids = {entry.instance_id for entry in entries if entry.purchase.provider == provider}
    unanswered = {entry.key for entry in entries if entry.instance_id is None}
    return [each for each in machines if each.id not in ids and each.key not in unanswered]


def by_place(entries: Iterable[LedgerEntry]) -> dict[Place, list[LedgerEntry]]:
    """Group entries by the provider with the settings that they were bought with; damaged ones have none."""
    places: dict[Place, list[LedgerEntry]] = {}
    for entry in entries:
        if entry.damage:
            continue
        place = entry.purchase.provider, settings_text(entry.purchase.settings)
        places.setdefault(place, []).append(entry)
    return places


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return a provider's settings as JSON, equal for equal ones."""
    return json.dumps(settings, sort_keys=True)


async def _list_tagged(
    provider: Provider, lost: Mapping[str, float], *, in_full: bool, clock: Clock
) -> Sequence[Instance] | str:
    """Return a provider's machines with Skyward's tag, or the reason for which it cannot list them.

    They are listed once more where one may be missing: after ``listing_s`` where the list is wanted ``in_full``, and
    ``unlisted_s`` after the entry of a key of ``lost`` without a machine. The first list precedes the wait, so that
    refused credentials are reported at once. A machine of either list counts: lists from several servers of a provider
    may lag behind each other.

    Args:
        provider: the provider.
        lost: Unix times of the entries without an id, by key.
        in_full: True if every machine is wanted, not those of ``lost`` only.
        clock: the time.
    """
    why_not = f"{provider.name}: it cannot list its machines"
    if provider.supports("tagged"):
        try:
            tagged = {each.id: each for each in await provider.tagged()}
            missing = lost.keys() - {each.key for each in tagged.values()}
            waits_s = [provider.listing_s if in_full or missing else 0.0]
            waits_s += [
                min(lost[key] - time.time(), 0.0) + max(provider.listing_s, provider.unlisted_s) for key in missing
            ]
            if (late_s := max(waits_s)) > 0:
                await clock.sleep(late_s)
                tagged |= {each.id: each for each in await provider.tagged()}
            return [*tagged.values()]
        except Exception as error:
            _logger.debug("%s cannot list its machines", provider.name, exc_info=True)
            why_not = attributed(provider.name, reason_of(error))
    return why_not


def _ids_by_tag(tagged: Sequence[Instance] | str, entry: LedgerEntry) -> list[str]:
    """Return the ids of the machines whose create call was never answered; empty if none was made."""
    if isinstance(tagged, str):
        raise SkywardError(f"its create call was never answered, and it may exist. {tagged}")
    found = [each.id for each in tagged if each.key == entry.key]
    if not found and _may_be_on_its_way(entry):
        raise SkywardError("it may have been requested just now; try again in a minute")
    return found


def _may_be_on_its_way(entry: LedgerEntry) -> bool:
    dead = entry.owner is None or entry.owner.lives() is False
    return not dead and time.time() - entry.created_at < _LONGEST_CREATE_S


async def _end_machines(provider: Provider, machines: Sequence[Instance]) -> dict[str, str]:
    """End machines and their by-products; return why some may be left, by id."""

    async def end_machine(machine: Instance) -> None:
        if machine.state is InstanceState.GONE:
            await provider.terminate([machine.id])  # for its leftovers: logs, by-products
        else:
            await end_instances(provider, [machine.id])

    outcomes = await asyncio.gather(*map(end_machine, machines), return_exceptions=True)
    reasons: dict[str, str] = {}
    for machine, error in zip(machines, outcomes, strict=True):
        if isinstance(error, Exception):
            _logger.debug("machine %s is left", machine.id, exc_info=error)
            reasons[machine.id] = reason_of(error)
        elif error is not None:  # a cancellation from inside confirms nothing
            raise error
    return reasons


async def _treat(provider: Provider, strangers: Sequence[Instance], *, end: bool) -> list[Unknown]:
    """List or end machines, except those that have ended since they were listed."""
    try:
        seen = await provider.describe([each.id for each in strangers])
    except Exception as error:
        _logger.debug("%s does not describe its machines", provider.name, exc_info=True)
        if len(strangers) > 1:  # one of several hosts may not answer
            return [each for one in strangers for each in await _treat(provider, [one], end=end)]
        seen, reasons = strangers, {strangers[0].id: reason_of(error) if end else ""}
    else:
        reasons = await _end_machines(provider, seen) if end else {}
    return [
        Unknown(
            provider=provider.name,
            instance_id=each.id,
            key=each.key,
            ended=end and each.id not in reasons,
            reason=reasons.get(each.id, ""),
        )
        for each, machine in zip(strangers, seen, strict=True)
        if machine.state is not InstanceState.GONE or each.id in reasons
    ]


def reason_of(error: Exception) -> str:
    """Return an error as text; one that a provider should not raise, with its type."""
    return str(error) if isinstance(error, SkywardError | OSError) else f"{type(error).__name__}: {error}"


def attributed(provider: str, reason: str) -> str:
    """Return a reason with the provider's name in front, unless it begins with that, or with the name and a region."""
    named = re.match(rf"{re.escape(provider)}( [\w-]+)?:", reason, re.IGNORECASE)
    return reason if named else f"{provider}: {reason}"


# --- presence of recorded machines ----------------------------------------------------------------------------------

_LIMIT_S = 15.0
# A provider's records may miss a machine for so long after its launch, and still have it for so long after its end.
_LISTED_S = 300.0


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


# --- the sweep beside the opening of a pool -------------------------------------------------------------------------

_SETTLE_S = 30.0
_ADVICE = "they may cost money: run `skyward sweep`"


@dataclass(slots=True, eq=False)
class OpeningSweep:
    """One sweep in the background, of the machines at a provider that only a sweep ends. Belongs to the event loop.

    Machines of living owners and of other computers stay. Nothing is asked of the provider where the ledger has no such
    machine of a dead owner. Errors are notices.

    Attributes:
        provider: the opening pool's provider.
        ledger: the record of the machines.
        publish: receives notices of what was ended; must not block.
        pool_id: the opening pool's id: what an earlier client of a kept fleet had bought in vain ends in any case.
        fleet: name of a kept fleet that is opened for the first time: notices name other machines of a fleet so named.
        ends_dead: False if the sweep of another provider of the same name ends the machines of dead owners.
    """

    provider: Provider
    ledger: Ledger
    publish: Callable[[SkywardEvent], None]
    pool_id: str = ""
    fleet: str = ""
    ends_dead: bool = True
    _running: asyncio.Future[Any] | None = None

    def begin(self) -> None:
        """Begin to sweep; does nothing for machines that the user already has."""
        if not self.provider.own_machines:
            self._running = asyncio.gather(self._run(), self._look_for_namesakes())

    async def settle(self) -> None:
        """Wait up to 30 s for the sweep to end, then cancel it; its remaining entries stay open for the next one."""
        if self._running is not None:
            await asyncio.wait((self._running,), timeout=_SETTLE_S)
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        if not self.ends_dead:
            return
        name = self.provider.name
        try:
            entrusted = self.provider.supports("secret")
            entries = await asyncio.to_thread(self.ledger.billed_entries, name, entrusted=entrusted)
            if self.pool_id:
                own = await asyncio.to_thread(self.ledger.open_entries, pool_id=self.pool_id)
                entries = list({entry.key: entry for entry in (*entries, *own)}.values())
            if not entries:
                return
            report = await Sweep(self.ledger, own=self.provider).end_dead(entries)
            notes = notes_on_sweep(name, report, time.time())
        except Exception as error:
            _logger.debug("the sweep of %s failed", name, exc_info=True)
            notes = [f"could not look for machines that programs left at {name} when they died: {error}; {_ADVICE}"]
        for note in notes:
            self.publish(Notice(note))

    async def _look_for_namesakes(self) -> None:
        """Publish notices of machines of a fleet of the same name that are not in this ledger: they cost money, too."""
        name = self.provider.name
        if not (self.fleet and self.provider.supports("tagged")):
            return
        try:
            tagged = await self.provider.tagged()
            entries = await asyncio.to_thread(self.ledger.entries)
        except Exception:
            _logger.debug("%s cannot list its machines", name, exc_info=True)
            return
        pools: dict[str, list[str]] = {}
        for machine in unaccounted(name, tagged, entries):
            if (pool_id := _pool_of(machine.key)) != self.pool_id and belongs_to(self.fleet, pool_id):
                pools.setdefault(pool_id, []).append(machine.id)
        for pool_id, machines in pools.items():
            text = (
                f"{name} has machines of another fleet {self.fleet!r}: {', '.join(machines)}. They belong "
                "to another computer, or the state folder that had their keys is lost; "
                f"`skyward down {pool_id} --provider {name}` ends them"
            )
            self.publish(Notice(text))


def opening_sweeps(
    providers: Iterable[Provider], ledger: Ledger, *, publish: Callable[[SkywardEvent], None], pool_id: str, fleet: str
) -> Sequence[OpeningSweep]:
    """Return the sweeps of a pool's providers; entries of providers of the same name are swept once."""
    names: set[str] = set()
    sweeps: list[OpeningSweep] = []
    for provider in providers:
        ends_dead = provider.name not in names
        sweeps.append(OpeningSweep(provider, ledger, publish, pool_id, fleet, ends_dead))
        names.add(provider.name)
    return sweeps


async def settle_sweeps(sweeps: Iterable[OpeningSweep]) -> None:
    """Settle all sweeps at the same time."""
    await asyncio.gather(*(sweep.settle() for sweep in sweeps))


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
