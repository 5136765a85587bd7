"""The examples for AWS, as they are, with EC2 and S3 on this machine."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.provision.buying.ledger import Ledger
from skyward.testing.aws import LocalEC2, use_ec2
from skyward.testing.hosts import require_sshd

require_sshd()
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def ec2(tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Iterator[LocalEC2]:
    machines = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    folder = tmp_path_factory.mktemp("ec2")
    with LocalEC2(folder, machines=True, cache=ssh_cache, env=machines) as ec2:
        yield ec2


def run(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, example: str, *arguments: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", ec2.endpoint_url)
    use_ec2(ec2, monkeypatch, ec2.settings)
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    assert ec2.left() == {}
    assert [entry for entry in Ledger.of_user().open_entries() if entry.purchase.provider == "aws"] == []


def test_spot_machines_say_what_they_cost(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # other tests' prices
    run(ec2, monkeypatch, "aws_spot.py")

    said = capsys.readouterr().out
    assert "node 1 of 2: Linux" in said
    assert "sum of squares: 328350" in said
    assert "cost: $0.00" in said


def test_nodes_read_a_bucket(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket = f"skyward-example-{os.getpid()}"
    s3 = ec2.client("s3")
    s3.create_bucket(Bucket=bucket)
    for number in range(5):
        s3.put_object(Bucket=bucket, Key=f"data/part-{number}", Body=bytes(1000))

    run(ec2, monkeypatch, "aws_volume.py", bucket, "data/")

    assert "5 files, 5000 bytes" in capsys.readouterr().out


def test_a_grid_search_runs_on_spot_machines(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run(ec2, monkeypatch, "aws_search.py")

    assert "best score: 0.97" in capsys.readouterr().out
