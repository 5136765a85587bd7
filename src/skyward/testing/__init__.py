"""Fakes and contract suites for users of the seams; the extra ``testing`` installs their requirements.

The suite for Dask cluster managers can be imported from here, the others from their modules. Only the suites require
pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward.testing.clusters import ClusterConformance, StrictClusterConformance

__all__ = ["ClusterConformance", "StrictClusterConformance"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = globals()[name] = getattr(importlib.import_module("skyward.testing.clusters"), name)
        return value
    raise AttributeError(f"module 'skyward.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
