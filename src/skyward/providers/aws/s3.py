"""Volumes in S3, for machines of every provider: checked and granted on the client, mounted or copied on a node."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import mimetypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, Final, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

from skyward.errors import AuthenticationError, ConfigurationError, SkywardError
from skyward.providers.aws.api import Where, chosen_profile, convert_errors, load_keys, new_session, refusal
from skyward.providers.storage import MountWay, StoredObject
from skyward.request.volume import GrantedVolume, StorageKey, Volume, VolumeAccess

P = ParamSpec("P")
T = TypeVar("T")

_ATTEMPTS: Final = 5
_CONNECT_TIMEOUT_S: Final = 10.0
_READ_TIMEOUT_S: Final = 60.0
_CONNECTIONS: Final = 48
_PAGE: Final = 1000
_PART_BYTES: Final = 32 << 20
_PARTS_AT_ONCE: Final = 4
_SHORTEST_S, _LONGEST_S = 900, 129_600
_USUAL_HOSTS: Final = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")
_REGION_HEADER: Final = "x-amz-bucket-region"
_logger = logging.getLogger("skyward")


async def grant(volumes: Sequence[Volume], *, lifetime_s: float, here: bool) -> Sequence[VolumeAccess]:
    """Grant access as :meth:`skyward.providers.storage.StoreKind.grant`, from the usual credentials of this process."""
    return await grant_with(None, volumes, lifetime_s=lifetime_s, keys="own" if here else "lent")


async def grant_with(
    session: Any,
    volumes: Sequence[Volume],
    *,
    lifetime_s: float,
    keys: str,
    endpoint_url: str | None = None,
    mountable: bool = False,
) -> Sequence[VolumeAccess]:
    """Grant access as :func:`grant`, from a session's credentials.

    Args:
        session: session of boto3's; None means the usual credentials.
        volumes: see :func:`grant`.
        lifetime_s: see :func:`grant`.
        keys: keys for the machine: ``"own"``, this process's; ``"lent"``, short-lived ones derived from them;
            ``"none"``, the machine has its own.
        endpoint_url: endpoint used instead of AWS's; None means AWS's, or the configured one.
        mountable: True if programs that mount may be installed on the machine.
    """

    def work() -> Sequence[VolumeAccess]:
        granting = _Granting(session or new_session(), endpoint_url=endpoint_url)
        found = [granting.look(volume, as_client=keys != "none") for volume in volumes]
        key = None if keys == "none" else granting.key(volumes, lifetime_s=lifetime_s, lent=keys == "lent")
        return [replace(each, key=key, mountable=mountable and not each.endpoint_url) for each in found]

    return await asyncio.to_thread(work)


def open_store(granted: GrantedVolume) -> Bucket:
    """Open the store as :meth:`skyward.providers.storage.StoreKind.open_store`."""
    access = granted.access
    session = new_session(region=access.region or None)
    return Bucket(_client(session, access.endpoint_url or None, access.region or None, access.key), granted)


def session_policy(volumes: Sequence[Volume], *, partition: str = "aws") -> str:
    """Return the policy, as JSON, that allows the volumes' operations and nothing else. Pure."""
    statements: list[dict[str, Any]] = []
    for volume in volumes:
        bucket = f"arn:{partition}:s3:::{volume.bucket}"
        listing: dict[str, Any] = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket}
        if volume.folder:
            listing["Condition"] = {"StringLike": {"s3:prefix": [f"{_literal(volume.folder)}*"]}}
        actions = ["s3:GetObject"]
        if not volume.read_only:
            actions += ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        objects = {"Effect": "Allow", "Action": actions, "Resource": f"{bucket}/{_literal(volume.folder)}*"}
        statements += [listing, objects]
    via = {"StringLike": {"kms:ViaService": "s3.*"}}
    keys = {"Effect": "Allow", "Action": ["kms:Decrypt", "kms:GenerateDataKey"], "Resource": "*", "Condition": via}
    return json.dumps({"Version": "2012-10-17", "Statement": [*statements, keys]}, separators=(",", ":"))


