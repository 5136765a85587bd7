"""The worker process: a Dask worker with a lane beside it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

from distributed import Worker
from distributed.threadpoolexecutor import ThreadPoolExecutor

from skyward._loop import LoopThread
from skyward.node.lane import LaneServer

__all__ = ["LaneWorker"]


class LaneWorker(Worker):
    """A :class:`distributed.Worker` that also serves native and joblib calls.

    It takes Worker's own arguments. Its place, incarnation, blob folders and log file come from the environment that
    the nanny sets before the process starts, since whatever user code starts needs them too. Lane calls run in an
    executor of their own: sharing Dask's hides them from the scheduler.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _own_log(Path(os.environ["SKYWARD_WORKER_LOG"]))
        blob_dirs = os.environ["SKYWARD_BLOB_DIRS"].split(os.pathsep)
        # Until it has started: distributed writes the pool's key to a temporary folder, which must go with the node.
        tempfile.tempdir = blob_dirs[0]
        super().__init__(*args, **kwargs)
        self.lane_loop = LoopThread()
        self.lane = self.lane_loop.call(_make_lane([Path(folder) for folder in blob_dirs]))
        self.lane.output.install()
        self._lane_address = os.environ["SKYWARD_LANE"]
        self.executors["lane"] = ThreadPoolExecutor(1, thread_name_prefix="skyward-lane")
        self.executors["lane"].submit(self.lane.runner.work)
        os.register_at_fork(after_in_child=self._leave_connections)

    async def start_unsafe(self) -> Self:
        """Start, leave the temporary folder to user code, and take calls."""
        await super().start_unsafe()
        tempfile.tempdir = None
        host, _, port = self._lane_address.rpartition(":")
        tls = cast("ssl.SSLContext", self.security.get_listen_args("worker")["ssl_context"])
        self.lane_loop.spawn(self.lane.serve(socket.create_server((host, int(port)), backlog=16), tls))
        return self

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close, once the call that runs has ended."""
        self.lane_loop.loop.call_soon_threadsafe(self.lane.close)
        return await super().close(*args, **kwargs)

    def _leave_connections(self) -> None:
        """In a forked child: it may outlive this worker, and would keep its ports and its clients' connections open."""
        ports = {int(address.rpartition(":")[2]) for address in (self.address, self._lane_address)}
        for descriptor in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _port_of(descriptor) in ports:
                    os.close(descriptor)

    def start_http_server(self, *_args: Any, **_kwargs: Any) -> None:
        """Serve no HTTP: distributed's pages have no authentication."""


def _port_of(descriptor: int) -> int:
    """The local port of an IPv4 socket; 0 of another one."""
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        return seen.getsockname()[1] if seen.family == socket.AF_INET else 0


def _own_log(path: Path) -> None:
    """Send what does not pass through ``sys.stdout`` (C code, subprocesses, tracebacks of crashes) to the log file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


async def _make_lane(blob_dirs: Sequence[Path]) -> LaneServer:
    return LaneServer(incarnation=os.environ["SKYWARD_INCARNATION"], blob_dirs=blob_dirs)
