"""Provider of containers on VastAI's marketplace, on demand or by bids, billed from prepaid credit."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    SkywardError,
    UnreachableError,
)
from skyward.providers._common.cached_answers import SharedAnswer, SharedAnswers
from skyward.providers._common.logins import host_key, user_key
from skyward.providers._common.machine_boot import CPU_IMAGE, GPU_IMAGE, ContainerBoot, HttpCall, checked_image, cuda_of
from skyward.providers._common.machine_catalogue import (
    cheapest_offers,
    checked_countries,
    refuse_unlikely,
    sold_as,
    spread,
)
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall, failed
from skyward.providers._common.rented_machines import MachineApi, MachineRecord, RentedContainers, label, labels_of
from skyward.providers._common.rest_client import (
    ApiAnswer,
    RestClient,
    VendorPayload,
    bearer,
    decode,
    decode_list,
    decode_rows,
    decode_state,
    is_found,
)
from skyward.providers.base import REFUSALS, Finding, InstanceState, LaunchOrder, Offer, check_settings
from skyward.request.accelerators import Accelerator, Vendor, model_name
from skyward.request.checks import (
    explain_options,
    flag,
    positive_number,
    refusal,
    secret,
    text,
    web_address,
    whole_number,
)
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest

CPU_ONLY: Final = "CPU"
"""Name of the machines without a GPU; others are named ``"2x RTX 4090"``."""
_MACHINE: Final = re.compile(rf"([1-9]\d*)x (\S.*)|{CPU_ONLY}", re.ASCII)
_LEAST_DISK_GB: Final = 8
_BELOW, _ABOVE = 0.92, 1.05
"""Reported memory of a GPU as a share of the nominal one: a B200 with 192 GB reports 179 GiB."""
_ALWAYS: Final[Mapping[str, Any]] = {
    "type": "on-demand",
    "limit": 256,
    "order": [["dph_total", "asc"], ["id", "asc"]],
    "rentable": {"eq": True},
    "rented": {"eq": False},
    "external": {"eq": False},
    "cpu_arch": {"eq": "amd64"},
    "direct_port_count": {"gte": 2},
}
"""Parts of every search. Asks on demand state the lowest bid as well, so that one search serves both markets."""


@dataclass(frozen=True, kw_only=True)
class AskTerms:
    """Requirements of asks, and terms of their rental: parameters of the provider, which documents them."""

    verified: bool = True
    min_reliability: float = 0.95
    regions: Sequence[str] | None = None
    min_inet_mbps: float = 100.0
    image: str | None = None
    image_login: str | None = field(default=None, repr=False)
    disk_gb: int = 40
    bid_factor: float = 1.25
    billed_traffic: bool = False

    def __post_init__(self) -> None:
        flag("verified", self.verified)
        flag("billed_traffic", self.billed_traffic)
        whole_number("disk_gb", self.disk_gb, minimum=_LEAST_DISK_GB)
        for name, most in (("min_reliability", 1.0), ("min_inet_mbps", math.inf)):
            value = getattr(self, name)
            if value != 0 and positive_number(name, value) > most:
                raise refusal(name, f"a number from 0 to {most:g}", value)
        if positive_number("bid_factor", self.bid_factor) < 1:
            raise refusal("bid_factor", "a number ≥ 1 (a bid below the minimum never runs but bills)", self.bid_factor)
        check_settings(self, regions=checked_countries, image_login=text)
        if self.image is not None:
            checked_image(self.image, disk="disk_gb", disk_gb=self.disk_gb, login=self.image_login)

    def image_for(self, *, gpu: bool) -> str:
        """Return the image of a container."""
        return self.image or (GPU_IMAGE if gpu else CPU_IMAGE)

    def pays_no_traffic(self, request: PoolRequest) -> bool:
        """Return whether only asks with free traffic suit a request: its bill has a limit, and traffic has no cap."""
        return request.max_cost is not None and not self.billed_traffic

    def search_body(self, request: PoolRequest) -> Mapping[str, Any]:
        """Return the body of the one search for a request, on both markets.

        Raises:
            ConfigurationError: ``machine`` is no machine's name.
        """
        gpus = _gpu_filters(request)
        cuda = cuda_of(self.image_for(gpu=True)) if gpus["num_gpus"] != {"eq": 0} else None
        free = {"lte": 0} if self.pays_no_traffic(request) else None
        optional = {
            "geolocation": {"in": list(self.regions)} if self.regions else None,
            "cuda_max_good": {"gte": cuda} if cuda else None,
            "cpu_cores_effective": {"gte": request.wish.cpu} if request.wish.cpu else None,
            "inet_up_cost": free,
            "inet_down_cost": free,
        }
        return {
            **_ALWAYS,
            "allocated_storage": self.disk_gb,
            "disk_space": {"gte": self.disk_gb},
            "verified": {"eq": True} if self.verified else {"in": [True, False]},
            "duration": {"gte": request.timeout_s},
            "reliability": {"gte": self.min_reliability},
            "inet_down": {"gte": self.min_inet_mbps},
            **{name: tests for name, tests in optional.items() if tests is not None},
            **gpus,
        }

    def __str__(self) -> str:
        where = f"in {', '.join(self.regions)}" if self.regions else "anywhere"
        return (
            f"{'verified' if self.verified else 'verified or not'}, {where}, reliability ≥ {self.min_reliability:g}, "
            f"≥ {self.min_inet_mbps:g} Mbit/s, ≥ {self.disk_gb} GB of disk"
        )


def _gpu_filters(request: PoolRequest) -> Mapping[str, Any]:
    if request.machine is not None:
        if (named := _MACHINE.fullmatch(request.machine)) is None:
            raise refusal("machine", f"{CPU_ONLY!r}, or a number and a GPU such as '2x RTX 4090'", request.machine)
        if named[2] is not None:
            return {"num_gpus": {"eq": int(named[1])}, "gpu_name": {"in": [named[2], named[2].replace(" ", "_")]}}
    if request.machine is not None or not request.accelerators:
        return {"num_gpus": {"eq": 0}}
    each_mb = [wanted.memory_gib * 1024 for wanted in request.accelerators]
    memory = {"gte": min(each_mb) * _BELOW, "lte": max(each_mb) * _ABOVE or 1e9}
    return {"num_gpus": {"gte": min(wanted.count for wanted in request.accelerators)}, "gpu_ram": memory}


_SEARCHES: Final = 3
"""Most searches for one pool, each for accelerators of one size: an account has ten a minute."""
_KEPT_S: Final = 60.0
"""Longest age of asks. Searches have a quota by the minute and another by the day."""
_LEAST: Final = InstanceWish(cpu=2, memory_gib=4.0)
"""Smallest machine for a request that gives no size."""
_VENDORS: Final = (Vendor.NVIDIA, Vendor.AMD, Vendor.UNKNOWN)
"""Vendors of the GPUs that hosts have; a name that Skyward's catalogue lacks may be one of them."""
_LEAST_BID, _BID_STEP, _DEARER = 0.001, 1e-6, 1.01
"""Least bid; least distance of a bid from the price on demand; highest price of an ask as a share of its offer's."""
_SPARE: Final = 12
"""Asks of a class beyond one per node: the size of the class is the least of all of them."""

