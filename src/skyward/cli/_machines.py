"""``skyward ls``, ``down``, ``sweep`` and ``top``: machines of pools by the ledger, and a live view of open pools."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyward.api.jobs import fetch_results
from skyward.api.live_views import read_snapshot
from skyward.base.waiting import SYSTEM_CLOCK
from skyward.cli._base import FAILED, Answer, Providers, Rows, answers, moment, money, provider_options
from skyward.display.tables import PoolView
from skyward.display.words import bill, plural
from skyward.errors import SkywardError
from skyward.events.snapshot import PoolSnapshot
from skyward.fleet.kept import keep_for
from skyward.ledger.fleet_record import FleetFolder, belongs_to, kept_fleets, no_such_fleet
from skyward.ledger.job_folders import job_folders
from skyward.ledger.keeper import end_fleet
from skyward.ledger.ledger import Ledger, LedgerEntry
from skyward.ledger.ownership import Moment, is_in_use, known_folders
from skyward.ledger.sweep import Presence, Sweep, SweepReport, Unknown, look_up, settings_text
from skyward.providers.base import InstanceState
from skyward.providers.registry import provider_settings
from skyward.request.checks import duration
from skyward.request.request import fleet_name

if TYPE_CHECKING:
    from rich.console import RenderableType

_SPARED = {
    True: "is alive",
    False: "has ended meanwhile; sweep again",
    None: "is on another machine or in another container and may be alive; --all ends it",
}
"""States of the owner of a spared pool, by whether it lives at the end of the sweep."""


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also machines that ended in the last month.")
@provider_options("Only machines of this provider, with those that this ledger does not account for")
@answers
def ls(*, everything: bool, providers: Providers) -> Answer:
    """List the machines of open pools: provider, state there, start, cost so far, and state of the owner process."""
    ledger = Ledger.of_user()
    listed = [(name, settings_text(provider_settings(providers.make(name)))) for name in providers.names]

    def recorded() -> list[LedgerEntry]:
        entries = ledger.entries() if everything else ledger.open_entries()
        return [entry for entry in entries if not providers.names or entry.purchase.provider in providers.names]

    presence = asyncio.run(look_up(ledger, recorded(), listed=listed))
    entries, now = recorded(), time.time()
    fleets = [] if providers.names else [_fleet(folder) for folder in kept_fleets()]
    document: dict[str, Any] = {
        "fleets": fleets,
        "machines": [_machine(entry) | _details(entry, presence, now) for entry in entries],
        "cost": sum(entry.cost(now) for entry in entries),
        "cost_by_provider": _by_provider(entries, now),
        "unknown": [_stranger(machine) for machine in presence.unknown],
        "unasked": presence.silent,
        "damaged": [{"key": entry.key, "reason": entry.damage} for entry in entries if entry.damage],
    }
    failed = document["damaged"] or (providers.names and presence.silent)
    none = "No machines are open" + (
        ", and none ended in the last month." if everything else "; --all lists those that have ended."
    )
    return Answer(
        document=document, text=_list_text(entries, document, presence, none), exit_code=FAILED if failed else 0
    )


@click.command()
@click.argument("pools", metavar="POOL...", nargs=-1, required=True)
@provider_options("Also end their machines at this provider that another computer's ledger has")
@answers
def down(*, pools: Sequence[str], providers: Providers) -> Answer:
    """End the machines of pools and of kept fleets, by id or name, of living owners too, and confirm it.

    These pools get no new machines. Results of jobs that are over are fetched first; jobs that are not are named.
    """
    ledger = Ledger.of_user()
    fleets = {folder.pool_id(): folder for folder in kept_fleets()}
    names = {folder.name: pool_id for pool_id, folder in fleets.items()}
    ids = [pool_id for pool in pools for pool_id in _pools_named(ledger, pool, names, elsewhere=bool(providers.names))]
    for folder in filter(None, map(fleets.get, dict.fromkeys(ids))):
        for job in fetch_results(folder.name):
            click.echo(f"job {job.id} is not over, or cannot be reached, and ends with {folder.name}", err=True)
    reports = [asyncio.run(_end(ledger, pool_id, fleets.get(pool_id))) for pool_id in dict.fromkeys(ids)]
    places = [(name, provider_settings(providers.make(name))) for name in providers.names]
    tagged = asyncio.run(Sweep(ledger).end_tagged(lambda pool_id: _is_named(pool_id, pools), places))
    document = _outcome_document(reports) | {"unknown": [_stranger(machine) for machine in tagged.unknown]}
    text = [line for report in reports for line in _outcomes(report)] + [*_strangers(tagged)] + [_summary(document)]
    failed = document["left"] or tagged.unasked or not tagged.clean
    return Answer(document=document | {"unasked": tagged.unasked}, text=text, exit_code=FAILED if failed else 0)


def _pools_named(ledger: Ledger, asked: str, fleets: Mapping[str, str], *, elsewhere: bool) -> Sequence[str]:
    """Return the ids of the pools that are meant: of a kept fleet, also of one whose folder was deleted.

    With ``elsewhere`` there may be none: another computer may know it.
    """
    if asked in fleets:
        return [fleets[asked]]
    recorded = dict.fromkeys(entry.purchase.pool_id for entry in ledger.open_entries())
    try:
        return [pool for pool in recorded if belongs_to(asked, pool)] or [known_pool(ledger, asked, fleets=[*fleets])]
    except click.BadParameter:
        if elsewhere:
            return []
        raise


def _is_named(pool_id: str, asked: Sequence[str]) -> bool:
    return any(pool_id == pool or belongs_to(pool, pool_id) for pool in asked)


@click.command(name="keep")
@click.argument("name")
@click.argument("length", metavar="TIME")
@answers
def keep_longer(*, name: str, length: str) -> Answer:
    """Keep the fleet NAME for TIME, such as 1h or 90m: from now on, or from the end of the client that has it.

    It counts instead of the pool's `keep=`, until the next pool of that name says otherwise.
    """
    folder = FleetFolder(fleet_name(name))
    seconds = duration("TIME", float(length) if length.isdecimal() else length)
    if not folder.pool_id():
        raise click.BadParameter(str(no_such_fleet(name)), param_hint="NAME")
    asyncio.run(keep_for(folder, Ledger.of_user(), seconds))
    fleet = _fleet(folder)
    return Answer(document=fleet, text=[f"{name}: {fleet['words']}"])


def _by_provider(entries: Sequence[LedgerEntry], now: float) -> Mapping[str, float]:
    """Return the cost of machines until ``now``, in USD by provider."""
    costs: defaultdict[str, float] = defaultdict(float)
    for entry in entries:
        costs[entry.purchase.provider] += entry.cost(now)
    return dict(costs)


def _fleet(folder: FleetFolder) -> dict[str, Any]:
    """Return the facts about a kept fleet; of one that cannot be read, the reason."""
    facts: dict[str, Any] = {"name": folder.name}
    try:
        record = folder.read()
    except SkywardError as error:
        return facts | {"pool": folder.pool_id(), "error": str(error), "words": "unreadable"}
    if record is None:
        return facts | {"error": "it has just ended", "words": "ended"}
    until, kept = record.kept_until, _span(record.keep_s)
    jobs = sum(bool(job.unfetched()) for job in job_folders(folder.name) if job.record.pool_id == record.pool_id)
    in_use = folder.is_held()
    if in_use or until is None:
        words = f"in use, then for {kept}"
    elif until.left_s > 0:
        words = f"until {_time(until)}"
    else:
        words = f"until its jobs are over, and {kept}"
    return facts | {
        "pool": record.pool_id,
        "nodes": len(record.nodes),
        "price_per_hour": record.price_per_hour,
        "jobs": jobs,
        "in_use": in_use,
        "keep_s": record.keep_s,
        "kept_until": None if in_use or until is None else moment(time.time() + until.left_s),
        "words": words,
    }


def _time(moment: Moment) -> str:
    return time.strftime("%H:%M", time.localtime(time.time() + moment.left_s))


def _span(seconds: float) -> str:
    """Return a length of time in its largest whole unit, such as ``"20m"``."""
    units = [(86400, "d"), (3600, "h"), (60, "m")]
    return next((f"{seconds / size:g}{unit}" for size, unit in units if not seconds % size), f"{seconds:g}s")


async def _end(ledger: Ledger, pool_id: str, fleet: FleetFolder | None) -> SweepReport:
    return await (end_fleet(fleet, ledger) if fleet is not None else Sweep(ledger).end_pool(pool_id))


@click.command()
@click.option(
    "--all",
    "others",
    is_flag=True,
    help="Also machines whose owner is on another machine or in another container, and may be alive.",
)
@click.option("--unknown", is_flag=True, help="Also tagged machines that this ledger does not account for.")
@click.option("--ssh", "hosts", metavar="HOST", multiple=True, help="Also search this host; may be repeated.")
@provider_options("Also search this provider")
@answers
def sweep(*, others: bool, unknown: bool, hosts: Sequence[str], providers: Providers) -> Answer:
    """End machines that a crash left: those whose owner is dead. Machines of a living owner are never touched."""
    also: list[tuple[str, Mapping[str, Any]]] = [("local", {})]
    also += [("ssh", {"hosts": [host]}) for host in hosts]
    also += [(name, provider_settings(providers.make(name))) for name in providers.names]
    report = asyncio.run(Sweep(Ledger.of_user()).run(others=others, unknown=unknown, also=also))
    document = _outcome_document([report]) | {
        "spared": [_machine(entry) for entry in report.spared],
        "unknown": [_stranger(machine) for machine in report.unknown],
        "unasked": report.unasked,
    }
    done = report.clean and not (report.unasked and (unknown or hosts or providers.names))
    return Answer(document=document, text=_sweep_text(report, document), exit_code=0 if done else FAILED)


def known_pool(ledger: Ledger, asked: str, others: Sequence[str] = (), fleets: Sequence[str] | None = None) -> str:
    """Return the id of the pool of the ledger, or of ``others``, whose id is ``asked`` or begins with it.

    The name of a kept fleet means its latest pool. If there is no such pool, the error names the kept ``fleets``, if
    they are given, and how to find one of another computer.
    """
    recorded = dict.fromkeys(entry.purchase.pool_id for entry in ledger.entries())
    known = [*(pool for pool in recorded if pool not in others), *others]  # the latest that are of use come last
    recent = f"The latest are {', '.join(known[-5:])}" if known else "There are none"
    if not asked:
        raise click.UsageError(f"name a POOL of this user's ledger. {recent}")
    matching = [pool for pool in known if pool == asked] or [pool for pool in known if pool.startswith(asked)]
    matching = matching or [pool for pool in known if belongs_to(asked, pool)][-1:]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise click.BadParameter(f"{asked} is ambiguous: {', '.join(matching)}", param_hint="POOL")
    if fleets is not None:
        kept = f"The kept fleets are {', '.join(fleets)}. " if fleets else ""
        recent = f"{kept}{recent}. A kept fleet of another computer is found with --provider NAME"
    raise click.BadParameter(f"no pool {asked} in this user's ledger. {recent}", param_hint="POOL")


def _list_text(
    entries: Sequence[LedgerEntry], document: dict[str, Any], presence: Presence, none: str
) -> Iterator[str | Rows]:
    if document["fleets"]:
        yield Rows(("fleet", "nodes", "$/h", "jobs", "kept"), [_fleet_row(each) for each in document["fleets"]])
    if entries:
        columns = ("pool", "node", "provider", "instance", "type", "state", "since", "$/h", "cost", "owner")
        yield Rows(columns, [_row(entry, row) for entry, row in zip(entries, document["machines"], strict=True)])
        yield f"{plural(len(entries), 'machine')}, {bill(document['cost'], document['cost_by_provider'])}"
    else:
        yield none
    for machine in presence.unknown:
        yield f"not accounted for by this ledger: {machine.provider} {machine.instance_id} ({machine.key})"
    for reason in dict.fromkeys(presence.silent):
        yield f"state unknown: {reason}"
    for entry in entries:
        if entry.damage:
            yield f"DAMAGED  {_name(entry)}: {entry.damage}"


def _sweep_text(report: SweepReport, document: dict[str, Any]) -> Iterator[str]:
    yield from _outcomes(report)
    yield from _strangers(report)
    for entry in {entry.purchase.pool_id: entry for entry in report.spared}.values():
        yield f"spared   {entry.purchase.pool_id}: {_why_spared(entry)}"
    yield _summary(document)
    if any(not machine.ended and not machine.reason for machine in report.unknown):
        yield "Unknown machines may be in another computer's ledger; `skyward sweep --unknown` ends them."


def _strangers(report: SweepReport) -> Iterator[str]:
    for machine in report.unknown:
        state = "ended    " if machine.ended else "LEFT     " if machine.reason else "unknown  "
        yield f"{state}{machine.provider} {machine.instance_id} ({machine.key}) {machine.reason}".rstrip()
    for reason in dict.fromkeys(report.unasked):
        yield f"no search for unknown machines: {reason}"


def _why_spared(entry: LedgerEntry) -> str:
    lives, until = entry.owner and entry.owner.lives(), entry.kept_until
    if lives or until is None:
        return f"its owner {_SPARED[lives]}"
    limit = f"until {_time(until)}" if until.left_s > 0 else "until its jobs are over"
    return f"it is kept {limit}; `skyward down {entry.purchase.pool_id}` ends it"


def _outcomes(report: SweepReport) -> Iterator[str]:
    for swept in report.ended:
        yield f"ended    {_name(swept.entry, swept.instance_id)}"
    for swept in report.left:
        yield f"LEFT     {_name(swept.entry)}: {swept.reason}"


def _summary(document: dict[str, Any]) -> str:
    ended = len(document["ended"]) + sum(machine["ended"] for machine in document.get("unknown", ()))
    return f"{ended} ended, {len(document['gone'])} were gone already, {len(document['left'])} left"


def _outcome_document(reports: Sequence[SweepReport]) -> dict[str, Any]:
    return {
        "ended": [
            _machine(swept.entry) | {"instance": swept.instance_id} for report in reports for swept in report.ended
        ],
        "gone": [_machine(entry) for report in reports for entry in report.forgotten],
        "left": [_machine(swept.entry) | {"reason": swept.reason} for report in reports for swept in report.left],
    }


def _name(entry: LedgerEntry, instance_id: str | None = None) -> str:
    bought = entry.purchase
    machine = instance_id or entry.instance_id or "without an id"
    return f"{bought.pool_id} node {entry.node}: {bought.provider} {machine}"


def _machine(entry: LedgerEntry) -> dict[str, Any]:
    bought = entry.purchase
    return {
        "pool": bought.pool_id,
        "node": entry.node,
        "provider": bought.provider,
        "region": bought.region,
        "instance": entry.instance_id,
        "key": entry.key,
    }


def _details(entry: LedgerEntry, presence: Presence, now: float) -> dict[str, Any]:
    owner, state = entry.owner, InstanceState.GONE if entry.closed_at is not None else presence.states.get(entry.key)
    return {
        "state": state and state.value,
        "type": entry.purchase.machine,
        "spot": entry.purchase.spot,
        "since": moment(entry.created_at),
        "ended": moment(entry.closed_at or entry.gone_at),
        "price_per_hour": entry.purchase.price_per_hour,
        "cost": entry.cost(now),
        "owner": None if owner is None else {"pid": owner.pid, "host": owner.host, "alive": owner.lives()},
        "kept": entry.owner_lives() is True and not (owner and owner.lives()),
    }


def _stranger(machine: Unknown) -> dict[str, Any]:
    facts = {
        "provider": machine.provider,
        "instance": machine.instance_id,
        "key": machine.key,
        "ended": machine.ended,
    }
    return facts | ({"reason": machine.reason} if machine.reason else {})


def _fleet_row(fleet: dict[str, Any]) -> tuple[str, ...]:
    if "error" in fleet:
        return (fleet["name"], "?", "?", "?", fleet["words"])
    return (
        fleet["name"],
        str(fleet["nodes"]),
        money(fleet["price_per_hour"]),
        str(fleet["jobs"]),
        fleet["words"],
    )


def _row(entry: LedgerEntry, machine: dict[str, Any]) -> tuple[str, ...]:
    owner = machine["owner"]
    if entry.closed_at is not None:
        words = f"ended {moment(entry.closed_at)}"
    elif owner is None:
        words = "unknown"
    elif machine["kept"]:
        words = "kept without one"
    else:
        dead = "removes it from this list" if entry.gone_at is not None else "ends its machines"
        place = "in another container" if owner["host"] == socket.gethostname() else f"on {owner['host']}"
        says = {True: "alive", False: f"dead: `skyward sweep` {dead}", None: f"{place}, may be alive"}
        words = f"{owner['pid']}, {says[owner['alive']]}"
    return (
        machine["pool"],
        str(machine["node"]),
        f"{machine['provider']} {machine['region']}".strip(),
        machine["instance"] or "?",
        f"{machine['type']}{' (spot)' if machine['spot'] else ''}",
        machine["state"] or "?",
        machine["since"] or "",
        money(machine["price_per_hour"]),
        money(machine["cost"]),
        words,
    )


_REFRESH_S = 1.0


@click.command()
@click.argument("pool", required=False)
@click.option("--once", is_flag=True, help="Print the present state once, as --json does and as into a pipe.")
@answers
def top(*, pool: str | None, once: bool) -> Answer:
    """Show nodes, workers and their calls, queue, failures, load and cost of POOL, or of all open pools, live."""
    as_json: bool = click.get_current_context().params["as_json"]
    looks = _look(pool)
    if not (once or as_json) and sys.stdout.isatty() and any(look.snapshot for look in looks):
        looks = _live(pool, looks)
    text = [look.view() for look in looks] or ["No pools are open here; `skyward ls` lists machines."]
    failed = pool is not None and not any(look.snapshot for look in looks)
    return Answer(document={"pools": [look.document() for look in looks]}, text=text, exit_code=FAILED * failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolLook:
    """State of one pool; without a snapshot, the reason and the ledger's facts."""

    pool_id: str
    snapshot: PoolSnapshot | None = None
    reason: str = ""

    def document(self) -> dict[str, Any]:
        return self.snapshot.to_dict() if self.snapshot else {"pool_id": self.pool_id, "error": self.reason}

    def view(self) -> RenderableType:
        from rich.text import Text

        return PoolView.of(self.snapshot).rich() if self.snapshot else Text(f"{self.pool_id}: {self.reason}")


