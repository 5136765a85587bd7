"""Machine types of a vendor, the types that satisfy a request, and the order of their offers (pure)."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from skyward.errors import ConfigurationError
from skyward.providers.base import Offer
from skyward.request.accelerators import Accelerator, find_variant, fold_name, model_name, models
from skyward.request.checks import closest, refusal, texts
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest

X86: Final = "x86_64"
_LEAST: Final = InstanceWish(cpu=2, memory_gib=4.0)
"""Smallest machine for a request that gives no size."""
_TOLERANCE: Final = 0.07
"""Share of an accelerator's memory by which a reported size may differ from the nominal one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """Machine type of a vendor.

    Attributes:
        spec: name, cores, memory, accelerators as sold; the memory is that of each accelerator.
        architecture: ``"x86_64"`` or ``"arm64"``.
        spot: True if it is sold on spot.
        on_demand: True if it is sold on demand.
        current: True if it is of a current generation.
        whole: True for a virtual machine with whole accelerators and constant speed; others are chosen by name only.
        general: True for general computing: chosen for a request without an accelerator.
    """

    spec: InstanceSpec
    architecture: str = X86
    spot: bool = True
    on_demand: bool = True
    current: bool = True
    whole: bool = True
    general: bool = True

    @property
    def name(self) -> str:
        """``"p5.48xlarge"``."""
        return self.spec.name

    @property
    def family(self) -> str:
        """The name up to its first dot: ``"p5"``."""
        return self.name.partition(".")[0]

    @property
    def size(self) -> tuple[float | str, ...]:
        """Sort key: the smallest first."""
        spec = self.spec
        return spec.accelerator_count, spec.cpu, spec.memory_gib, spec.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SoldAs:
    """Accelerator by its name in Skyward's catalogue.

    Attributes:
        name: ``"A100-80GB"``; the vendor's name if the catalogue has none for it.
        memory_gib: nominal memory of one.
    """

    name: str
    memory_gib: float

    def built_into(self, spec: InstanceSpec, count: int) -> InstanceSpec:
        """Return a machine with so many of these."""
        held = {"accelerator": self.name, "accelerator_memory_gib": self.memory_gib}
        return replace(spec, accelerator_count=count, **held)


def sold_as(*names: str, reported_gib: float) -> SoldAs:
    """Return the accelerator of one of these names; the first name that the catalogue has counts.

    Args:
        *names: the vendor's names, such as ``"NVIDIA A100"``; at least one.
        reported_gib: memory of one accelerator as the vendor states it; 0 if it states none. Usable memory, which is
            less than the nominal memory, is recognised.
    """
    variant = next((found for name in names if (found := find_variant(name)) is not None), None)
    if variant is None:
        return SoldAs(name=names[0], memory_gib=reported_gib)
    model = variant.model
    if variant.form_factor is not None:
        return SoldAs(name=f"{model.name}-{variant.form_factor}", memory_gib=variant.memory_gib)
    if len(model.memory_gib) == 1:
        nominal = model.memory_gib[0]
        near = not reported_gib or abs(nominal - reported_gib) <= _TOLERANCE * nominal
        return SoldAs(name=model.name, memory_gib=nominal if near else reported_gib)
    memory_gib = min(model.memory_gib, key=lambda sold: abs(sold - (reported_gib or variant.memory_gib)))
    return SoldAs(name=f"{model.name}-{memory_gib:g}GB", memory_gib=memory_gib)


def sold_accelerators(places: Mapping[MachineType, Sequence[str]]) -> Mapping[str, str]:
    """Return the accelerators that a vendor has anywhere, with the smallest machine and its places, for messages.

    Args:
        places: the places that have each machine type.
    """
    smallest = sorted(places, key=lambda each: each.size, reverse=True)
    found = {each.spec.accelerator: f"{each.name} in {', '.join(places[each])}" for each in smallest if places[each]}
    return {name: text for name, text in found.items() if name is not None and find_variant(name) is not None}


def fewest_accelerators(types: Sequence[MachineType]) -> tuple[MachineType, ...]:
    """Return the types with the fewest accelerators, so that a request for one does not pay for eight."""
    fewest = min((each.spec.accelerator_count for each in types), default=0)
    return tuple(each for each in types if each.spec.accelerator_count == fewest)


def refuse_unlikely(machine: str | None, vendor: str) -> None:
    """Refuse a machine type such as ``"2x RTX 4091"`` that was not found, if its accelerator is not in the catalogue.

    Raises:
        ConfigurationError: it is not; names the nearest machine types.
    """
    count, _, name = (machine or "").partition("x ")
    if not count.isdigit() or any(find_variant(each) for each in (name, model_name(name))):
        return
    near = closest(name, [model.name.replace("-", " ") for model in models()])
    raise ConfigurationError(
        f"machine={machine!r}: {vendor} has no such machine now, and Skyward's catalogue no {name!r}{near}. "
        "`skyward offers` lists machine types by accelerator"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Machine types of a vendor in one place, and the words for messages about them.

    Attributes:
        vendor: the vendor's name.
        types: the machine types of the place.
        place: name of the place; empty for a vendor's whole offer.
        kind: the vendor's word for a place.
        accelerators: every accelerator that the vendor has in any place, by its name in Skyward's catalogue, with the
            machines that have it: ``{"A100-40GB": "p4d"}``.
        places: places that have a machine type, by the name of one that this place may lack.
        remedy: next step where another place has it: ``"try Cloud(region={place!r})"``. Empty to request another place.
    """

    vendor: str
    types: Sequence[MachineType]
    place: str = ""
    kind: str = "region"
    accelerators: Mapping[str, str] = field(default_factory=dict[str, str])
    places: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    remedy: str = ""

    def candidates(self, request: PoolRequest) -> tuple[MachineType, ...]:
        """Return the types that satisfy a request, the smallest first.

        Raises:
            ConfigurationError: there is none; names the nearest, and the places that have it.
        """
        if request.machine is not None:
            return (self._named(request.machine),)
        fitting = [each for each in self.types if not request.wish.shortfall(each.spec) and each.whole]
        if request.accelerator is None:
            x86 = [each for each in fitting if self._is_plain(each) and each.architecture == X86]
            fitting = [each for each in x86 if not _LEAST.shortfall(each.spec)]
            fitting = [each for each in fitting if each.current] or fitting
        elif any(each.architecture == X86 for each in fitting):
            fitting = [each for each in fitting if each.architecture == X86]
        if not fitting:
            raise ConfigurationError(self._none(request))
        return tuple(sorted(fitting, key=lambda each: each.size))

    @property
    def _here(self) -> str:
        return f" in {self.place}" if self.place else ""

    def _is_plain(self, machine: MachineType) -> bool:
        return machine.spec.accelerator is None and machine.whole and machine.general

    def _named(self, name: str) -> MachineType:
        found = next((each for each in self.types if each.name == name), None)
        if found is not None:
            return found
        if places := self.places.get(name):
            where = f"in {', '.join(places)}, but not{self._here}"
            raise ConfigurationError(f"machine={name!r}: {self.vendor} has it {where}: {self._elsewhere(name)}")
        near = closest(name, [each.name for each in self.types])
        raise ConfigurationError(
            f"machine={name!r}: {self.vendor} has no such machine type{self._here}{near}. "
            "`skyward offers --provider NAME` lists a provider's types"
        )

    def _elsewhere(self, machine: str) -> str:
        """Return the next step where another place has a machine."""
        places = self.places.get(machine)
        return self.remedy.format(place=places[0]) if self.remedy and places else f"request another {self.kind}"

    def _none(self, request: PoolRequest) -> str:
        """Return the message for a request that no type satisfies."""
        wanted = request.accelerator
        if wanted is None:
            plain = [each for each in self.types if self._is_plain(each)]
            nearest = sorted(plain, key=lambda each: (request.wish.shortfall(each.spec), -each.spec.cpu, each.name))[:3]
            none = f"{self.vendor} has no machine type with {request.wish}{self._here}"
            return f"{none}; nearest: {'; '.join(str(each.spec) for each in nearest)}" if nearest else none
        alone = InstanceWish(accelerator=wanted)
        if largest := [each for each in self.types if not alone.shortfall(each.spec) and each.whole]:
            most = max(largest, key=lambda each: each.size)
            return (
                f"{self.vendor}'s machines with {wanted}{self._here} have less than {request.wish}; the largest is "
                f"{most.spec}"
            )
        same = [each for each in self.types if each.whole and _is_model(each.spec.accelerator, wanted)]
        return self._other_variant(same, wanted) if same else self._other_model(wanted)

    def _other_variant(self, same: Sequence[MachineType], wanted: Accelerator) -> str:
        """Return the message where the place has the model, but fewer of it, or another form or memory."""
        if fitting := [each for each in same if has_kind(each.spec, wanted)]:
            most = max(fitting, key=lambda each: each.size)
            return (
                f"{self.vendor} has at most {most.spec.accelerator_count} {wanted.label} on a machine{self._here} "
                f"({most.name}), not {wanted.count}: request more nodes instead"
            )
        kinds = ", ".join(dict.fromkeys(f"{each.spec.accelerator} ({each.name})" for each in same))
        if not self.place:
            return f"{self.vendor} has no {_described(wanted)}, but {kinds}: request that"
        if any(_is_sold_as(name, wanted) for name in self.accelerators):
            return (
                f"{self.vendor} has no {_described(wanted)}{self._here}, but {kinds}: request that, or another "
                f"{self.kind}"
            )
        return f"{self.vendor} has no {_described(wanted)} in any {self.kind}; {self.place} has {kinds}: request that"

    def _other_model(self, wanted: Accelerator) -> str:
        """Return the message where the place has nothing of that model."""
        elsewhere = [name for name in self.accelerators if _is_model(name, wanted)]
        if fitting := [name for name in elsewhere if _is_sold_as(name, wanted)]:
            machine, _, _ = self.accelerators[fitting[0]].partition(" ")
            return (
                f"accelerator {wanted.label}: {self.vendor} has {self._listed(fitting[:1])} in other {self.kind}s, but "
                f"not{self._here}: {self._elsewhere(machine)}"
            )
        if elsewhere:
            return (
                f"{self.vendor} has no {_described(wanted)} in any {self.kind}, but {self._listed(elsewhere)}: "
                "request that"
            )
        nearest = self._listed(nearest_accelerators(wanted, self.accelerators))
        none = (
            f"accelerator {wanted.label}: {self.vendor} has none of these ({wanted.vendor.value}, "
            f"{wanted.memory_gib:g} GiB) in any {self.kind}"
        )
        return f"{none}; nearest: {nearest}. Or use another provider" if nearest else f"{none}: use another provider"

    def _listed(self, names: Iterable[str]) -> str:
        return ", ".join(f"{name} ({self.accelerators[name]})" for name in names)


