"""Provider of Verda's machines, billed from a prepaid balance."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from skyward.errors import CapacityError, ConfigurationError, RateLimitError, SkywardError, UnreachableError
from skyward.providers._common.logins import host_key, user_key
from skyward.providers._common.machine_boot import POWER_OFF, SelfDestruct, boot_script, first_delivery
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    cheapest_offers,
    fewest_accelerators,
    sold_accelerators,
    sold_as,
)
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, failed
from skyward.providers._common.rented_machines import MachineApi, MachineRecord, RentedMachines, label, labels_of
from skyward.providers._common.rest_client import (
    ApiAnswer,
    ClientCredentials,
    SignedInClient,
    VendorPayload,
    decode,
    decode_rows,
    decode_state,
    is_found,
    read_credentials,
)
from skyward.providers.base import (
    REFUSALS,
    Finding,
    Instance,
    InstanceState,
    LaunchOrder,
    MachineSecret,
    Offer,
    check_settings,
)
from skyward.request.accelerators import model_name
from skyward.request.checks import explain_options, flag, refusal, text, web_address
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

Stock = Mapping[bool, Mapping[str, Sequence[str]]]
"""Machine types that are available now, by market (True is spot), then by the code of their location."""

STATES: Final[Mapping[str, InstanceState]] = {
    **dict.fromkeys(("new", "ordered", "provisioning", "validating", "pending", "unknown"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    "deleting": InstanceState.STOPPING,
    "discontinued": InstanceState.GONE,
    "notfound": InstanceState.GONE,
    "offline": InstanceState.FAILED,  # switched off, and billed all the same
    **dict.fromkeys(("error", "installation_failed", "no_capacity"), InstanceState.FAILED),
}
"""State of a machine, by Verda's word for it."""

_MINIMUM_BILLED_S: Final = 600.0
"""Shortest time billed, by an old text of the vendor's: no present document states one."""
_READING: Final = "Verda: GET /instances"
_CATALOGUE: Final = "Verda: GET /instance-types"
_POOL_TAG: Final = "skyward-pool"
_KEY_TAG: Final = "skyward-key"
_IMAGE: Final = re.compile(r"ubuntu-(\d+\.\d+)(?:-cuda-(\d+)\.(\d+))?", re.ASCII)
_NEWEST_TRIED: Final = "24.04"
_GPU_DISK_GB: Final = 100
_DISK_GB: Final = 50


class _TagPayload(VendorPayload):
    key: str
    value: str


