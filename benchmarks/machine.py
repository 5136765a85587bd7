"""What the numbers were taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

__all__ = ["machine", "versions"]

_PACKAGES = (
    *("skyward", "joblib", "distributed", "ray", "ipyparallel", "parsl", "hyperqueue"),
    *("numpy", "scikit-learn", "paramiko", "asyncssh"),
)


def machine() -> dict[str, str]:
    """CPU, cores, memory, system, Python."""
    return {
        "CPU": _cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of everything that takes part; what is absent is said to be."""
    return {package: _version(package) for package in _PACKAGES}


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