def _is_model(name: str | None, wanted: Accelerator) -> bool:
    variant = find_variant(name or "")
    return variant is not None and fold_name(variant.model.name) == fold_name(wanted.name)


def has_kind(spec: InstanceSpec, wanted: Accelerator) -> bool:
    """Return whether a machine has accelerators of that kind, however many."""
    return not InstanceWish(accelerator=wanted).shortfall(replace(spec, accelerator_count=wanted.count))


def _is_sold_as(name: str, wanted: Accelerator) -> bool:
    variant = find_variant(name)
    if variant is None or not _is_model(name, wanted):
        return False
    return wanted.form_factor in (None, variant.form_factor) and wanted.memory_gib == variant.memory_gib


def _described(wanted: Accelerator) -> str:
    form = f"-{wanted.form_factor}" if wanted.form_factor else ""
    return f"{wanted.name}{form} with {wanted.memory_gib:g} GiB"


def nearest_accelerators(wanted: Accelerator, names: Iterable[str]) -> Sequence[str]:
    """Return the three accelerators nearest by name, then by memory."""
    folded = [fold_name(name) for name in names]
    named = difflib.get_close_matches(fold_name(wanted.name), folded, n=1, cutoff=0.7)

    def distance(name: str) -> tuple[bool, float]:
        variant = find_variant(name)
        memory_gib = variant.memory_gib if variant else 0.0
        return fold_name(name) not in named, abs(memory_gib - wanted.memory_gib)

    return sorted(names, key=distance)[:3]