class _TaggedMachinePayload(VendorPayload):
    description: str | None = None
    tags: tuple[_TagPayload, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The pool and the ledger key of a machine; empty for a machine of somebody else.

        They are its tags, else in its description: Verda's tags are new.
        """
        tags = {tag.key: tag.value for tag in self.tags or ()}
        if _KEY_TAG in tags and _POOL_TAG in tags:
            return tags[_POOL_TAG], tags[_KEY_TAG]
        return labels_of(self.description)


class _MachinePayload(VendorPayload):
    id: str
    status: str
    instance_type: str
    location: str
    is_spot: bool
    price_per_hour: float | None = None
    ip: str | None = None


def parse_record(row: Mapping[str, Any]) -> MachineRecord | None:
    """Parse one machine of an answer; None for a machine of somebody else."""
    if not (labels := decode(_TaggedMachinePayload, row, _READING).labels):
        return None
    machine = decode(_MachinePayload, row, _READING)
    status, spot = machine.status, machine.is_spot
    state = decode_state(STATES, status, _READING)
    spec = InstanceSpec(name=machine.instance_type, cpu=0, memory_gib=0.0)
    return MachineRecord(
        id=machine.id,
        key=labels[1],
        pool_id=labels[0],
        state=state,
        offer=_offer(spec, machine.location, spot=spot, price=machine.price_per_hour),
        public_address=machine.ip or "",
        reason=status if state in (InstanceState.FAILED, InstanceState.GONE) else "",
        preempted=spot and status == "discontinued",
    )


def create_body(offer: Offer, pool_id: str, key: str, *, image: str, key_id: str, script_id: str) -> dict[str, Any]:
    """Return the body of the call that creates a machine, its volume and its tags."""
    name = label(pool_id, key)
    disk_gb = _GPU_DISK_GB if offer.spec.accelerator else _DISK_GB
    return {
        "instance_type": offer.spec.name,
        "image": image,
        "hostname": key,
        "description": name,
        "location_code": offer.region,
        "ssh_key_ids": [key_id],
        "startup_script_id": script_id,
        "is_spot": offer.spot,
        "contract": "SPOT" if offer.spot else "PAY_AS_YOU_GO",
        "pricing": "FIXED_PRICE",
        "os_volume": {"name": name, "size": disk_gb, "on_spot_discontinue": "delete_permanently"},
        "tags": [{"key": _POOL_TAG, "value": pool_id}, {"key": _KEY_TAG, "value": key}],
    }


def choose_image(supported: Sequence[str], *, gpu: bool) -> str | None:
    """Return the image for a machine type: Ubuntu 24.04 if there is one, with the newest CUDA for a GPU.

    Images differ by type: older GPUs lack the newer ones. None if no image is Ubuntu's.
    """

    def rank(name: str) -> tuple[Any, ...]:
        version, *cuda = cast("re.Match[str]", _IMAGE.match(name)).groups()
        numbers = tuple(int(each) for each in cuda if each)
        return bool(numbers) is gpu, version == _NEWEST_TRIED, version, numbers, "kubernetes" not in name, -len(name)

    return max(filter(_IMAGE.match, supported), key=rank, default=None)


def parse_types(rows: Iterable[Mapping[str, Any]]) -> tuple[MachineType, ...]:
    """Parse the catalogue; malformed rows are left out."""
    return tuple(map(_parse_type, decode_rows(_TypePayload, rows, _CATALOGUE)))


def parse_images(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the image for each machine type of the catalogue that has one."""
    images = {each.instance_type: each.image for each in decode_rows(_TypePayload, rows, _CATALOGUE)}
    return {name: image for name, image in images.items() if image is not None}


def make_offers(
    types: Sequence[MachineType], stock: Stock, request: PoolRequest, *, region: str | None
) -> Sequence[Offer]:
    """Return the offers that satisfy a request, in the region or in any, the cheapest of each market first.

    A larger machine than requested is not offered because the smallest one is sold out.

    Raises:
        ConfigurationError: there is no such machine type; names the nearest.
        CapacityError: it is not available now; names the locations in which it is, and the larger machines.
    """
    places = {each: sorted({place for spot in stock for place in _places(each, stock, spot=spot)}) for each in types}
    catalogue = Catalogue(vendor="Verda", types=types, kind="location", accelerators=sold_accelerators(places))
    fitting = catalogue.candidates(request)
    chosen = fewest_accelerators(fitting)
    offers = [
        _offer(each.spec, place, spot=spot, price=each.spec.price_spot if spot else each.spec.price_on_demand)
        for each in chosen
        for spot in stock
        for place in _places(each, stock, spot=spot)
        if region in (None, place)
    ]
    if offers:
        return cheapest_offers(offers, request, vendor="Verda")
    elsewhere = sorted({place for each in chosen for place in places[each]})
    larger = [f"{each.name} in {', '.join(places[each])}" for each in fitting if places[each] and each not in chosen]
    advice = f"it is in {', '.join(elsewhere)}: leave region out, or name one of these" if elsewhere else "try later"
    more = f", or request a larger machine by machine=: {'; '.join(larger[:3])}" if larger else ""
    names = ", ".join(each.name for each in chosen[:3])
    raise CapacityError(f"Verda has no {names} available now in {region or 'any location'}; {advice}{more}")


def _places(machine: MachineType, stock: Stock, *, spot: bool) -> Sequence[str]:
    if spot and not machine.spot:
        return ()
    return sorted(code for code, names in stock[spot].items() if machine.name in names)


def _offer(spec: InstanceSpec, location: str, *, spot: bool, price: float | None) -> Offer:
    return Offer(
        spec=spec,
        region=location,
        spot=spot,
        price_per_hour=price,
        on_demand_price_per_hour=spec.price_on_demand,
        minimum_billed_s=_MINIMUM_BILLED_S,
        island=True,
    )


class _CoresPayload(VendorPayload):
    number_of_cores: int


class _GigabytesPayload(VendorPayload):
    size_in_gigabytes: float


class _VerdaGpuPayload(VendorPayload):
    number_of_gpus: int
    description: str


class _TypePayload(VendorPayload):
    instance_type: str
    cpu: _CoresPayload
    memory: _GigabytesPayload
    gpu: _VerdaGpuPayload
    gpu_memory: _GigabytesPayload
    supported_os: tuple[str, ...]
    price_per_hour: float | None
    spot_price: float | None

    @property
    def image(self) -> str | None:
        """The image for it; None if none is Ubuntu's."""
        return choose_image(self.supported_os, gpu=self.gpu.number_of_gpus > 0)


def _parse_type(row: _TypePayload) -> MachineType:
    spec = InstanceSpec(
        name=row.instance_type,
        cpu=row.cpu.number_of_cores,
        memory_gib=row.memory.size_in_gigabytes,
        price_on_demand=row.price_per_hour,
        price_spot=row.spot_price or None,
    )
    if count := row.gpu.number_of_gpus:  # Verda states the memory of all GPUs together: "8x H100 SXM5 80GB" has 640
        name = re.sub(r"^\d+x\s+|\s+\d+\s*GB$", "", row.gpu.description)
        reported_gib = row.gpu_memory.size_in_gigabytes / count
        sold = sold_as(re.sub(r"SXM\d", "SXM", name), name, model_name(name), reported_gib=reported_gib)
        spec = sold.built_into(spec, count)
    return MachineType(spec=spec, spot=spec.price_spot is not None, whole=row.image is not None)


API_URL: Final = "https://api.verda.com/v1"
CATALOGUE: Final = ("/instance-types", {"currency": "usd"})
"""Path and query of the machine types."""
_CONSOLE: Final = "https://console.verda.com"
_KEYS: Final = (
    f"Make credentials for the cloud API in the console ({_CONSOLE}, under Keys), and put them in VERDA_CLIENT_ID and "
    "VERDA_CLIENT_SECRET, or in ~/.verda/credentials"
)

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.IN_USE, words="discontinue a provisioning"),
        RefusalRow(kind=RefusalKind.MISSING, words="invalid instance id|discontinue a discontinued|does not exist"),
        RefusalRow(kind=RefusalKind.QUOTA, status=402, advice=f"Top up the balance in the console: {_CONSOLE}"),
        RefusalRow(kind=RefusalKind.QUOTA, status=403, advice=f"The project's limits forbid it: {_CONSOLE}"),
        RefusalRow(kind=RefusalKind.CAPACITY, words="capacity|not available", status=400),
        # No other 5xx is a refusal: the machine may have been made.
        RefusalRow(kind=RefusalKind.CAPACITY, words="no capacity", status=503),
        RefusalRow(kind=RefusalKind.CAPACITY, words="instance.?type|location", status=400),
    ),
    advice={RefusalKind.AUTH: _KEYS},
)
"""Verda's errors; the code alone seldom decides, since most are ``invalid_request``."""


