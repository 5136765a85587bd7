"""Dask on Skyward: :class:`SkywardCluster`, a pool with the interface of Dask's cluster classes.

Importing this package registers the defaults of Dask's settings ``skyward.*``; the rest is loaded on first use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skyward.request.front_ends import FRONT_ENDS, needs

if not FRONT_ENDS["dask"].is_installed:
    raise ImportError(needs("skyward_dask", "dask"))


if TYPE_CHECKING:
    from skyward_dask.clients import check_versions
    from skyward_dask.cluster import SkywardCluster

__all__ = ["SkywardCluster", "check_versions"]

_HOMES = {
    "SkywardCluster": "skyward_dask.cluster",
    "check_versions": "skyward_dask.clients",
    # For ComputePool, by the table of front-ends.
    "client_of": "skyward_dask.clients",
    "close_client": "skyward_dask.clients",
    "scheduler_of": "skyward_dask.clients",
}


@contextmanager
def _no_settings_of_the_host() -> Generator[None]:
    """Hide the folders in which Dask looks for settings while it is imported, on a node on another machine."""
    hidden = {"HOME": "/dev/null/none", "DASK_ROOT_CONFIG": "/dev/null/none"}
    before = {name: os.environ.get(name) for name in hidden}
    if os.environ.get("SKYWARD_ENVIRONMENT") == "known":
        os.environ.update(hidden)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


with _no_settings_of_the_host():
    from skyward_dask.settings import load_defaults

load_defaults()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
