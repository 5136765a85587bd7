"""Parts of dask and distributed that Skyward relies on and that neither promises to keep, in one place.

Every other module imports Dask's undocumented classes from here: a difference between two releases has one home, and a
missing part is reported by its name, with the releases that have it. Importing this module loads nothing of Dask; each
part is loaded on first use. ``make test-matrix`` runs the tests of these parts with every supported release.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    from distributed.batched import BatchedSend
    from distributed.comm.core import Comm, CommClosedError, FatalCommClosedError
    from distributed.comm.registry import backends
    from distributed.comm.tcp import TLSBackend, TLSConnector
    from distributed.core import rpc
    from distributed.deploy.adaptive import Adaptive
    from distributed.deploy.cluster import Cluster
    from distributed.http.routing import RoutingApplication
    from distributed.objects import SchedulerInfo
    from distributed.threadpoolexecutor import ThreadPoolExecutor
    from distributed.utils import NoOpAwaitable
    from distributed.versions import get_versions

    def get_handlers(server: Any, modules: list[str], prefix: str = "/") -> list[Any]:
        """Return the routes of these modules; distributed leaves the type of ``server`` open."""
        raise NotImplementedError

    def key_split(s: Any) -> str:
        """Return the label of a task's key; dask leaves the types open."""
        raise NotImplementedError


__all__ = [
    "NODE_RELEASE",
    "OLDEST_RELEASE",
    "OVERRIDDEN",
    "READ",
    "Adaptive",
    "BatchedSend",
    "Cluster",
    "Comm",
    "CommClosedError",
    "FatalCommClosedError",
    "NoOpAwaitable",
    "RoutingApplication",
    "SchedulerInfo",
    "TLSBackend",
    "TLSConnector",
    "ThreadPoolExecutor",
    "add_client_extension",
    "backends",
    "check_parts",
    "dashboard_pages",
    "get_handlers",
    "get_versions",
    "is_dask_here",
    "keep_own_fork_server",
    "key_split",
    "load_lazy_parts",
    "missing_parts",
    "names_of_parts",
    "needs_dask",
    "rpc",
]

OLDEST_RELEASE: Final = "2026.3.0"
"""First release of dask and distributed that the tests run with."""

NODE_RELEASE: Final = "2026.8.0"
"""Release for nodes of a client that has no Dask: the newest that the tests run with."""

_HOMES: Final[Mapping[str, str]] = {
    "Adaptive": "distributed.deploy.adaptive",
    "BatchedSend": "distributed.batched",
    "Cluster": "distributed.deploy.cluster",
    "Comm": "distributed.comm.core",
    "CommClosedError": "distributed.comm.core",
    "FatalCommClosedError": "distributed.comm.core",
    "NoOpAwaitable": "distributed.utils",
    "RoutingApplication": "distributed.http.routing",
    "SchedulerInfo": "distributed.objects",
    "TLSBackend": "distributed.comm.tcp",
    "TLSConnector": "distributed.comm.tcp",
    "ThreadPoolExecutor": "distributed.threadpoolexecutor",
    "backends": "distributed.comm.registry",
    "get_handlers": "distributed.http.utils",
    "get_versions": "distributed.versions",
    "key_split": "dask.utils",
    "rpc": "distributed.core",
}

OVERRIDDEN: Final[Mapping[str, str]] = {
    "distributed.client:": "DEFAULT_EXTENSIONS",
    "distributed.client:Client": "_send_to_scheduler",
    "distributed.comm.tcp:TLSBackend": "_connector_class",
    "distributed.comm.tcp:TLSConnector": "connect prefix",
    "distributed.deploy.adaptive:Adaptive": (
        "adapt observed recommendations requested scale_down scale_up target workers_to_close"
    ),
    "distributed.deploy.cluster:Cluster": (
        "_close _log _repr_html_ _scaling_status _start _update_worker_status _wait_for_workers get_logs sync"
    ),
    "distributed.nanny:Nanny": "_on_worker_exit_sync instantiate kill start_unsafe",
    "distributed.scheduler:Scheduler": "add_plugin close start_http_server transition transitions worker_send",
    "distributed.utils:": "_forkserver_preload_set",
    "distributed.worker:Worker": (
        "_register_with_scheduler close handle_scheduler handle_stream heartbeat start_http_server"
    ),
    "dask.sizeof:": "random",
}
"""Undocumented members that Skyward overrides, replaces or calls, by ``module:class``."""

