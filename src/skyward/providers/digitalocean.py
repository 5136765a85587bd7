"""Provider of DigitalOcean's droplets in one region, with and without GPUs, billed by the second."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import platformdirs

from skyward.errors import AuthenticationError, ConfigurationError, SkywardError
from skyward.providers._common.logins import ADDRESS_URL, client_cidr, host_key, user_key
from skyward.providers._common.machine_boot import POWER_OFF, SelfDestruct, cloud_config, delete_script
from skyward.providers._common.machine_catalogue import (
    Catalogue,
    MachineType,
    cheapest_offers,
    fewest_accelerators,
    sold_accelerators,
    sold_as,
)
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, failed
from skyward.providers._common.rented_machines import MachineApi, MachineRecord, RentedMachines
from skyward.providers._common.rest_client import (
    ApiAnswer,
    RestClient,
    VendorPayload,
    bearer,
    decode,
    decode_rows,
    decode_state,
    is_found,
)
from skyward.providers.base import Finding, Instance, InstanceState, LaunchOrder, MachineSecret, Offer, check_settings
from skyward.request.accelerators import Vendor, find_model
from skyward.request.checks import explain_options, refusal, secret, text, web_address
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

MINIMUM_BILLED_S: Final = 60.0
MINIMUM_CHARGE: Final = 0.01
SPOT_SUFFIX: Final = "-spot"
_MIB_PER_GIB: Final = 1024
_NOT_SOLD: Final = ("-contracted", "-devcloud")
"""Endings of sizes that are listed, and ordered by contract only."""
_WITH_GPUS: Final = "gpu-"
"""Beginning of the sizes with GPUs."""
_SHARED: Final = "s-"
"""Beginning of the sizes whose processors are shared with other customers."""
_NAMES: Final[Mapping[str, str]] = {"h100": "H100-SXM"}
"""Accelerators that are sold in one form only, and not named by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropletSize:
    """Size of droplets.

    Attributes:
        type: its machine type.
        price_per_hour: USD.
        regions: regions that have it; empty for none.
    """

    type: MachineType
    price_per_hour: float
    regions: tuple[str, ...]


class _VramPayload(VendorPayload):
    amount: float


class _DropletGpuPayload(VendorPayload):
    count: int
    model: str
    vram: _VramPayload


class _DropletSizePayload(VendorPayload):
    slug: str
    vcpus: int
    memory: float
    price_hourly: float
    regions: tuple[str, ...]
    available: bool
    gpu_info: _DropletGpuPayload | None = None

    def __post_init__(self) -> None:
        if self.slug.startswith(_WITH_GPUS) and not self.slug.endswith(_NOT_SOLD) and self.gpu_info is None:
            raise ValueError(f"Size {self.slug} lacks the field `gpu_info`")


class _TaggedPayload(VendorPayload):
    name: str
    tags: tuple[str, ...]


class _RegionPayload(VendorPayload):
    slug: str


class _AddressPayload(VendorPayload):
    type: str
    ip_address: str


class _NetworksPayload(VendorPayload):
    v4: tuple[_AddressPayload, ...]


class _PricePayload(VendorPayload):
    price_hourly: float


class _DropletPayload(_TaggedPayload):
    id: int
    status: str
    size_slug: str
    vcpus: int
    memory: float
    region: _RegionPayload
    networks: _NetworksPayload
    size: _PricePayload
    vpc_uuid: str | None = None
    gpu_info: _DropletGpuPayload | None = None


def parse_sizes(rows: Iterable[Mapping[str, Any]]) -> Sequence[DropletSize]:
    """Parse the sizes that can be ordered."""
    return [
        DropletSize(
            type=MachineType(spec=_spec(size.slug, size.vcpus, size.memory, size.gpu_info)),
            price_per_hour=size.price_hourly,
            regions=size.regions if size.available else (),
        )
        for size in decode_rows(_DropletSizePayload, rows, "digitalocean: GET /v2/sizes")
        if not size.slug.endswith(_NOT_SOLD)
    ]