T = TypeVar("T")

_OFFERED: Final = 10
"""Number of offers on each market."""


def cheapest_offers(offers: Iterable[Offer], request: PoolRequest, *, vendor: str) -> Sequence[Offer]:
    """Return the ten cheapest offers on spot, then the ten cheapest on demand; those of unknown price come last.

    Offers with more accelerators than requested get a note that says so. ``vendor`` is the name for that.
    """
    every = sorted(offers, key=_rank)
    chosen = [each for spot in (True, False) for each in [each for each in every if each.spot is spot][:_OFFERED]]
    return [replace(each, note="; ".join(filter(None, (_more(each, request, vendor), each.note)))) for each in chosen]


def spread(items: Iterable[T], host: Callable[[T], str], used: Mapping[str, int]) -> list[T]:
    """Return items with those of the hosts used least first, else in their order; ``used`` are uses until now."""
    uses = Counter(used)
    turns: list[tuple[int, T]] = []
    for each in items:
        turns.append((uses[host(each)], each))
        uses[host(each)] += 1
    return [each for _, each in sorted(turns, key=lambda turn: turn[0])]


def _rank(offer: Offer) -> tuple[float, float, float]:
    price = offer.price_per_hour
    return float("inf") if price is None else price, offer.spec.cpu, offer.spec.memory_gib


