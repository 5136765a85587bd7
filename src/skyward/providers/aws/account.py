"""Facts about an account and region, each requested once and cached in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from skyward.providers._common.answer_file import AnswerFile
from skyward.providers._common.machine_catalogue import MachineType
from skyward.providers._common.rented_machines import MachineBook
from skyward.providers.aws.api import Api, Json
from skyward.providers.aws.boot import MachineImage, find_image, image_path
from skyward.providers.aws.machine_types import FIELDS, parse_types
from skyward.providers.aws.network import find_subnets
from skyward.providers.aws.payloads import Record, Subnet, filters, parse_record

__all__ = ["Account", "in_parts"]

_WEEK_S: Final = 7 * 24 * 3600.0
_MOST_VALUES: Final = 200
"""Limit of EC2 for the values of one filter; also used for the ids of one call, which may be more."""


@dataclass(slots=True, eq=False)
class Account:
    """One account in one region. Answers are cached for the provider's life, except records of machines.

    Attributes:
        api: its API.
        subnet: id of the subnet given by the user; None means the default ones.
        book: machines of this process.
        zones: zone of a pool's machines, by pool id.
    """

    api: Api
    subnet: str | None
    book: MachineBook = field(default_factory=MachineBook)
    zones: dict[str, str] = field(default_factory=dict[str, str])
    _types: tuple[MachineType, ...] = ()
    _offered: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _subnets: tuple[Subnet, ...] = ()
    _images: dict[str, MachineImage] = field(default_factory=dict[str, MachineImage])

    @property
    def region(self) -> str:
        """``"us-east-1"``."""
        return self.api.credentials.region

    async def types(self) -> tuple[MachineType, ...]:
        """Return every machine type of the region; cached on disk for a week."""
        if not self._types:
            kept = await self.kept("types", _WEEK_S).completed(["types"], self._types_now)
            self._types = parse_types(kept.get("types", ()))
        return self._types

    async def _types_now(self, names: Sequence[str]) -> Mapping[str, Sequence[Json]]:
        rows: list[Json] = await self.api.pages("ec2", "DescribeInstanceTypes", "InstanceTypes")
        short = [{each: row[each] for each in FIELDS.split() if each in row} for row in rows]
        return dict.fromkeys(names, short) if short else {}

    async def image(self, name: str) -> MachineImage:
        """Return the image of a machine type; raises :class:`KeyError` if the region has no such type."""
        path = image_path({machine.name: machine for machine in await self.types()}[name])
        if path not in self._images:
            self._images[path] = await find_image(self.api, path)
        return self._images[path]

    async def offered(self, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the zones that offer each of these types; an empty tuple if none does."""
        unknown = [name for name in names if name not in self._offered]
        for part in in_parts(unknown):
            rows = await self.api.pages(
                "ec2",
                "DescribeInstanceTypeOfferings",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=filters({"instance-type": part}),
            )
            for name in part:
                self._offered[name] = tuple(sorted({row["Location"] for row in rows if row["InstanceType"] == name}))
        return {name: self._offered[name] for name in names}

    async def subnets(self) -> tuple[Subnet, ...]:
        """Return the subnets that machines may be in."""
        if not self._subnets:
            self._subnets = await find_subnets(self.api, self.subnet)
        return self._subnets

    async def records(self, wanted: Mapping[str, Sequence[str]]) -> list[Record]:
        """Return the machines that match every filter by one of its values; the last filter may have many values."""
        *others, (name, values) = wanted.items()
        found: list[Record] = []
        for part in in_parts(values):
            rows = await self.api.pages(
                "ec2", "DescribeInstances", "Reservations", Filters=filters({**dict(others), name: part})
            )
            found += [parse_record(row, self.region) for reservation in rows for row in reservation["Instances"]]
        return found

    def kept(self, name: str, longest_s: float) -> AnswerFile:
        """Return the file that caches answers of this region under ``name``."""
        endpoint_url = self.api.credentials.endpoint_url
        return AnswerFile(vendor="aws", name=name, place=self.region, endpoint_url=endpoint_url, longest_s=longest_s)


def in_parts(values: Sequence[str]) -> list[list[str]]:
    """Split ``values`` into lists of the size that EC2 admits."""
    return [list(values[start : start + _MOST_VALUES]) for start in range(0, len(values), _MOST_VALUES)]