def _look(asked: str | None) -> Sequence[_PoolLook]:
    folders = known_folders()
    if asked is None:
        return [_look_at(folder) for folder in folders if is_in_use(folder)]
    matching = [folder for folder in folders if folder.name == asked or folder.name.startswith(asked)]
    if len(matching) == 1:
        return [_look_at(matching[0])]
    others = [folder.name for folder in reversed(folders)]
    pool_id = known_pool(Ledger.of_user(), asked, others)  # else the error that names the known pools
    return [_look_at(next((folder for folder in folders if folder.name == pool_id), Path(pool_id)))]


def _look_at(folder: Path) -> _PoolLook:
    try:
        return _PoolLook(pool_id=folder.name, snapshot=read_snapshot(folder))
    except OSError:
        living = is_in_use(folder)
        why = "its client does not answer" if living else "it is closed, or its client has ended"
        return _PoolLook(pool_id=folder.name, reason=f"{why}; {_ledger_words(folder.name)}")
    except ValueError as error:
        return _PoolLook(pool_id=folder.name, reason=f"its client has another version of Skyward: {error}")


def _ledger_words(pool_id: str) -> str:
    """Return the ledger's facts about a pool."""
    now = time.time()
    entries = Ledger.of_user().entries(pool_id=pool_id)
    count = sum(entry.closed_at is None for entry in entries)
    cost = money(sum(entry.cost(now) for entry in entries))
    if count:
        return f"{plural(count, 'machine')} may still run, {cost} so far: `skyward down {pool_id}` ends them"
    return f"by the ledger none of its machines is left, {cost} in all"


def _live(asked: str | None, looks: Sequence[_PoolLook]) -> Sequence[_PoolLook]:
    """Redraw every second until Ctrl-C, or until no pool answers; return the last state."""
    from rich.console import Group
    from rich.live import Live

    with (
        suppress(KeyboardInterrupt),
        Live(get_renderable=lambda: Group(*(look.view() for look in looks)), auto_refresh=False, screen=True) as live,
    ):
        while any(look.snapshot for look in looks):
            asyncio.run(SYSTEM_CLOCK.sleep(_REFRESH_S))
            looks = _look(asked)
            live.refresh()
    return looks
