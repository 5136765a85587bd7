from __future__ import annotations

from typing import Any

import pytest

from skyward.errors import ConfigurationError
from skyward.spec.volume import S3Volume


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
