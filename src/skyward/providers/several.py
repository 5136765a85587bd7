"""Several providers as one: all are asked for offers, and if one refuses an order, the next one gets it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar, cast

from skyward.base.waiting import CALL_LIMIT_S
from skyward.errors import CapacityError, ConfigurationError, QuotaError, SkywardError, UnreachableError
from skyward.providers.base import (
    ELSEWHERE,
    Instance,
    LaunchOrder,
    Offer,
    Provider,
    checked_provider,
    error_of_all,
    matching_offers,
)
from skyward.providers.registry import make_provider, provider_settings, secret_parameters
from skyward.request.request import PoolRequest

T = TypeVar("T")
ProviderLike: TypeAlias = Provider | Sequence[Provider]
"""Values that ``provider=`` takes: a provider, or a list of them."""

_ANSWER_S: Final = 10.0
_OWN_ANSWER_S: Final = 25.0
"""Seconds in which a provider, and one of the user's own machines, has to answer: one host that is down takes 15."""
_RECORDED: Final = "several"
_LONGEST_LABEL: Final = 40
_ASK_MEMBER: Final = "a list does not know whose a machine is: ask member_of(instance.offer)"
_NAMED_TYPES: Final = 5
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, eq=False)
class Several(Provider):
    """A provider made of others.

    Offers of all come together, each with its provider's label. Machines are bought price by price in the order of the
    offers: one attempt after the other, each at one site, which is a provider in a region.

    Args:
        providers: the providers, at least two.

    Attributes:
        labels: label of each: its name, and what tells several of that name apart.
    """

    providers: tuple[Provider, ...]
    labels: tuple[str, ...] = field(init=False)
    _silent: dict[str, SkywardError] = field(init=False, repr=False, default_factory=dict[str, SkywardError])

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", _labels(self.providers))

    @property
    def name(self) -> str:
        """Their labels."""
        return ", ".join(self.labels)

    @property
    def members(self) -> Sequence[Provider]:
        """See :attr:`Provider.members`."""
        return self.providers

    def member_of(self, offer: Offer) -> Provider:
        """See :meth:`Provider.member_of`."""
        if offer.provider not in self.labels:
            raise ConfigurationError(f"a machine is of provider {offer.provider!r}, and the pool has {self.name}")
        return self.providers[self.labels.index(offer.provider)]

    @property
    def silence(self) -> str:
        """Which providers had no offers when they were last asked, and why; empty for none."""
        if not self._silent:
            return ""
        reasons = "; ".join(f"{label}: {error}" for label, error in self._silent.items())
        return f"no offers from {len(self._silent)} of {len(self.labels)} providers: {reasons}"

    def wishes(self, request: PoolRequest) -> Sequence[PoolRequest]:
        """Return the request: each provider makes its own wishes of it."""
        return (request,)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the offers of all that answer in time, in the providers' order.

        Raises:
            SkywardError: none has an offer; the message gives the reason of each.
        """
        if request.spread and not request.one_network:
            request = replace(request, nodes=1, elastic=None)  # a provider need not have room for all of them
        asking = map(_ask, self.labels, self.providers, itertools.repeat(request))
        answers = dict(zip(self.labels, await asyncio.gather(*asking), strict=True))
        refused = {label: answer for label, answer in answers.items() if isinstance(answer, SkywardError)}
        self._silent.clear()
        self._silent.update(
            (label, error)
            for label, error in refused.items()
            if not isinstance(error, CapacityError)  # it sells such machines, and has none now: there is nothing to fix
        )
        found = [offer for answer in answers.values() if not isinstance(answer, SkywardError) for offer in answer]
        if refused and not found:
            raise _summary("no provider offers a machine for this request", [*refused.items()])
        return found

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Create the machines at the first site that has them all.

        Raises:
            SkywardError: each has refused; the message gives the reason of each.
        """
        refusals: dict[str, SkywardError] = {}
        tried: defaultdict[str, list[Sequence[Offer]]] = defaultdict(list)
        passed: set[str] = set()
        for attempt in attempts(offers, nodes=len(order.keys)):
            first = attempt[0]
            if first.provider in passed:
                continue
            member = self.member_of(first)
            try:
                async with order.served_by(member, attempt) as own:
                    made = await member.launch([replace(offer, provider="") for offer in attempt], own)
            except ELSEWHERE as error:
                place = " ".join(filter(None, (first.provider, first.region)))
                refusals[place] = error
                tried[place].append(attempt)
                if not isinstance(error, CapacityError | QuotaError):
                    passed.add(first.provider)
            else:
                return [labelled(each, first.provider) for each in made]
        lines = [(place + _types_of(tried[place]), error) for place, error in refusals.items()]
        raise _summary("no provider has the machines for this request now", lines)

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Refuse: the machine's own provider is asked, see :meth:`member_of`."""
        raise NotImplementedError(_ASK_MEMBER)

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Refuse: the machine's own provider is asked, see :meth:`member_of`."""
        raise NotImplementedError(_ASK_MEMBER)

    async def close(self) -> None:
        """Close all of them."""
        outcomes = await asyncio.gather(*(member.close() for member in self.providers), return_exceptions=True)
        for error in filter(None, outcomes):
            raise error