def find_offers(sizes: Sequence[DropletSize], request: PoolRequest, region: str) -> Sequence[Offer]:
    """Return the offers of a region for a request.

    Raises:
        ConfigurationError: the region does not exist, or has no such droplets; names those that have.
    """
    known = sorted({each for size in sizes for each in size.regions})
    if region not in known:
        raise ConfigurationError(f"region={region!r}: digitalocean has no such region; it has {', '.join(known)}")
    here = {size.type.name: size for size in sizes if region in size.regions}
    places = {size.type: size.regions for size in sizes}
    catalogue = Catalogue(
        vendor="digitalocean",
        types=[each.type for each in here.values()],
        place=region,
        accelerators=sold_accelerators(places),
        places={each.name: regions for each, regions in places.items()},
        remedy="try DigitalOcean(region={place!r})",
    )
    prices = {size.type.name: size.price_per_hour for size in sizes}
    chosen = [here[each.name] for each in fewest_accelerators(catalogue.candidates(request))]
    return cheapest_offers(
        [_offer(each, region, prices, chosen=bool(request.machine)) for each in chosen], request, vendor="digitalocean"
    )


def _offer(size: DropletSize, region: str, prices: Mapping[str, float], *, chosen: bool) -> Offer:
    name, spot = size.type.name, size.type.name.endswith(SPOT_SUFFIX)
    return Offer(
        spec=size.type.spec,
        region=region,
        spot=spot,
        price_per_hour=size.price_per_hour,
        on_demand_price_per_hour=prices.get(name.removesuffix(SPOT_SUFFIX)) if spot else size.price_per_hour,
        minimum_billed_s=MINIMUM_BILLED_S,
        minimum_charge=MINIMUM_CHARGE,
        note=f"{name} shares its processors with other customers" if name.startswith(_SHARED) and not chosen else "",
    )


def _spec(slug: str, vcpus: int, memory_mib: float, gpus: _DropletGpuPayload | None) -> InstanceSpec:
    spec = InstanceSpec(name=slug, cpu=vcpus, memory_gib=memory_mib / _MIB_PER_GIB)
    if gpus is None or not gpus.count:
        return spec
    _, _, name = gpus.model.partition("_")
    # The API's ``vram`` is the sum of all GPUs of a droplet.
    sold = sold_as(_NAMES.get(name, name) or gpus.model, reported_gib=gpus.vram.amount / gpus.count)
    return sold.built_into(spec, gpus.count)


def image_of(spec: InstanceSpec) -> str:
    """Return the slug of the image for a size."""
    if spec.accelerator is None:
        return "ubuntu-24-04-x64"
    model = find_model(spec.accelerator)
    if model is not None and model.vendor is Vendor.AMD:
        return "gpu-amd-base"
    # Eight connected GPUs need NVIDIA's fabric manager, which is in the second image only.
    return "gpu-h100x1-base" if spec.accelerator_count == 1 else "gpu-h100x8-base"


API_URL: Final = "https://api.digitalocean.com"
_VARIABLES: Final = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN")
_TOKENS_URL: Final = "https://cloud.digitalocean.com/account/api/tokens"