def _more(offer: Offer, request: PoolRequest, vendor: str) -> str:
    wanted, spec = request.accelerator_of(offer.spec), offer.spec
    if request.machine is not None or wanted is None or spec.accelerator_count <= wanted.count:
        return ""
    cost = "price unknown" if offer.price_per_hour is None else f"${offer.price_per_hour:,.2f}/h"
    number = "single" if wanted.count == 1 else str(wanted.count)
    return f"no {number} {wanted.name} on {vendor}: {spec.name} has {spec.accelerator_count}, {cost}"


_COUNTRIES: Final = """
AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR BS BT BV BW BY BZ CA CC
CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ EC EE EG EH ER ES ET FI FJ FK FM FO FR GA GB GD
GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW GY HK HM HN HR HT HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP KE KG KH
KI KM KN KP KR KW KY KZ LA LB LC LI LK LR LS LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT MU MV MW
MX MY MZ NA NC NE NF NG NI NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY QA RE RO RS RU RW SA SB SC
SD SE SG SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG TH TJ TK TL TM TN TO TR TT TV TW TZ UA UG UM US UY
UZ VA VC VE VG VI VN VU WF WS XK YE YT ZA ZM ZW
"""


def checked_countries(parameter: str, value: object) -> tuple[str, ...]:
    """Return ``value`` if it is a list of codes of countries, at least one."""
    known = _COUNTRIES.split()
    for each in (found := texts(parameter, value)):
        if each not in known:
            near = closest(each.upper(), known).removeprefix("; ")
            raise refusal(
                parameter, "two-letter codes of countries such as 'US'" + (f" ({near})" if near else ""), each
            )
    if not found:
        raise refusal(parameter, "at least one country, or None for any", value)
    return found
