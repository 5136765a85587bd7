"""A machine's first boot: its operating system, its keys, and its cloud-config."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import platformdirs

from skyward.errors import AuthenticationError, ConfigurationError, SkywardError
from skyward.providers.aws.api import Api
from skyward.providers.aws.errors import RefusalKind, is_kind
from skyward.providers.aws.machine_types import X86, MachineType
from skyward.request.accelerators import Vendor, find_model

__all__ = [
    "LARGEST_BYTES",
    "KeyPair",
    "MachineImage",
    "find_image",
    "image_path",
    "make_key_pair",
    "user_data",
    "user_key",
]

_DEEP_LEARNING: Final = "/aws/service/deeplearning/ami/{0}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_UBUNTU: Final = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{0}/hvm/ebs-gp3/ami-id"
_NEURON: Final = "/aws/service/neuron/dlami"
_NEURON_CHOICE: Final = ("/base/ubuntu-24.04/", "/multi-framework/ubuntu-24.04/", "/ubuntu-24.04/", "/ubuntu-22.04/")
_GPU_DISK_GB: Final = 100
_DISK_GB: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineImage:
    """Operating system image of a machine.

    Attributes:
        id: ``"ami-…"``.
        root_device: device name of its disk.
        disk_gb: size of the disk to request.
    """

    id: str
    root_device: str
    disk_gb: int


def image_path(machine: MachineType) -> str:
    """Return the public parameter that names a machine type's image; for AWS's own accelerators, a folder."""
    name = machine.spec.accelerator
    model = find_model(name or "")
    vendor = model.vendor if model else Vendor.NVIDIA if name else None
    match vendor:
        case Vendor.NVIDIA:
            return _DEEP_LEARNING.format(machine.architecture)
        case Vendor.AWS:
            return _NEURON
        case _:
            return _UBUNTU.format("amd64" if machine.architecture == X86 else "arm64")


async def find_image(api: Api, path: str) -> MachineImage:
    """Return the image of a public parameter.

    Raises:
        ConfigurationError: the region has none.
    """
    image_id = await (_neuron_image(api) if path == _NEURON else _parameter(api, path))
    rows = (await api.call("ec2", "DescribeImages", ImageIds=[image_id]))["Images"]
    if not rows:
        raise ConfigurationError(f"the image {image_id} of {path} does not exist in {api.credentials.region}")
    least = _DISK_GB if path.startswith("/aws/service/canonical") else _GPU_DISK_GB
    root = str(rows[0].get("RootDeviceName") or "/dev/sda1")
    return MachineImage(id=image_id, root_device=root, disk_gb=max(least, _snapshot_gb(rows[0], root)))


def _snapshot_gb(row: dict[str, Any], root: str) -> int:
    disks = (disk for disk in row.get("BlockDeviceMappings", ()) if disk.get("DeviceName") == root)
    return max((int(disk.get("Ebs", {}).get("VolumeSize", 0)) for disk in disks), default=0)


async def _parameter(api: Api, path: str) -> str:
    try:
        found = await api.call("ssm", "GetParameter", Name=path)
    except SkywardError as error:
        if is_kind(error, RefusalKind.MISSING):
            raise _none(path, api) from error
        raise
    return str(found["Parameter"]["Value"])


async def _neuron_image(api: Api) -> str:
    """Return the newest image for Neuron devices; the list is searched, since paths change with framework versions."""
    found = await api.pages("ssm", "GetParametersByPath", "Parameters", Path=_NEURON, Recursive=True)
    latest = {row["Name"]: row["Value"] for row in found if row["Name"].endswith("/latest/image_id")}
    for part in _NEURON_CHOICE:
        if names := sorted(name for name in latest if part in name):
            return str(latest[names[-1]])
    raise _none(_NEURON, api)


def _none(path: str, api: Api) -> ConfigurationError:
    return ConfigurationError(
        f"aws {api.credentials.region} has no image for this kind of machine ({path}): try another region"
    )


LARGEST_BYTES = 16 * 1024
"""Limit of EC2 for user data, before encoding."""

_GRACE_S = 120.0
"""Time for the node to end by itself first, report that, and write changed files back to volumes."""

# This early in the boot systemd accepts a timer, but `shutdown` does not reach logind. A timer also admits logins until
# the end, while a scheduled `shutdown` refuses them for its last minutes.
_SCRIPT = """\
life=@seconds
kept=/var/lib/cloud/instance/skyward-ends-at
now=$(date +%s)
ends=$(cat "$kept" 2>/dev/null)
case $ends in
"" | *[!0-9]*) ends=$((now + life)) ;;
esac
left=$((ends - now))
[ "$left" -le "$life" ] || left=$life
[ "$left" -ge 1 ] || left=1
systemd-run --no-block --unit=skyward-time-to-live --timer-property=DefaultDependencies=no \\
    --on-active="$left" shutdown -h now || shutdown -h "+$(((left + 59) / 60))"
