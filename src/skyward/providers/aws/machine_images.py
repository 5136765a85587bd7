"""Operating system images of EC2 machines, by AWS's and Canonical's public parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import X86, MachineType
from skyward.providers._common.refusals import RefusalKind
from skyward.providers.aws.api import Api
from skyward.request.accelerators import Vendor, find_model

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
    found = await api.call("ssm", "GetParameter", Name=path, done=[RefusalKind.MISSING])
    if not found:
        raise _none(path, api)
    return str(found["Parameter"]["Value"])


async def _neuron_image(api: Api) -> str:
    """Return the newest image for Neuron devices; the list is searched, since paths change with framework versions."""
    found = await api.pages("ssm", "GetParametersByPath", "Parameters", Path=_NEURON, Recursive=True)
    latest = {row["Name"]: row["Value"] for row in found if row["Name"].endswith("/latest/image_id")}
    for part in _NEURON_CHOICE:
        if names := [name for name in latest if part in name]:
            return str(latest[max(names, key=_by_version)])
    raise _none(_NEURON, api)


def _by_version(path: str) -> list[list[str | int]]:
    """Return a sort key by which ``pytorch-2.10`` and ``pytorch-2.9.1`` are newer than ``pytorch-2.9``."""
    parts = [re.split(r"(\d+)", name) for name in path.split("/")]
    return [[int(part) if part.isdecimal() else part for part in name] for name in parts]


def _none(path: str, api: Api) -> ConfigurationError:
    return ConfigurationError(
        f"aws {api.credentials.region} has no image for this kind of machine ({path}): try another region"
    )
