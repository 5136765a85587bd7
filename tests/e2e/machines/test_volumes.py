"""Volumes as calls see them: real nodes, a real server that speaks S3."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.events import BootstrapProgress, Error, Notice, SkywardEvent
from skyward.testing.hosts import require_sshd, write_known_hosts
from support.ssh_hosts import cached_host

pytestmark = pytest.mark.timeout(300)
BUCKET = "skyward-test"


@pytest.fixture
def s3(user_s3: Any) -> Iterator[Any]:
    user_s3.create_bucket(Bucket=BUCKET)
    yield user_s3
    for each in user_s3.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        user_s3.delete_object(Bucket=BUCKET, Key=each["Key"])
    user_s3.delete_bucket(Bucket=BUCKET)


def keys(s3: Any) -> set[str]:
    return {each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())}


def content(s3: Any, key: str) -> bytes:
    return s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()


@sky.compute
def look(folder: str) -> tuple[list[str], str, int]:
    names = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    file = Path(folder, "train/a.txt")
    return names, file.read_text(), stat.S_IMODE(file.stat().st_mode)


@sky.compute
def keep(folder: str, text: str) -> None:
    Path(folder, "runs").mkdir(exist_ok=True)
    Path(folder, f"runs/{sky.instance_info().node}.txt").write_text(text)


@sky.compute
def held_keys() -> int:
    import gc

    gc.unfreeze()
    return sum(type(found).__name__ == "StorageKey" for found in gc.get_objects())


def test_two_local_nodes_read_a_dataset_and_write_results(s3: Any, tmp_path: Path) -> None:
    for key in ("data/train/a.txt", "data/b.txt", "data/../escape.txt", "other.txt"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=f"this is {key}".encode())
    data, models = tmp_path / "data", tmp_path / "deep/models"
    events: list[SkywardEvent] = []
    volumes = [
        sky.S3Volume(mount_path=str(data), bucket=BUCKET, prefix="data"),
        sky.S3Volume(mount_path=str(models), bucket=BUCKET, prefix="models/", read_only=False),
    ]

    with sky.ComputePool(
        provider=sky.Local(), nodes=2, volume=volumes, display="quiet", on_event=events.append
    ) as pool:
        seen = look(str(data)) @ pool
        keep(str(models), "result") @ pool
        assert held_keys() @ pool == (0, 0), "keys of volumes are in the memory of a worker"

    assert seen == ((["b.txt", "train/a.txt"], "this is data/train/a.txt", 0o444),) * 2
    assert keys(s3) >= {"models/runs/0.txt", "models/runs/1.txt"}
    assert content(s3, "models/runs/1.txt") == b"result"
    assert list(tmp_path.iterdir()) == [], "a folder that was made for a volume goes with it"
    assert [each.step for each in events if isinstance(each, BootstrapProgress)].count("volumes") == 2
    notes = [each.message for each in events if isinstance(each, Notice)]
    assert notes
    assert "'../escape.txt'" in notes[0]


@pytest.mark.full
def test_changes_that_cannot_be_written_back_stay_and_are_told_of(s3: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    volume = sky.S3Volume(mount_path=str(folder), bucket=BUCKET, read_only=False)
    events: list[SkywardEvent] = []

    with sky.ComputePool(provider=sky.Local(), volume=[volume], display="quiet", on_event=events.append) as pool:
        keep(str(folder), "42") >> pool
        s3.delete_bucket(Bucket=BUCKET)
    s3.create_bucket(Bucket=BUCKET)

    (error,) = [each.message for each in events if isinstance(each, Error)]
    assert "NoSuchBucket" in error
    assert (folder / "runs/0.txt").read_text() == "42"

    with sky.ComputePool(provider=sky.Local(), volume=[volume], display="quiet"):
        pass
    assert content(s3, "runs/0.txt") == b"42"
    assert not folder.exists()


def test_a_bucket_that_does_not_exist_is_said_before_anything_is_created(s3: Any, tmp_path: Path) -> None:
    volume = sky.S3Volume(mount_path=str(tmp_path / "data"), bucket="no-such-bucket")
    events: list[SkywardEvent] = []

    with (
        pytest.raises(sky.ConfigurationError, match="there is no bucket 'no-such-bucket'"),
        sky.ComputePool(provider=sky.Local(), volume=[volume], display="quiet", on_event=events.append),
    ):
        pass

    assert not any(type(each).__name__ == "InstanceLaunching" for each in events)


def test_a_mount_path_that_cannot_be_made_is_named(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "data"
    volume = sky.S3Volume(mount_path=str(folder), bucket=BUCKET)

    with (
        pytest.raises(sky.BootstrapError, match=f"mount_path {folder} cannot be made") as failed,
        sky.ComputePool(provider=sky.Local(), volume=[volume], display="quiet"),
    ):
        pass

    assert failed.value.step == "volumes"


# In `make test`: unit/providers/test_s3.py for the keys, the two local nodes above for the files.
@pytest.mark.full
def test_a_host_gets_short_lived_keys_and_leaves_no_trace(s3: Any, tmp_path: Path, ssh_cache: Path) -> None:
    require_sshd()
    s3.put_object(Bucket=BUCKET, Key="train/a.txt", Body=b"on a host")
    folder = tmp_path / "mounted"
    folder.mkdir()
    with ExitStack() as stack:
        host = stack.enter_context(cached_host(tmp_path / "host", "127.74.0.2", ssh_cache))
        known_hosts = write_known_hosts(tmp_path / "known_hosts", host)
        provider = sky.SSH(
            hosts=[f"{host.address}:{host.port}"], key_path=str(host.key_path), known_hosts=str(known_hosts)
        )
        volume = sky.S3Volume(mount_path=str(folder), bucket=BUCKET, read_only=False)
        with sky.ComputePool(provider=provider, volume=[volume], display="quiet") as pool:
            names, text, _ = look(str(folder)) >> pool
            keep(str(folder), "from the host") >> pool

    assert (names, text) == (["train/a.txt"], "on a host")
    assert content(s3, "runs/0.txt") == b"from the host"
    assert list(folder.iterdir()) == [], "a folder that was there before stays, as it was"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and os.access(path, os.R_OK)]
    assert not any(b"the-users-own-secret" in path.read_bytes() for path in written)
