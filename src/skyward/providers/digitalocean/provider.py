"""Provider of DigitalOcean's droplets in one region, with and without GPUs, billed by the second."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from skyward.providers._common.boot.delete_script import DeleteScript
from skyward.providers._common.boot.first_boot import POWER_OFF, cloud_config
from skyward.providers._common.client_address import ADDRESS_URL, client_cidr
from skyward.providers._common.rented_machines import MachineRecord, RentedMachines
from skyward.providers._common.rest_client import RestClient
from skyward.providers._common.ssh_keys import host_key, user_key
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.providers.digitalocean.droplet_api import API_URL, check_account, open_api, read_sizes
from skyward.providers.digitalocean.droplet_sizes import find_offers
from skyward.providers.digitalocean.droplets import Droplets, droplet_order, fingerprint_of
from skyward.providers.registry import Finding, MachineSecret
from skyward.request.checks import refusal, secret, text, web_address
from skyward.request.option_names import explain_options
from skyward.request.request import PoolRequest

__all__ = ["DigitalOcean"]

_REGION = re.compile(r"[a-z]{3}\d{1,2}", re.ASCII)


@explain_options
@dataclass(frozen=True, kw_only=True)
class DigitalOcean(RentedMachines):
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
    _rest: RestClient = field(init=False, repr=False, compare=False)
    _droplets: Droplets = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, checked in (("token", secret), ("reaper_token", secret), ("endpoint_url", web_address)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked(name, value))
        if not _REGION.fullmatch(text("region", self.region)):
            raise refusal("region", "a region's slug such as 'nyc1'", self.region)
        rest = open_api(self.region, self.token, self.endpoint_url, patience_s=self.patience_s)
        object.__setattr__(self, "_rest", rest)
        object.__setattr__(self, "_droplets", Droplets(rest, self.region))

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
        return find_offers(await read_sizes(self._rest), request, self.region)

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address over SSH, in the pool's firewall, and no other."""
        client = await client_cidr(self.address_url)
        async with self.book.locks[pool_id]:
            return client if await self._droplets.admit(pool_id, client) else ""

    async def secret(self, instance: Instance) -> MachineSecret | None:
        """Return the script by which a droplet deletes itself, with the reaper token; None without that."""
        if self.reaper_token is None:
            return None
        url = f"{self.endpoint_url or API_URL}/v2/droplets/{instance.id}"
        return self._script(instance.key).secret(url, self.reaper_token)

    async def check(self) -> Sequence[Finding]:
        """Check the token and its scopes, the account's state and limit, and the region; creates nothing."""
        return await check_account(self._rest, self.region)

    async def close(self) -> None:
        """Close the connections to the API."""
        await self._rest.close()

    @property
    def api(self) -> Droplets:
        """The API's calls that concern droplets."""
        return self._droplets

    @property
    def ends_itself(self) -> bool:
        """True with a reaper token: powering off does not stop the bill."""
        return self.reaper_token is not None

    async def prepare(self, order: LaunchOrder) -> None:
        """Create the pool's firewall, and register the user's key."""
        _, key = await asyncio.to_thread(user_key)
        await self._droplets.ensure_firewall(order.pool_id, await client_cidr(self.address_url))
        await self._droplets.ensure_key(key.public)

    async def create(self, offer: Offer, key: str, order: LaunchOrder) -> MachineRecord:
        """Create a droplet with a host key of its own, which powers itself off after the pool's ``timeout``."""
        _, user = await asyncio.to_thread(user_key)
        boot = cloud_config(
            host_key=await asyncio.to_thread(host_key, key),
            user_key=user.public,
            time_to_live_s=order.lasts_s(offer),
            root=True,
            end=self._script(key).end if self.ends_itself else POWER_OFF,
        )
        ssh_key = fingerprint_of(user.public)
        return await self._droplets.create(droplet_order(offer, key, order.pool_id, ssh_key=ssh_key, user_data=boot))

    def end_command(self, key: str) -> tuple[str, ...]:
        """Return the command by which a droplet deletes itself."""
        return self._script(key).command if self.ends_itself else ()

    def _script(self, key: str) -> DeleteScript:
        return DeleteScript(path=f"{self.home}/.skyward/end-{key}")
