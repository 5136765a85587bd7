"""Volumes in S3, against a real server that speaks it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from skyward.errors import AuthenticationError, ConfigurationError, SkywardError, UnreachableError
from skyward.providers.aws import s3 as storage
from skyward.providers.aws.s3 import mount_ways
from skyward.providers.local import Local
from skyward.providers.storage import Store, grant_volumes
from skyward.request.volume import GrantedVolume, S3Volume, StorageKey, VolumeAccess

BUCKET = "skyward-unit"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUSERSOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-users-own-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    yield client
    for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=each["Key"])
    client.delete_bucket(Bucket=BUCKET)
    client.close()


def volume(**fields: Any) -> S3Volume:
    return S3Volume(**{"mount_path": "/data", "bucket": BUCKET} | fields)


def grant(*asked: S3Volume, here: bool = False) -> tuple[VolumeAccess, ...]:
    granted = asyncio.run(grant_volumes(Local(), asked, lifetime_s=3600, here=here))
    return tuple(each.access for each in granted)


def opened(s3: Any, **fields: Any) -> Store:
    asked = volume(**fields)
    return storage.open_store(GrantedVolume(volume=asked, access=grant(asked, here=True)[0]))


def test_the_users_own_keys_stay_here(s3: Any, aws_server: str) -> None:
    (here,), (elsewhere,) = grant(volume(), here=True), grant(volume())

    assert here.key == StorageKey(id="AKIAUSERSOWN", secret="the-users-own-secret")
    assert elsewhere.key is not None
    assert elsewhere.key.token
    assert "the-users-own-secret" not in (elsewhere.key.secret, elsewhere.key.token)
    assert (elsewhere.endpoint_url, elsewhere.region, elsewhere.mountable) == (aws_server, "eu-west-1", False)


def test_short_lived_keys_are_handed_on_as_they_are(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session")

    (access,) = grant(volume())

    assert access.key == StorageKey(id="AKIAUSERSOWN", secret="the-users-own-secret", token="session")


def test_a_bucket_that_is_not_there_is_named(s3: Any) -> None:
    with pytest.raises(ConfigurationError, match="volume /data: there is no bucket 'no-such-bucket'"):
        grant(volume(bucket="no-such-bucket"))


def test_a_prefix_with_nothing_below_it_is_named_unless_it_is_to_be_written(s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="datasets-old/a", Body=b"")

    with pytest.raises(ConfigurationError, match=f"nothing below s3://{BUCKET}/datasets/.*prefix='datasets'"):
        grant(volume(prefix="datasets"))
    assert grant(volume(prefix="datasets", read_only=False))


def test_no_credentials_are_said(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)

    with pytest.raises(AuthenticationError, match="aws configure"):
        grant(volume())


def test_a_store_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.74.9.9:9")
    monkeypatch.setattr(storage, "_ATTEMPTS", 1)

    with pytest.raises(UnreachableError):
        grant(volume())


class Refusing:
    """A session whose calls are refused."""

    region_name = "eu-west-1"

    def __init__(self, operation: str, code: str) -> None:
        self._session = boto3.Session()
        self._refused = operation, code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def client(self, service: str, **options: Any) -> Any:
        from botocore.awsrequest import AWSResponse

        client = self._session.client(service, **options)
        operation, code = self._refused

        def refuse(request: Any, **_: Any) -> AWSResponse:
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            if service == "sts":
                body = b"<ErrorResponse>" + body + b"</ErrorResponse>"
            response = AWSResponse(request.url, 403, {}, None)
            response._content = body
            return response

        client.meta.events.register(f"before-send.{service}.{operation}", refuse)
        return client


@pytest.mark.parametrize(
    ("operation", "action"),
    [("ListObjectsV2", "s3:ListBucket"), ("GetFederationToken", "sts:GetFederationToken")],
)
def test_a_missing_permission_is_named(s3: Any, operation: str, action: str) -> None:
    session = Refusing(operation, "AccessDenied")

    with pytest.raises(AuthenticationError, match=action):
        asyncio.run(storage.grant_with(session, [volume()], lifetime_s=60, keys="lent"))


def test_a_machine_with_a_role_needs_no_rights_of_this_client(s3: Any) -> None:
    session = Refusing("ListObjectsV2", "AccessDenied")

    (access,) = asyncio.run(storage.grant_with(session, [volume()], lifetime_s=60, keys="none", mountable=True))

    assert (access.key, access.region, access.mountable) == (None, "eu-west-1", False)


def test_the_policy_allows_what_the_volumes_need_and_nothing_else() -> None:
    policy = json.loads(
        storage.session_policy([volume(prefix="a*b"), volume(mount_path="/w", prefix="w/", read_only=False)])
    )
    listing, reading, _, writing, keys = policy["Statement"]

    assert listing["Resource"] == f"arn:aws:s3:::{BUCKET}"
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["a${*}b/*"]}}
    assert (reading["Action"], reading["Resource"]) == (["s3:GetObject"], f"arn:aws:s3:::{BUCKET}/a${{*}}b/*")
    assert "s3:PutObject" in writing["Action"]
    assert writing["Resource"] == f"arn:aws:s3:::{BUCKET}/w/*"
    assert keys["Condition"] == {"StringLike": {"kms:ViaService": "s3.*"}}


def test_a_listing_has_every_page_and_names_below_the_prefix(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PAGE", 2)
    for number in range(5):
        s3.put_object(Bucket=BUCKET, Key=f"many/{number:04}", Body=b"x" * (number % 3))
    s3.put_object(Bucket=BUCKET, Key="many-more", Body=b"")

    listed = list(opened(s3, prefix="many").listing())

    assert [each.name for each in listed] == [f"{number:04}" for number in range(5)]
    assert [each.nbytes for each in listed[:3]] == [0, 1, 2]


def test_big_files_travel_in_parts_and_come_back_the_same(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_PART_BYTES", 5 * MIB)
    store = opened(s3, prefix="big", read_only=False)
    data = bytes(range(256)) * (10 * MIB // 256)
    (tmp_path / "file").write_bytes(data)

    tag = store.upload(str(tmp_path / "file"), "file")
    back = io.BytesIO()
    store.download("file", back)

    assert back.getvalue() == data
    assert tag.strip('"').endswith("-2")
    assert [each.tag for each in store.listing()] == [tag]


def test_what_is_not_there_any_more_is_a_file_that_is_not_found(s3: Any) -> None:
    with pytest.raises(FileNotFoundError):
        opened(s3, read_only=False).download("gone", io.BytesIO())


def test_writing_without_a_bucket_is_an_error_of_ours(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    granted = GrantedVolume(volume=volume(bucket="no-such-bucket"), access=grant(volume(), here=True)[0])

    with pytest.raises(SkywardError, match=r"s3 PutObject.*NoSuchBucket"):
        storage.open_store(granted).upload(str(tmp_path / "file"), "file")


# --- mounting, by inspection --------------------------------------------------------------------------------------

KEY = StorageKey(id="ASIA", secret="s3cret", token="t0ken")
READING = GrantedVolume(volume=volume(prefix="data"), access=VolumeAccess(region="eu-west-1", key=KEY, mountable=True))
WRITING = GrantedVolume(
    volume=volume(read_only=False), access=VolumeAccess(region="eu-west-1", endpoint_url="http://10.0.0.1:9000")
)


def test_mountpoint_is_first_and_reads_only_what_it_may() -> None:
    first, _, _ = mount_ways(READING, "aarch64")

    assert first.argv == ("mount-s3", BUCKET, "/data", "--prefix", "data/", "--region", "eu-west-1", "--read-only")
    assert first.env["AWS_SHARED_CREDENTIALS_FILE"] == "{key_file}"
    assert "aws_session_token = t0ken" in first.key_text
    assert "/arm64/mount-s3.deb" in first.install["apt-get"][0][-1]
    assert "/arm64/mount-s3.rpm" in first.install["dnf"][0][-1]


def test_mountpoint_may_delete_and_overwrite_where_writing_is_asked_for() -> None:
    first, _, _ = mount_ways(WRITING, "x86_64")

    words = "--region eu-west-1 --endpoint-url http://10.0.0.1:9000 --force-path-style --allow-delete --allow-overwrite"
    assert first.argv == ("mount-s3", BUCKET, "/data", *words.split())
    assert (first.env, first.key_text) == ({}, "")


def test_s3fs_is_second() -> None:
    _, reading, _ = mount_ways(READING, "x86_64")
    _, writing, _ = mount_ways(WRITING, "x86_64")

    assert reading.argv[:3] == ("s3fs", f"{BUCKET}:/data", "/data")
    assert {"ro", "use_session_token", "endpoint=eu-west-1", "url=https://s3.eu-west-1.amazonaws.com"} < {*reading.argv}
    assert {"iam_role=auto", "use_path_request_style", "url=http://10.0.0.1:9000"} < {*writing.argv}
    assert "ro" not in writing.argv


def test_rclone_is_third_and_never_installed() -> None:
    *_, reading = mount_ways(READING, "x86_64")
    *_, writing = mount_ways(WRITING, "x86_64")

    assert reading.argv == ("rclone", "mount", f":s3:{BUCKET}/data", "/data", "--daemon", "--read-only")
    assert "--vfs-write-back" in writing.argv
    assert writing.env["RCLONE_S3_ENDPOINT"] == "http://10.0.0.1:9000"
    assert (reading.install, writing.install) == ({}, {})


@pytest.mark.parametrize("granted", [READING, replace(READING, volume=volume(read_only=False))])
def test_no_secret_is_in_an_argument_or_shown(granted: GrantedVolume) -> None:
    for way in mount_ways(granted, "x86_64"):
        words = " ".join(
            (*way.argv, *(word for commands in way.install.values() for each in commands for word in each))
        )
        assert "s3cret" not in words + repr(way)
        assert "t0ken" not in words + repr(way)