_SCOPES: Final[Mapping[str, str]] = {"keys": "ssh_key", "regions": "regions", "sizes": "sizes"}
"""Names of scopes that are not the singular of the path's last word."""
_VERBS: Final[Mapping[str, str]] = {"GET": "read", "POST": "create", "PUT": "update", "DELETE": "delete"}
_READ: Final = ("/v2/droplets", "/v2/firewalls", "/v2/account/keys")
REFUSED: Final = RefusalTable(
    rows=(
        RefusalRow(
            kind=RefusalKind.AUTH,
            status=403,
            advice=f"The token lacks the scope {{scope}}, or its account is locked: {_TOKENS_URL}",
        ),
        RefusalRow(kind=RefusalKind.QUOTA, status=422, words=r"droplet limit|limit exceeded|exceed your"),
        RefusalRow(
            kind=RefusalKind.QUOTA,
            status=422,
            words=r"invalid size",
            advice="Sizes with GPUs need an approval for the account: https://cloud.digitalocean.com/gpus",
        ),
        RefusalRow(kind=RefusalKind.MISSING, status=422, words=r"invalid key identifiers"),
        RefusalRow(kind=RefusalKind.IN_USE, status=422, words=r"pending event|is locked|currently being|in progress"),
        RefusalRow(kind=RefusalKind.EXISTS, words=r"already (?:in use|exists|been taken)|duplicate"),
        RefusalRow(kind=RefusalKind.CAPACITY, status=422, words=r"unavailable|not available|capacity|sold out"),
    ),
    advice={
        RefusalKind.AUTH: f"Set {_VARIABLES[0]} to a token of {_TOKENS_URL}, or `doctl auth init`",
        RefusalKind.QUOTA: "Request a higher limit, or settle the bill: https://cloud.digitalocean.com/account/team",
        RefusalKind.CAPACITY: "Another size or region may have some: see `skyward offers --provider digitalocean`",
        RefusalKind.TRANSIENT: "Check this machine's network, then https://status.digitalocean.com",
    },
)
"""Refusals. The API's codes repeat the HTTP status, so the words of a message have to do."""


async def read_sizes(rest: RestClient) -> Sequence[DropletSize]:
    """Return the sizes that can be ordered, at their present prices."""
    return parse_sizes(await rest.share("sizes", lambda: rest.pages("/v2/sizes", "sizes", {"per_page": "200"})))


def find_token() -> str:
    """Return the token of the environment, else that of doctl's present context.

    Raises:
        AuthenticationError: there is none; names the places.
    """
    for name in _VARIABLES:
        if found := os.environ.get(name, "").strip():
            return found
    path = platformdirs.user_config_path("doctl") / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    context = _setting(text, "context")
    name = "access-token" if context in ("", "default") else rf"[ \t]+{re.escape(context)}"
    if found := _setting(text, name):
        return found
    raise AuthenticationError(
        f"digitalocean: no token: set {_VARIABLES[0]} (or {_VARIABLES[1]}) to one of {_TOKENS_URL}, log in with "
        f"`doctl auth init` ({path}), or pass DigitalOcean(token=...)"
    )


