"""What the opening of a pool would do, found by the code that opens pools; nothing is created."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Final

from skyward.api.node_packages import MIRRORING, refuse_spread_gangs, runs_here, with_environment
from skyward.base.loop import LoopThread
from skyward.base.waiting import SYSTEM_CLOCK
from skyward.display.tables import html_table, text_table
from skyward.display.words import duration, money, plural
from skyward.environment.skyward_wheel import engine_pins
from skyward.errors import PoolStateError, SkywardError
from skyward.events import Notice, SkywardEvent
from skyward.fleet.machines import Machines
from skyward.ledger.fleet_record import FleetFolder, FleetRecord, changes_to
from skyward.ledger.ledger import Ledger
from skyward.market.choose import Batch
from skyward.market.consent import Forecast
from skyward.providers.base import PASSING, Offer, Provider
from skyward.providers.several import own_copy
from skyward.request.image import ImageSettings
from skyward.request.includes import bytes_of, included_files, size_words
from skyward.request.request import PoolRequest

__all__ = ["Plan", "PlannedOffer", "make_plan"]

_WIDTH: Final = 80
_SHOWN_OFFERS: Final = 20
_SHOWN_FILES: Final = 12
_COLUMNS: Final = ("nodes", "try", "place", "machine", "accelerators", "market", "$/h", "at most")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOffer:
    """Machines that the opening of a pool would try to get.

    Attributes:
        nodes: number of nodes that they are for.
        attempt: 1 for those that are tried first for these nodes, 2 for those that are tried if the first are refused.
        provider: name of the provider.
        region: region; empty if the provider has none.
        zone: zone of the region; empty for any.
        machine: the provider's name of the machine type.
        accelerator: name of the accelerators; None without.
        accelerators: number of accelerators of a machine.
        cores: cores of a machine.
        memory_gib: main memory of a machine.
        spot: True if the provider may take the machines back.
        price_per_hour: USD for one machine; None is unknown.
        at_most: USD that all of these nodes can cost until ``timeout``, within ``max_cost``; None is unknown.
        connected: True if the machines reach each other.
        ends_itself: True if the machines can end their own bill when the program is dead, or cost nothing.
        installs: True if the machines would install the plan's ``packages``, and do not use what is installed here.
    """

    nodes: int
    attempt: int
    provider: str
    region: str
    zone: str
    machine: str
    accelerator: str | None
    accelerators: int
    cores: int
    memory_gib: float
    spot: bool
    price_per_hour: float | None
    at_most: float | None
    connected: bool
    ends_itself: bool
    installs: bool


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """What the opening of a pool would do at this moment; shown as a table, as text and in notebooks.

    Attributes:
        provider: name of the pool's provider.
        nodes: number of machines that it would get.
        present: number of nodes of a kept fleet that it would take over.
        most_nodes: number of nodes that the pool can have.
        spread: True if the nodes may be of several providers and regions.
        timeout_s: hard limit on the life of a node.
        offers: the machines, in the order in which they would be tried.
        at_most: USD that the pool can cost until ``timeout``, whichever of the offers it gets, within ``max_cost``;
            None is unknown. Of an elastic pool, and for machines that replace lost ones, only ``max_cost`` is a limit.
        packages: requirements that would be installed on these machines, in pip's notation, Skyward's own ones last.
        apt: Debian packages that would be installed.
        files: names of the files that every node would get, in the folder of its files.
        files_bytes: their size.
        notes: remarks that the opening would publish, and questions that it would ask.
        problems: why the pool would not open; empty if it would.
        waits_s: seconds for which the opening would try again what the problem is about (``wait_for_capacity``).
    """

    provider: str
    nodes: int
    present: int
    most_nodes: int
    spread: bool
    timeout_s: float
    offers: tuple[PlannedOffer, ...]
    at_most: float | None
    packages: tuple[str, ...]
    apt: tuple[str, ...]
    files: tuple[str, ...]
    files_bytes: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    waits_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    def __repr__(self) -> str:
        table = [text_table(_COLUMNS, self._rows)] if self.offers else []
        details = [_wrapped(f"{title}: {text}") for title, text in self._details()]
        return "\n".join([_wrapped(self._headline()), *table, *details])

    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self._rows) if self.offers else ""
        details = "".join(f"<li>{escape(title)}: {escape(text)}</li>" for title, text in self._details())
        return f"<p>{escape(self._headline())}</p>{table}<ul>{details}</ul>"

    @property
    def _rows(self) -> Sequence[Sequence[str]]:
        return [_cells(offer) for offer in self.offers[:_SHOWN_OFFERS]]

    def _headline(self) -> str:
        if self.waits_s:
            return f"This pool would not open now: it would wait for capacity, for up to {duration(self.waits_s)}."
        if self.problems:
            return "This pool would not open."
        taken = f"take over {plural(self.present, 'node')}" if self.present else ""
        sources = ", ".join(_labels(self.offers)) or self.provider
        got = f"get {plural(self.nodes, 'node')} of {sources}" if self.nodes or not self.present else ""
        more = f", and up to {self.most_nodes} with its work" if self._grows else ""
        would = " and ".join(filter(None, (taken, got)))
        return f"Opening this pool would {would}{more}{self._cost_words() if self.offers else ''}."

    @property
    def _grows(self) -> bool:
        return self.most_nodes > self.nodes + self.present

    def _cost_words(self) -> str:
        if self.at_most is None:
            return ", for an unknown sum: set max_cost" if self._grows else ", for an unknown sum"
        if not self.at_most:
            return ", for nothing"
        if self._grows:
            return f", for at most {money(self.at_most)}"
        first = sum(offer.at_most or 0.0 for offer in self.offers if offer.attempt == 1)
        last = f" ({money(self.at_most)} if only the most expensive can be had)" if first < self.at_most else ""
        return f", for at most {money(min(first, self.at_most))}{last} until timeout={self.timeout_s:g}"

    def _details(self) -> Iterator[tuple[str, str]]:
        if (more := len(self.offers) - _SHOWN_OFFERS) > 0:
            yield "offers", f"{more} more, which are tried after these"
        if self.packages or self.apt:
            counted = plural(len(self.packages) + len(self.apt), "package")
            some = not all(offer.installs for offer in self.offers)
            where = f" on machines of {_names(offer for offer in self.offers if offer.installs)}" if some else ""
            yield counted + where, ", ".join([*self.packages, *(f"{name} (apt)" for name in self.apt)])
        elif not self.problems:
            yield "packages", "none is installed"
        if self.files:
            shown = ", ".join(self.files[:_SHOWN_FILES])
            more_files = len(self.files) - _SHOWN_FILES
            rest = f" and {more_files} more" if more_files > 0 else ""
            yield f"{plural(len(self.files), 'file')}, {size_words(self.files_bytes)}", shown + rest
        if self.offers:
            if self.most_nodes > 1:
                yield "network", _network_words(self.offers, spread=self.spread)
            yield "own end", _end_words(self.offers)
        yield from (("note", note) for note in self.notes)
        yield from (("problem", problem) for problem in self.problems)


def make_plan(
    request: PoolRequest,
    provider: Provider,
    *,
    names: Sequence[Mapping[str, object]],
    loop: LoopThread,
    as_found: bool = False,
    takeover: bool = False,
) -> Plan:
    """Return what a pool would do if it were opened now. Blocks.

    Args:
        request: the pool's parameters.
        provider: its provider.
        names: variables of the code that made the pool, see :func:`with_environment`.
        loop: the client's loop.
        as_found: True for a pool that takes a kept fleet as it is.
        takeover: True for a pool that takes it from another process.
    """
    notes: list[str] = []
    problems: list[str] = []
    waits_s = 0.0
    files = ()
    try:
        files = included_files(request.image.includes)
        if not as_found:
            refuse_spread_gangs(request, names)
            request = with_environment(request, provider, names=names, report=notes.append)
    except SkywardError as error:
        problems.append(str(error))
    here = any(member.this_machine for member in provider.members) and runs_here(request.image)
    try:
        record = _kept_fleet(request, takeover=takeover)
        purchase = loop.call(_decide_purchase(request, provider, notes, record, as_found=as_found, installed_here=here))
    except SkywardError as error:
        waits_s = 0.0 if problems or not isinstance(error, PASSING) else request.wait_for_capacity_s
        problems.append(str(error))
        purchase = _Purchase()
    sources = purchase.sources or provider.members
    installs = purchase.prepares and not all(source.this_machine and here for source in sources)
    return Plan(
        provider=provider.name,
        nodes=purchase.nodes,
        present=purchase.present,
        most_nodes=max(request.nodes, purchase.present + purchase.nodes),
        spread=request.spread,
        timeout_s=request.timeout_s,
        offers=purchase.offers,
        at_most=purchase.at_most,
        packages=_packages(request.image) if installs else (),
        apt=request.image.apt if installs and not all(source.this_machine for source in sources) else (),
        files=tuple(file.name for file in files if file.link or not file.path.is_dir()) if purchase.prepares else (),
        files_bytes=bytes_of(files) if purchase.prepares else 0,
        notes=tuple(note for note in dict.fromkeys(notes) if not note.startswith(MIRRORING)),
        problems=tuple(problems),
        waits_s=waits_s,
    )


def _packages(image: ImageSettings) -> tuple[str, ...]:
    from skyward.environment.installed import without_implied

    return (*without_implied(image.pip, engine_pins()), *engine_pins())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Purchase:
    """Machines that a pool would get, and nodes that it would take over.

    Attributes:
        nodes, present, offers, at_most: see :class:`Plan`.
        prepares: True if a node would get its environment and files.
        sources: providers of the nodes that would be set up; empty if they are not known.
    """

    nodes: int = 0
    present: int = 0
    offers: tuple[PlannedOffer, ...] = ()
    at_most: float | None = None
    prepares: bool = True
    sources: tuple[Provider, ...] = ()


def _kept_fleet(request: PoolRequest, *, takeover: bool) -> FleetRecord | None:
    """Return the record of the kept fleet that the pool would take over; None if there is none."""
    if not request.name:
        return None
    folder = FleetFolder(request.name)
    if not takeover and (client := folder.client()):
        raise PoolStateError(client)
    record = folder.read()
    return record if record is not None and record.nodes else None


async def _decide_purchase(
    request: PoolRequest,
    provider: Provider,
    notes: list[str],
    record: FleetRecord | None,
    *,
    as_found: bool,
    installed_here: bool,
) -> _Purchase:
    """Decide what would be bought, as the opening does. Raises what that raises before it buys."""
    nodes, restart = request.first_nodes, ""
    has = tuple(kept.instance.offer for kept in record.nodes) if record is not None else ()
    if record is not None:
        nodes = 0 if as_found else max(0, request.size_of_kept(len(has)) - len(has))
        restart = "" if as_found else changes_to(record, request, provider)
        notes += [f"the nodes of the kept fleet {record.name!r} are set up again, for: {restart}"] if restart else []
        if not nodes:
            return _Purchase(present=len(has), prepares=bool(restart))
    async with own_copy(provider) as own:
        batches, forecast = await _decide(request, own, notes, record, nodes=max(1, nodes))
        offers = tuple(_planned(batches, own, forecast, installed_here=installed_here))
        set_up = [*(has if restart else ()), *(offer for batch in batches for offer in batch.offers)]
        sources = tuple(map(own.member_of, set_up))
    at_most = forecast.max_cost if request.elastic else _most(batches, has, forecast)
    return _Purchase(
        nodes=nodes,
        present=len(has),
        offers=offers,
        at_most=None if math.isinf(at_most) else at_most,
        sources=sources,
    )


async def _decide(
    request: PoolRequest, provider: Provider, notes: list[str], record: FleetRecord | None, *, nodes: int
) -> tuple[Sequence[Batch], Forecast]:
    def publish(event: SkywardEvent) -> None:
        if isinstance(event, Notice):
            notes.append(event.message)

    async def agree(question: str) -> bool:
        notes.append(f"the opening asks: {question.strip()}")
        return True

    machines = Machines(provider, request, pool_id="", publish=publish, ledger=Ledger.of_user(), clock=SYSTEM_CLOCK)
    machines.consent.ask = agree
    has: Sequence[Offer] = ()
    if record is not None:
        machines.count_past(record.spent)
        has = [machines.resume(kept).instance.offer for kept in record.nodes]
    await machines.ask_for_elastic()
    await machines.grants.check()
    return await machines.decide(nodes, has), machines.consent.forecast


def _planned(
    batches: Sequence[Batch], provider: Provider, forecast: Forecast, *, installed_here: bool
) -> Iterator[PlannedOffer]:
    for batch in batches:
        for attempt, offer in enumerate(batch.offers, 1):
            most, spec, source = forecast.most(offer, batch.nodes), offer.spec, provider.member_of(offer)
            yield PlannedOffer(
                nodes=batch.nodes,
                attempt=attempt,
                provider=offer.provider or provider.name,
                region=offer.region,
                zone=offer.zone,
                machine=spec.name,
                accelerator=spec.accelerator,
                accelerators=spec.accelerator_count,
                cores=spec.cpu,
                memory_gib=spec.memory_gib,
                spot=offer.spot,
                price_per_hour=offer.price_per_hour,
                at_most=None if math.isinf(most) else most,
                connected=not offer.island,
                ends_itself=source.ends_itself or offer.price_per_hour == 0,
                installs=not (source.this_machine and installed_here),
            )


def _most(batches: Sequence[Batch], has: Sequence[Offer], forecast: Forecast) -> float:
    """Return the most that machines can cost, whichever offer each batch is bought as."""
    dearest = (max(forecast.most(offer, batch.nodes) for offer in batch.offers) for batch in batches)
    return min(forecast.max_cost, sum(dearest) + sum(map(forecast.most, has)))


def _cells(offer: PlannedOffer) -> tuple[str, ...]:
    place = offer.zone or offer.region  # which the label of a provider in a list may name
    return (
        str(offer.nodes),
        str(offer.attempt),
        offer.provider if place in offer.provider else f"{offer.provider} {place}",
        offer.machine,
        f"{offer.accelerators} x {offer.accelerator}" if offer.accelerator else "",
        "spot" if offer.spot else "on demand",
        _price(offer.price_per_hour),
        "?" if offer.at_most is None else money(offer.at_most),
    )


def _price(per_hour: float | None) -> str:
    return "?" if per_hour is None else f"{per_hour:.4f}" if per_hour else "free"


def _network_words(offers: Sequence[PlannedOffer], *, spread: bool) -> str:
    if spread and len({(offer.provider, offer.region) for offer in offers}) > 1:
        return "nodes of different places do not reach each other: calls with skyward.distributed are refused then"
    apart = _names(offer for offer in offers if not offer.connected)
    if not apart:
        return "nodes reach each other: calls with skyward.distributed and Dask may use several"
    subject = "nodes" if all(not offer.connected for offer in offers) else f"nodes of {apart}"
    return f"{subject} do not reach each other: calls with skyward.distributed, and Dask, are refused on several"


def _end_words(offers: Sequence[PlannedOffer]) -> str:
    endless = _names(offer for offer in offers if not offer.ends_itself)
    if not endless:
        return "should this program die, machines end by themselves"
    return (
        f"machines of {endless} cannot end their own bill: should this program die, they cost money until "
        "`skyward sweep` ends them, or the next pool that opens there"
    )


def _names(offers: Iterable[PlannedOffer]) -> str:
    return " and ".join(_labels(offers))


def _labels(offers: Iterable[PlannedOffer]) -> Sequence[str]:
    return [*dict.fromkeys(offer.provider for offer in offers)]


def _wrapped(text: str) -> str:
    fill = textwrap.TextWrapper(_WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False).fill
    return "\n".join(map(fill, text.splitlines()))