def find_credentials() -> ClientCredentials:
    """Return the credentials in the environment, else those in the file of Verda's command line.

    Raises:
        AuthenticationError: there are none.
    """
    folder = Path(os.environ.get("VERDA_HOME") or Path.home() / ".verda")
    return read_credentials("Verda", ("verda_client_id", "verda_client_secret"), folder / "credentials", advice=_KEYS)


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    text = str(row.get("message") or (answer.body if isinstance(answer.body, str) else "") or "no message")
    return TABLE.judge(str(row.get("code") or f"HTTP {answer.status}"), text, status=answer.status)


class VerdaAccount(MachineApi):
    """Machines of one account. Everything that is made for one bears its label, and is removed by it.

    Args:
        url: URL of the API.
        patience_s: time for which throttled and interrupted calls are repeated.

    Attributes:
        rest: the API.
        client: the same, which issues bearers.
    """

    def __init__(self, url: str, *, patience_s: float) -> None:
        self.rest = self.client = SignedInClient(
            vendor="Verda",
            base_url=url,
            bearer_path="/oauth2/token",
            credentials=find_credentials,
            judge=_judge,
            explain=lambda refused, call: TABLE.explain(refused, f"Verda: {call}"),
            patience_s=patience_s,
        )
        self._images: Mapping[str, str] = {}
        self._key_id = ""
        self._seen: dict[str, Mapping[str, Any]] = {}

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return every machine of Skyward's in the account: one call lists them all."""
        del instance_ids, pool_id
        found = await self._rows("/instances")
        self._seen = {str(row["id"]): row for row in found}
        return [each for row in found if (each := parse_record(row)) is not None]

    async def prepare(self, public_key: str) -> None:
        """Add the user's key to those of the account, unless it is there, and look up the images of machine types."""
        self._images = parse_images(await self.rest.read(*CATALOGUE))
        wanted = public_key.split()[:2]
        kept = [row for row in await self._rows("/sshkeys") if str(row.get("key", "")).split()[:2] == wanted]
        body = {"name": f"skyward-{wanted[1][-12:]}", "key": public_key}
        self._key_id = str(kept[0]["id"]) if kept else await self._make("/sshkeys", body)

    async def create(self, offer: Offer, pool_id: str, key: str, script: str) -> str:
        """Make a machine's startup script, then the machine, with its volume and tags; return the machine's id.

        The call for the machine is sent once. Raises one of :data:`~skyward.providers.base.REFUSALS` if none was made.
        """
        if (image := self._images.get(offer.spec.name)) is None:
            raise ConfigurationError(f"Verda has no machine type {offer.spec.name!r} with an image of Ubuntu")
        try:
            script_id = await self._make("/scripts", {"name": label(pool_id, key), "script": script})
        except UnreachableError as error:
            raise RateLimitError(f"Verda takes no startup script now, so that no machine was made: {error}") from error
        body = create_body(offer, pool_id, key, image=image, key_id=self._key_id, script_id=script_id)
        try:
            return _id_in(await self.rest.create("/instances", body))
        except REFUSALS:
            with contextlib.suppress(SkywardError):  # one that is left is removed by its name, with its pool
                await self._delete("/scripts", script_id)
            raise

    async def request_end(self, machine: str) -> None:
        """Request a machine's deletion, with its volumes, for good; then delete its script.

        Raises the refusal, which may be an item of an answer of success.
        """
        row = self._seen.get(machine, {})
        order: dict[str, Any] = {"id": [machine], "action": "delete", "delete_permanently": True}
        # An empty list would keep every volume; without one, the machine's own volume is deleted.
        if volumes := [each for each in {row.get("os_volume_id"), *(row.get("volume_ids") or ())} if each]:
            order["volume_ids"] = volumes
        items = await self.rest.call("PUT", "/instances", order)
        for item in cast("Sequence[Mapping[str, Any]]", items if isinstance(items, list) else ()):
            if item.get("status") == "error":
                raise TABLE.refused("item", str(item.get("error")), "Verda: PUT /instances", status=400)
        if script := row.get("startup_script_id"):
            await self._delete("/scripts", str(script))

    async def remove(self, pool_id: str) -> None:
        """Remove the startup scripts and volumes of a pool. Idempotent."""
        for path in ("/scripts", "/volumes"):
            for row in await self._rows(path):
                if labels_of(row.get("name"))[:1] == (pool_id,):
                    await self._delete(path, str(row["id"]))

    async def _make(self, path: str, body: Mapping[str, Any]) -> str:
        """Make a script or key, and return its id; where the answer is lost, look for its name, and make it again."""
        try:
            return _id_in(await self.rest.create(path, body))
        except UnreachableError:
            rows = [row for row in await self._rows(path) if row.get("name") == body["name"]]
            return str(rows[-1]["id"]) if rows else _id_in(await self.rest.create(path, body))

    async def _delete(self, path: str, made: str) -> None:
        for_good = ({"is_permanent": True}, {"is_permanent": "true"}) if path == "/volumes" else (None, None)
        await self.rest.call("DELETE", f"{path}/{made}", *for_good, done=(RefusalKind.MISSING,))

    async def _rows(self, path: str) -> Sequence[Mapping[str, Any]]:
        return cast("Sequence[Mapping[str, Any]]", await self.rest.read(path) or ())