def _setting(text: str, name: str) -> str:
    found = re.search(rf"^{name}:[ \t]*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
    return found[1] if found else ""


def _judge(answer: ApiAnswer) -> Refusal:
    row: Mapping[str, Any] = answer.row()
    code, message = str(row.get("id") or answer.status), str(row.get("message") or answer.body or "no reason given")
    return REFUSED.judge(code, message, status=answer.status)


def _scope(call: str) -> str:
    """Return the token's scope that a call such as ``"GET /v2/sizes"`` requires."""
    method, _, path = call.partition(" ")
    word = path.removeprefix("/v2/").removeprefix("account/").partition("/")[0]
    return f"{_SCOPES.get(word, word.removesuffix('s'))}:{_VERBS.get(method, 'read')}"


async def check_account(rest: RestClient, region: str) -> Sequence[Finding]:
    """See :meth:`skyward.providers.base.Provider.check`. Scopes for changes cannot be tested without a change."""
    try:
        account: Mapping[str, Any] = (await rest.read("/v2/account"))["account"]
        findings = [Finding(what="digitalocean token", state="ok", found=str(account["email"])), _state(account)]
        for path in _READ:
            await rest.read(path, {"per_page": "1"})
            findings.append(Finding(what=f"digitalocean may {_scope(f'GET {path}')}", state="ok", found="yes"))
        return [*findings, _region(await read_sizes(rest), region)]
    except SkywardError as error:
        return [failed("digitalocean token", error)]


def _state(account: Mapping[str, Any]) -> Finding:
    what, status, limit = "digitalocean account", str(account["status"]), account.get("droplet_limit")
    if status == "active":
        return Finding(what=what, state="ok", found=f"active, {limit} droplets at a time")
    state = "fail" if status == "locked" else "warn"
    found = f"{status} {account['status_message']}".strip()
    return Finding(what=what, state=state, found=found, fix="see https://cloud.digitalocean.com, or open a ticket")


def _region(sizes: Sequence[DropletSize], region: str) -> Finding:
    what, known = "digitalocean region", sorted({each for size in sizes for each in size.regions})
    if region not in known:
        return Finding(what=what, state="fail", found=f"no region {region}", fix=f"one of {', '.join(known)}")
    where = sorted({each for size in sizes if size.type.spec.accelerator for each in size.regions})
    gpus = "with GPUs" if region in where else f"without GPUs; {', '.join(where)} have some"
    return Finding(what=what, state="ok", found=f"{region}, {gpus}")


_NAME: Final = "skyward-"
_POOL_TAG: Final = "skyward:pool:"
_READING: Final = "digitalocean: reading a droplet"
_DROPLETS, _KEYS, _FIREWALLS = "/v2/droplets", "/v2/account/keys", "/v2/firewalls"
_PAGE: Final = {"per_page": "200"}
_FRESH_S: Final = 60.0
"""Time after its creation for which a key may not be accepted."""
STATES: Final[Mapping[Any, InstanceState]] = {
    "new": InstanceState.PENDING,
    "active": InstanceState.RUNNING,
    "off": InstanceState.FAILED,
    "archive": InstanceState.FAILED,
}
"""States. A droplet that is off bills as before, and must be ended."""
_PROTOCOLS: Final = ("tcp", "udp", "icmp")
_EVERYWHERE: Final = ("0.0.0.0/0", "::/0")


class Droplets(MachineApi):
    """Calls of the API that concern droplets and what belongs to them.

    Args:
        url: URL of the API.
        token: the account's token; None is looked up at each call, so that a newer one counts.
        region: region of the droplets.
        patience_s: time for which throttled and interrupted calls are repeated.

    Attributes:
        rest: the API.
    """

    def __init__(self, url: str, token: str | None, region: str, *, patience_s: float) -> None:
        self.rest = RestClient(
            vendor="digitalocean",
            base_url=url,
            authorize=bearer(lambda: token or find_token()),
            judge=_judge,
            explain=lambda found, call: REFUSED.explain(found, f"digitalocean {region}: {call}", scope=_scope(call)),
            reset_header="ratelimit-reset",
            patience_s=patience_s,
        )
        self._region = region
        self._listed: set[str] = set()
        self._ended: set[str] = set()

    async def ensure_key(self, public: str) -> None:
        """Register the user's public key with the account, unless it is there."""
        fingerprint = fingerprint_of(public)
        if await self.rest.optional(f"{_KEYS}/{fingerprint}") is None:
            body = {"name": f"skyward {fingerprint[:8]}", "public_key": public}
            # Repeated even if the answer was lost: the same key is not added twice.
            await self.rest.call("POST", _KEYS, body, done=(RefusalKind.EXISTS,))

    async def create(self, order: Mapping[str, Any]) -> MachineRecord:
        """Create a droplet, with one call that is accepted."""
        answer = await self.rest.create(_DROPLETS, order, unseen_s=_FRESH_S)
        record = parse_droplet(answer["droplet"])
        assert record is not None, "the answer to a creation is of another droplet"
        return record

    async def find(self, key: str) -> MachineRecord | None:
        """Return the droplet with that ledger key; None if none is listed."""
        found = await self._list({"name": _NAME + key})
        return next((each for each in found if each.key == key), None)

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return Skyward's droplets in the region, or at least those of that pool."""
        return await self._list({"tag_name": _POOL_TAG + pool_id} if pool_id else {})

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return droplets, those with these ids among them: from two lists, and a call for each that they miss.

        A droplet that was listed, and whose deletion was accepted, is gone once the lists miss it: a thousand calls
        would take four minutes. The lists are read at least twice then, the second time before the tag is removed, or
        if that stays, after.
        """
        found = {each.id: each for each in await self.listed(pool_id)}
        self._listed.update(found)
        missing = [each for each in instance_ids if each.isdecimal() and each not in self._ended and each not in found]
        answers = await asyncio.gather(*(self.rest.optional(f"{_DROPLETS}/{each}") for each in missing))
        rows = (parse_droplet(answer["droplet"]) for answer in answers if answer is not None)
        return [*found.values(), *(each for each in rows if each is not None)]

    async def request_end(self, machine: str) -> None:
        """Request the end of a droplet."""
        if machine.isdecimal():
            await self.rest.call("DELETE", f"{_DROPLETS}/{machine}")
            self._ended |= {machine} & self._listed

    async def request_pool_end(self, pool_id: str, machines: Sequence[str]) -> Sequence[str]:
        """Request the end of all droplets with the pool's tag, unless it has others, in whatever region."""
        query = {"tag_name": _POOL_TAG + pool_id}
        rows = [(str(row["id"]), decode(_TaggedPayload, row, _READING)) for row in await self._rows(query)]
        tagged = {each for each, row in rows if query["tag_name"] in row.tags}
        if not pool_id or not tagged <= {*machines}:
            return ()
        await self.rest.call("DELETE", _DROPLETS, query=query)
        self._ended |= tagged
        return [*tagged]

    async def ensure_firewall(self, pool_id: str, client: str) -> None:
        """Create the pool's firewall: it admits all traffic among its droplets, and SSH from ``client``. Idempotent."""
        if await self._firewall(pool_id) is None:
            await self.rest.call("POST", "/v2/tags", {"name": _POOL_TAG + pool_id}, done=(RefusalKind.EXISTS,))
            # As for the key: a name is not taken twice.
            await self.rest.call("POST", _FIREWALLS, _rules(pool_id, client), done=(RefusalKind.EXISTS,))
        else:
            await self.admit(pool_id, client)

    async def admit(self, pool_id: str, client: str) -> bool:
        """Admit the client over SSH from its present address only; return True if it was not admitted before."""
        found = await self._firewall(pool_id)
        if found is None or _admitted(found) == [client]:
            return False
        await self.rest.call("PUT", f"{_FIREWALLS}/{found['id']}", _rules(pool_id, client))
        return True

    async def remove(self, pool_id: str) -> None:
        """Remove the pool's firewall and tag. Idempotent."""
        if (found := await self._firewall(pool_id)) is not None:
            await self.rest.call("DELETE", f"{_FIREWALLS}/{found['id']}", done=(RefusalKind.MISSING,))
        await self.rest.call("DELETE", f"/v2/tags/{_POOL_TAG}{pool_id}", done=(RefusalKind.MISSING,))

    async def _firewall(self, pool_id: str) -> Mapping[str, Any] | None:
        rows = await self.rest.pages(_FIREWALLS, "firewalls", _PAGE)
        return next((row for row in rows if row["name"] == _NAME + pool_id), None)

    async def _list(self, query: Mapping[str, str]) -> Sequence[MachineRecord]:
        """Return Skyward's droplets in the region, of :meth:`_rows`."""
        found = map(parse_droplet, await self._rows(query))
        return [*{each.id: each for each in found if each is not None and each.offer.region == self._region}.values()]

    async def _rows(self, query: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a list without GPUs, and of one with GPUs only, of any tag: no list has both."""
        with_gpus = {name: value for name, value in query.items() if name != "tag_name"} | {"type": "gpus"}
        answers = await asyncio.gather(
            *(self.rest.pages(_DROPLETS, "droplets", {**_PAGE, **each}) for each in (query, with_gpus))
        )
        return [row for rows in answers for row in rows]


def fingerprint_of(public: str) -> str:
    """Return the name of a public key in the API."""
    return hashlib.md5(base64.b64decode(public.split()[1]), usedforsecurity=False).digest().hex(":")


def parse_droplet(row: Mapping[str, Any]) -> MachineRecord | None:
    """Parse a droplet of an answer; None if it is not one of Skyward's."""
    tagged = decode(_TaggedPayload, row, _READING)
    pools = [tag for tag in tagged.tags if tag.startswith(_POOL_TAG)]
    if not pools or not tagged.name.startswith(_NAME):
        return None
    droplet = decode(_DropletPayload, row, _READING)
    addresses = {place.type: place.ip_address for place in droplet.networks.v4}
    state = decode_state(STATES, droplet.status, _READING)
    return MachineRecord(
        id=str(droplet.id),
        key=droplet.name.removeprefix(_NAME),
        pool_id=pools[0].removeprefix(_POOL_TAG),
        state=state,
        offer=Offer(
            spec=_spec(droplet.size_slug, droplet.vcpus, droplet.memory, droplet.gpu_info),
            region=droplet.region.slug,
            spot=droplet.size_slug.endswith(SPOT_SUFFIX),
            price_per_hour=droplet.size.price_hourly,
            minimum_billed_s=MINIMUM_BILLED_S,
            minimum_charge=MINIMUM_CHARGE,
        ),
        public_address=addresses.get("public", ""),
        private_address=addresses.get("private", ""),
        network=droplet.vpc_uuid or "",
        reason=f"its status is {droplet.status!r}, and it bills" if state is InstanceState.FAILED else "",
    )


def droplet_order(offer: Offer, key: str, pool_id: str, *, ssh_key: str, user_data: str) -> Mapping[str, Any]:
    """Return the body of the call that creates a droplet.

    Without an account key (``ssh_key``, a fingerprint) DigitalOcean would mail a password for root, who must change it
    at the first login.
    """
    return {
        "name": _NAME + key,
        "region": offer.region,
        "size": offer.spec.name,
        "image": image_of(offer.spec),
        "ssh_keys": [ssh_key],
        "tags": [_POOL_TAG + pool_id],
        "user_data": user_data,
        "with_droplet_agent": False,
    }


def _admitted(firewall: Mapping[str, Any]) -> Sequence[str]:
    ssh = [rule for rule in firewall.get("inbound_rules") or () if rule["ports"] == "22"]
    return [str(each) for rule in ssh for each in rule["sources"].get("addresses") or ()]


def _rules(pool_id: str, client: str) -> Mapping[str, Any]:
    tag = _POOL_TAG + pool_id
    among = [{"protocol": each, "ports": "0", "sources": {"tags": [tag]}} for each in _PROTOCOLS]
    ssh = {"protocol": "tcp", "ports": "22", "sources": {"addresses": [client]}}
    out = [{"protocol": each, "ports": "0", "destinations": {"addresses": [*_EVERYWHERE]}} for each in _PROTOCOLS]
    return {"name": _NAME + pool_id, "tags": [tag], "inbound_rules": [ssh, *among], "outbound_rules": out}


_REGION = re.compile(r"[a-z]{3}\d{1,2}", re.ASCII)


@explain_options
@dataclass(frozen=True, kw_only=True)
class DigitalOcean(RentedMachines[Droplets]):
    """Droplets of DigitalOcean, with and without GPUs, reached over SSH as root, billed by the second.

    The token is that of the environment, ``DIGITALOCEAN_TOKEN`` or ``DIGITALOCEAN_ACCESS_TOKEN``, else doctl's. A
    pool's droplets are in the default VPC of the region, behind a firewall that admits SSH from this machine only. A
    droplet that is switched off bills as before: without ``reaper_token``, droplets whose client died cost money until
    they are swept.

    Args:
        region: region, e.g. ``"nyc1"``; few of them have GPUs.
        token: the API's token, in place of the environment's. It is not recorded: ``skyward sweep`` needs it in the
            environment.
        reaper_token: token with the scope ``droplet:delete`` and no other, by which droplets delete themselves when
            their client is dead or their time is over. It is sent over SSH. Calls run as root and can read it; it can
            delete every droplet of its account.
        endpoint_url: URL of the API used instead of DigitalOcean's; for tests and private gateways.

    Raises:
        ConfigurationError: a value is wrong.
    """

    region: str = "nyc1"
    token: str | None = field(default=None, repr=False)
    reaper_token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None

    patience_s: ClassVar[float] = 60.0
    """Time for which throttled and interrupted calls are retried."""
    look_interval_s: ClassVar[float] = 2.5
    """Least number of seconds between two looks, of two lists each: 250 calls a minute, 5,000 an hour are allowed."""
    address_url: ClassVar[str] = ADDRESS_URL
    """Web page that answers with the client's public address."""

    def __post_init__(self) -> None:
        check_settings(self, token=secret, reaper_token=secret, endpoint_url=web_address)
        if not _REGION.fullmatch(text("region", self.region)):
            raise refusal("region", "a region's slug such as 'nyc1'", self.region)
        url = self.endpoint_url or API_URL
        self.use_api(Droplets(url, self.token, self.region, patience_s=self.patience_s))

    @classmethod
    def has_credentials(cls) -> bool:
        """Return whether a token is here."""
        return is_found(find_token)

    @property
    def name(self) -> str:
        """``"digitalocean"``."""
        return "digitalocean"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the cheapest few sizes of the region that satisfy the request, at their present prices.

        Raises:
            ConfigurationError: the region does not exist, or has no such droplets; names those that have.
            AuthenticationError: there is no token, or it lacks a scope.
        """
        return find_offers(await read_sizes(self.api.rest), request, self.region)

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address over SSH, in the pool's firewall, and no other."""
        client = await client_cidr(self.address_url)
        async with self.book.locks[pool_id]:
            return client if await self.api.admit(pool_id, client) else ""

    async def secret(self, instance: Instance) -> MachineSecret | None:
        """Return the script by which a droplet deletes itself, with the reaper token; None without that."""
        if self.reaper_token is None:
            return None
        url = f"{self.endpoint_url or API_URL}/v2/droplets/{instance.id}"
        return self._destruct(instance.key).delivery(delete_script(url, self.reaper_token))

    async def check(self) -> Sequence[Finding]:
        """Check the token and its scopes, the account's state and limit, and the region; creates nothing."""
        return await check_account(self.api.rest, self.region)

    @property
    def ends_itself(self) -> bool:
        """True with a reaper token: powering off does not stop the bill."""
        return self.reaper_token is not None

    async def prepare(self, order: LaunchOrder) -> None:
        """Create the pool's firewall, and register the user's key."""
        _, key = await asyncio.to_thread(user_key)
        await self.api.ensure_firewall(order.pool_id, await client_cidr(self.address_url))
        await self.api.ensure_key(key.public)

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Create a droplet with a host key of its own, which powers itself off after the pool's ``timeout``."""
        _, user = await asyncio.to_thread(user_key)
        boot = cloud_config(
            host_key=await asyncio.to_thread(host_key, key),
            user_key=user.public,
            time_to_live_s=order.lasts_s(offer),
            root=True,
            end=self._destruct(key).end if self.ends_itself else POWER_OFF,
        )
        ssh_key = fingerprint_of(user.public)
        return await self.api.create(droplet_order(offer, key, order.pool_id, ssh_key=ssh_key, user_data=boot))

    def end_command(self, key: str) -> tuple[str, ...]:
        """Return the command by which a droplet deletes itself."""
        return self._destruct(key).command if self.ends_itself else ()

    def _destruct(self, key: str) -> SelfDestruct:
        return SelfDestruct(path=f"{self.home}/.skyward/end-{key}")
