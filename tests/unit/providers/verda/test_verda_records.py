"""Verda's JSON, without a service: types, images, records."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.providers._common.refusals import RefusalKind
from skyward.providers.verda import TABLE, choose_image, parse_record, parse_types
from support.clouds.verda_api import machine_type


@pytest.mark.parametrize(
    ("description", "count", "total_gb", "name", "each_gib"),
    [
        ("B200 SXM6 180GB", 8, 1440, "B200", 192.0),
        ("B300 SXM6 268GB", 1, 268, "B300", 288.0),
        ("H200 SXM5 141GB", 4, 564, "H200", 141.0),
        ("H100 SXM5 80GB", 2, 160, "H100-SXM", 80.0),
        ("A100 SXM4 80GB", 8, 640, "A100-80GB", 80.0),
        ("A100 SXM4 40GB", 1, 40, "A100-40GB", 40.0),
        ("RTX 6000 Ada 48GB", 1, 48, "RTX-6000-Ada", 48.0),
        ("RTX PRO 6000 96GB", 8, 768, "RTX-PRO-6000", 96.0),
        ("RTX A6000 48GB", 1, 48, "RTX-A6000", 48.0),
        ("Tesla V100 16GB", 4, 64, "V100-16GB", 16.0),
        ("L40S 48GB", 1, 48, "L40S", 48.0),
        ("7900XTX 24GB", 1, 24, "7900XTX", 24.0),
    ],
)
def test_gpus_are_those_of_skywards_catalogue_with_the_memory_of_each(
    description: str, count: int, total_gb: float, name: str, each_gib: float
) -> None:
    row = machine_type("X", description, count, total_gb=total_gb, cores=4, memory_gb=16, price="1", spot="0.5")
    (found,) = parse_types([row])
    spec = found.spec
    assert (spec.accelerator, spec.accelerator_count, spec.accelerator_memory_gib) == (name, count, each_gib)


def test_malformed_types_are_left_out_and_prices_may_be_text_or_numbers() -> None:
    good = machine_type("A", "CPU", 0, total_gb=0, cores=4, memory_gb=16, price="0.5", spot="0")
    rows: list[dict[str, Any]] = [{"instance_type": "B"}, good, {**good, "cpu": None}, {**good, "price_per_hour": 0.75}]
    found = parse_types(rows)
    assert [each.spec.price_on_demand for each in found] == [0.5, 0.75]
    assert [each.spot for each in found] == [False, False]


@pytest.mark.parametrize(
    ("supported", "gpu", "chosen"),
    [
        (["ubuntu-22.04", "ubuntu-24.04"], False, "ubuntu-24.04"),
        (["ubuntu-24.04", "ubuntu-24.04-cuda-12.8-open-docker"], False, "ubuntu-24.04"),
        (["ubuntu-24.04-cuda-12.8-open", "ubuntu-24.04-cuda-13.0-open"], True, "ubuntu-24.04-cuda-13.0-open"),
        (["ubuntu-24.04-cuda-12.8-open-docker", "ubuntu-24.04-cuda-12.8-open"], True, "ubuntu-24.04-cuda-12.8-open"),
        (["ubuntu-22.04-cuda-12.0-docker", "ubuntu-24.04"], True, "ubuntu-22.04-cuda-12.0-docker"),
        (["ubuntu-26.04-cuda-13.0", "ubuntu-24.04-cuda-12.8"], True, "ubuntu-24.04-cuda-12.8"),
        (["debian-12", "jupyter"], False, None),
    ],
)
def test_the_image_is_ubuntu_2404_with_the_newest_cuda_for_a_gpu(
    supported: list[str], gpu: bool, chosen: str | None
) -> None:
    assert choose_image(supported, gpu=gpu) == chosen


def record(**fields: Any) -> dict[str, Any]:
    usual = {"id": "i", "status": "running", "description": "skyward.sky-1.sky-1-0-ab", "location": "FIN-01"}
    return {**usual, "instance_type": "CPU.4V.16G", "hostname": "h", "is_spot": False, "ssh_key_ids": [], **fields}


def test_labels_are_the_tags_else_the_description_and_others_machines_are_none() -> None:
    tags = [{"key": "skyward-pool", "value": "sky-2"}, {"key": "skyward-key", "value": "sky-2-0-cd"}]
    tagged, described = parse_record(record(tags=tags)), parse_record(record())
    assert tagged is not None
    assert described is not None
    assert (tagged.pool_id, tagged.key) == ("sky-2", "sky-2-0-cd")
    assert (described.pool_id, described.key) == ("sky-1", "sky-1-0-ab")
    assert parse_record(record(description="mine", tags=tags[:1])) is None


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (401, "unauthorized_request", "token is invalid", RefusalKind.AUTH),
        (402, "insufficient_funds", "Insufficient funds", RefusalKind.QUOTA),
        (403, "forbidden_action", "Not allowed", RefusalKind.QUOTA),
        (503, "service_unavailable", "No capacity available", RefusalKind.CAPACITY),
        (503, "service_unavailable", "Maintenance", RefusalKind.TRANSIENT),
        (400, "invalid_request", "Invalid instance type", RefusalKind.CAPACITY),
        (400, "invalid_request", "Location FIN-09 is not valid", RefusalKind.CAPACITY),
        (400, "invalid_request", "Can't discontinue a provisioning instance", RefusalKind.IN_USE),
        (400, "invalid_request", "Can't discontinue a discontinued instance", RefusalKind.MISSING),
        (400, "invalid_request", "Invalid instance id", RefusalKind.MISSING),
        (404, "not_found", "No such thing", RefusalKind.MISSING),
        (429, "too_many_requests", "Slow down", RefusalKind.RATE),
        (400, "invalid_request", "hostname is too long", RefusalKind.BAD_REQUEST),
    ],
)
def test_errors_are_classified_by_status_and_words(status: int, code: str, message: str, kind: RefusalKind) -> None:
    assert TABLE.judge(code, message, status=status).kind is kind