async def _ask(label: str, provider: Provider, request: PoolRequest) -> Sequence[Offer] | SkywardError:
    """Return a provider's offers with its label, or why there are none."""

    async def find() -> Sequence[Offer]:
        return [replace(offer, provider=label) for offer in await matching_offers(provider, request)]

    return await answer_within(_OWN_ANSWER_S if provider.own_machines else _ANSWER_S, find())


async def answer_within(limit_s: float, asking: Coroutine[Any, Any, T]) -> T | SkywardError:
    """Return a provider's answer, or why there is none. The limit holds for all later calls of the current task."""
    CALL_LIMIT_S.set(limit_s)  # no thread outlives the deadline
    task = asyncio.ensure_future(asking)
    try:
        done, _ = await asyncio.wait((task,), timeout=limit_s)
        return task.result() if done else UnreachableError(f"no answer within {limit_s:g} s")
    except SkywardError as error:
        return error
    except Exception as error:  # providers of other packages may raise anything
        _logger.debug("the answer of a provider failed", exc_info=error)
        return UnreachableError(f"it failed: {type(error).__name__}: {error}")
    finally:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved, else asyncio logs it
        task.cancel()  # not waited for, since it may ignore the cancellation


def labelled(instance: Instance, label: str) -> Instance:
    """Return a provider's record of a machine with the label that it has in a list; empty where there is none."""
    if instance.offer.provider == label:
        return instance
    return replace(instance, offer=replace(instance.offer, provider=label))


def label_of(provider: Provider, name: str, settings: Mapping[str, Any]) -> str:
    """Return the label of the provider with these settings in a list; the name of one that is in no list."""
    for label, member in labelled_members(provider):
        if member.name == name and provider_settings(member) == dict(settings):
            return label
    return name


def labelled_members(provider: Provider) -> Sequence[tuple[str, Provider]]:
    """Return the providers of a list with their labels; one that is no list with its name."""
    if isinstance(provider, Several):
        return [*zip(provider.labels, provider.providers, strict=True)]
    return [(provider.name, provider)]


def attempts(offers: Sequence[Offer], *, nodes: int) -> Sequence[Sequence[Offer]]:
    """Return ranked offers as they are tried: those of one site that follow each other are one attempt.

    For several machines an attempt may also use the site's cheaper offers, which alone did not suffice.
    """
    earlier: defaultdict[tuple[str, str], list[Offer]] = defaultdict(list)
    found: list[list[Offer]] = []
    for site, run in itertools.groupby(offers, key=lambda offer: offer.site):
        new = [*run]
        found.append([*earlier[site], *new] if nodes > 1 else new)
        earlier[site] += new
    return found


def _types_of(tried: Sequence[Sequence[Offer]]) -> str:
    """Return the machine types of several attempts at one place as a clause; the last refusal may not name them all."""
    if len(tried) == 1:
        return ""
    names = [*dict.fromkeys(offer.spec.name for attempt in tried for offer in attempt)]
    more = [f"and {len(names) - _NAMED_TYPES} more"] if len(names) > _NAMED_TYPES else []
    return f" ({', '.join([*names[:_NAMED_TYPES], *more])})"


def _summary(what: str, refusals: Sequence[tuple[str, SkywardError]]) -> SkywardError:
    """Return the error of an order that all have refused, with a line for each refusal."""
    errors = [error for _, error in refusals]
    lines = [f"- {name}: {' '.join(str(error).split())}" for name, error in refusals]
    summary = error_of_all("\n".join([f"{what}; tried, in this order:", *lines]), errors)
    summary.__cause__ = errors[-1]
    return summary


