"""The first pool of each example opens as planned. Those that need frameworks are in tests/ml/test_plans.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import gallery
import skyward as sky
from skyward.testing.aws import LocalEC2, use_ec2
from support.clouds.vendors import VENDORS, opened
from support.gpus import FakeGpu, FakeGpus, Machine
from support.openings import WITH_FRAMEWORKS, open_as_planned

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

ON_GPUS, ON_HOSTS = "operators/gpu_partitions.py", {"providers/ssh_hosts.py"}
ON_BUCKETS = {"providers/aws_volume.py": "data/", "data/s3_checkpoints.py": ""}
HERE = sorted({*gallery.shown()} - WITH_FRAMEWORKS - ON_HOSTS)


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalEC2]:
    """AWS and every cloud with a fake, without machines."""
    with ExitStack() as stack:
        for vendor in VENDORS:
            cloud = stack.enter_context(opened(vendor, monkeypatch, tmp_path))
            monkeypatch.setattr(sky, vendor.kind.__name__, partial(vendor.kind, endpoint_url=cloud.endpoint_url))
        ec2 = stack.enter_context(LocalEC2())
        monkeypatch.setenv("AWS_ENDPOINT_URL", ec2.endpoint_url)
        use_ec2(ec2, monkeypatch, ec2.settings)
        yield ec2


def arguments_of(example: str, ec2: LocalEC2) -> list[str]:
    if example not in ON_BUCKETS:
        return [*gallery.shown()[example].arguments]
    bucket = f"skyward-plans-{os.getpid()}"
    ec2.client("s3").create_bucket(Bucket=bucket)
    ec2.client("s3").put_object(Bucket=bucket, Key=f"{ON_BUCKETS[example]}part-0", Body=bytes(1000))
    return [bucket, *filter(None, [ON_BUCKETS[example]])]


@pytest.mark.parametrize("example", HERE)
def test_the_first_pool_of_an_example_opens_as_planned(
    example: str, clouds: LocalEC2, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if example == ON_GPUS:
        gpus = FakeGpus(tmp_path / "gpus.json", Machine(gpus=[FakeGpu()]))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in gpus.install(tmp_path / "bin").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "pynvml", gpus.nvml())
    open_as_planned(example, arguments_of(example, clouds), monkeypatch, tmp_path)


def test_the_pool_of_the_example_on_hosts_opens_as_planned(
    lab: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (example,) = ON_HOSTS
    monkeypatch.setenv("HOME", str(lab))
    open_as_planned(example, [*gallery.shown()[example].arguments], monkeypatch, tmp_path)
