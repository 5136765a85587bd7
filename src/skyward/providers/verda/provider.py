"""Provider of Verda's machines, billed from a prepaid balance."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers._common.boot.dead_man import DeadMan, first_delivery
from skyward.providers._common.boot.first_boot import POWER_OFF, boot_script
from skyward.providers._common.findings import failed
from skyward.providers._common.rented_machines import MachineRecord, RentedMachines
from skyward.providers._common.ssh_keys import host_key, user_key
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.registry import Finding, MachineSecret
from skyward.providers.verda.machine_records import Stock, make_offers, parse_types
from skyward.providers.verda.verda_account import API_URL, CATALOGUE, VerdaAccount
from skyward.request.checks import flag, refusal, text, web_address
from skyward.request.option_names import explain_options
from skyward.request.request import PoolRequest

__all__ = ["Verda"]

_PROGRAM: Final = Path(__file__).with_name("self_destruct.py")
_STALE_S: Final = 3000
"""Age of a bearer at which the client counts as dead, ten minutes before the bearer expires."""


@explain_options
@dataclass(frozen=True, kw_only=True)
class Verda(RentedMachines):
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
        for name in ("region", "endpoint_url"):
            if (value := getattr(self, name)) is not None:
                (web_address if name == "endpoint_url" else text)(name, value)
        if not re.fullmatch(r"[\w.-]+", self.region or "any", re.ASCII):
            raise refusal("region", "the code of a location such as 'FIN-03'", self.region)
        object.__setattr__(self, "_known", VerdaAccount(self._url, patience_s=self.patience_s))

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
        types = parse_types(await self.api.rest.read(*CATALOGUE))
        return make_offers(types, await self._stock(), request, region=self.region)

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
        return self._dead_man(key).command if self.self_destruct else ()

    async def check(self) -> Sequence[Finding]:
        """Check credentials, balance, region and availability; creates nothing."""
        found: list[Finding] = []
        try:
            balance: Mapping[str, Any] = await self.api.rest.read("/balance")
            amount = float(balance.get("amount") or 0.0)
            found.append(Finding(what="credentials", state="ok", found="Verda accepts them"))
            money, fix = f"{amount:.2f} {balance.get('currency', '')}", "top it up: https://console.verda.com"
            state, fix = ("ok", "") if amount > 0 else ("fail", fix)
            found.append(Finding(what="balance", state=state, found=money, fix=fix))
            stock = await self._stock()
        except SkywardError as error:
            what = "availability" if found else "credentials"
            return [*found, failed(what, error, fix="see docs/providers/verda.md")]
        held = {code for codes in stock.values() for code, names in codes.items() if names}
        where, here = f"machines in {', '.join(sorted(held)) or 'no location'}", self.region in {None, *held}
        return [*found, Finding(what="availability", state="ok" if held and here else "warn", found=where)]

    async def close(self) -> None:
        """Close the connections to Verda."""
        await self.api.close()

    @property
    def api(self) -> VerdaAccount:
        """The account."""
        return cast("VerdaAccount", self.__dict__["_known"])

    @property
    def _url(self) -> str:
        return self.endpoint_url or API_URL

    async def _stock(self) -> Stock:
        """Return the types that are available now; each market is asked for."""
        rest, stock = self.api.rest, dict[bool, dict[str, Sequence[str]]]()
        codes = sorted(str(row.get("code")) for row in await rest.read("/locations")) if self.region else ()
        if self.region not in (None, *codes):
            raise ConfigurationError(
                f"region={self.region!r}: Verda has no such location, only {', '.join(codes)}; leave it out for any"
            )
        for spot in (True, False):
            wanted = str(spot).lower()  # two spellings, since the vendor's two libraries disagree
            rows = await rest.read("/instance-availability", {"is_spot": wanted, "isSpot": wanted})
            stock[spot] = {str(row["location_code"]): row.get("availabilities") or () for row in rows}
        return stock

    async def _script(self, key: str, time_to_live_s: float) -> str:
        own = await asyncio.to_thread(host_key, key)
        if not self.self_destruct:
            return boot_script(host_key=own, time_to_live_s=time_to_live_s, end=POWER_OFF)
        first = first_delivery(await self._secret(key))
        return boot_script(host_key=own, time_to_live_s=time_to_live_s, end=self._dead_man(key).end, first=first)

    async def _secret(self, key: str) -> MachineSecret:
        facts, bearer = {"url": self._url, "hostname": key}, await self.api.tokens.new()
        return self._dead_man(key).delivery(facts, bearer, renewed_s=self.renewed_s)

    def _dead_man(self, key: str) -> DeadMan:
        return DeadMan(program=_PROGRAM, path=f"{self.home}/.skyward/end-{key}.py", stale_s=_STALE_S)