def _labels(providers: Sequence[Provider]) -> tuple[str, ...]:
    alike = Counter(provider.name for provider in providers)
    settings = [provider_settings(provider) for provider in providers]
    labels: list[str] = []
    for provider, own in zip(providers, settings, strict=True):
        others = [theirs for other, theirs in zip(providers, settings, strict=True) if other.name == provider.name]
        apart = [_words(value) for name, value in own.items() if any(other.get(name) != value for other in others)]
        enough = [_words(value) for name, value in own.items() if _tells_apart(name, others)]
        what = ", ".join(filter(None, enough[:1] or apart))[:_LONGEST_LABEL] if alike[provider.name] > 1 else ""
        labels.append(f"{provider.name} ({what})" if what else provider.name)
    taken = Counter(labels)
    numbers: Counter[str] = Counter()
    for index, label in enumerate(labels):
        if taken[label] > 1:  # what tells them apart is longer than a label
            numbers[label] += 1
            labels[index] = f"{label} #{numbers[label]}"
    return tuple(labels)


def _tells_apart(name: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a setting has another value, which is not empty, for each provider."""
    words = {_words(each.get(name)) for each in settings}
    return "" not in words and len(words) == len(settings)


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, cast("Sequence[object]", value)))
    return "" if value is None else str(value)


# --- what users pass, and what records hold -------------------------------------------------------------------------


def parse_provider(value: object) -> Provider:
    """Return the provider that ``provider=`` names; a list is made one.

    Raises:
        ConfigurationError: it is none, an empty list, or a list with something else in it, with one twice, or with two
            accounts of one vendor that only a secret tells apart.
    """
    if not isinstance(value, list | tuple):
        return checked_provider(value)
    given = cast("Sequence[object]", value)
    if not given:
        raise ConfigurationError("provider is an empty list: name a source of machines, such as [sky.Local()]")
    providers = [checked_provider(each, f"provider[{index}]") for index, each in enumerate(given)]
    for index, provider in enumerate(providers):
        if (first := providers.index(provider)) < index:
            same = f"provider[{first}] ({provider.name} with equal settings)"
            raise ConfigurationError(f"provider[{index}] is the same as {same}: leave one out")
        for first, other in enumerate(providers[:index]):
            if other.name == provider.name and _secrets(other) != _secrets(provider):
                raise ConfigurationError(
                    f"provider[{first}] and provider[{index}] are accounts of {provider.name} that a secret tells "
                    "apart, which is in no record: `skyward sweep` would look for the machines of one in the other. "
                    "Open a pool for each account"
                )
    return providers[0] if len(providers) == 1 else Several(tuple(providers))


def _secrets(provider: Provider) -> Mapping[str, object]:
    """Return the settings of a provider that are in no record."""
    return {name: getattr(provider, name) for name in secret_parameters(type(provider))}


def copied(provider: Provider) -> Provider:
    """Return a provider with the same settings and its own connections; one that is no dataclass is returned itself.

    Pools that are open may share a provider, and closing it would close their connections.
    """
    if isinstance(provider, Several):
        return Several(tuple(map(copied, provider.providers)))
    return cast("Provider", replace(cast("Any", provider))) if is_dataclass(provider) else provider


@asynccontextmanager
async def own_copy(provider: Provider) -> AsyncGenerator[Provider]:
    """Yield a copy, and close it."""
    copy = copied(provider)
    try:
        yield copy
    finally:
        if copy is not provider:
            await copy.close()


def provider_record(provider: Provider) -> tuple[str, dict[str, Any]]:
    """Return name and settings, as JSON values, from which :func:`recorded_provider` makes the provider again."""
    if not isinstance(provider, Several):
        return provider.name, provider_settings(provider)
    members = [{"name": each.name, "settings": provider_settings(each)} for each in provider.providers]
    return _RECORDED, {"providers": members}


def recorded_provider(name: str, settings: Mapping[str, Any]) -> Provider:
    """Return the provider of a record; errors as :func:`~skyward.providers.registry.make_provider`."""
    if name != _RECORDED:
        return make_provider(name, settings)
    return Several(tuple(make_provider(each["name"], each["settings"]) for each in settings["providers"]))