READ: Final[Mapping[str, str]] = {
    "distributed.client:Client": "_set_config _start_arg cluster direct_to_workers scheduler_comm",
    "distributed.deploy.adaptive:Adaptive": "periodic_callback state",
    "distributed.deploy.cluster:Cluster": (
        "_adaptive _cluster_info _loop_runner _sync_cluster_info_task _sync_interval _watch_worker_status_comm "
        "_watch_worker_status_task periodic_callbacks scheduler_comm"
    ),
    "distributed.nanny:Nanny": (
        "_ongoing_background_tasks env handlers memory_manager process rpc scheduler scheduler_addr"
    ),
    "distributed.nanny:WorkerProcess": "pid status worker_kwargs",
    "distributed.scheduler:Scheduler": "handlers stream_handlers http_application http_server ip unrunnable",
    "distributed.scheduler:TaskState": (
        "host_restrictions key processing_on resource_restrictions worker_restrictions"
    ),
    "distributed.scheduler:WorkerState": "address executing host name resources",
    "distributed.worker:Worker": (
        "_client batched_stream data executors handlers metrics nanny periodic_callbacks state stream_handlers"
    ),
    "distributed.worker_memory:NannyMemoryManager": "_last_terminated_pid memory_limit",
    "distributed.worker_state_machine:WorkerState": "executed_count tasks",
}
"""Attributes of instances that Skyward reads or sets, by ``module:class``; no class has them before it is used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(_explained([f"{_HOMES[name]}:{name}"])) from error
    return value


def is_dask_here() -> bool:
    """Return True if dask and distributed are installed in this environment. Imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("dask", "distributed"))


def needs_dask(what: str, *, extra: str = "local") -> str:
    """Return the message for ``what`` in an environment without Dask; ``extra`` is the extra that installs it."""
    return (
        f"{what} needs dask and distributed in this environment, and they are not installed here: "
        f"pip install 'skyward-fleet[{extra}]'"
    )


def add_client_extension(name: str, extension: type) -> None:
    """Give every new Dask client of this process an instance of ``extension``, which is called with the client."""
    client: Any = importlib.import_module("distributed.client")
    client.DEFAULT_EXTENSIONS[name] = extension


def dashboard_pages() -> Any:
    """Return the module of the scheduler's pages. Raises ImportError without bokeh; takes a second."""
    return importlib.import_module("distributed.dashboard.scheduler")


def keep_own_fork_server() -> None:
    """Make distributed preload nothing into multiprocessing's fork server, which runs already."""
    utils: Any = importlib.import_module("distributed.utils")
    utils._forkserver_preload_set = True  # noqa: SLF001 - distributed offers no other way


def load_lazy_parts() -> None:
    """Import the modules that a scheduler or worker would import when it starts, and fill their caches."""
    importlib.import_module("distributed.http.worker")
    versions: Any = importlib.import_module("distributed.versions")
    versions.get_versions()


def names_of_parts(parts: Mapping[str, str]) -> Iterator[str]:
    """Yield ``module:class.member`` for every member in a table such as :data:`OVERRIDDEN`."""
    for owner, members in parts.items():
        for member in members.split():
            yield f"{owner}.{member}" if not owner.endswith(":") else f"{owner}{member}"


def missing_parts(parts: Mapping[str, str] = OVERRIDDEN) -> list[str]:
    """Return the parts that the installed release lacks, as ``module:class.member``."""
    return [part for part in names_of_parts(parts) if not _is_there(part)]


def check_parts() -> None:
    """Refuse a release of Dask that lacks a part in use.

    Raises:
        ConfigurationError: parts are missing; the message names them and the releases that have them.
    """
    if missing := missing_parts():
        raise ConfigurationError(_explained(missing))


def _is_there(part: str) -> bool:
    module, _, path = part.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def _explained(missing: list[str]) -> str:
    if not is_dask_here():
        return needs_dask("this", extra="dask")
    return (
        f"distributed {_release()} lacks {', '.join(missing)}, on which Skyward relies. Install a release that it was "
        f"tested with, from {OLDEST_RELEASE} to {NODE_RELEASE}: pip install 'distributed=={NODE_RELEASE}'"
    )


def _release() -> str:
    try:
        return version("distributed")
    except PackageNotFoundError:
        return "(of unknown version)"
