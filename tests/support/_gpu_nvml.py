"""The functions of :mod:`pynvml` that are used here, over GPUs that do not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from support._gpu_cards import CARDS, PROFILES

if TYPE_CHECKING:
    from support.gpus import FakeGpu, FakeGpus, FakeInstance

__all__ = ["FakeNvml", "NVMLError"]

_MIB = 1 << 20


class NVMLError(Exception):
    """What every function raises; ``value`` says which error it is."""

    value = 0

    def __init__(self) -> None:
        super().__init__(type(self).__name__)


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


@dataclass(frozen=True, slots=True)
class _Gpu:
    uuid: str


@dataclass(frozen=True, slots=True)
class _Part:
    gpu: str
    number: int


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class _Rates:
    gpu: int


@dataclass(frozen=True, slots=True)
class _Event:
    device: _Gpu
    eventData: int  # noqa: N815


class FakeNvml:
    """A module, as far as it is used.

    Attributes:
        users: how many have initialised it and not shut it down.
    """

    NVMLError = NVMLError
    NVMLError_NotSupported = _NotSupportedError
    NVMLError_NoPermission = _NoPermissionError
    NVMLError_NotFound = _NotFoundError
    NVMLError_Timeout = _TimeoutError
    NVMLError_GpuIsLost = _GpuIsLostError
    NVML_ERROR_GPU_IS_LOST = _GpuIsLostError.value
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus = gpus
        self._registered: set[str] = set()
        self.users = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus.machine.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Gpu:  # noqa: N802
        return self.nvmlDeviceGetHandleByUUID(self._gpus.machine.gpus[index].uuid)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> _Gpu:  # noqa: N802
        self._find(_Gpu(uuid))
        return _Gpu(uuid)

    def nvmlDeviceGetIndex(self, handle: _Gpu) -> int:  # noqa: N802
        return [gpu.uuid for gpu in self._gpus.machine.gpus].index(handle.uuid)

    def nvmlDeviceGetUUID(self, handle: _Gpu) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetName(self, handle: _Gpu) -> str:  # noqa: N802
        return CARDS[self._find(handle).card].called(self._gpus.machine.family)

    def nvmlDeviceGetMigMode(self, handle: _Gpu) -> list[int]:  # noqa: N802
        gpu = self._find(handle)
        if not PROFILES[gpu.card]:
            raise _NotSupportedError
        return [int(gpu.mig), int(gpu.pending)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: _Gpu) -> int:  # noqa: N802
        return 7 if PROFILES[self._find(handle).card] else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: _Gpu, index: int) -> _Part:  # noqa: N802
        if index >= len(_parts(self._find(handle))):
            raise _NotFoundError
        return _Part(handle.uuid, index)

    def nvmlDeviceGetMemoryInfo(self, handle: _Gpu | _Part) -> _Memory:  # noqa: N802
        if isinstance(handle, _Part):
            gpu = self._find(_Gpu(handle.gpu))
            part = _parts(gpu)[handle.number]
            gib = next(each.memory_gib for each in PROFILES[gpu.card] if each.name == part.profile)
            return _Memory(total=int(gib * 1024) * _MIB, used=11 * _MIB)
        gpu = self._find(handle)
        if gpu.mig and not self._gpus.machine.root:
            raise _NoPermissionError
        return _Memory(total=CARDS[gpu.card].memory_mib * _MIB, used=11 * _MIB)

    def nvmlDeviceGetUtilizationRates(self, handle: _Gpu) -> _Rates:  # noqa: N802
        if self._find(handle).mig:
            raise _NotSupportedError
        return _Rates(gpu=40)

    def nvmlDeviceGetTemperature(self, handle: _Gpu, _sensor: int) -> int:  # noqa: N802
        self._find(handle)
        return 50

    def nvmlDeviceGetSupportedEventTypes(self, handle: _Gpu) -> int:  # noqa: N802
        self._find(handle)
        return self.nvmlEventTypeXidCriticalError

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlEventSetFree(self, _events: object) -> None:  # noqa: N802
        self._registered.clear()

    def nvmlDeviceRegisterEvents(self, handle: _Gpu, _types: int, _events: object) -> None:  # noqa: N802
        self._registered.add(handle.uuid)

    def nvmlEventSetWait_v2(self, _events: object, _timeout_ms: int) -> _Event:  # noqa: N802
        with self._gpus.change() as machine:
            for gpu in machine.gpus:
                if gpu.uuid in self._registered and gpu.xids:
                    return _Event(_Gpu(gpu.uuid), gpu.xids.pop(0))
        raise _TimeoutError

    def _find(self, handle: _Gpu) -> FakeGpu:
        gpu = next((each for each in self._gpus.machine.gpus if each.uuid == handle.uuid), None)
        if gpu is None:
            raise _NotFoundError
        if gpu.lost:
            raise _GpuIsLostError
        return gpu


def _parts(gpu: FakeGpu) -> list[FakeInstance]:
    return [each for each in gpu.instances if each.uuid]
