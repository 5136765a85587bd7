"""The examples for AWS, as they are, with EC2 and S3 on this machine."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gallery
from skyward.ledger.ledger import Ledger
from skyward.node.processes import carriers
from skyward.testing.aws import Capacity, LocalEC2, use_ec2
from skyward.testing.hosts import require_sshd
from support.eventually import eventually

require_sshd()
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

FOLDER = Path("/tmp/skyward-example-checkpoints")
"""Where the example keeps them on its machine, which is this one."""


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
    runpy.run_path(str(gallery.EXAMPLES / example), run_name="__main__")
    assert ec2.left() == {}
    assert [entry for entry in Ledger.of_user().open_entries() if entry.purchase.provider == "aws"] == []


def test_spot_machines_say_what_they_cost(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # other tests' prices
    run(ec2, monkeypatch, "providers/aws_spot.py")

    said = capsys.readouterr().out
    assert "node 1 of 2: Linux" in said
    assert "sum of squares: 328350" in said
    assert "cost: $0.00" in said
    gallery.compare("providers/aws_spot.py", said, exactly=False)


def test_nodes_read_a_bucket(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket = f"skyward-example-{os.getpid()}"
    s3 = ec2.client("s3")
    s3.create_bucket(Bucket=bucket)
    for number in range(5):
        s3.put_object(Bucket=bucket, Key=f"data/part-{number}", Body=bytes(1000))

    run(ec2, monkeypatch, "providers/aws_volume.py", bucket, "data/")

    said = capsys.readouterr().out
    assert "5 files, 5000 bytes" in said
    gallery.compare("providers/aws_volume.py", said)


def test_a_grid_search_runs_on_spot_machines(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run(ec2, monkeypatch, "providers/aws_search.py")

    said = capsys.readouterr().out
    assert "best score: 0.97" in said
    gallery.compare("providers/aws_search.py", said, exactly=False)


def test_a_training_whose_machine_is_taken_back_goes_on_from_its_checkpoints_in_s3(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket = f"skyward-checkpoints-{os.getpid()}"
    s3 = ec2.client("s3")
    s3.create_bucket(Bucket=bucket)

    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(take_back, ec2, s3, bucket)
        run(ec2, monkeypatch, "data/s3_checkpoints.py", bucket)
        assert taken.result()

    said = capsys.readouterr().out
    first, lost, again, result = said.splitlines()
    assert (first, lost) == ("begins with step 0", "node 0 is taken back")
    assert 0 < int(again.removeprefix("begins with step ")) < 150
    assert result == "slope after 150 steps: 2.855"
    gallery.compare("data/s3_checkpoints.py", said, exactly=False)


def take_back(ec2: LocalEC2, s3: Any, bucket: str) -> bool:
    """Take the machine back in the middle, and with it its disk; nothing is on offer until it is gone."""
    wait_until((FOLDER / "step-000005.json").exists)
    (machine,) = [each["InstanceId"] for each in ec2.instances()]
    ec2.market.limits.append(Capacity(count=0))
    ec2.preempt(machine, in_s=10)
    wait_until(lambda: ec2.instances()[0]["State"]["Name"] == "terminated" and not carriers(machine))
    shutil.rmtree(FOLDER)
    ec2.market.limits.clear()
    return "Contents" in s3.list_objects_v2(Bucket=bucket)


def wait_until(met: Callable[[], bool]) -> None:
    for attempt in eventually(120):
        with attempt:
            assert met()
