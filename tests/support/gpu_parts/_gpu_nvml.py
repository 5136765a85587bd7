"""The functions of :mod:`pynvml` that are used here, over GPUs that do not exist."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.gpu_parts._gpu_cards import CARDS, COMPUTE_SLICES, PROFILES

if TYPE_CHECKING:
    from support.gpus import FakeGpu, FakeGpus, FakeInstance

__all__ = ["FakeNvml", "NVMLError"]

_MIB = 1 << 20
_PROFILES = 18
"""Numbers of profiles that drivers have constants for."""


class NVMLError(Exception):
    """What every function raises; ``value`` says which error it is."""

    value = 0

    def __init__(self) -> None:
        super().__init__(type(self).__name__)


class _InvalidArgumentError(NVMLError):
    value = 2


class _NotSupportedError(NVMLError):
    value = 3


class _NoPermissionError(NVMLError):
    value = 4


class _NotFoundError(NVMLError):
    value = 6


class _TimeoutError(NVMLError):
    value = 10


class _GpuIsLostError(NVMLError):
    value = 15


class _OpaqueInstance(ctypes.Structure):
    """What a handle of a GPU instance points at."""


_InstanceHandle = ctypes.POINTER(_OpaqueInstance)


@dataclass(frozen=True, slots=True)
class _GpuHandle:
    uuid: str


@dataclass(frozen=True, slots=True)
class _MigHandle:
    gpu: str
    uuid: str


@dataclass(frozen=True, slots=True)
class _Placement:
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _InstanceInfo:
    device: _GpuHandle
    id: int
    profileId: int  # noqa: N815
    placement: _Placement


@dataclass(frozen=True, slots=True)
class _ProfileInfo:
    id: int
    instanceCount: int  # noqa: N815
    name: str


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class _Rates:
    gpu: int


@dataclass(frozen=True, slots=True)
class _Event:
    device: _GpuHandle
    eventData: int  # noqa: N815


class FakeNvml:
    """A module, as far as it is used.

    Attributes:
        users: how many have initialised it and not shut it down.
    """

    NVMLError = NVMLError
    NVMLError_InvalidArgument = _InvalidArgumentError
    NVMLError_NotSupported = _NotSupportedError
    NVMLError_NoPermission = _NoPermissionError
    NVMLError_NotFound = _NotFoundError
    NVMLError_Timeout = _TimeoutError
    NVMLError_GpuIsLost = _GpuIsLostError
    NVML_ERROR_INVALID_ARGUMENT = _InvalidArgumentError.value
    NVML_ERROR_NOT_SUPPORTED = _NotSupportedError.value
    NVML_ERROR_NO_PERMISSION = _NoPermissionError.value
    NVML_ERROR_NOT_FOUND = _NotFoundError.value
    NVML_ERROR_GPU_IS_LOST = _GpuIsLostError.value
    NVML_GPU_INSTANCE_PROFILE_COUNT = 18
    NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 = 7
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815
    c_nvmlGpuInstance_t = _InstanceHandle  # noqa: N815

    def __init__(self, gpus: FakeGpus, *, root: bool | None = None) -> None:
        self._gpus = gpus
        self._root = root
        self._instances: dict[int, tuple[str, FakeInstance]] = {}
        self._registered: set[str] = set()
        self.users = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus.machine.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _GpuHandle:  # noqa: N802
        return self.nvmlDeviceGetHandleByUUID(self._gpus.machine.gpus[index].uuid)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> _GpuHandle:  # noqa: N802
        self._find(_GpuHandle(uuid))
        return _GpuHandle(uuid)

    def nvmlDeviceGetIndex(self, handle: _GpuHandle) -> int:  # noqa: N802
        return [gpu.uuid for gpu in self._gpus.machine.gpus].index(handle.uuid)

    def nvmlDeviceGetUUID(self, handle: _GpuHandle | _MigHandle) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetName(self, handle: _GpuHandle | _MigHandle) -> str:  # noqa: N802
        if isinstance(handle, _MigHandle):
            gpu = self._find(_GpuHandle(handle.gpu))
            return f"{self.nvmlDeviceGetName(_GpuHandle(handle.gpu))} MIG {_part(gpu, handle).profile}"
        return CARDS[self._find(handle).card].name

    # --- MIG --------------------------------------------------------------------------------------------------------

    def nvmlDeviceGetMigMode(self, handle: _GpuHandle) -> list[int]:  # noqa: N802
        gpu = self._find(handle)
        if not PROFILES[gpu.card]:
            raise _NotSupportedError
        return [int(gpu.mig), int(gpu.pending)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: _GpuHandle) -> int:  # noqa: N802
        return COMPUTE_SLICES if self._find(handle).mig else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: _GpuHandle, index: int) -> _MigHandle:  # noqa: N802
        parts = _parts(self._find_in_mig_mode(handle))
        if index >= len(parts):
            raise _NotFoundError
        return _MigHandle(handle.uuid, parts[index].uuid)

    def nvmlDeviceGetGpuInstanceId(self, handle: _MigHandle) -> int:  # noqa: N802
        return _part(self._find(_GpuHandle(handle.gpu)), handle).id

    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: _GpuHandle, profile: int) -> _ProfileInfo:  # noqa: N802
        if profile >= _PROFILES:
            raise _InvalidArgumentError
        known = PROFILES[self._find(handle).card]
        media = profile == self.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1
        found = next((each for each in known if each.index == (0 if media else profile)), None)
        if found is None:
            raise _NotSupportedError
        # With media extensions the smallest one exists a second time, once on a GPU.
        name = f"MIG {found.name}{'+me' if media else ''}"
        return _ProfileInfo(id=found.id + media, instanceCount=1 if media else found.total, name=name)

    def nvmlDeviceGetGpuInstances(self, handle: _GpuHandle, profile_id: int, instances: Any, count: Any) -> None:  # noqa: N802
        gpu = self._find_in_mig_mode(handle)
        self._needs_root()
        names = {each.id: each.name for each in PROFILES[gpu.card]}
        there = [each for each in gpu.instances if each.profile == names.get(profile_id)]
        assert len(there) <= len(instances), "NVML would write past the buffer's end"
        for number, instance in enumerate(there):
            instances[number] = self._handle_of(gpu, instance)
        count.contents.value = len(there)

    def nvmlDeviceGetGpuInstanceById(self, handle: _GpuHandle, number: int) -> Any:  # noqa: N802
        gpu = self._find_in_mig_mode(handle)
        self._needs_root()
        instance = next((each for each in gpu.instances if each.id == number), None)
        if instance is None:
            raise _NotFoundError
        return self._handle_of(gpu, instance)

    def nvmlGpuInstanceGetInfo(self, instance: Any) -> _InstanceInfo:  # noqa: N802
        self._needs_root()
        address = ctypes.cast(instance, ctypes.c_void_p).value
        if address not in self._instances:
            raise _InvalidArgumentError
        uuid, known = self._instances[address]
        gpu = self._find(_GpuHandle(uuid))
        if known not in gpu.instances:
            raise _InvalidArgumentError
        profile = next(each for each in PROFILES[gpu.card] if each.name == known.profile)
        return _InstanceInfo(_GpuHandle(uuid), known.id, profile.id, _Placement(known.start, profile.size))

    def _handle_of(self, gpu: FakeGpu, instance: FakeInstance) -> Any:
        address = 16 * (len(self._instances) + 1)
        self._instances[address] = (gpu.uuid, instance)
        return ctypes.cast(address, _InstanceHandle)

    def _needs_root(self) -> None:
        if not (self._gpus.machine.root if self._root is None else self._root):
            raise _NoPermissionError

    # --- load and errors --------------------------------------------------------------------------------------------

    def nvmlDeviceGetMemoryInfo(self, handle: _GpuHandle | _MigHandle) -> _Memory:  # noqa: N802
        if isinstance(handle, _MigHandle):
            gpu = self._find(_GpuHandle(handle.gpu))
            profile = _part(gpu, handle).profile
            gib = next(each.memory_gib for each in PROFILES[gpu.card] if each.name == profile)
            return _Memory(total=int(gib * 1024) * _MIB, used=11 * _MIB)
        gpu = self._find(handle)
        if gpu.mig:
            self._needs_root()
        return _Memory(total=CARDS[gpu.card].memory_mib * _MIB, used=11 * _MIB)

    def nvmlDeviceGetUtilizationRates(self, handle: _GpuHandle) -> _Rates:  # noqa: N802
        if self._find(handle).mig:
            raise _NotSupportedError
        return _Rates(gpu=40)

    def nvmlDeviceGetTemperature(self, handle: _GpuHandle, _sensor: int) -> int:  # noqa: N802
        self._find(handle)
        return 50

    def nvmlDeviceGetSupportedEventTypes(self, handle: _GpuHandle) -> int:  # noqa: N802
        self._find(handle)
        return self.nvmlEventTypeXidCriticalError

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlEventSetFree(self, _events: object) -> None:  # noqa: N802
        self._registered.clear()

    def nvmlDeviceRegisterEvents(self, handle: _GpuHandle, _types: int, _events: object) -> None:  # noqa: N802
        self._registered.add(handle.uuid)

    def nvmlEventSetWait_v2(self, _events: object, _timeout_ms: int) -> _Event:  # noqa: N802
        with self._gpus.change() as machine:
            for gpu in machine.gpus:
                if gpu.uuid in self._registered and gpu.xids:
                    return _Event(_GpuHandle(gpu.uuid), gpu.xids.pop(0))
        raise _TimeoutError

    def _find_in_mig_mode(self, handle: _GpuHandle) -> FakeGpu:
        gpu = self._find(handle)
        if not gpu.mig:
            raise _NotSupportedError
        return gpu

    def _find(self, handle: _GpuHandle) -> FakeGpu:
        gpu = next((each for each in self._gpus.machine.gpus if each.uuid == handle.uuid), None)
        if gpu is None:
            raise _NotFoundError
        if gpu.lost:
            raise _GpuIsLostError
        return gpu


def _parts(gpu: FakeGpu) -> list[FakeInstance]:
    return sorted((each for each in gpu.instances if each.uuid), key=lambda each: each.id)


def _part(gpu: FakeGpu, handle: _MigHandle) -> FakeInstance:
    """The part of a handle, which is invalid once its compute instance is destroyed."""
    found = next((each for each in gpu.instances if each.uuid == handle.uuid), None)
    if found is None:
        raise _InvalidArgumentError
    return found
