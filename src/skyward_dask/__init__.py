"""Dask on Skyward: :class:`SkywardCluster`, a pool with the interface of Dask's cluster classes.

Importing this package registers the defaults of Dask's settings ``skyward.*``; the rest is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skyward.wire.dask_parts import is_dask_here, needs_dask

if not is_dask_here():
    raise ImportError(needs_dask("skyward_dask", extra="dask"))

from skyward_dask.settings import load_defaults

if TYPE_CHECKING:
    from skyward_dask.clients import check_versions
    from skyward_dask.skyward_cluster import SkywardCluster

__all__ = ["SkywardCluster", "check_versions"]

_HOMES = {"SkywardCluster": "skyward_dask.skyward_cluster", "check_versions": "skyward_dask.clients"}

load_defaults()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
