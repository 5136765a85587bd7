"""The way to NVIDIA's driver: its library NVML, where there is one."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["import_nvml", "open_nvml"]

log = logging.getLogger("skyward.node.gpu.nvml")


def import_nvml() -> Any:
    """The :mod:`pynvml` module. Raises ImportError."""
    return importlib.import_module("pynvml")


def open_nvml(load: Callable[[], Any]) -> Any | None:
    """The :mod:`pynvml` module, initialised, so that whoever asked shuts it down; None where there is no driver.

    Args:
        load: returns it, not yet initialised.
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
