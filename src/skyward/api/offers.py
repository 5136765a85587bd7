"""Machine types that providers rent out, with their prices, with an account or without one."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from html import escape
from typing import Any, Final, TypeVar, cast

from skyward.api.misuse import options_by_name
from skyward.base.loop import LoopThread
from skyward.display.tables import html_table, text_table
from skyward.errors import AuthenticationError, CapacityError, ConfigurationError, SkywardError
from skyward.ledger.sweep import attributed
from skyward.providers.base import ANSWERS, Offer, Provider, matching_offers, offers_for_each
from skyward.providers.list_prices import closest_sold, listed_offers, most_sold
from skyward.providers.registry import make_provider, provider_names, provider_type
from skyward.providers.several import ProviderLike, Several, answer_within, copied, own_copy, parse_provider
from skyward.request.accelerators import Accelerator, any_accelerator
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest, parse_request

__all__ = ["Offers", "PriceBasis", "PricedInstance", "offers"]

LIMIT_S: Final = 2.0
"""Timeout of each provider when all are asked."""
NAMED_S: Final = 30.0
"""Timeout of each provider that the user names: the first listing of some takes many calls."""
COLUMNS: Final[Sequence[str]] = ("provider", "type", "accelerators", "cores", "GiB", "spot", "$/h", "rests on")
T = TypeVar("T")
_NOW_S: Final = 10.0
_CENTS: Final = 1.0
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


class PriceBasis(enum.Enum):
    """What a price rests on."""

    LIVE = "live"
    """The provider offers the machine to this account, at this price, now."""
    PUBLIC = "public"
    """The vendor shows this price to anyone, now. The machine may not be in stock."""
    LISTED = "list"
    """The vendor asked this price on the day of a list that is shipped with Skyward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedInstance(InstanceSpec):
    """Machine type of a provider with its prices, and what they rest on.

    Attributes:
        provider: name of the provider.
        regions: regions that have it, the cheapest first; empty if they are not known, or the provider has none.
        basis: see :class:`PriceBasis`.
        price_age_s: seconds since the price was asked for, or since the day of the list.
        zones: zones that have it, with the USD an hour on spot where the provider has such zones.
        note: remark of the provider; empty for none.
    """

    provider: str
    regions: tuple[str, ...] = ()
    basis: PriceBasis = PriceBasis.LIVE
    price_age_s: float = 0.0
    zones: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"], hash=False)
    note: str = ""

    @property
    def cheapest(self) -> float:
        """The lower of its prices, in USD an hour; infinity if none is known."""
        return min((price for price in (self.price_spot, self.price_on_demand) if price is not None), default=math.inf)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its row: see :data:`COLUMNS`."""
        more = f" +{len(self.regions) - 1}" if len(self.regions) > 1 else ""
        age = "" if self.price_age_s < _NOW_S else f" {_age(self.price_age_s)}"
        return (
            f"{self.provider} {self.regions[0] if self.regions else ''}{more}".strip(),
            self.name,
            f"{self.accelerator_count}x {self.accelerator}" if self.accelerator else "",
            str(self.cpu or "?"),  # some vendors do not state the size of machines with GPUs
            f"{self.memory_gib:g}" if self.memory_gib else "?",
            *map(_usd, (self.price_spot, self.price_on_demand)),
            f"{self.basis.value}{age}",
        )


class Offers(tuple[PricedInstance, ...]):  # noqa: SLOT001 - a tuple's slots cannot hold values
    """Machine types, cheapest first; a tuple that is shown as a table, as text and in notebooks.

    Attributes:
        remarks: lines about providers that have none, and about what prices rest on.
    """

    remarks: Sequence[str] = ()

    def __repr__(self) -> str:
        if not self:
            return "\n".join(["no machine type satisfies the request", *self.remarks])
        return "\n".join([text_table(COLUMNS, (row.cells for row in self)), *self.remarks])

    def _repr_html_(self) -> str:
        remarks = "".join(f"<p>{escape(each)}</p>" for each in self.remarks)
        if not self:
            return f"<p>no machine type satisfies the request</p>{remarks}"
        return html_table(COLUMNS, (row.cells for row in self)) + remarks


@options_by_name
def offers(
    provider: ProviderLike | None = None,
    *,
    accelerator: str | Accelerator | Sequence[str | Accelerator] | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    machine: str | None = None,
) -> Offers:
    """Return the machine types that satisfy a request, cheapest first, with their prices; create nothing.

    Without a provider, every one that rents machines is asked, for two seconds. That needs no account: where there are
    no credentials, the prices are those that the vendor shows to anyone, else those of a list that is shipped with
    Skyward: ``basis`` of a row says which. Prices are in USD an hour. The result is a tuple that
    is shown as a table. :func:`~skyward.select_instance` chooses the smallest type of them::

        sky.offers(accelerator="H100:4")
        sky.select_instance(sky.offers(provider, accelerator="A100"), accelerator="A100", memory="128GB")

    Args:
        provider: the only provider to ask, with its account, as a pool would; of a list each has thirty seconds.
        accelerator: kind and minimum number on a machine, such as ``"A100"`` or ``"H100:4"``; or several, for all that
            have one of them.
        cpu: minimum number of cores.
        memory: minimum main memory, such as ``"64GB"``.
        machine: the provider's name of the only type to return.

    Raises:
        ConfigurationError: a parameter is wrong, or no provider has such a machine; names the closest ones.
        CapacityError: no such machine is available now.
        AuthenticationError: the provider that is named refuses the credentials.
    """
    request = parse_request(accelerator=accelerator, cpu=cpu, memory=memory, machine=machine, spot="if-available")
    named = None if provider is None else parse_provider(provider)
    match named:
        case None:
            asked = _ask_all(rented_sources(), request, LIMIT_S)
        case Several():
            members = zip(named.labels, named.providers, strict=True)
            asked = _ask_all([_member_source(label, member) for label, member in members], request, NAMED_S)
        case _:
            asked = _ask_one(named, request)
    return run_asking(asked)


def run_asking(asking: Coroutine[Any, Any, T]) -> T:
    """Return what providers answer, without waiting for threads that still wait for one, or for a DNS server."""
    loop = LoopThread("skyward-offers", waits=False)
    try:
        return loop.call(asking)
    finally:
        loop.end()


async def _ask_one(provider: Provider, request: PoolRequest) -> Offers:
    async with own_copy(provider) as own:
        return Offers(priced_instances(provider.name, await find_offers(own, request)))


async def _ask_all(sources: Sequence[PriceSource], request: PoolRequest, limit_s: float) -> Offers:
    survey = await survey_prices(sources, request, limit_s=limit_s)
    if not survey.rows:
        raise survey.no_rows(request)
    found = Offers(survey.rows)
    found.remarks = [*survey.silence, *survey.basis]
    return found


# --- prices of many providers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSource:
    """Provider to ask for prices.

    Attributes:
        name: its name, or its label in a list.
        vendor: the name under which it has list prices.
        make: creates it.
        kind: its class; None if it cannot be loaded.
        account: True to ask with credentials.
        configured: True if it has settings of the user's.
        named: True if the user has named it, and so is told why it has no such machine.
    """

    name: str
    vendor: str
    make: Callable[[], Provider]
    kind: type[Provider] | None
    account: bool
    configured: bool = False
    named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSurvey:
    """Answers of providers.

    Attributes:
        rows: machine types, cheapest first.
        errors: reasons for which a provider did not answer, or has none, by its name.
        left_out: machine types of the offers that were not accepted, cheapest first.
        named: names of the providers that the user has named, or given settings.
    """

    rows: Sequence[PricedInstance]
    errors: Mapping[str, SkywardError]
    left_out: Sequence[PricedInstance] = ()
    named: Collection[str] = ()

    @property
    def silence(self) -> list[str]:
        """The lines about providers without an answer, and about those that are named and do not sell such machines."""
        names: dict[str, list[str]] = {}
        for name, error in self.errors.items():
            if name in self.named or not isinstance(error, ConfigurationError):
                names.setdefault(str(error), []).append(name)
        return [attributed(", ".join(alike), error) for error, alike in names.items()]

    @property
    def basis(self) -> list[str]:
        """The lines about prices that are not live."""
        today = dt.datetime.now(tz=dt.UTC).date()
        listed: dict[str, dt.date] = {}
        for row in self.rows:
            if row.basis is PriceBasis.LISTED:
                day = today - dt.timedelta(seconds=row.price_age_s)
                listed[row.provider] = min(day, listed.get(row.provider, day))
        lines = [
            f"list: {name} asked these prices on {day}; they are shipped with Skyward" for name, day in listed.items()
        ]
        if any(row.basis is not PriceBasis.LIVE for row in self.rows):
            lines.append("What is not live may be out of stock. Credentials make it live: `skyward doctor`")
        return lines

    def no_rows(self, request: PoolRequest) -> SkywardError:
        """Return the error for a request that no provider satisfies."""
        wanted, lines = request.accelerator, self.silence
        sold_out = any(isinstance(error, CapacityError) for error in self.errors.values())
        if wanted is None:
            none = f"no provider has a machine with {request.machine or request.wish}"
            lines = [attributed(name, str(error)) for name, error in self.errors.items()]
        elif request.accelerators[1:]:
            none = f"no provider has one of {len(request.accelerators)} accelerators now"
        elif most := most_sold(wanted):
            too_many = f": the most on a machine is {most}" if most < wanted.count else ""
            none = f"no provider has {wanted} now{too_many}"
        else:
            none = f"no provider sells {wanted.label}; closest: {', '.join(closest_sold(wanted))}"
        return (CapacityError if sold_out else ConfigurationError)("\n  ".join([none, *lines]))


def rented_providers() -> Sequence[str]:
    """Return the names of the providers that rent machines, and of those that cannot be loaded."""
    return [name for name in provider_names() if not getattr(_loaded(name), "own_machines", False)]


def rented_sources() -> Sequence[PriceSource]:
    """Return the providers that rent machines, with their default settings."""
    return [price_source(name) for name in rented_providers()]


def price_source(
    name: str, make: Callable[[], Provider] | None = None, *, configured: bool = False, named: bool = False
) -> PriceSource:
    """Return a provider to ask for prices: with credentials if it is configured, or there seem to be any."""
    kind = _loaded(name)
    return PriceSource(
        name=name,
        vendor=name,
        make=make or partial(make_provider, name, {}),
        kind=kind,
        account=kind is None or configured or kind.has_credentials(),
        configured=configured,
        named=named,
    )


def _member_source(label: str, provider: Provider) -> PriceSource:
    return PriceSource(
        name=label,
        vendor=provider.name,
        make=partial(copied, provider),
        kind=type(provider),
        account=True,
        configured=True,
    )


def _loaded(name: str) -> type[Provider] | None:
    try:
        kind = provider_type(name)
    except ConfigurationError:
        return None
    return kind if hasattr(kind, "has_credentials") else None  # what is registered may be anything


async def survey_prices(
    sources: Iterable[PriceSource],
    request: PoolRequest,
    *,
    limit_s: float = LIMIT_S,
    accepts: Callable[[Offer, PriceBasis], bool] = lambda _, __: True,
    with_zones: bool = False,
) -> PriceSurvey:
    """Ask providers in parallel, each for ``limit_s`` at most.

    Args:
        sources: the providers.
        request: the request.
        limit_s: time for the answer of a provider; after it, its list of prices serves.
        accepts: which of the offers count, by what they rest on.
        with_zones: True to ask for the zones that have the machines.
    """
    chosen = list(sources)
    answers = await asyncio.gather(*(_prices_of(each, request, limit_s, with_zones=with_zones) for each in chosen))
    rows: list[PricedInstance] = []
    errors: dict[str, SkywardError] = {}
    left_out: list[PricedInstance] = []
    for source, answer in zip(chosen, answers, strict=True):
        if isinstance(answer, _Prices):
            matching = [offer for offer in answer.offers if accepts(offer, answer.basis)]
            others = [offer for offer in answer.offers if not accepts(offer, answer.basis)]
            rows += priced_instances(source.name, matching, answer.basis, answer.zones)
            left_out += priced_instances(source.name, others, answer.basis)
        if (error := answer.remark if isinstance(answer, _Prices) else answer) is not None:
            errors[source.name] = error
    return PriceSurvey(
        rows=sorted(rows, key=price_rank),
        errors=errors,
        left_out=sorted(left_out, key=price_rank),
        named={source.name for source in chosen if source.named or source.configured},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    """Answer of a provider; ``remark`` is why it is not a better one."""

    offers: Sequence[Offer]
    basis: PriceBasis
    zones: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict[str, "Mapping[str, float | None]"])
    remark: SkywardError | None = None


async def _prices_of(
    source: PriceSource, request: PoolRequest, limit_s: float, *, with_zones: bool
) -> _Prices | SkywardError:
    """Return the live offers, else public ones, else those of the list; or why there are none."""
    answer = await answer_within(limit_s, _current_prices(source, request, with_zones=with_zones))
    if isinstance(answer, (_Prices, *ANSWERS)):
        return answer
    requests = [one for wish in _wishes(request) for one in wish.alternatives]
    listed = list(dict.fromkeys(offer for one in requests for offer in listed_offers(source.vendor, one)))
    if not listed and answer is not None:
        return answer
    return _Prices(offers=listed, basis=PriceBasis.LISTED, remark=answer)


async def _current_prices(source: PriceSource, request: PoolRequest, *, with_zones: bool) -> _Prices | None:
    """Return live offers, or those that anyone may see; None for a vendor that shows none without credentials."""
    public = source.kind is not None and source.kind.supports("public_offers")
    if not (source.account or public):
        return None
    try:
        provider = await asyncio.to_thread(source.make)
    except ConfigurationError as error:
        if source.configured:
            raise
        raise SkywardError(str(error)) from error  # a package is missing: others than the provider have its prices
    refused: AuthenticationError | None = None
    try:
        if source.account:
            try:
                matching = await find_offers(provider, request)
                names = list(dict.fromkeys(offer.spec.name for offer in matching))
                if not with_zones:
                    return _Prices(offers=matching, basis=PriceBasis.LIVE)
                return _Prices(offers=matching, basis=PriceBasis.LIVE, zones=await provider.zones(names))
            except AuthenticationError as error:
                refused = error
        matching = await _of_each_wish(partial(_public_offers, provider), request) if public else []
        if refused is not None and not matching:
            raise refused
        return _Prices(offers=matching, basis=PriceBasis.PUBLIC, remark=refused) if matching else None
    finally:
        await provider.close()


async def _public_offers(provider: Provider, request: PoolRequest) -> Sequence[Offer]:
    return await offers_for_each(provider.wishes(request), provider.public_offers)


async def _of_each_wish(ask: Callable[[PoolRequest], Awaitable[Sequence[Offer]]], request: PoolRequest) -> list[Offer]:
    matching: list[Offer] = []
    refusals: list[SkywardError] = []
    for wish in (wishes := _wishes(request)):
        try:
            matching += await ask(wish)
        except SkywardError as error:
            refusals.append(error)
    if len(refusals) == len(wishes):
        raise refusals[0]
    return matching


def _wishes(request: PoolRequest) -> Sequence[PoolRequest]:
    """Return the requests to make; where nothing is requested, for machines without accelerators and with any.

    A pool that requests nothing gets none with accelerators, and so providers leave them out.
    """
    if request.machine is not None or request.wish != InstanceWish():
        return (request,)
    return (request, replace(request, accelerators=(any_accelerator(),)))


async def find_offers(provider: Provider, request: PoolRequest) -> Sequence[Offer]:
    """Return a provider's offers; where nothing is requested, of machines without accelerators and with any."""
    return await _of_each_wish(partial(matching_offers, provider), request)


