"""Volumes on rented machines: EC2 on this machine, with S3 beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import skyward as sky
from skyward.testing.aws import LocalEC2, Market, use_ec2
from skyward.testing.hosts import require_sshd

require_sshd()
pytestmark = pytest.mark.timeout(240)  # the first pool builds an environment

MACHINE = "m7i.large"
BUCKET = "skyward-rented"


@pytest.fixture
def ec2(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalEC2]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # other tests' prices
    settings = {"PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    ec2 = LocalEC2(
        tmp_path_factory.mktemp("ec2"),
        machines=True,
        market=Market(prices={MACHINE: 1.0}),
        cache=ssh_cache,
        env=settings,
        block=74,
    )
    with ExitStack() as stack:
        stack.enter_context(ec2)
        use_ec2(ec2, monkeypatch, ec2.settings)
        yield ec2


@sky.compute
def count(data: str, results: str) -> int:
    words = len(Path(data, "hamlet.txt").read_text().split())
    Path(results, f"{sky.instance_info().node}.txt").write_text(str(words))
    return words


@pytest.mark.full
def test_rented_machines_read_and_write_a_bucket_with_keys_made_for_it(ec2: LocalEC2, tmp_path: Path) -> None:
    s3 = ec2.client("s3")
    s3.create_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="texts/hamlet.txt", Body=b"to be or not to be")
    data, results = tmp_path / "data", tmp_path / "results"
    volumes = [
        sky.S3Volume(mount_path=str(data), bucket=BUCKET, prefix="texts"),
        sky.S3Volume(mount_path=str(results), bucket=BUCKET, prefix="results", read_only=False),
    ]
    provider = sky.AWS(endpoint_url=ec2.endpoint_url)

    with sky.ComputePool(provider=provider, nodes=2, machine=MACHINE, volume=volumes, display="quiet") as pool:
        assert count(str(data), str(results)) @ pool == (6, 6)

    listed = s3.list_objects_v2(Bucket=BUCKET, Prefix="results/")["Contents"]
    assert [each["Key"] for each in listed] == ["results/0.txt", "results/1.txt"]
    assert "GetFederationToken" in ec2.actions
    assert not data.exists()
    assert not results.exists()
    assert ec2.left() == {}


def test_a_bucket_that_is_not_there_costs_nothing(ec2: LocalEC2, tmp_path: Path) -> None:
    volume = sky.S3Volume(mount_path=str(tmp_path / "data"), bucket="no-such-bucket")
    provider = sky.AWS(endpoint_url=ec2.endpoint_url)

    with (
        pytest.raises(sky.ConfigurationError, match="there is no bucket 'no-such-bucket'"),
        sky.ComputePool(provider=provider, machine=MACHINE, volume=[volume], display="quiet"),
    ):
        pass

    assert "RunInstances" not in ec2.actions
    assert "CreateFleet" not in ec2.actions
