from __future__ import annotations

import json
from typing import Any

import pytest

from skyward.errors import ConfigurationError
from skyward.request.volume import GrantedVolume, S3Volume, StorageKey, VolumeAccess


def test_a_volume_is_read_only_and_whole_unless_said_otherwise():
    volume = S3Volume(mount_path="/data", bucket="my-bucket")

    assert (volume.prefix, volume.read_only) == ("", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mount_path": "data"}, "mount_path must be an absolute folder"),
        ({"mount_path": "/"}, "mount_path must be an absolute folder"),
        ({"mount_path": "/a/../../etc"}, "mount_path must be an absolute folder"),
        ({"mount_path": 3}, "mount_path must be non-empty text, got 3"),
        ({"bucket": "My Bucket"}, "bucket must be an S3 bucket name"),
        ({"bucket": "$(reboot)"}, "bucket must be an S3 bucket name"),
        ({"bucket": None}, "bucket must be non-empty text"),
        ({"prefix": "/x"}, "prefix must be text that does not start with /"),
        ({"prefix": None}, "prefix must be non-empty text"),
        ({"read_only": 1}, "read_only must be True or False, got 1"),
    ],
)
def test_bad_fields_name_themselves(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        S3Volume(**({"mount_path": "/data", "bucket": "my-bucket"} | arguments))


@pytest.mark.parametrize(("prefix", "folder"), [("", ""), ("a", "a/"), ("a/", "a/"), ("a/b//", "a/b/")])
def test_a_prefix_is_a_folder_with_or_without_its_slash(prefix: str, folder: str):
    volume = S3Volume(mount_path="/data", bucket="my-bucket", prefix=prefix)

    assert (volume.folder, volume.location) == (folder, f"s3://my-bucket/{folder}")


@pytest.mark.parametrize("key", [None, StorageKey(id="id", secret="hidden", token="hidden")])
def test_a_granted_volume_travels_as_json_and_shows_no_key(key: StorageKey | None):
    granted = GrantedVolume(
        volume=S3Volume(mount_path="/data", bucket="my-bucket", read_only=False),
        access=VolumeAccess(region="eu-west-1", endpoint_url="http://127.0.0.1:1", key=key, mountable=True),
    )

    assert GrantedVolume.from_dict(json.loads(json.dumps(granted.to_dict()))) == granted
    assert "hidden" not in f"{granted} {granted.access} {key}"
