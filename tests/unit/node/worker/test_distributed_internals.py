"""What we rely on inside distributed. A failure here means: read the named code again before raising the pin."""

from __future__ import annotations

import inspect
import multiprocessing.process
import re
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import distributed.client
import distributed.http.scheduler.info
import distributed.utils
import pytest
from distributed import Client, Nanny, Scheduler, Security, Status, Worker
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.adaptive_core import AdaptiveCore
from distributed.deploy.cluster import Cluster
from distributed.nanny import WorkerProcess
from distributed.scheduler import WorkerStatusPlugin
from distributed.worker_memory import NannyMemoryManager


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


def test_nanny_hands_its_own_env_to_every_process_it_starts() -> None:
    assert "env=self.env" in source_of(Nanny.instantiate)
    assert "env=self.env" in source_of(WorkerProcess.start)
    assert "os.environ.update(env)" in source_of(WorkerProcess._run)


def test_nanny_starts_processes_only_by_instantiate() -> None:
    assert "await self.instantiate()" in source_of(Nanny.start_unsafe)
    assert "await self.instantiate()" in source_of(Nanny.restart)
    assert "await self.instantiate()" in source_of(Nanny._on_worker_exit)


def test_nanny_that_has_started_its_process_only_tells_the_scheduler_and_looks_after_it() -> None:
    _, _, rest = source_of(Nanny.start_unsafe).partition('await comm.write({"status": "ok"})')

    assert [line.strip() for line in rest.splitlines() if line.strip()] == [
        "finally:",
        "await comm.close()",
        "assert self.worker_address",
        "self.start_periodic_callbacks()",
        "return self",
    ]


def test_starting_a_process_sets_its_state_before_it_first_waits() -> None:
    source = source_of(WorkerProcess.start)

    assert source.index("self.status = Status.starting") < source.index("await self.process.start()")
    assert {Status.starting, Status.running} <= set(Status)


def test_nanny_hears_of_exits_by_the_method_we_override() -> None:
    assert list(inspect.signature(Nanny._on_worker_exit_sync).parameters) == ["self", "exitcode"]
    assert "on_exit=self._on_worker_exit_sync" in source_of(Nanny.instantiate)


def test_starting_a_process_polls_the_others_by_the_function_we_replace() -> None:
    assert "_cleanup()" in source_of(multiprocessing.process.BaseProcess.start)


def test_memory_manager_remembers_the_pid_it_terminated() -> None:
    source = source_of(NannyMemoryManager.memory_monitor)

    assert "self._last_terminated_pid = process.pid" in source
    assert "process.terminate()" in source


def test_worker_class_may_be_any_callable() -> None:
    assert "worker=self.Worker" in source_of(Nanny.instantiate)
    assert "functools.partial(self.Worker, **self.worker_kwargs)" in source_of(WorkerProcess.start)


def test_tasks_run_in_threads_of_this_name() -> None:
    assert 'Dask-Default-Threads",' in source_of(Worker.__init__)


def test_fork_server_preload_can_be_left_to_us() -> None:
    assert distributed.utils._forkserver_preload_set in (True, False)
    assert "not _forkserver_preload_set" in source_of(distributed.utils.get_mp_context)


def test_a_fork_server_is_started_by_the_function_we_replace_and_keeps_its_state_in_one_object() -> None:
    assert "util.spawnv_passfds(exe, args, fds_to_pass)" in source_of(forkserver.ForkServer.ensure_running)
    assert "args += ['-c', cmd]" in source_of(forkserver.ForkServer.ensure_running)
    assert forkserver.ensure_running.__self__ is forkserver._forkserver  # type: ignore[attr-defined]


def test_environment_before_the_spawn_is_what_the_plan_sets() -> None:
    import dask

    assert set(dask.config.get("distributed.nanny.pre-spawn-environ")) == {
        "MALLOC_TRIM_THRESHOLD_",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    }
    assert 'update({"PYTHONHASHSEED": "6640"})' in source_of(Nanny.__init__)


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
