"""Failures of a node's GPUs: errors that the driver reports, and GPUs that answer no more.

The driver also reports errors of programs, such as an access outside of their memory; those are no failures. Failures
are the errors for which NVIDIA's Xid catalogue ("Analyzing Xid Errors with the Xid Catalog") demands a reset of the
GPU, or a restart or repair of the machine: later programs would fail on it as well.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from typing import Any

from skyward.node.gpu.nvml import ask, import_nvml, open_nvml

log = logging.getLogger("skyward.node.gpu.health")

DOUBT_S = 3.0
"""Seconds after a call's error within which the driver has reported a failed GPU."""

_OF_A_DEVICE = re.compile(
    r"CUDA error|CUDA_ERROR_|cudaError|CUBLAS_STATUS|CUDNN_STATUS|CUSOLVER_STATUS|uncorrectable ECC|GPU is lost"
)
_OF_ITS_MEMORY = re.compile(r"out.of.memory|RESOURCE_EXHAUSTED|ALLOC_FAILED|MemoryAllocation", re.IGNORECASE)
_FATAL = {
    46: "it stopped processing",
    48: "its memory has an error that cannot be corrected",
    62: "its microcontroller halted",
    64: "a broken part of its memory cannot be replaced",
    74: "its NVLink failed",
    79: "it has fallen off the bus",
    95: "an error in its memory has spread",
    110: "its security processor failed",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "its memory has errors that were not corrected",
    143: "it could not be initialised",
}


class GpuWatch:
    """Watch over some GPUs. Not thread-safe.

    Args:
        nvml: the :mod:`pynvml` module, initialised; closing the watch shuts it down.
        uuids: the driver's names of the GPUs.
    """

    def __init__(self, nvml: Any, uuids: Collection[str]) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._events: Any = None
        for uuid in uuids:
            self._watch(uuid)

    def trouble(self) -> str:
        """Return the failure of a GPU in plain English; empty if there is none. Takes a millisecond. Raises nothing."""
        return self._reported() or self._unanswered()

    def close(self) -> None:
        """Shut NVML down."""
        if self._events is not None:
            ask(self._nvml, self._nvml.nvmlEventSetFree, self._events)
        ask(self._nvml, self._nvml.nvmlShutdown)

    def _watch(self, uuid: str) -> None:
        nvml = self._nvml
        try:
            handle = self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            if nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError:
                self._events = self._events or nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as error:  # the GPU can be asked if it answers still, at least
            log.info("%s does not report its errors: %s", uuid, error)

    def _reported(self) -> str:
        while self._events is not None:
            event = ask(self._nvml, self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # after 0 s: no event is an error to NVML, and the usual answer
                return ""
            xid = int(event.eventData)
            if xid in _FATAL:
                return f"{self._name(event.device)} failed: {_FATAL[xid]} (Xid {xid})"
            log.warning("%s reports Xid %d, the error of a program", self._name(event.device), xid)
        return ""

    def _unanswered(self) -> str:
        nvml = self._nvml
        for uuid, handle in self._handles.items():
            try:
                nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError as error:  # others are no failure: in MIG mode only root may read the memory
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    return f"the GPU {uuid} is lost: it has fallen off the bus, or cannot be reached any more"
        return ""

    def _name(self, handle: Any) -> str:
        try:
            return f"GPU {self._nvml.nvmlDeviceGetIndex(handle)} ({self._nvml.nvmlDeviceGetUUID(handle)})"
        except self._nvml.NVMLError:
            return "a GPU"


def open_watch(uuids: Collection[str], load: Callable[[], Any] = import_nvml) -> GpuWatch | None:
    """Return a watch over these GPUs; None where there are none, or no driver.

    Args:
        uuids: the driver's names of the GPUs.
        load: returns the :mod:`pynvml` module, not yet initialised.
    """
    nvml = open_nvml(load) if uuids else None
    return None if nvml is None else GpuWatch(nvml, uuids)


def is_doubtful(type_name: str, message: str) -> bool:
    """Return True if a call's exception may come from a failed GPU."""
    # Running out of the GPU's memory has the same wording in places, and is the program's error.
    text = f"{type_name}: {message}"
    return bool(_OF_A_DEVICE.search(text)) and not _OF_ITS_MEMORY.search(text)
