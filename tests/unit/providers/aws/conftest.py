"""EC2's real machine types, and EC2 on this machine, for every test of the provider."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE
from skyward.providers._common.machine_catalogue import MachineType
from skyward.providers.aws.account import parse_types
from skyward.testing.aws import LocalEC2, Looks, use_ec2
from support.clouds.aws_clients import remember_classes


@pytest.fixture(scope="session", autouse=True)
def classes() -> None:
    remember_classes()


@pytest.fixture(scope="session")
def type_rows() -> Mapping[str, Any]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES  # takes a second, in every process that collects tests

    return INSTANCE_TYPES


@pytest.fixture(scope="session")
def types(type_rows: Mapping[str, Any]) -> tuple[MachineType, ...]:
    return parse_types(type_rows.values())


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEC2]:
    """An account in which nothing was made; waits are short."""
    with LocalEC2(looks=Looks(pending=0, ending=0), block=71) as ec2:
        use_ec2(ec2, monkeypatch, {"listing_s": 0.0, "patience_s": 2.0})
        monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
        yield ec2
