"""Provider of AWS EC2 machines in one region, billed by the second."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

from skyward.errors import ConfigurationError
from skyward.machine.ssh import SSHAccess
from skyward.providers._common.logins import ADDRESS_URL, client_cidr, user_key
from skyward.providers._common.machine_catalogue import closest
from skyward.providers._common.rented_machines import check_login, log_in
from skyward.providers.aws.account import (
    LIVE_STATES,
    POOL_TAG,
    Account,
    Record,
    Terms,
    admit_client,
)
from skyward.providers.aws.api import Api, Credentials, new_session
from skyward.providers.aws.launching import UNSEEN_S, Launching, end, remove_by_products
from skyward.providers.aws.offering import Prices, check_account, find_offers
from skyward.providers.aws.ssm import require_plugin, session_command
from skyward.providers.base import Finding, Instance, LaunchOrder, Offer, Provider, check_settings
from skyward.providers.storage.s3 import grant_with
from skyward.request.checks import explain_options, flag, refusal, text, web_address
from skyward.request.request import PoolRequest
from skyward.request.volume import Volume, VolumeAccess

_SUBNET = re.compile(r"subnet-[0-9a-f]+", re.ASCII)


@explain_options
@dataclass(frozen=True, kw_only=True)
class AWS(Provider):
    """Machines of AWS EC2, reached over SSH, billed by the second.

    Credentials are those of boto3: the environment, ``~/.aws``, single sign-on, a machine's role. Every resource that
    Skyward creates carries the tag ``skyward:pool`` and is removed with the pool; a machine also terminates itself
    after the pool's ``timeout``.

    Args:
        region: region, e.g. ``"eu-central-1"``.
        use_ssm: reach machines through Session Manager, with no open port; needs its plugin on this machine and an
            ``instance_profile`` with the policy ``AmazonSSMManagedInstanceCore``.
        profile: profile of the shared configuration; None means the usual chain of credentials.
        subnet: id of the subnet for all machines; by default those of the default VPC.
        instance_profile: name or ARN of the machines' role, e.g. to read from S3.
        endpoint_url: endpoint used instead of AWS's; for tests.

    Raises:
        ConfigurationError: a value is wrong, or boto3 is not installed.
    """

    region: str = "us-east-1"
    use_ssm: bool = False
    profile: str | None = None
    subnet: str | None = None
    instance_profile: str | None = None
    endpoint_url: str | None = None

    patience_s: ClassVar[float] = 60.0
    """Time for which throttled and interrupted calls are retried."""
    termination_s: ClassVar[float] = 300.0
    """Deadline for the termination of machines."""
    listing_s: ClassVar[float] = 10.0
    """Time after its launch during which a machine may be missing from EC2's lists."""
    address_url: ClassVar[str] = ADDRESS_URL
    """Web page that answers with the client's public address."""
    user: ClassVar[str | None] = "ubuntu"
    home: ClassVar[str] = "/home/ubuntu"
    power_off: ClassVar[tuple[str, ...]] = ("sudo", "-n", "shutdown", "-h", "now")
    """Command that ends a machine from within: EC2 terminates machines launched here when they shut down."""
    port: ClassVar[int | None] = 22
    boot_s: ClassVar[float] = 300.0
    other_key_s: ClassVar[float] = 10.0
    _account: Account = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flag("use_ssm", self.use_ssm)
        check_settings(self, profile=text, subnet=text, instance_profile=text, endpoint_url=web_address)
        if not _SUBNET.fullmatch(self.subnet or "subnet-0"):
            raise refusal("subnet", "a subnet's id such as 'subnet-0123456789abcdef0'", self.subnet)
        if self.use_ssm and self.instance_profile is None:
            raise ConfigurationError(
                "use_ssm=True needs instance_profile=: a role with the policy AmazonSSMManagedInstanceCore, by which "
                "machines register with Session Manager"
            )
        if text("region", self.region) not in (known := _known_regions()):
            raise ConfigurationError(f"region={self.region!r}: AWS has no such region{closest(self.region, known)}")
        credentials = Credentials(region=self.region, profile=self.profile, endpoint_url=self.endpoint_url)
        account = Account(api=Api(credentials=credentials, patience_s=self.patience_s), subnet=self.subnet)
        object.__setattr__(self, "_account", account)

    @property
    def name(self) -> str:
        """``"aws"``."""
        return "aws"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the cheapest few machine types of the region that satisfy the request, on spot and on demand.

        Prices that the account may not query are unknown.

        Raises:
            ConfigurationError: EC2 has no such machine, none in this region, or no network for it; names alternatives.
                Or Session Manager's plugin is not installed.
            QuotaError: the account's quotas allow none of them.
            AuthenticationError: there are no credentials, or they lack a permission.
        """
        if self.use_ssm:
            require_plugin()
        return await find_offers(self._account, request)

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Launch machines of one type in one zone, in a security group of their pool.

        Of spot offers at similar prices, EC2 takes the one least likely to be preempted.
        """
        await check_login(self)
        _, key = await asyncio.to_thread(user_key)
        on_spot = dict.fromkeys(each.spec.name for each in offers if each.spot and each.price_per_hour is not None)
        terms = Terms(
            user_key=key.public,
            ssh_from=None if self.use_ssm else await self._client(),
            instance_profile=self.instance_profile,
            deadline_s=self.termination_s,
            listing_s=self.listing_s,
            zone_prices=await Prices(self._account).by_zone([*on_spot]),
        )
        return await Launching(self._account, order, terms).run(offers)

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Return EC2's records; a machine launched just now and not listed yet is pending."""
        records = await self._account.records({"instance-id": instance_ids}) if instance_ids else []
        found = {record.id: self._instance(record) for record in records}
        return [found.get(each) or self._account.book.unlisted(each, listing_s=UNSEEN_S) for each in instance_ids]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Terminate machines and wait for that; with a pool's last one its security group is removed."""
        if instance_ids:
            await end(self._account, instance_ids, deadline_s=self.termination_s)

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address over SSH, in the pool's security group; does nothing with ``use_ssm``.

        The address is found as in :meth:`launch`.
        """
        if self.use_ssm:
            return ""
        cidr = await self._client()
        async with self._account.book.locks[pool_id]:
            return cidr if await admit_client(self._account.api, pool_id, cidr) else ""

    async def tidy(self, pool_id: str) -> None:
        """Remove a pool's security group and launch templates, unless it has machines."""
        await remove_by_products(self._account, pool_id)

    async def tagged(self) -> Sequence[Instance]:
        """Return every machine of Skyward's in this region that is listed and not gone."""
        wanted = {"tag-key": [POOL_TAG], "instance-state-name": LIVE_STATES}
        return [self._instance(record) for record in await self._account.records(wanted)]

    async def check(self) -> Sequence[Finding]:
        """Check credentials, permissions, network, image and quotas; creates nothing."""
        return await check_account(self._account, use_ssm=self.use_ssm)

    async def zones(self, machines: Sequence[str]) -> Mapping[str, Mapping[str, float | None]]:
        """Return the zones that offer each machine type, with the price on spot."""
        offered, prices = await self._account.offered(machines), await Prices(self._account).of(machines)
        return {name: {zone: prices.spot.get(name, {}).get(zone) for zone in zones} for name, zones in offered.items()}

    async def grant(self, volumes: Sequence[Volume], *, lifetime_s: float) -> Sequence[VolumeAccess]:
        """Grant machines access to volumes: by their role if they have one, else by short-lived keys."""
        return await grant_with(
            new_session(profile=self.profile, region=self.region),
            volumes,
            lifetime_s=lifetime_s,
            keys="none" if self.instance_profile else "lent",
            endpoint_url=self.endpoint_url,
            mountable=True,
        )

    async def close(self) -> None:
        """Close the connections to AWS."""
        await asyncio.to_thread(self._account.api.close)

    async def _client(self) -> str:
        return await client_cidr(self.address_url, otherwise="use AWS(use_ssm=True)")

    def _instance(self, record: Record) -> Instance:
        listed = replace(record.instance(self._access), power_off=self.power_off)
        return self._account.book.as_bought(listed)

    def _access(self, record: Record) -> SSHAccess | None:
        host = record.private_address if self.use_ssm else record.public_address
        if host is None or record.private_address is None:
            return None
        access = log_in(self, record.id, record.key, host=host, address=record.private_address)
        proxy = session_command(self._account.api.credentials, record.id, self.port or 22) if self.use_ssm else ()
        return replace(access, target=replace(access.target, proxy=proxy))


@cache
def _known_regions() -> Sequence[str]:
    session = new_session()
    return [each for part in session.get_available_partitions() for each in session.get_available_regions("ec2", part)]
