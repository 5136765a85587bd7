"""The commands that mount a part of an S3 bucket (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from skyward.providers.storage import MountWay
from skyward.request.volume import GrantedVolume, StorageKey

__all__ = ["mount_ways"]

_RELEASES: Final = "https://s3.amazonaws.com/mountpoint-s3-release/latest"
_ARCHITECTURES: Final = {"x86_64": "x86_64", "aarch64": "arm64"}


def mount_ways(granted: GrantedVolume, machine: str) -> Sequence[MountWay]:
    """Mountpoint for Amazon S3, then s3fs, then rclone; the first two are installed where they can be.

    Args:
        granted: the volume.
        machine: ``uname -m`` of the node.
    """
    return (_mountpoint(granted, machine), _s3fs(granted), _rclone(granted))


def _mountpoint(granted: GrantedVolume, machine: str) -> MountWay:
    volume, access = granted.volume, granted.access
    argv = ["mount-s3", volume.bucket, volume.mount_path]
    argv += ["--prefix", volume.folder] if volume.folder else []
    argv += ["--region", access.region] if access.region else []
    argv += ["--endpoint-url", access.endpoint_url, "--force-path-style"] if access.endpoint_url else []
    argv += ["--read-only"] if volume.read_only else ["--allow-delete", "--allow-overwrite"]
    return MountWay(
        program="mount-s3",
        argv=tuple(argv),
        env=_key_env(access.key),
        key_text=_key_text(access.key),
        install=_packages(_ARCHITECTURES.get(machine, machine)),
    )


def _s3fs(granted: GrantedVolume) -> MountWay:
    volume, access = granted.volume, granted.access
    source = f"{volume.bucket}:/{volume.folder.rstrip('/')}" if volume.folder else volume.bucket
    options = ["compat_dir", f"url={access.endpoint_url or f'https://s3.{access.region}.amazonaws.com'}"]
    options += [f"endpoint={access.region}"] if access.region else []
    options += ["use_path_request_style"] if access.endpoint_url else []
    options += ["ro"] if volume.read_only else []
    options += ["iam_role=auto"] if access.key is None else []
    env: dict[str, str] = {}
    if access.key is not None:
        env = {"AWSACCESSKEYID": access.key.id, "AWSSECRETACCESSKEY": access.key.secret}
        if access.key.token:
            env["AWSSESSIONTOKEN"] = access.key.token
            options += ["use_session_token"]
    return MountWay(
        program="s3fs",
        argv=("s3fs", source, volume.mount_path, *(word for option in options for word in ("-o", option))),
        env=env,
        install={"apt-get": [_apt_get("s3fs")]},
    )


def _rclone(granted: GrantedVolume) -> MountWay:
    volume, access = granted.volume, granted.access
    argv = ["rclone", "mount", f":s3:{volume.bucket}/{volume.folder}".rstrip("/"), volume.mount_path, "--daemon"]
    argv += ["--read-only"] if volume.read_only else ["--vfs-cache-mode", "writes", "--vfs-write-back", "0s"]
    env = {"RCLONE_S3_PROVIDER": "Other" if access.endpoint_url else "AWS", "RCLONE_S3_ENV_AUTH": "true"}
    env |= {"RCLONE_S3_REGION": access.region} if access.region else {}
    env |= {"RCLONE_S3_ENDPOINT": access.endpoint_url} if access.endpoint_url else {}
    return MountWay(program="rclone", argv=tuple(argv), env=env | _key_env(access.key), key_text=_key_text(access.key))


def _packages(architecture: str) -> Mapping[str, Sequence[tuple[str, ...]]]:
    package = "/var/cache/skyward-mount-s3.{}"
    return {
        "apt-get": [
            _download(f"{_RELEASES}/{architecture}/mount-s3.deb", package.format("deb")),
            _apt_get(package.format("deb")),
        ],
        "dnf": [("dnf", "install", "-y", f"{_RELEASES}/{architecture}/mount-s3.rpm")],
        "yum": [("yum", "install", "-y", f"{_RELEASES}/{architecture}/mount-s3.rpm")],
    }


def _download(url: str, path: str) -> tuple[str, ...]:
    return ("curl", "-fsSL", "--connect-timeout", "10", "--max-time", "120", "-o", path, url)


def _apt_get(package: str) -> tuple[str, ...]:
    options = ("-o", "DPkg::Lock::Timeout=200", "-y", "--no-install-recommends")
    return ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", *options, "--", package)


def _key_env(key: StorageKey | None) -> dict[str, str]:
    return {} if key is None else {"AWS_SHARED_CREDENTIALS_FILE": "{key_file}", "AWS_PROFILE": "default"}


def _key_text(key: StorageKey | None) -> str:
    if key is None:
        return ""
    token = f"aws_session_token = {key.token}\n" if key.token else ""
    return f"[default]\naws_access_key_id = {key.id}\naws_secret_access_key = {key.secret}\n{token}"
