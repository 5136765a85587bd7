"""NVML, the library of NVIDIA's driver: loading it, and the MIG partitions that it lists.

Also a program, ``python nvml.py UUID``, which prints a GPU's instances as JSON: NVML lists them for root only, so the
driver runs this file through sudo where the node has another user. Hence it imports nothing of Skyward's.

Facts about NVML are from its reference, "Multi Instance GPU Management".
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger("skyward.node.gpu.nvml")

_GIB, _MIB = 1 << 30, 1 << 20
_MEMORY_SLICES = 8
_NAMED, _UNNAMED = 2, 1
"""Versions of the structure that describes a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """Part of a GPU that was set aside; programs can use it once it has a compute instance.

    Attributes:
        id: the driver's number of it, unique on its GPU.
        profile: its size, e.g. ``"3g.40gb"``.
    """

    id: int
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProfile:
    """Size of GPU instance that a GPU supports.

    Attributes:
        id: the driver's number of the profile.
        name: e.g. ``"3g.40gb"``.
        capacity: number of such instances that an empty GPU has room for.
    """

    id: int
    name: str
    capacity: int


def import_nvml() -> Any:
    """Import the :mod:`pynvml` module. Raises ImportError, also without the driver."""
    if shutil.which("nvidia-smi") is None:  # first: the module takes 60 ms and 14 MiB
        try:
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise ImportError(f"no NVIDIA driver: {error}") from error
    return importlib.import_module("pynvml")


def open_nvml(load: Callable[[], Any]) -> Any | None:
    """Return the :mod:`pynvml` module, initialised; the caller shuts it down. None where there is no driver.

    Args:
        load: returns the module, not yet initialised.
    """
    try:
        nvml = load()
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("there is no NVIDIA driver: %s", error)
        return None
    return nvml


def mig_mode(nvml: Any, handle: Any) -> tuple[bool | None, bool]:
    """Return the GPU's MIG mode, None where it has none, and the mode that follows its next reset."""
    try:
        current, pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU, or a driver, older than MIG
        return None, False
    return bool(current), bool(pending)


def mig_devices(nvml: Any, handle: Any) -> Iterator[tuple[str, str]]:
    """Yield profile and UUID of each of a GPU's compute instances, in the driver's order. Raises NVMLError."""
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):  # 0 where MIG mode is off
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError as error:
            # The count is the number that the GPU could have: some indices have no device.
            if error.value != nvml.NVML_ERROR_NOT_FOUND:
                raise
            continue
        # The name is the GPU's and the profile's, such as "NVIDIA A100-SXM4-40GB MIG 3g.20gb".
        yield nvml.nvmlDeviceGetName(device).partition("MIG ")[2], nvml.nvmlDeviceGetUUID(device)


def list_instances(nvml: Any, handle: Any) -> list[GpuInstance]:
    """Return a GPU's instances by id, in use or not; none where MIG mode is off.

    Raises NVMLError, with the value ``NVML_ERROR_NO_PERMISSION`` for all users but root.
    """
    if not mig_mode(nvml, handle)[0]:
        return []
    found: list[GpuInstance] = []
    for profile in instance_profiles(nvml, handle):
        # NVML writes every handle without a look at the buffer's size: it must hold all that the profile allows.
        instances = (nvml.c_nvmlGpuInstance_t * profile.capacity)()
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetGpuInstances(handle, profile.id, instances, ctypes.pointer(count))
        found += [
            GpuInstance(id=int(nvml.nvmlGpuInstanceGetInfo(instance).id), profile=profile.name)
            for instance in instances[: count.value]
        ]
    return sorted(found, key=lambda instance: instance.id)


def instance_profiles(nvml: Any, handle: Any) -> Iterator[InstanceProfile]:
    """Yield the profiles that a GPU supports. Raises NVMLError."""
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = _profile_info(nvml, handle, number)
        if info is not None:
            yield InstanceProfile(
                id=int(info.id), name=_profile_name(nvml, handle, info), capacity=int(info.instanceCount)
            )


def _profile_info(nvml: Any, handle: Any, number: int) -> Any | None:
    # The GPU lacks the profile, or the profile is newer than the driver: pynvml lists those of the newest one.
    lacking = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT)
    for version in (_NAMED, _UNNAMED):  # R470 has the second only
        try:
            return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=version)
        except nvml.NVMLError as error:
            if error.value in lacking:
                return None
            if version == _UNNAMED or error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    return None


def _profile_name(nvml: Any, handle: Any, info: Any) -> str:
    if name := getattr(info, "name", ""):
        return str(name).removeprefix("MIG ")
    # A profile is called by its share of the memory in eighths, not by its size: one of 4.75 GiB, of 40, is "1g.5gb".
    total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    slices = math.ceil(int(info.memorySizeMB) * _MIB * _MEMORY_SLICES / total)
    return f"{info.sliceCount}g.{round(math.ceil(total / _GIB) * slices / _MEMORY_SLICES)}gb"


def instances_as_json(nvml: Any, uuid: str) -> str:
    """Return the instances of the GPU with this UUID for another process. Raises NVMLError."""
    return json.dumps([asdict(each) for each in list_instances(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))])


def main() -> None:
    """Print the instances of the GPU that the first argument names."""
    nvml = import_nvml()
    nvml.nvmlInit()
    try:
        sys.stdout.write(instances_as_json(nvml, sys.argv[1]) + "\n")
    finally:
        nvml.nvmlShutdown()


if __name__ == "__main__":
    main()