class _Granting:
    """Checks of volumes, and keys for them, with a session's credentials."""

    def __init__(self, session: Any, *, endpoint_url: str | None) -> None:
        self._session = session
        self._endpoint_url = endpoint_url
        self._region = str(session.region_name or "us-east-1")

    def look(self, volume: Volume, *, as_client: bool) -> VolumeAccess:
        """Check that the volume's bucket exists, and is readable if ``as_client``; return its region and endpoint."""
        client = _client(self._session, self._endpoint_url, self._region, None)
        bucket, folder = volume.bucket, volume.folder
        region, found = self._region, None
        try:
            self._load_keys()
            found = _call_s3("ListBucket", region, client.list_objects_v2, Bucket=bucket, Prefix=folder, MaxKeys=1)
            region = self._region_of(client, bucket) or region
            if as_client:
                self._look_at_first(client, volume, found)
        except SkywardError as error:
            if not isinstance(error, AuthenticationError) or as_client:
                raise self._explained(error, volume) from error
            region = self._region_of(client, bucket) or region
        finally:
            url = str(client.meta.endpoint_url)
            client.close()
        usual = (urlsplit(url).hostname or "").endswith(_USUAL_HOSTS)
        return VolumeAccess(region=region, endpoint_url="" if usual else url)

    def _load_keys(self) -> None:
        """Load the session's credentials: the errors name the profile to log in with."""
        profile = chosen_profile(self._session)
        where = Where(region=self._region, service="s3", operation="ListBucket", profile=profile)
        convert_errors(where, lambda: load_keys(self._session, profile))

    def key(self, volumes: Sequence[Volume], *, lifetime_s: float, lent: bool) -> StorageKey:
        """Return a machine's keys: the session's if short-lived or not ``lent``, else short-lived ones from them."""
        profile = chosen_profile(self._session)
        where = Where(region=self._region, service="sts", operation="GetFederationToken", profile=profile)
        credentials = convert_errors(where, self._session.get_credentials)
        if credentials is None:
            raise AuthenticationError(
                "volumes need credentials for S3, and this process has none: use `aws configure`, `aws sso login`, or "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        own = convert_errors(where, credentials.get_frozen_credentials)
        if own.token or not lent:
            return StorageKey(id=own.access_key, secret=own.secret_key, token=own.token or "")
        partition = self._session.get_partition_for_region(self._region)
        seconds = min(max(round(lifetime_s), _SHORTEST_S), _LONGEST_S)
        client = self._session.client("sts", region_name=self._region, endpoint_url=self._endpoint_url)
        policy = session_policy(volumes, partition=partition)
        ask = functools.partial(client.get_federation_token, Name="skyward", Policy=policy, DurationSeconds=seconds)
        try:
            answer = convert_errors(where, ask)
        except SkywardError as error:
            raise type(error)(
                f"{error}. Machines get short-lived credentials for their volumes, never your own. Other ways: start "
                "from short-lived ones yourself (`aws sso login`), or AWS(instance_profile=...) with a role that may "
                "use the bucket"
            ) from error
        finally:
            client.close()
        made = answer["Credentials"]
        return StorageKey(id=made["AccessKeyId"], secret=made["SecretAccessKey"], token=made["SessionToken"])

    def _look_at_first(self, client: Any, volume: Volume, found: Mapping[str, Any]) -> None:
        keys = [each["Key"] for each in found.get("Contents", ())]
        if keys:
            _call_s3("GetObject", self._region, client.head_object, Bucket=volume.bucket, Key=keys[0])
        elif volume.read_only and volume.folder:
            raise ConfigurationError(f"there is nothing below {volume.location}: check prefix={volume.prefix!r}")

    def _region_of(self, client: Any, bucket: str) -> str:
        from botocore.exceptions import ClientError

        try:
            answer = client.head_bucket(Bucket=bucket)
        except ClientError as error:  # a refusal has the region's header too
            answer = cast("Mapping[str, Any]", error.response)
        return str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(_REGION_HEADER, ""))

    def _explained(self, error: SkywardError, volume: Volume) -> SkywardError:
        code = _code(error)
        if code in ("NoSuchBucket", "404"):
            return ConfigurationError(
                f"volume {volume.mount_path}: there is no bucket {volume.bucket!r}. Check the name; "
                f"`aws s3 ls` lists yours, `aws s3 mb s3://{volume.bucket}` creates it"
            )
        return type(error)(f"volume {volume.mount_path} ({volume.location}): {error}")


