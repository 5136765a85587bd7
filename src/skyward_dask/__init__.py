"""Skyward behind Dask: :class:`SkywardCluster` is a pool as Dask's tools know clusters.

Importing this package gives Dask the defaults of its settings, ``skyward.*``; the rest is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
