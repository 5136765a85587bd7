"""Requirements that asks must meet, and the search for them (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import closest
from skyward.request.checks import flag, positive_number, refusal, text, texts, whole_number
from skyward.request.request import PoolRequest

__all__ = ["CPU_ONLY", "AskTerms"]

CPU_ONLY: Final = "CPU"
"""Name of the machines without a GPU; others are named ``"2x RTX 4090"``."""
_GPU_IMAGE: Final = "nvidia/cuda:12.4.1-base-ubuntu22.04"
_CPU_IMAGE: Final = "ubuntu:24.04"
_IMAGE: Final = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.@-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)
_PRIVATE: Final = re.compile(r"\d{12}\.dkr\.ecr\.|[\w-]+\.azurecr\.io/", re.ASCII)
"""Registries that admit nobody without credentials."""
_NEEDS_GB: Final = {r"pytorch/pytorch|vastai/pytorch|tensorflow/tensorflow.*gpu|nvcr\.io/nvidia/": 30, r"-devel": 20}
"""Unpacked sizes of well-known images, with room for an environment."""
_MACHINE: Final = re.compile(rf"([1-9]\d*)x (\S.*)|{CPU_ONLY}", re.ASCII)
_LEAST_DISK_GB: Final = 8
_LIMIT: Final = 256
_BELOW, _ABOVE = 0.92, 1.05
"""Reported memory of a GPU as a share of the nominal one: a B200 with 192 GB reports 179 GiB."""
_COUNTRIES: Final = """
AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR BS BT BV BW BY BZ CA CC
CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ EC EE EG EH ER ES ET FI FJ FK FM FO FR GA GB GD
GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW GY HK HM HN HR HT HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP KE KG KH
KI KM KN KP KR KW KY KZ LA LB LC LI LK LR LS LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT MU MV MW
MX MY MZ NA NC NE NF NG NI NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY QA RE RO RS RU RW SA SB SC
SD SE SG SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG TH TJ TK TL TM TN TO TR TT TV TW TZ UA UG UM US UY
UZ VA VC VE VG VI VN VU WF WS XK YE YT ZA ZM ZW
"""


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
            why = "a number ≥ 1: a bid below the minimum never runs, and its disk is billed"
            raise refusal("bid_factor", why, self.bid_factor)
        if self.regions is not None:
            object.__setattr__(self, "regions", _checked_regions(self.regions))
        if self.image_login is not None:
            text("image_login", self.image_login)
        if self.image is not None:
            self._check_image(text("image", self.image))

    def image_for(self, *, gpu: bool) -> str:
        """Return the image of a container."""
        return self.image or (_GPU_IMAGE if gpu else _CPU_IMAGE)

    def pays_no_traffic(self, request: PoolRequest) -> bool:
        """Return whether only asks with free traffic suit a request: its bill has a limit, and traffic has no cap."""
        return request.max_cost is not None and not self.billed_traffic

    def search_body(self, request: PoolRequest) -> Mapping[str, Any]:
        """Return the body of the one search for a request, on both markets.

        Raises:
            ConfigurationError: ``machine`` is no machine's name.
        """
        cuda = re.search(r"cuda:?(\d+\.\d+)", self.image_for(gpu=True))
        return {
            "type": "on-demand",
            "limit": _LIMIT,
            "order": [["dph_total", "asc"], ["id", "asc"]],
            "allocated_storage": self.disk_gb,
            "disk_space": {"gte": self.disk_gb},
            "verified": {"eq": True} if self.verified else {"in": [True, False]},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "cpu_arch": {"eq": "amd64"},
            "direct_port_count": {"gte": 2},
            "duration": {"gte": request.timeout_s},
            "reliability": {"gte": self.min_reliability},
            "inet_down": {"gte": self.min_inet_mbps},
            **({"geolocation": {"in": list(self.regions)}} if self.regions else {}),
            **({"cuda_max_good": {"gte": float(cuda[1])}} if cuda and _has_gpu(request) else {}),
            **({"cpu_cores_effective": {"gte": request.wish.cpu}} if request.wish.cpu else {}),
            **({"inet_up_cost": {"lte": 0}, "inet_down_cost": {"lte": 0}} if self.pays_no_traffic(request) else {}),
            **_gpu_filters(request),
        }

    def __str__(self) -> str:
        where = f"in {', '.join(self.regions)}" if self.regions else "anywhere"
        return (
            f"{'verified' if self.verified else 'verified or not'}, {where}, reliability ≥ {self.min_reliability:g}, "
            f"≥ {self.min_inet_mbps:g} Mbit/s, ≥ {self.disk_gb} GB of disk"
        )

    def _check_image(self, image: str) -> None:
        if not _IMAGE.fullmatch(image):
            raise refusal("image", "the name of a container image such as 'ubuntu:24.04'", image)
        if _PRIVATE.match(image) and self.image_login is None:
            raise ConfigurationError(
                f"image={image!r} is in a private registry: pass image_login='-u USER -p PASSWORD REGISTRY'"
            )
        for pattern, needs_gb in _NEEDS_GB.items():
            if re.search(pattern, image) and self.disk_gb < needs_gb:
                raise refusal("disk_gb", f"at least {needs_gb} for the image {image}", self.disk_gb)


def _checked_regions(value: Sequence[str]) -> tuple[str, ...]:
    countries = _COUNTRIES.split()
    for each in (found := texts("regions", value)):
        if each not in countries:
            near = closest(each.upper(), countries)
            raise refusal("regions", f"two-letter codes of countries such as 'US' (closest: {near})", each)
    if not found:
        raise refusal("regions", "at least one country, or None for any", value)
    return found


def _has_gpu(request: PoolRequest) -> bool:
    return request.accelerator is not None if request.machine is None else request.machine != CPU_ONLY


def _gpu_filters(request: PoolRequest) -> Mapping[str, Any]:
    if request.machine is not None:
        if (named := _MACHINE.fullmatch(request.machine)) is None:
            raise refusal("machine", f"{CPU_ONLY!r}, or a number and a GPU such as '2x RTX 4090'", request.machine)
        if named[2] is None:
            return {"num_gpus": {"eq": 0}}
        return {"num_gpus": {"eq": int(named[1])}, "gpu_name": {"in": [named[2], named[2].replace(" ", "_")]}}
    if (wanted := request.accelerator) is None:
        return {"num_gpus": {"eq": 0}}
    each_mb = wanted.memory_gib * 1024
    return {"num_gpus": {"gte": wanted.count}, "gpu_ram": {"gte": each_mb * _BELOW, "lte": each_mb * _ABOVE}}
