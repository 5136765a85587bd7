"""What we rely on inside distributed. A failure here means: read the named code again before raising the pin."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import distributed.client
import distributed.http.scheduler.info
import pytest
from distributed import Client, Scheduler, Security, Worker
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.adaptive_core import AdaptiveCore
from distributed.deploy.cluster import Cluster
from distributed.scheduler import WorkerStatusPlugin


def source_of(thing: Callable[..., Any]) -> str:
    return inspect.getsource(thing)


def stopping(cls: Any) -> Callable[..., Any]:
    """Return the method that ends the pages; it was synchronous until 2026.6."""
    return getattr(cls, "_stop_services", cls.stop_services)


@pytest.mark.parametrize("cls", [Scheduler, Worker])
def test_http_servers_are_started_by_the_method_we_override(cls: type) -> None:
    assert "start_http_server" in dir(cls)
    assert "self.start_http_server(" in inspect.getsource(cls)


def test_http_server_attributes_are_touched_only_with_a_dashboard() -> None:
    assert "if show_dashboard:" in source_of(Scheduler.__init__)
    assert "if self._dashboard:" in source_of(Worker.start_unsafe)
    assert 'hasattr(self, "http_application")' in source_of(stopping(Worker))


def test_pages_look_for_their_server_where_we_put_it() -> None:
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import connect

    assert list(inspect.signature(connect).parameters) == ["application", "http_server", "scheduler", "prefix"]
    assert "server.http_server.port" in source_of(BokehApplication)
    assert "self.server.http_application.applications" in inspect.getsource(distributed.http.scheduler.info)


def test_scheduler_stops_the_pages_it_finds_there() -> None:
    source = source_of(stopping(Scheduler))

    assert "for application in self.http_application.applications:" in source
    assert "application.stop()" in source
    assert re.search(r"self\._?stop_services\(\)", source_of(Scheduler.close))


def test_scheduler_does_not_know_the_name_under_which_we_keep_them() -> None:
    assert not re.search(r"\b_pages\b", "".join(inspect.getsource(cls) for cls in Scheduler.__mro__[:-1]))


def test_certificates_may_be_text_and_stay_mutual() -> None:
    source = source_of(Security._get_tls_context)

    assert "cadata=ca" in source
    assert "ctx.verify_mode = ssl.CERT_REQUIRED" in source


def test_a_cluster_object_can_be_connected_anew_by_its_own_start() -> None:
    source = source_of(Cluster._start)

    for done in (
        "self._watch_worker_status_comm =",
        "self._watch_worker_status_task =",
        "self._sync_cluster_info_task =",
    ):
        assert done in source
    assert "self._cluster_info.update(info)" in source  # the name of whoever was connected before
    assert source.rstrip().endswith("self.status = Status.running")
    assert "except OSError:\n                break" in source_of(Cluster._watch_worker_status)


def test_a_cluster_object_keeps_its_loop_and_its_interval_where_we_read_them() -> None:
    source = source_of(Cluster.__init__)

    assert "self._loop_runner = LoopRunner(" in source
    assert "self._sync_interval = parse_timedelta(" in source


def test_a_scheduler_tells_the_last_cluster_object_only() -> None:
    assert WorkerStatusPlugin.name == "worker-status"
    assert "scheduler.add_plugin(self)" in source_of(WorkerStatusPlugin.__init__)


def test_adaptive_scaling_asks_what_we_override() -> None:
    assert "await self.workers_to_close(target=target)" in source_of(AdaptiveCore.recommendations)
    assert "requested = self.requested" in source_of(AdaptiveCore.recommendations)
    assert "self.scale_up(**recommendations)" in source_of(AdaptiveCore.adapt)
    assert "self.scale_down(**recommendations)" in source_of(AdaptiveCore.adapt)
    assert {"starting", "running", "stopped"} <= set(
        str(Adaptive.__init__.__globals__["AdaptiveStateState"]).split("'")
    )


def test_clients_are_given_extensions_after_they_know_their_cluster_and_before_they_start() -> None:
    source = source_of(Client.__init__)
    made = source.index("extension(self) for name, extension in extensions.items()")

    assert source.index("self.cluster = address") < made < source.index("self.start(timeout=timeout)")
    assert source.index("self.direct_to_workers = direct_to_workers") < made
    assert source.index("self._set_config = dask.config.set(") < made
    assert inspect.signature(Client.__init__).parameters["extensions"].default is distributed.client.DEFAULT_EXTENSIONS


def test_threads_can_be_ended_before_the_interpreter_lets_no_more_start() -> None:
    assert "_threading_atexits" in inspect.getsource(threading._shutdown)  # type: ignore[attr-defined]
    assert callable(threading._register_atexit)  # type: ignore[attr-defined]
