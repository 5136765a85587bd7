"""Parts of dask and distributed that are undocumented and in use here, in one place.

Other modules import undocumented classes from here, and the tables name all members: a missing part is reported by its
name. pyproject.toml admits the releases that ``make test-matrix`` runs, and no newer one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final

from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.http.routing import RoutingApplication
from distributed.threadpoolexecutor import ThreadPoolExecutor

from skyward.errors import ConfigurationError

__all__ = [
    "NEWEST_RELEASE",
    "OLDEST_RELEASE",
    "OVERRIDDEN",
    "READ",
    "Adaptive",
    "Cluster",
    "RoutingApplication",
    "ThreadPoolExecutor",
    "add_client_extension",
    "check_parts",
    "dashboard_pages",
    "missing_parts",
    "names_of_parts",
    "page_routes",
]

OLDEST_RELEASE: Final = "2026.3.0"
NEWEST_RELEASE: Final = "2026.8.0"
"""First and last release of dask and distributed that the tests run with."""

OVERRIDDEN: Final[Mapping[str, str]] = {
    "distributed.client:": "DEFAULT_EXTENSIONS",
    "distributed.client:Client": "_send_to_scheduler",
    "distributed.deploy.cluster:Cluster": ("_close _scaling_status _start _update_worker_status _wait_for_workers"),
    "distributed.http.routing:": "RoutingApplication",
    "distributed.http.utils:": "get_handlers",
    "distributed.node:ServerNode": "start_http_server",
    "distributed.threadpoolexecutor:": "ThreadPoolExecutor",
    "dask.sizeof:": "random",
}
"""Members that Skyward overrides, replaces or calls, by ``module:class``."""

READ: Final[Mapping[str, str]] = {
    "distributed.client:Client": "_set_config scheduler_comm",
    "distributed.core:Server": "stream_handlers",
    "distributed.deploy.adaptive:Adaptive": "periodic_callback state",
    "distributed.deploy.cluster:Cluster": "_adaptive _loop_runner _watch_worker_status_task scheduler_comm",
    "distributed.scheduler:Scheduler": "http_application http_server",
}
"""Attributes of instances that Skyward reads or sets, by ``module:class``; no class has them before it is used."""


def add_client_extension(name: str, extension: type) -> None:
    """Give every new Dask client of this process an instance of ``extension``, which is called with the client."""
    client: Any = importlib.import_module("distributed.client")
    client.DEFAULT_EXTENSIONS[name] = extension


def page_routes(scheduler: Any, modules: list[str]) -> list[Any]:
    """Return the routes of the scheduler's pages in these modules."""
    utils: Any = importlib.import_module("distributed.http.utils")
    return utils.get_handlers(scheduler, modules)


def dashboard_pages() -> Any:
    """Return the module of the scheduler's pages. Raises ImportError without bokeh; takes a second."""
    return importlib.import_module("distributed.dashboard.scheduler")


def names_of_parts(parts: Mapping[str, str]) -> Iterator[str]:
    """Yield ``module:class.member`` for every member in a table such as :data:`OVERRIDDEN`."""
    for owner, members in parts.items():
        for member in members.split():
            yield f"{owner}.{member}" if not owner.endswith(":") else f"{owner}{member}"


def missing_parts(parts: Mapping[str, str] = OVERRIDDEN) -> list[str]:
    """Return the parts that the installed release lacks, as ``module:class.member``."""
    return [part for part in names_of_parts(parts) if not _exists(part)]


def check_parts() -> None:
    """Refuse a release of Dask that lacks a part in use.

    Raises:
        ConfigurationError: parts are missing; the message names them and the releases that have them.
    """
    if missing := missing_parts():
        raise ConfigurationError(
            f"distributed {version('distributed')} lacks {', '.join(missing)}, on which Skyward relies. Install a "
            f"release that it was tested with, from {OLDEST_RELEASE} to {NEWEST_RELEASE}: "
            f"pip install 'distributed=={NEWEST_RELEASE}'"
        )


def _exists(part: str) -> bool:
    module, _, path = part.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError):
        return False
    return True
