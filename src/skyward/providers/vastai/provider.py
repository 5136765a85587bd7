"""Provider of containers on VastAI's marketplace, on demand or by bids, billed from prepaid credit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, cast

from skyward.errors import CapacityError, QuotaError, SkywardError
from skyward.providers._common.boot.container_boot import ContainerBoot, HttpCall
from skyward.providers._common.boot.rented_containers import RentedContainers
from skyward.providers._common.findings import failed
from skyward.providers._common.rented_machines import MachineRecord, label
from skyward.providers._common.ssh_keys import host_key, user_key
from skyward.providers.base import InstanceState, LaunchOrder, Offer
from skyward.providers.registry import Finding
from skyward.providers.vastai.ask_market import Ask, AskOffer
from skyward.providers.vastai.ask_terms import AskTerms
from skyward.providers.vastai.instance_records import PORT
from skyward.providers.vastai.vast_account import TOP_UP, VastAccount, instance_path
from skyward.request.checks import secret, web_address
from skyward.request.option_names import explain_options
from skyward.request.request import PoolRequest

__all__ = ["VastAI"]

_TRIES: Final = 8
"""Most asks of a class that are tried for one machine: asks go stale within seconds."""


@explain_options
@dataclass(frozen=True, kw_only=True)
class VastAI(AskTerms, RentedContainers):
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
        for name, checked in (("api_key", secret), ("endpoint_url", web_address)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked(name, value))
        account = VastAccount(self.endpoint_url, self.api_key, self, patience_s=self.patience_s, pace=self.pace)
        self.__dict__["_api"] = account

    @property
    def name(self) -> str:
        """``"vastai"``."""
        return "vastai"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return classes of asks: a number of GPUs in a country on one market, at the price of the dearest one taken.

        Raises:
            ConfigurationError: ``machine`` is no machine's name.
            CapacityError: no ask satisfies the request and the terms now.
            QuotaError: the day's searches are used up.
            AuthenticationError: there is no key, or VastAI refuses it.
        """
        return await self.api.market.offers(request)

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

    @property
    def api(self) -> VastAccount:
        """The account."""
        return cast("VastAccount", self.__dict__["_api"])

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
