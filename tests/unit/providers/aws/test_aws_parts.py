"""Orders for the first boot, prices, quotas, records: the parts that need no EC2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyward.errors import ConfigurationError
from skyward.providers._common.logins import KeyPair
from skyward.providers.aws.account import LARGEST_BYTES, parse_record, user_data
from skyward.providers.aws.api import Api
from skyward.providers.aws.machine_images import find_image
from skyward.providers.aws.offering import parse_product, parse_spot_prices, quota_of
from skyward.providers.base import InstanceState


def test_orders_that_are_too_long_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"{LARGEST_BYTES} bytes"):
        user_data(host_key=KeyPair(public="", private="x" * LARGEST_BYTES), user_key="", time_to_live_s=60)


class Images:
    """EC2 and its public parameters, as far as images are looked up: each image's id is its parameter's name."""

    credentials = SimpleNamespace(region="eu-north-1")

    def __init__(self, *names: str, disk_gb: int = 8) -> None:
        self.names = names
        self.disk = {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": disk_gb}}

    async def pages(self, service: str, operation: str, key: str, **parameters: Any) -> Sequence[Mapping[str, Any]]:
        names = [f"{parameters['Path']}{name}" for name in self.names]
        return [{"Name": name, "Value": name} for name in names if parameters["Recursive"]]

    async def call(self, service: str, operation: str, **parameters: Any) -> Mapping[str, Any]:
        if operation == "GetParameter":
            return {"Parameter": {"Value": parameters["Name"]}} if self.names else {}
        return {"Images": [{"RootDeviceName": "/dev/xvda", "BlockDeviceMappings": [self.disk]}]}


def neuron(*parts: str) -> list[str]:
    return [f"/{part}/latest/image_id" for part in parts]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (neuron("pytorch-2.8/ubuntu-24.04", "base/ubuntu-24.04", "base/ubuntu-22.04"), "base/ubuntu-24.04"),
        (neuron("pytorch-2.8/ubuntu-24.04", "multi-framework/ubuntu-24.04"), "multi-framework/ubuntu-24.04"),
        (
            neuron("pytorch-2.8/ubuntu-24.04", "pytorch-2.9/ubuntu-24.04", "base/ubuntu-22.04"),
            "pytorch-2.9/ubuntu-24.04",
        ),
        (neuron("pytorch-2.10/ubuntu-24.04", "pytorch-2.9/ubuntu-24.04"), "pytorch-2.10/ubuntu-24.04"),
        (neuron("pytorch-2.9.1/ubuntu-24.04", "pytorch-2.9/ubuntu-24.04"), "pytorch-2.9.1/ubuntu-24.04"),
        ([*neuron("base/ubuntu-22.04"), "/base/ubuntu-24.04/2026-11-01/image_id"], "base/ubuntu-22.04"),
    ],
)
async def test_a_machine_with_neuron_devices_boots_the_most_general_image(names: list[str], chosen: str) -> None:
    image = await find_image(cast("Api", Images(*names, disk_gb=120)), "/aws/service/neuron/dlami")

    assert image.id.endswith(f"/{chosen}/latest/image_id")
    assert (image.root_device, image.disk_gb) == ("/dev/xvda", 120)


@pytest.mark.parametrize("path", ["/aws/service/neuron/dlami", "/aws/service/canonical/ubuntu"])
async def test_a_region_without_an_image_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=f"aws eu-north-1 has no image for this kind of machine \\({path}\\)"):
        await find_image(cast("Api", Images()), path)


# --- prices -------------------------------------------------------------------------------------------------------


def product(**dimension: Any) -> str:
    return json.dumps({"terms": {"OnDemand": {"1": {"priceDimensions": {"2": dimension}}}}})


@pytest.mark.parametrize(
    ("text", "price"),
    [
        (product(unit="Hrs", pricePerUnit={"USD": "0.5260000000"}), 0.526),
        (product(unit="Hrs", pricePerUnit={"USD": "0.0000000000"}), None),
        (product(unit="Quantity", pricePerUnit={"USD": "3"}), None),
        (product(unit="Hrs", pricePerUnit={"CNY": "3"}), None),
        (product(unit="Hrs", pricePerUnit={"USD": "free"}), None),
        ('{"terms": {"Reserved": {}}}', None),
        ('"a bare string"', None),
        ("<html>", None),
        ("null", None),
    ],
)
def test_a_product_has_a_price_or_none(text: str, price: float | None) -> None:
    assert parse_product(text) == price


def test_the_latest_spot_price_of_each_zone_counts() -> None:
    def row(zone: str, price: str, at: int, **more: Any) -> dict[str, Any]:
        return {"InstanceType": "g", "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": at} | more

    rows = [row("a", "0.3", 2), row("a", "0.1", 1), row("b", "0.2", 1), row("c", "much", 1), {}]
    assert parse_spot_prices(rows) == {"g": {"a": 0.3, "b": 0.2}}


# --- quotas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spot", "code"),
    [
        ("g4dn.xlarge", False, "L-DB2E81BA"),
        ("gr6.4xlarge", True, "L-3819A6DF"),
        ("p5.48xlarge", False, "L-417A185B"),
        ("p6-b200.48xlarge", True, "L-7212CCBC"),
        ("inf2.xlarge", False, "L-1945791B"),
        ("inf2.xlarge", True, "L-B5D1601B"),
        ("trn2.48xlarge", False, "L-2C3B7624"),
        ("trn1.2xlarge", True, "L-6B0D517C"),
        ("dl1.24xlarge", False, "L-6E869C2A"),
        ("c7a.large", False, "L-1216C47A"),
        ("im4gn.large", True, "L-34B43A08"),
        ("mac2.metal", False, None),
        ("x2iedn.xlarge", False, None),
    ],
)
def test_a_type_counts_against_the_quota_of_its_family(name: str, spot: bool, code: str | None) -> None:
    quota = quota_of(name, spot=spot)
    assert (quota.code if quota else None) == code


# --- records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("pending", InstanceState.PENDING),
        ("running", InstanceState.RUNNING),
        ("shutting-down", InstanceState.STOPPING),
        ("stopping", InstanceState.FAILED),
        ("stopped", InstanceState.FAILED),
        ("terminated", InstanceState.GONE),
        ("something-new", InstanceState.PENDING),
    ],
)
def test_every_state_has_its_meaning(word: str, state: InstanceState) -> None:
    record = parse_record({"InstanceId": "i-1", "State": {"Name": word}}, "us-east-1")
    assert record.state is state


def test_why_a_machine_ended_is_told() -> None:
    reason = {"Code": "Server.SpotInstanceTermination", "Message": "taken back"}
    record = parse_record({"InstanceId": "i-1", "StateReason": reason}, "us-east-1")
    assert record.reason == "Server.SpotInstanceTermination: taken back"


def test_a_terminated_machine_ended_when_its_record_says() -> None:
    row = {"InstanceId": "i-1", "StateTransitionReason": "User initiated (2026-11-23 07:00:01 GMT)"}
    ended = [
        parse_record(row | more, "us-east-1").ended_at
        for more in (
            {"State": {"Name": "terminated"}},
            {"State": {"Name": "running"}},
            {"State": {"Name": "terminated"}, "StateTransitionReason": ""},
        )
    ]
    assert ended == [1795417201.0, None, None]