class Bucket:
    """Part of an S3 bucket; implements :class:`~skyward.providers.storage.Store`."""

    def __init__(self, client: Any, granted: GrantedVolume) -> None:
        self._client = client
        self._bucket = granted.volume.bucket
        self._folder = granted.volume.folder
        self._region = granted.access.region

    def listing(self) -> Iterator[StoredObject]:
        """Yield every object; see :meth:`Store.listing <skyward.providers.storage.Store.listing>`."""
        listing = self._client.get_paginator("list_objects_v2")
        pages = iter(listing.paginate(Bucket=self._bucket, Prefix=self._folder, PaginationConfig={"PageSize": _PAGE}))
        while (page := _call_s3("ListBucket", self._region, next, pages, None)) is not None:
            for each in page.get("Contents", ()):
                if name := each["Key"].removeprefix(self._folder):
                    yield StoredObject(
                        name=name,
                        nbytes=each["Size"],
                        tag=each["ETag"],
                        modified_at=each["LastModified"].timestamp(),
                    )

    def download(self, name: str, file: BinaryIO) -> None:
        """Download an object; see :meth:`Store.download <skyward.providers.storage.Store.download>`."""
        key = f"{self._folder}{name}"
        try:
            _call_s3(
                "GetObject",
                self._region,
                self._client.download_fileobj,
                Bucket=self._bucket,
                Key=key,
                Fileobj=file,
                Config=_transfer(),
            )
        except SkywardError as error:
            if _code(error) in ("404", "NoSuchKey"):
                raise FileNotFoundError(key) from error
            raise

    def upload(self, path: str, name: str) -> str:
        """Upload an object; see :meth:`Store.upload <skyward.providers.storage.Store.upload>`."""
        key = f"{self._folder}{name}"
        kind = mimetypes.guess_type(name)[0]
        _call_s3(
            "PutObject",
            self._region,
            self._client.upload_file,
            Filename=path,
            Bucket=self._bucket,
            Key=key,
            ExtraArgs={"ContentType": kind} if kind else None,
            Config=_transfer(),
        )
        return str(_call_s3("GetObject", self._region, self._client.head_object, Bucket=self._bucket, Key=key)["ETag"])


def _client(session: Any, endpoint_url: str | None, region: str | None, key: StorageKey | None) -> Any:
    from botocore.config import Config

    own: dict[str, str] = {}
    if key is not None:
        own = {"aws_access_key_id": key.id, "aws_secret_access_key": key.secret}
        own |= {"aws_session_token": key.token} if key.token else {}
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        max_pool_connections=_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        s3={"addressing_style": "path"} if endpoint_url else None,
    )
    made = functools.partial(session.client, "s3", region_name=region, endpoint_url=endpoint_url, config=config, **own)
    return _call_s3("ListBucket", region or "", made)


def _call_s3(action: str, region: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call S3; the errors name the ``action`` that a policy has to allow."""
    from boto3.exceptions import S3TransferFailedError, S3UploadFailedError

    def work() -> T:
        try:
            return call(*arguments, **named)
        except (S3TransferFailedError, S3UploadFailedError) as error:
            raise error.__context__ or error from None

    return convert_errors(Where(region=region, service="s3", operation=action), work)


def _code(error: SkywardError) -> str:
    found = refusal(error)
    return found.code if found else ""


def _literal(text: str) -> str:
    """Escape the wildcards of policies in ``text``."""
    return "".join(f"${{{each}}}" if each in "*?$" else each for each in text)


def _transfer() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=2 * _PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_PARTS_AT_ONCE,
    )


_RELEASES: Final = "https://s3.amazonaws.com/mountpoint-s3-release/latest"
_ARCHITECTURES: Final = {"x86_64": "x86_64", "aarch64": "arm64"}


def mount_ways(granted: GrantedVolume, machine: str) -> Sequence[MountWay]:
    """Return the ways to mount a volume: Mountpoint for Amazon S3, s3fs, rclone; the first two can be installed.

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