def _id_in(answer: object) -> str:
    """Return the id in the answer to a creating call: text, or an object. The answer counts as lost if it has none."""
    found: object = cast("Mapping[str, Any]", answer).get("id") if isinstance(answer, dict) else answer
    if not isinstance(found, str) or not re.fullmatch(r"[\w-]*\d[\w-]*", found):
        raise UnreachableError(f"Verda answered a creating call with success, and without an id: {str(found)[:60]!r}")
    return found


_PROGRAM: Final = Path(__file__).with_name("_verda_self_destruct.py")
_FACTS: Final = "FACTS: dict[str, str] = {}"
"""Line of the program that its facts replace."""
_STALE_S: Final = 3000
"""Age of a bearer at which the client counts as dead, ten minutes before the bearer expires."""


class _BalancePayload(VendorPayload):
    amount: float
    currency: str


class _LocationPayload(VendorPayload):
    code: str


class _AvailabilityPayload(VendorPayload):
    location_code: str
    availabilities: tuple[str, ...]


@explain_options
@dataclass(frozen=True, kw_only=True)
class Verda(RentedMachines[VerdaAccount]):
    """Machines of Verda, reached over SSH as root, billed from a prepaid balance.

    Credentials are those of the cloud API: ``VERDA_CLIENT_ID`` and ``VERDA_CLIENT_SECRET`` in the environment, else
    ``~/.verda/credentials``. Machines have no private network: each is an island.

    Args:
        region: code of the location, e.g. ``"FIN-03"``; None means any in which the request is available, the cheapest
            first.
        self_destruct: have machines delete themselves when their client is dead or their time is over. Each then holds
            a bearer of the account, valid for an hour, which calls that run as root can read. Without it they power
            off, and bill on until they are swept.
        endpoint_url: URL of the API used instead of Verda's; for tests and private gateways.

    Raises:
        ConfigurationError: a value is wrong.
    """

    region: str | None = None
    self_destruct: bool = False
    endpoint_url: str | None = None

    patience_s: ClassVar[float] = 60.0
    """Time for which throttled and interrupted calls are retried."""
    termination_s: ClassVar[float] = 900.0
    """Deadline for the termination of machines, which cannot be deleted while they are provisioned."""
    look_interval_s: ClassVar[float] = 2.0
    """Least number of seconds between two lists of machines; Verda publishes no limit."""
    other_key_s: ClassVar[float] = 120.0
    """Time for which a machine may show its image's host key: the startup script runs late in the boot."""
    renewed_s: ClassVar[float] = 1200.0
    """Time after which a machine gets a newer bearer."""
    bind: ClassVar[str] = "127.0.0.1"
    """Address to which the ports of nodes bind: at the machine's own one, every port is open to the internet."""

    def __post_init__(self) -> None:
        flag("self_destruct", self.self_destruct)
        check_settings(self, region=text, endpoint_url=web_address)
        if not re.fullmatch(r"[\w.-]+", self.region or "any", re.ASCII):
            raise refusal("region", "the code of a location such as 'FIN-03'", self.region)
        self.use_api(VerdaAccount(self._url, patience_s=self.patience_s))

    @classmethod
    def has_credentials(cls) -> bool:
        """Return whether credentials are here."""
        return is_found(find_credentials)

    @property
    def name(self) -> str:
        """``"verda"``."""
        return "verda"

    @property
    def ends_itself(self) -> bool:
        """True if machines delete themselves."""
        return self.self_destruct

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the offers that are available now and satisfy the request, cheapest first, in the region or in all.

        Raises:
            ConfigurationError: Verda has no such machine, or no such region; names alternatives.
            CapacityError: no such machine is available now; names where it is.
            AuthenticationError: there are no credentials, or Verda refuses them.
        """
        rest = self.api.rest
        types = parse_types(await rest.share("types", lambda: rest.read(*CATALOGUE)))
        return make_offers(types, await rest.share("stock", self._stock), request, region=self.region)

    async def public_offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the machine types that satisfy a request, in stock or not: Verda shows their prices to anyone."""
        types = parse_types(await self.api.rest.read_public("GET", CATALOGUE[0], query=CATALOGUE[1]))
        anywhere = {"": [each.name for each in types]}
        return make_offers(types, {True: anywhere, False: anywhere}, request, region=None)

    async def prepare(self, order: LaunchOrder) -> None:
        """Add the user's key to the account, once, and look the images up."""
        del order
        _, user = await asyncio.to_thread(user_key)
        await self.api.prepare(user.public)

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Create a startup script, then a machine with a volume and tags, all of which end with it."""
        script = await self._script(key, order.lasts_s(offer))
        made = await self.api.create(offer, order.pool_id, key, script)
        return MachineRecord(id=made, key=key, pool_id=order.pool_id, state=InstanceState.PENDING, offer=offer)

    async def secret(self, instance: Instance) -> MachineSecret | None:
        """Return the program by which a machine deletes itself, with a new bearer; None without that."""
        return await self._secret(instance.key) if self.self_destruct else None

    def end_command(self, key: str) -> tuple[str, ...]:
        """Return the command by which a machine deletes itself; empty where it does not."""
        return self._destruct(key).command if self.self_destruct else ()

    async def check(self) -> Sequence[Finding]:
        """Check credentials, balance, region and availability; creates nothing."""
        found: list[Finding] = []
        try:
            balance = decode(_BalancePayload, await self.api.rest.read("/balance"), "Verda: GET /balance")
            amount = balance.amount
            found.append(Finding(what="credentials", state="ok", found="Verda accepts them"))
            money, fix = f"{amount:.2f} {balance.currency}", "top it up: https://console.verda.com"
            state, fix = ("ok", "") if amount > 0 else ("fail", fix)
            found.append(Finding(what="balance", state=state, found=money, fix=fix))
            stock = await self._stock()
        except SkywardError as error:
            what = "availability" if found else "credentials"
            return [*found, failed(what, error, fix="see docs/providers/verda.md")]
        held = {code for codes in stock.values() for code, names in codes.items() if names}
        where, here = f"machines in {', '.join(sorted(held)) or 'no location'}", self.region in {None, *held}
        return [*found, Finding(what="availability", state="ok" if held and here else "warn", found=where)]

    @property
    def _url(self) -> str:
        return self.endpoint_url or API_URL

    async def _stock(self) -> Stock:
        """Return the types that are available now; each market is asked for."""
        rest, stock = self.api.rest, dict[bool, dict[str, Sequence[str]]]()
        codes = sorted(row.code for row in await self._locations()) if self.region else ()
        if self.region not in (None, *codes):
            raise ConfigurationError(
                f"region={self.region!r}: Verda has no such location, only {', '.join(codes)}; leave it out for any"
            )
        for spot in (True, False):
            wanted = str(spot).lower()  # two spellings, since the vendor's two libraries disagree
            rows = await rest.read("/instance-availability", {"is_spot": wanted, "isSpot": wanted})
            places = decode(list[_AvailabilityPayload], rows, "Verda: GET /instance-availability")
            stock[spot] = {place.location_code: place.availabilities for place in places}
        return stock

    async def _locations(self) -> Sequence[_LocationPayload]:
        return decode(list[_LocationPayload], await self.api.rest.read("/locations"), "Verda: GET /locations")

    async def _script(self, key: str, time_to_live_s: float) -> str:
        own = await asyncio.to_thread(host_key, key)
        if not self.self_destruct:
            return boot_script(host_key=own, time_to_live_s=time_to_live_s, end=POWER_OFF)
        first = first_delivery(await self._secret(key))
        return boot_script(host_key=own, time_to_live_s=time_to_live_s, end=self._destruct(key).end, first=first)

    async def _secret(self, key: str) -> MachineSecret:
        bearer = await self.api.client.new_bearer()
        renewal = hashlib.sha256(bearer.encode()).hexdigest()[:16]
        facts = json.dumps({"url": self._url, "hostname": key, "secret": bearer, "renewal": renewal})
        program = _PROGRAM.read_text(encoding="utf-8").replace(_FACTS, f"FACTS = {facts}", 1)
        destruct = self._destruct(key)
        return destruct.delivery(program, renewal=renewal, stale_s=_STALE_S, renewed_s=self.renewed_s)

    def _destruct(self, key: str) -> SelfDestruct:
        return SelfDestruct(path=f"{self.home}/.skyward/end-{key}.py", interpreter="python3")
