"""What is known of an account while its provider is in use, and what asking for it costs only once."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.providers.aws.api import Api, Json
from skyward.providers.aws.catalog import MachineType, parse_types
from skyward.providers.aws.images import MachineImage, find_image
from skyward.providers.aws.kept import Kept
from skyward.providers.aws.network import Subnet, find_subnets
from skyward.providers.aws.records import Record, parse_record
from skyward.providers.aws.tags import filters
from skyward.providers.base import Offer

__all__ = ["Account", "Launched", "in_parts"]

_WEEK_S: Final = 7 * 24 * 3600.0
_MOST_VALUES: Final = 200
"""Of a filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A machine that this process has launched.

    Attributes:
        key: its ledger key.
        pool_id: its pool.
        offer: what was got.
        at: when, an ``elapsed`` reading of the system clock.
    """

    key: str
    pool_id: str
    offer: Offer
    at: float


@dataclass(slots=True, eq=False)
class Account:
    """Answers are remembered for the provider's life; what may become wrong meanwhile is asked for anew.

    Attributes:
        api: the way to it.
        subnet: the one that was named; None means the default ones.
        launched: machines of this process, by id.
        launching: how many launches of a pool are under way.
        zones: the zone that a pool's machines are in.
        locks: of each pool's security group.
        silent: services that did not answer what need not be known; they are not asked again.
    """

    api: Api
    subnet: str | None
    launched: dict[str, Launched] = field(default_factory=dict[str, Launched])
    launching: Counter[str] = field(default_factory=Counter[str])
    zones: dict[str, str] = field(default_factory=dict[str, str])
    locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    silent: set[str] = field(default_factory=set[str])
    _types: tuple[MachineType, ...] = ()
    _offered: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _subnets: tuple[Subnet, ...] = ()
    _images: dict[str, MachineImage] = field(default_factory=dict[str, MachineImage])

    @property
    def region(self) -> str:
        """``"us-east-1"``."""
        return self.api.credentials.region

    async def types(self) -> tuple[MachineType, ...]:
        """Every machine type of the region; asked for once a week."""
        if not self._types:
            kept = self.kept("types", _WEEK_S)
            rows: list[Json] = (await asyncio.to_thread(kept.read)).get("types", [])
            types = parse_types(rows)
            if not types:
                rows = await self.api.pages("ec2", "DescribeInstanceTypes", "InstanceTypes")
                types = parse_types(rows)
                await asyncio.to_thread(kept.add, {"types": [_short(row) for row in rows]})
            self._types = types
        return self._types

    async def type(self, name: str) -> MachineType:
        """One of them; raises :class:`KeyError` for a name that is none."""
        return {machine.name: machine for machine in await self.types()}[name]

    async def offered(self, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """The zones in which each of these types is offered; empty where it is in none."""
        unknown = [name for name in names if name not in self._offered]
        for part in in_parts(unknown, _MOST_VALUES):
            rows = await self.api.pages(
                "ec2",
                "DescribeInstanceTypeOfferings",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=filters({"instance-type": part}),
            )
            zones: dict[str, set[str]] = {name: set() for name in part}
            for row in rows:
                zones.setdefault(row["InstanceType"], set()).add(row["Location"])
            self._offered |= {name: tuple(sorted(found)) for name, found in zones.items()}
        return {name: self._offered[name] for name in names}

    async def ask(self, service: str, operation: str, *, region: str = "", **parameters: Any) -> Json | None:
        """The answer to a question that may remain open; None once the service has not answered one."""
        if service in self.silent:
            return None
        answer = await self.api.ask(service, operation, region=region, **parameters)
        if answer is None:
            self.silent.add(service)
        return answer

    async def subnets(self) -> tuple[Subnet, ...]:
        """Where machines may stand."""
        if not self._subnets:
            self._subnets = await find_subnets(self.api, self.subnet)
        return self._subnets

    async def image(self, path: str) -> MachineImage:
        """The image of a public parameter."""
        if path not in self._images:
            self._images[path] = await find_image(self.api, path)
        return self._images[path]

    async def records(self, wanted: Mapping[str, Sequence[str]]) -> list[Record]:
        """The machines that have one of the values of each filter; the last filter may have many."""
        *others, (name, values) = wanted.items()
        found: list[Record] = []
        for part in in_parts(values, _MOST_VALUES):
            rows = await self.api.pages(
                "ec2", "DescribeInstances", "Reservations", Filters=filters({**dict(others), name: part})
            )
            found += [parse_record(row, self.region) for reservation in rows for row in reservation["Instances"]]
        return found

    def age_s(self, instance_id: str) -> float:
        """How long ago this process launched it; infinite if it did not."""
        launched = self.launched.get(instance_id)
        return float("inf") if launched is None else SYSTEM_CLOCK.elapsed() - launched.at

    def kept(self, name: str, longest_s: float) -> Kept:
        """Answers of this account's region that are kept on disk."""
        endpoint_url = self.api.credentials.endpoint_url
        return Kept(name=name, region=self.region, endpoint_url=endpoint_url, longest_s=longest_s)


def in_parts(values: Iterable[str], most: int) -> list[list[str]]:
    """``values`` in lists of at most so many."""
    every = list(values)
    return [every[start : start + most] for start in range(0, len(every), most)]


_OF_INTEREST: Final = (
    "InstanceType",
    "VCpuInfo",
    "MemoryInfo",
    "ProcessorInfo",
    "SupportedUsageClasses",
    "CurrentGeneration",
    "BareMetal",
    "BurstablePerformanceSupported",
    "GpuInfo",
    "NeuronInfo",
    "InferenceAcceleratorInfo",
    "FpgaInfo",
    "MediaAcceleratorInfo",
)


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _OF_INTEREST if name in row}