def priced_instances(
    provider: str,
    offers: Sequence[Offer],
    basis: PriceBasis = PriceBasis.LIVE,
    zones: Mapping[str, Mapping[str, float | None]] = {},
) -> list[PricedInstance]:
    """Return the machine types of a provider's offers, the cheapest first."""
    types: dict[str, list[Offer]] = {}
    for offer in offers:
        types.setdefault(offer.spec.name, []).append(offer)
    rows: list[PricedInstance] = []
    for name, matching in types.items():
        spec = priced(matching)
        ordered = sorted(matching, key=lambda offer: math.inf if offer.price_per_hour is None else offer.price_per_hour)
        rows.append(
            PricedInstance(
                **{each.name: getattr(spec, each.name) for each in fields(InstanceSpec)},
                provider=provider,
                regions=tuple(dict.fromkeys(offer.region for offer in ordered if offer.region)),
                basis=basis,
                price_age_s=max(offer.price_age_s for offer in matching),
                zones=zones.get(name, {}),
                note="; ".join(dict.fromkeys(offer.note for offer in matching if offer.note)),
            )
        )
    return sorted(rows, key=price_rank)


def priced(offers: Sequence[Offer]) -> InstanceSpec:
    """Return the machine type of ``offers``, of which there is at least one, with the lowest price of each market."""
    known = [offer for offer in offers if offer.price_per_hour is not None]
    spot = [cast("float", offer.price_per_hour) for offer in known if offer.spot]
    on_demand = [cast("float", offer.price_per_hour) for offer in known if not offer.spot]
    usual = min((price for offer in offers if (price := offer.on_demand_price_per_hour) is not None), default=None)
    return replace(offers[0].spec, price_spot=min(spot, default=None), price_on_demand=min(on_demand, default=usual))


def price_rank(row: PricedInstance) -> tuple[float, str, str]:
    """Return the sort key of a machine type: cheapest first, unknown prices last."""
    return row.cheapest, row.provider, row.name


def _age(seconds: float) -> str:
    """Return an age in its largest unit of which there are two: ``"64d"``, ``"12min"``."""
    size, unit = next((each for each in _UNITS if seconds >= 2 * each[0]), (1, "s"))
    return f"{seconds // size:.0f}{unit}"


def _usd(price: float | None) -> str:
    if price is None:
        return "?"
    return f"{price:.2f}" if price >= _CENTS else f"{price:.4f}"
