"""Requirements that asks must meet, and the search for them (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from skyward.providers._common.boot.container_image import CPU_IMAGE, GPU_IMAGE, checked_image, cuda_of
from skyward.providers._common.country_codes import checked_countries
from skyward.request.checks import flag, positive_number, refusal, text, whole_number
from skyward.request.request import PoolRequest

__all__ = ["CPU_ONLY", "AskTerms"]

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
        for name, checked in (("regions", checked_countries), ("image_login", text)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked(name, value))
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
    if request.machine is not None or (wanted := request.accelerator) is None:
        return {"num_gpus": {"eq": 0}}
    each_mb = wanted.memory_gib * 1024
    return {"num_gpus": {"gte": wanted.count}, "gpu_ram": {"gte": each_mb * _BELOW, "lte": each_mb * _ABOVE or 1e9}}