echo "$ends" >"$kept.new" && mv "$kept.new" "$kept" && sync
"""


def user_data(*, host_key: KeyPair, user_key: str, time_to_live_s: float) -> str:
    """Return one machine's cloud-config, as JSON: that is YAML with everything quoted.

    Args:
        host_key: the machine's only host key.
        user_key: the public key that it admits.
        time_to_live_s: the machine shuts itself down so long after its first boot, plus two minutes for the node to
            end by itself. Armed before everything else; reboots do not extend it.
    """
    config = {
        "bootcmd": [["sh", "-c", _time_to_live(time_to_live_s)]],
        "ssh_deletekeys": True,
        "ssh_genkeytypes": [],
        "ssh_keys": {"ed25519_private": host_key.private, "ed25519_public": host_key.public},
        "ssh_authorized_keys": [user_key],
        "disable_root": True,
        "ssh_pwauth": False,
    }
    text = "#cloud-config\n" + json.dumps(config, indent=1)
    if len(text.encode()) > LARGEST_BYTES:
        raise ConfigurationError(f"a machine's user data may have {LARGEST_BYTES} bytes, not {len(text.encode())}")
    return text


def _time_to_live(seconds: float) -> str:
    """Return the shell script that arms the end, at every boot.

    The moment is chosen at the first boot and stored in cloud-init's folder of this instance, so that a reboot does not
    postpone it. It is measured by the machine's own clock. If that clock was set back meanwhile, no boot arms more than
    the whole time. A machine that cannot store the moment arms the whole time at each boot.
    """
    whole = math.ceil(seconds + _GRACE_S)
    return _SCRIPT.replace("@seconds", str(whole))


_FILE_MODE = 0o600
_FOLDER_MODE = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """Key pair of type ed25519.

    Attributes:
        public: ``"ssh-ed25519 AAAA…"``.
        private: in OpenSSH's format. Secret.
    """

    public: str
    private: str = field(repr=False)


def make_key_pair() -> KeyPair:
    """Generate a key pair."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _key_pair(Ed25519PrivateKey.generate())


def user_key() -> tuple[Path, KeyPair]:
    """Return the path (mode 0600) of the user's key, and the key; generated on first use, once for all processes."""
    folder = platformdirs.user_data_path("skyward") / "ssh"
    path = folder / "id_ed25519"
    if not path.exists():
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _make_once(path)
    return path, _read(path)


def _make_once(path: Path) -> None:
    """Generate the key file, unless another process links its own first; readers never see a partial file."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(make_key_pair().private)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        os.unlink(draft)


def _read(path: Path) -> KeyPair:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    advice = "remove it; a new one is generated for machines launched from then on"
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(_FILE_MODE)
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"Skyward's private key {path} cannot be used: {error}; {advice}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise AuthenticationError(f"Skyward's private key {path} is not an ed25519 key; {advice}")
    return _key_pair(key)


def _key_pair(key: object) -> KeyPair:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    assert isinstance(key, Ed25519PrivateKey)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return KeyPair(public=public.decode(), private=private.decode())