_Rows = Sequence[Mapping[str, Any]]
Search = Callable[[Mapping[str, Any]], Awaitable[_Rows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOffer(Offer):
    """A class of asks, as it was offered for a request.

    Attributes:
        request: the request; it says which asks suit the pool.
        traffic: USD a GB of incoming and of outgoing traffic, as the note states them.
    """

    request: PoolRequest = field(compare=False, repr=False)
    traffic: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A machine, or a share of one, that a host rents out. Gone within seconds, at times.

    Attributes:
        id: the ask's id.
        host: id of the physical machine.
        region: code of its country.
        spec: its share of the machine; the name is that of its class.
        price: USD an hour on demand, disk included.
        disk: USD an hour of the disk.
        bid: the bid that is made for it, without the disk; infinite if none would run and be below the price on demand.
        traffic: USD a GB of incoming and of outgoing traffic.
    """

    id: int
    host: str
    region: str
    spec: InstanceSpec
    price: float
    disk: float
    bid: float
    traffic: tuple[float, float]

    def charged(self, *, spot: bool) -> float:
        """Return the USD an hour, disk included; infinity if it is not on that market."""
        return self.bid + self.disk if spot else self.price

    def serves(self, offer: AskOffer) -> bool:
        """Return whether it belongs to the class that an offer stands for, and costs no more than was offered."""
        fits = not InstanceWish(cpu=offer.spec.cpu, memory_gib=offer.spec.memory_gib).shortfall(self.spec)
        fits &= self.charged(spot=offer.spot) <= _DEARER * (offer.price_per_hour or 0.0)
        fits &= self.traffic[0] <= offer.traffic[0] and self.traffic[1] <= offer.traffic[1]
        return fits and (self.spec.name, self.region) == (offer.spec.name, offer.region)


class AskMarket:
    """Asks that meet the terms; those that one search found are kept for a minute. Serves several event loops.

    Args:
        search: performs a search.
        terms: the terms.
        now: the time in seconds.
    """

    def __init__(self, search: Search, terms: AskTerms, now: Callable[[], float] = time.monotonic) -> None:
        self._search = search
        self._terms = terms
        self._now = now
        self._found = SharedAnswers[_Rows](_KEPT_S, now)
        self._lock = threading.Lock()
        self._taken: dict[int, float] = {}
        self._used: dict[str, Counter[str]] = defaultdict(Counter)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the classes of asks that satisfy a request, of each market, the cheapest first.

        A class costs as much as the dearest of the asks that the request's nodes take.

        Raises:
            CapacityError: no ask does.
        """
        found = await self._asks(request)
        wishes = [one.wish for one in request.alternatives]
        left = self._left(found)
        fitting = [each for each in left if request.machine is not None or any(_fits(each, wish) for wish in wishes)]
        if not fitting:
            refuse_unlikely(request.machine, "VastAI")
            if not wishes[1:]:
                _refuse_unknown_vendor(request.accelerator)
            wanted = f"one of {len(wishes)} accelerators" if wishes[1:] else request.machine or request.wish
            free = ", free traffic because of max_cost" if self._terms.pays_no_traffic(request) else ""
            raise CapacityError(
                f"VastAI has no machine with {wanted} now ({self._terms}{free}). Try again "
                "later, or relax regions, min_reliability, min_inet_mbps, verified, disk_gb, billed_traffic of VastAI"
            )
        alike: defaultdict[Accelerator | None, list[Ask]] = defaultdict(list)
        for each in fitting:
            alike[request.accelerator_of(each.spec)].append(each)
        groups: dict[tuple[str, str, bool], list[Ask]] = defaultdict(list)
        for asks in alike.values():
            fewest = min(each.spec.accelerator_count for each in asks)
            for each, spot in itertools.product(asks, (True, False)):
                if each.spec.accelerator_count == fewest and each.charged(spot=spot) < math.inf:
                    groups[each.spec.name, each.region, spot].append(each)
        offers = [_offer(same, request, spot=spot, age_s=self._now() - found.at) for (*_, spot), same in groups.items()]
        return cheapest_offers(offers, request, vendor="VastAI")

    async def take(self, offer: AskOffer, order: LaunchOrder) -> Ask | None:
        """Return the next ask of an offer's class, at about its price at most; None if there is none.

        Hosts without a machine of the pool come first, those to be avoided never. Nobody gets the ask again before it
        is released.
        """
        found = await self._asks(offer.request)
        with self._lock:
            left = [each for each in self._left(found) if each.serves(offer) and each.host not in order.avoid]
            first = next(iter(_in_order(left, spot=offer.spot, used=self._used[order.pool_id])), None)
            if first is not None:
                self._taken[first.id] = math.inf
                self._used[order.pool_id][first.host] += 1
        return first

    def release(self, ask: int) -> None:
        """Let an ask, whose machine is destroyed, be taken again once a later search finds it."""
        self._taken[ask] = self._now()

    def _left(self, found: SharedAnswer[_Rows]) -> Sequence[Ask]:
        """Return the asks of a search that nobody took: the vendor may list a rented one for a while."""
        asks = (
            _parse(row, self._terms.bid_factor) for row in decode_rows(_AskPayload, found.value, "VastAI: a search")
        )
        return [ask for ask in asks if self._taken.get(ask.id, -math.inf) < found.at]

    async def _asks(self, request: PoolRequest) -> SharedAnswer[_Rows]:
        """Return the rows that one search has found for a request's terms."""
        body = self._terms.search_body(request)
        return await self._found.of(json.dumps(body, sort_keys=True), lambda: self._search(body))


def _refuse_unknown_vendor(wanted: Accelerator | None) -> None:
    """Refuse an accelerator of which no host will ever have one.

    Raises:
        ConfigurationError: it is none of the kinds that the vendor lists.
    """
    if wanted is not None and wanted.vendor not in _VENDORS:
        raise ConfigurationError(
            f"accelerator {wanted.label}: VastAI has none of these ({wanted.vendor.value}), but GPUs of NVIDIA and "
            "AMD: use another provider"
        )


class _SharePayload(VendorPayload):
    """Share of a machine that an ask or an instance has."""

    num_gpus: int | None
    cpu_cores: float
    cpu_cores_effective: float
    cpu_ram: float
    gpu_name: str | None
    gpu_ram: float | None
    geolocation: str | None
    machine_id: int
    dph_total: float

    def __post_init__(self) -> None:
        if self.cpu_cores <= 0 or (self.num_gpus and not (self.gpu_name and self.gpu_ram)):
            raise ValueError("Machine without cores, or with GPUs of no kind or memory")

    @property
    def spec(self) -> InstanceSpec:
        """Type, cores, memory and accelerators."""
        cores, count = self.cpu_cores_effective, self.num_gpus
        memory_gib = self.cpu_ram / 1024 * min(1.0, cores / self.cpu_cores)
        spec = InstanceSpec(name=CPU_ONLY, cpu=max(1, int(cores)), memory_gib=round(memory_gib, 1))
        if not count:
            return spec
        gpu = (self.gpu_name or "").replace("_", " ")
        sold = sold_as(gpu, model_name(gpu), reported_gib=(self.gpu_ram or 0.0) / 1024)
        return sold.built_into(replace(spec, name=f"{count}x {gpu}"), count)

    @property
    def region(self) -> str:
        """The country: the end of ``"Quebec, CA"``."""
        return (self.geolocation or "").rpartition(",")[2].strip()


class _AskPayload(_SharePayload):
    id: int
    dph_base: float
    min_bid: float
    inet_down_cost: float | None
    inet_up_cost: float | None


def _in_order(asks: Iterable[Ask], *, spot: bool, used: Mapping[str, int]) -> list[Ask]:
    """Return asks in the order in which they are tried: the hosts used least first, then the cheapest."""
    return spread(sorted(asks, key=lambda ask: (ask.charged(spot=spot), ask.id)), lambda ask: ask.host, used)


def _offer(asks: Sequence[Ask], request: PoolRequest, *, spot: bool, age_s: float) -> AskOffer:
    ordered = _in_order(asks, spot=spot, used={})[: request.nodes + _SPARE]
    first = ordered[: request.nodes]
    cpu, memory_gib = min(each.spec.cpu for each in ordered), min(each.spec.memory_gib for each in ordered)
    inward, outward = (max(each.traffic[index] for each in ordered) for index in (0, 1))
    note = f"traffic is billed in addition, up to ${inward:.3g} a GB in and ${outward:.3g} a GB out"
    note += "" if request.max_cost is None else ": max_cost does not hold for it"
    return AskOffer(
        request=request,
        traffic=(inward, outward),
        spec=replace(first[0].spec, cpu=cpu, memory_gib=memory_gib),
        region=first[0].region,
        spot=spot,
        price_per_hour=max(each.charged(spot=spot) for each in first),
        on_demand_price_per_hour=max(each.price for each in first),
        price_age_s=age_s,
        note=note if inward or outward else "",
        island=True,
    )


def _fits(ask: Ask, wish: InstanceWish) -> bool:
    least = _LEAST if wish.accelerator is None else InstanceWish()
    return not (wish.shortfall(ask.spec) or least.shortfall(ask.spec))


def _parse(ask: _AskPayload, bid_factor: float) -> Ask:
    # A bid below the least one leaves a stopped contract.
    bid = max(_LEAST_BID, round(ask.min_bid * bid_factor, 6), ask.min_bid)
    return Ask(
        id=ask.id,
        host=str(ask.machine_id),
        region=ask.region,
        spec=ask.spec,
        price=ask.dph_total,
        disk=ask.dph_total - ask.dph_base,
        bid=bid if bid < ask.dph_base - _BID_STEP else math.inf,
        traffic=(ask.inet_down_cost or 0.0, ask.inet_up_cost or 0.0),
    )


PORT: Final = 10022
"""Port of Skyward's sshd in a container."""

STATES: Final[Mapping[str | None, InstanceState]] = {
    **dict.fromkeys((None, "created", "loading", "rebooting"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(("stopped", "exited", "frozen", "offline", "unknown"), InstanceState.FAILED),
}
"""State of an instance, by its ``actual_status``."""

_NEVER_RUNS: Final = re.compile(
    r"OCI runtime create failed|failed to create|pull access denied|manifest unknown|manifest for .* not found|"
    r"unauthorized|no space left|no basic auth|toomanyrequests",
    re.IGNORECASE,
)
"""Messages of instances that do not come up, although their status goes on as if they did."""


def create_body(ask: Ask, terms: AskTerms, name: str, boot: ContainerBoot, *, spot: bool) -> Mapping[str, Any]:
    """Return the body of the call that rents an ask, by a bid or on demand.

    Args:
        ask: the ask.
        terms: terms of the rental.
        name: the instance's label.
        boot: orders of the container.
        spot: True for a bid.
    """
    return {
        "client_id": "me",
        "image": terms.image_for(gpu=ask.spec.accelerator_count > 0),
        "disk": terms.disk_gb,
        "label": name,
        "runtype": "args",  # any other one starts the vendor's sshd, whose keys the vendor rewrites
        "args": list(boot.arguments),
        "env": {f"-p {PORT}:{PORT}": "1", **boot.variable},
        "target_state": "running",
        "cancel_unavail": True,  # without it an ask that is gone becomes a stopped contract, whose disk bills
        **({"price": ask.bid} if spot else {}),
        **({"image_login": terms.image_login} if terms.image_login else {}),
    }


class _LabelledPayload(VendorPayload):
    label: str | None


class _MappedPortPayload(VendorPayload, rename="pascal"):
    host_port: str


class _InstancePayload(_SharePayload):
    id: int
    actual_status: str | None
    cur_state: str | None
    next_state: str | None
    intended_status: str | None
    is_bid: bool | None
    status_msg: str | None = None
    public_ipaddr: str | None = None
    ports: Mapping[str, tuple[_MappedPortPayload, ...] | None] | None = None

    @property
    def port(self) -> int:
        """Port of the host that is mapped to sshd; 0 while there is none."""
        mapped = (self.ports or {}).get(f"{PORT}/tcp") or ()
        return next((int(each.host_port) for each in mapped if each.host_port.isdecimal()), 0)


def parse_record(row: Mapping[str, Any]) -> MachineRecord | None:
    """Parse one instance of a list; None for one of somebody else."""
    if not (labels := labels_of(decode(_LabelledPayload, row, _READING).label)):
        return None
    instance = decode(_InstancePayload, row, _READING)
    status, message = instance.actual_status, (instance.status_msg or "").strip()
    stopped = {instance.cur_state, instance.next_state, instance.intended_status} == {"stopped"}
    state = InstanceState.FAILED if stopped else decode_state(STATES, status, _READING)
    if state is InstanceState.PENDING and _NEVER_RUNS.search(message):
        state = InstanceState.FAILED
    outbid = stopped and instance.is_bid is True  # "exited" alone: its main process ended, which is no host's doing
    reason = "outbid: the host runs somebody else's bid" if outbid else f"{status}: {message[:200]}".rstrip(": ")
    return MachineRecord(
        id=str(instance.id),
        key=labels[1],
        pool_id=labels[0],
        state=state,
        offer=Offer(
            spec=instance.spec,
            region=instance.region,
            spot=instance.is_bid is True,
            price_per_hour=instance.dph_total,
            island=True,
        ),
        public_address=(instance.public_ipaddr or "").strip() if instance.port else "",
        public_port=instance.port,
        host=str(instance.machine_id),
        reason=reason if state is InstanceState.FAILED else "",
        preempted=outbid,
    )


API_URL: Final = "https://console.vast.ai"
_LIST: Final = "/api/v1/instances/"
_SEARCH: Final = "/api/v0/bundles/"
_PAGE: Final = 25
_SUCCESS, _NOT_FOUND = 200, 404
_READING: Final = "VastAI: reading an instance"
_CONTRACT: Final = re.compile(r"\(it made contract (\d+)\)")
_DAY_S: Final = 86400
_KEYS: Final = (
    "Make a key in the console (https://cloud.vast.ai/manage-keys/) with the scopes misc, user_read, instance_read and "
    "instance_write, and put it in VAST_API_KEY or ~/.config/vastai/vast_api_key"
)
TOP_UP: Final = "Add credit: https://cloud.vast.ai/billing/"
_RESET: Final = "Searches are limited by the day, and no retry helps: the quota resets at 00:00 UTC, in {reset}"

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.QUOTA, codes="search_quota_exceeded", advice=_RESET),
        RefusalRow(kind=RefusalKind.AUTH, words="invalid user key"),
        RefusalRow(kind=RefusalKind.CAPACITY, codes="invalid_price no_such_ask"),
        RefusalRow(kind=RefusalKind.CAPACITY, words="no_such_ask|no longer available|is not available|not your own"),
        RefusalRow(kind=RefusalKind.QUOTA, codes="missing_billing insufficient_credit"),
        RefusalRow(kind=RefusalKind.QUOTA, words="credit|billing", status=400),
        RefusalRow(kind=RefusalKind.CAPACITY, status=_SUCCESS),  # with "success": false
    ),
    advice={RefusalKind.AUTH: _KEYS, RefusalKind.QUOTA: TOP_UP},
)
"""VastAI's errors. Any part of them may be missing, and those of throttled calls are often plain text."""


def find_key(given: str | None) -> str:
    """Return the key that was given, else the environment's, else that of the vendor's command line.

    Raises:
        AuthenticationError: there is none.
    """
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = (each for each in (folder / "vastai/vast_api_key", Path.home() / ".vast_api_key") if each.is_file())
    found = (given, os.environ.get("VAST_API_KEY"), *(each.read_text(encoding="utf-8") for each in files))
    if key := next((each.strip() for each in found if each and each.strip()), ""):
        return key
    raise AuthenticationError(f"no key for VastAI in VAST_API_KEY, nor in {folder}/vastai/vast_api_key. {_KEYS}")


def instance_path(instance: str) -> str:
    """Return the path of an instance's calls."""
    return f"/api/v0/instances/{instance}/"


class _UserPayload(VendorPayload):
    credit: float


class VastAccount(MachineApi):
    """Instances of one account; they bear labels, and there is nothing else to remove.

    Args:
        url: URL of the API; None for the vendor's.
        key: the account's key; None for that of the environment.
        terms: terms of the rentals.
        patience_s: time for which throttled and interrupted calls are repeated.
        pace: least seconds between two calls of a route.

    Attributes:
        url: as given, without a slash at its end.
        rest: the API.
        market: the asks that meet the terms.
    """

    def __init__(
        self, url: str | None, key: str | None, terms: AskTerms, *, patience_s: float, pace: Mapping[str, float]
    ) -> None:
        self.url, self._terms, self._asks = (url or API_URL).removesuffix("/"), terms, dict[str, int]()
        self.market = AskMarket(self.search, terms)
        api: Mapping[str, Any] = {"vendor": "VastAI", "base_url": self.url, "pace": pace, "patience_s": patience_s}
        self.rest = RestClient(authorize=bearer(lambda: find_key(key)), judge=_judge, explain=_explain, **api)

    async def credit(self) -> float:
        """Return the USD that are left."""
        path = "/api/v0/users/current/"
        return decode(_UserPayload, await self.rest.read(path), f"VastAI: GET {path}").credit

    async def search(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the asks of a search, of which an account has few a minute, and a limited number a day."""
        return decode_list(await self.rest.call("POST", _SEARCH, body), "offers", "VastAI: a search")

    async def search_publicly(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the asks of a search that anyone may make, of which an address has few a minute."""
        return decode_list(await self.rest.read_public("POST", _SEARCH, body), "offers", "VastAI: a public search")

    async def rent(self, ask: Ask, name: str, boot: ContainerBoot, *, spot: bool) -> str:
        """Rent an ask and return the id of the instance. Throttled calls, which have no effect, are repeated.

        A contract that was made with a refusal is destroyed. Raises one of :data:`~skyward.providers.base.REFUSALS`
        if there is no instance.
        """
        path, body = f"/api/v0/asks/{ask.id}/", create_body(ask, self._terms, name, boot, spot=spot)
        try:
            answer = _accepted(await self.rest.create(path, body, method="PUT"), f"PUT {path}")
        except REFUSALS as error:
            if contract := _CONTRACT.search(str(error.__cause__)):
                await self._destroy(contract[1])
            raise
        if not (made := answer.get("new_contract")):
            raise UnreachableError(f"VastAI answered a creating call with success, but no id: {str(answer)[:80]}")
        self._asks[str(made)] = ask.id
        return str(made)

    async def find(self, key: str) -> MachineRecord | None:
        """Return the instance with that ledger key; None if none is listed.

        A contract that was made with a refusal has the key, too, and is listed for some seconds: it is older.
        """
        found = [each for each in await self.listed() if each.key == key]
        return max(found, key=lambda each: (each.state is not InstanceState.FAILED, int(each.id)), default=None)

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:  # noqa: ARG002 - ids do
        """Return the instances with these ids that exist."""
        return await self._rows({"id": {"in": [int(each) for each in instance_ids if each.isdecimal()]}})

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:  # noqa: ARG002 - labels cannot be searched
        """Return every instance of Skyward's in the account."""
        return await self._rows({})

    async def request_end(self, machine: str) -> None:
        """Destroy an instance with its disk. It is never stopped: the disk of a stopped one bills."""
        if not machine.isdecimal():
            raise TABLE.refused("no_such_instance", f"{machine!r} is no number", "VastAI", status=_NOT_FOUND)
        _accepted(await self.rest.call("DELETE", instance_path(machine), {}), f"DELETE {instance_path(machine)}")
        self.market.release(self._asks.pop(machine, 0))

    async def _rows(self, filters: Mapping[str, Any]) -> Sequence[MachineRecord]:
        def following(page: Mapping[str, Any]) -> Mapping[str, str] | None:
            return {"after_token": str(page["next_token"])} if page.get("next_token") else None

        query = {"limit": str(_PAGE), "select_filters": json.dumps(filters)}
        rows = await self.rest.pages(_LIST, "instances", query, following=following)
        return [each for row in rows if (each := parse_record(row)) is not None]

    async def _destroy(self, contract: str) -> None:
        """Destroy a contract that came with a refusal.

        Raises:
            UnreachableError: it may be left.
        """
        try:
            await self.rest.call("DELETE", instance_path(contract), {}, done=(RefusalKind.MISSING,))
        except SkywardError as error:
            raise UnreachableError(f"VastAI refused to rent, yet made contract {contract}: {error}") from error


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    plain = answer.body if isinstance(answer.body, str) else ""
    words = str(row.get("msg") or row.get("detail") or plain or "no message")
    if contract := row.get("new_contract"):
        words += f" (it made contract {contract})"
    return TABLE.judge(str(row.get("error") or f"HTTP {answer.status}"), words, status=answer.status)


def _accepted(answer: Any, call: str) -> Mapping[str, Any]:
    """Return an answer with a status of success; raises if it is a refusal all the same."""
    row = cast("Mapping[str, Any]", answer if isinstance(answer, dict) else {})
    if row.get("success") is False:
        found = _judge(ApiAnswer(status=_SUCCESS, body=row))
        raise _explain(found, call) from RefusedCall(found)
    return row


def _explain(found: Refusal, call: str) -> SkywardError:
    left_s = _DAY_S - time.time() % _DAY_S
    return TABLE.explain(found, f"VastAI: {call}", reset=f"{left_s // 3600:.0f} h {left_s % 3600 // 60:.0f} min")


_TRIES: Final = 8
"""Most asks of a class that are tried for one machine: asks go stale within seconds."""


@explain_options
@dataclass(frozen=True, kw_only=True)
class VastAI(AskTerms, RentedContainers[VastAccount]):
    """Containers on hosts of VastAI's marketplace, reached over SSH as root at a mapped port.

    The key is ``VAST_API_KEY`` of the environment, else that of VastAI's command line. Each node is an island. The
    owner of a host can read everything that is on it.

    Args:
        verified: rent from hosts that VastAI has verified only.
        min_reliability: least share of its time for which a host was up, from 0 to 1.
        regions: codes of countries, e.g. ``["US", "DE"]``; None for any.
        min_inet_mbps: least bandwidth of a host's downloads in Mbit/s.
        image: container image, whose shell and package manager start Skyward's sshd. None for a small official one,
            with CUDA where there is a GPU.
        image_login: credentials for the image's registry, as the vendor takes them: ``"-u USER -p TOKEN REGISTRY"``.
        disk_gb: size of the disk, which bills as long as the instance exists. It is part of every price.
        bid_factor: bids on the interruptible market as a multiple of the lowest one that runs; at least 1.
        billed_traffic: with ``max_cost``, rent from hosts that bill traffic as well: the limit does not hold for that.
        endpoint_url: URL of the API used instead of VastAI's; for tests and private gateways.
        api_key: the key, in place of the environment's. It is not recorded: ``skyward sweep`` needs it there.

    Raises:
        ConfigurationError: a value is wrong.
    """

    endpoint_url: str | None = None
    api_key: str | None = field(default=None, repr=False)

    patience_s: ClassVar[float] = 60.0
    """Time for which throttled and interrupted calls are retried."""
    ending_pace_s: ClassVar[float] = 3.5
    look_interval_s: ClassVar[float] = 2.0
    """Least number of seconds between two lists of machines."""
    create_route: ClassVar[str] = "PUT /api/v0/asks/*"
    pace: ClassVar[Mapping[str, float]] = {
        "PUT /api/v0/asks/*": 5.0,
        "DELETE /api/v0/instances/*": 3.5,
        "GET /api/v1/instances": 1.2,
    }
    """Least number of seconds between two calls of a route: VastAI refuses them below 4.5, 3 and 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, api_key=secret, endpoint_url=web_address)
        self.use_api(VastAccount(self.endpoint_url, self.api_key, self, patience_s=self.patience_s, pace=self.pace))

    @classmethod
    def has_credentials(cls) -> bool:
        """Return whether a key is here."""
        return is_found(lambda: find_key(None))

    @property
    def name(self) -> str:
        """``"vastai"``."""
        return "vastai"

    def wishes(self, request: PoolRequest) -> Sequence[PoolRequest]:
        """Return one request for many accelerators, since searches are few: it may miss the most expensive asks."""
        sizes = {wanted.memory_gib for wanted in request.accelerators}
        return request.alternatives if len(sizes) <= _SEARCHES else (request,)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return classes of asks: a number of GPUs in a country on one market, at the price of the dearest one taken.

        Raises:
            ConfigurationError: ``machine`` is no machine's name.
            CapacityError: no ask satisfies the request and the terms now.
            QuotaError: the day's searches are used up.
            AuthenticationError: there is no key, or VastAI refuses it.
        """
        return await self.api.market.offers(request)

    async def public_offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return classes of asks as :meth:`offers` does, by a search without a key."""
        return await AskMarket(self.api.search_publicly, self).offers(request)

    async def prepare(self, order: LaunchOrder) -> None:  # noqa: ARG002 - all orders share the credit
        """Refuse to rent anything without credit."""
        if (credit := await self.api.credit()) <= 0:
            raise QuotaError(f"VastAI: the account's credit is ${credit:.2f}, and nothing is rented. {TOP_UP}")

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Rent the next ask of the offer's class, on another host than the pool's others where there is one.

        Asks that are gone, or too dear by now for the pool's limits, are passed over. After an answer that leaves the
        outcome open no other ask is tried.
        """
        refused: SkywardError = CapacityError(f"VastAI has no other {offer.spec.name} in {offer.region} at that price")
        for _ in range(_TRIES):
            if (ask := await self.api.market.take(cast("AskOffer", offer), order)) is None:
                break
            try:
                return await self._rent(ask, offer, key, order)
            except CapacityError as error:
                refused = error
        raise refused

    async def check(self) -> Sequence[Finding]:
        """Check the key, the credit, and whether the key may list instances; creates nothing and searches nothing."""
        found: list[Finding] = []
        try:
            credit = await self.api.credit()
            found.append(Finding(what="key", state="ok", found="VastAI accepts it"))
            state, fix = ("ok", "") if credit > 0 else ("fail", TOP_UP)
            found.append(Finding(what="credit", state=state, found=f"${credit:.2f}", fix=fix))
            listed = f"it lists instances, {len(await self.api.listed())} of them Skyward's"
        except SkywardError as error:
            return [*found, failed("scopes" if found else "key", error, fix="see docs/providers/vastai.md")]
        return [*found, Finding(what="scopes", state="ok", found=f"{listed}; only a launch shows the others")]

    async def _rent(self, ask: Ask, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        actual = replace(offer, price_per_hour=ask.charged(spot=offer.spot))
        if (lasts_s := order.lasts_s(actual)) <= 0:
            raise CapacityError(f"ask {ask.id} costs ${actual.price_per_hour:.4g} an hour, more than is allowed")
        boot = await asyncio.to_thread(self._boot, key, int(time.time() + lasts_s))
        made = await self.api.rent(ask, label(order.pool_id, key), boot, spot=offer.spot)
        pool_id, new = order.pool_id, InstanceState.PENDING
        return MachineRecord(id=made, key=key, pool_id=pool_id, state=new, offer=actual, host=ask.host)

    def _boot(self, key: str, ends_at: int) -> ContainerBoot:
        """Return the orders of a container, which ends with the key that VastAI gives to it alone."""
        url = self.api.url + instance_path("${CONTAINER_ID}")
        headers, refused = ("Authorization: Bearer ${CONTAINER_API_KEY}",), '"success":false'
        return ContainerBoot(
            host_key=host_key(key),
            user_key=user_key()[1].public,
            port=PORT,
            made_at=int(time.time()),
            ends_at=ends_at,
            end=[HttpCall(method="DELETE", url=url, headers=headers, body="{}", refusal=refused)],
            # Starting a container that runs changes nothing; the key is not documented to read anything.
            check=HttpCall(method="PUT", url=url, headers=headers, body='{"state":"running"}', refusal=refused),
        )
