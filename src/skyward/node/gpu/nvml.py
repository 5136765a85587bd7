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
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

log = logging.getLogger("skyward.node.gpu.nvml")

T = TypeVar("T")


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


def ask(nvml: Any, question: Callable[..., T], *args: Any) -> T | None:
    """Return what ``question`` returns; None if the driver refuses the answer, or the GPU has none."""
    try:
        return question(*args)
    except nvml.NVMLError as error:
        log.debug("NVML: %s%r: %s", getattr(question, "__name__", question), args, error)
        return None


def mig_mode(nvml: Any, handle: Any) -> tuple[bool | None, bool]:
    """Return the GPU's MIG mode, None where it has none, and the mode that follows its next reset."""
    modes = ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return (None, False) if modes is None else (bool(modes[0]), bool(modes[1]))


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
    # The GPU lacks a profile, or the profile is newer than the driver: pynvml lists those of the newest one.
    lacking = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT)
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
        except nvml.NVMLError as error:
            if error.value not in lacking:
                raise
            continue
        name = str(info.name).removeprefix("MIG ")
        yield InstanceProfile(id=int(info.id), name=name, capacity=int(info.instanceCount))


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
