"""Whether the GPUs of a node still work: what the driver reports of them by itself, and whether they answer.

A program that asks for more memory than there is, or reads where it may not, is reported as well; that is the program's
affair. What counts here are the errors after which NVIDIA's Xid catalogue ("Analyzing Xid Errors with the Xid Catalog")
has the GPU reset, or the machine restarted or repaired: nothing that runs on it later would do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from typing import Any

from skyward.node.gpu.nvml import import_nvml, open_nvml

__all__ = ["DOUBT_S", "GpuWatch", "is_doubtful", "open_watch"]

log = logging.getLogger("skyward.node.gpu.health")

DOUBT_S = 3.0
"""How long after an error that may be a GPU's it is known whether it was."""

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
    """Watches some GPUs. Not thread-safe.

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
        """What makes a GPU unusable, in plain English; empty if nothing does. Takes a millisecond. Raises nothing."""
        return self._reported() or self._unanswered()

    def close(self) -> None:
        """Let go of the driver."""
        if self._events is not None:
            self._quietly(self._nvml.nvmlEventSetFree, self._events)
        self._quietly(self._nvml.nvmlShutdown)

    def _watch(self, uuid: str) -> None:
        nvml = self._nvml
        try:
            handle = self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            if nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError:
                self._events = self._events or nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as error:  # then only whether it answers is known, or not even that
            log.info("%s does not report its errors: %s", uuid, error)

    def _reported(self) -> str:
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # there is none, as a rule
                return ""
            xid = int(event.eventData)
            if xid in _FATAL:
                return f"{self._name(event.device)} failed: {_FATAL[xid]} (Xid {xid})"
            log.warning("%s reports Xid %d: the error of a program", self._name(event.device), xid)
        return ""

    def _unanswered(self) -> str:
        nvml = self._nvml
        for uuid, handle in self._handles.items():
            try:
                nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    return f"the GPU {uuid} is lost: it has fallen off the bus, or cannot be reached any more"
        return ""

    def _name(self, handle: Any) -> str:
        try:
            return f"GPU {self._nvml.nvmlDeviceGetIndex(handle)} ({self._nvml.nvmlDeviceGetUUID(handle)})"
        except self._nvml.NVMLError:
            return "a GPU"

    def _quietly(self, verb: Callable[..., object], *args: Any) -> None:
        try:
            verb(*args)
        except self._nvml.NVMLError as error:
            log.debug("NVML: %s", error)


def open_watch(uuids: Collection[str], load: Callable[[], Any] = import_nvml) -> GpuWatch | None:
    """A watch over these GPUs; None where there are none, or no driver.

    Args:
        uuids: the driver's names of them.
        load: returns the :mod:`pynvml` module, not yet initialised.
    """
    nvml = open_nvml(load) if uuids else None
    return None if nvml is None else GpuWatch(nvml, uuids)


def is_doubtful(type_name: str, message: str) -> bool:
    """Whether a call's exception may be the last that is heard of a GPU; running out of its memory is not."""
    text = f"{type_name}: {message}"
    return bool(_OF_A_DEVICE.search(text)) and not _OF_ITS_MEMORY.search(text)
