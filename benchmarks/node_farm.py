"""Many nodes in one process, each with the real ports of a node: control, one worker's lane, and large arguments.

``python -m benchmarks.node_farm`` runs them; :func:`node_farms` is what measures. What a farm does not have is a
process for each worker: hundreds of lane servers share one, each with a thread that runs calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyward.base.descriptors import raise_descriptor_limit
from skyward.node.storage.blob_port import BlobPort
from skyward.node.supervisor.control_server import ControlServer
from skyward.node.worker.lane_server import LaneServer
from skyward.wire.control import Command, Fetch, Ping, Pong, Report
from skyward.wire.frames import TlsIdentity, server_context
from skyward.wire.listening import BACKLOG
from skyward.wire.node_config import NodeReady

__all__ = ["NodeFarm", "node_farms"]

_NODES_A_PROCESS = 250
_MOST_PROCESSES = 4
_BLOBS_BYTES = 64 << 20
_MEMORY = Path("/dev/shm")


class NodeFarm:
    """A process of nodes, seen from the measured client.

    Attributes:
        nodes: what each node's supervisor reports, in order.
    """

    def __init__(self, process: subprocess.Popen[str], identity: TlsIdentity, folder: str, ranks: range) -> None:
        self._process = process
        self._order(identity=asdict(identity), folder=folder, ranks=[ranks.start, ranks.stop])
        self.nodes: Sequence[NodeReady] = ()

    def wait(self) -> None:
        """Wait until its nodes listen."""
        assert self._process.stdout is not None
        self.nodes = [NodeReady.from_json(text) for text in json.loads(self._process.stdout.readline())]

    def cut(self) -> None:
        """Break every connection of its nodes, as a network failure would."""
        self._order(cut=True)

    def _order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()


@contextmanager
def node_farms(count: int, identity: TlsIdentity) -> Iterator[Sequence[NodeFarm]]:
    """So many nodes in a few processes, until the block ends."""
    processes = min(_MOST_PROCESSES, -(-count // _NODES_A_PROCESS))
    bounds = [count * number // processes for number in range(processes + 1)]
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="farm-", dir=_MEMORY if _MEMORY.is_dir() else None)
        )
        farms = [
            NodeFarm(stack.enter_context(_process()), identity, folder, range(*ranks)) for ranks in pairwise(bounds)
        ]
        for farm in farms:
            farm.wait()
        yield farms


@contextmanager
def _process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.node_farm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # the end of its input is its end
        yield process


# --- in the process of the nodes ----------------------------------------------------------------------------------


class _FarmedNode:
    """Ports of one node.

    Args:
        rank: the node's rank, which chooses its loopback address.
        folder: folder of its large arguments.
        identity: the pool's certificates.
    """

    def __init__(self, rank: int, folder: Path, identity: TlsIdentity) -> None:
        self._rank = rank
        self._folder = folder
        self._identity = identity
        self._blobs = BlobPort(identity)
        self._blobs.folders = [str(folder)]

    async def listen(self) -> NodeReady:
        """Bind its ports, and serve them until the process ends."""
        self._folder.mkdir(mode=0o700)
        address = f"127.99.{1 + self._rank // 250}.{1 + self._rank % 250}"
        lane = socket.create_server((address, 0), backlog=BACKLOG)
        self._lane = LaneServer(incarnation=f"worker-{self._rank}", blob_dirs=[self._folder])
        self._serving = asyncio.ensure_future(self._lane.serve(lane, server_context(self._identity)))
        threading.Thread(target=self._lane.runner.work, daemon=True).start()
        self._control = ControlServer(self)
        return NodeReady(
            control=f"{address}:{await self._control.listen(address, self._identity)}",
            service="",
            guests=(),
            lanes=(f"{address}:{lane.getsockname()[1]}",),
            blobs=f"{address}:{await self._blobs.listen(address)}",
            call_ports=(20_000 + self._rank,),
            blob_dir=str(self._folder),
            blob_dir_disk=str(self._folder),
            blob_budget_bytes=_BLOBS_BYTES,
            pid=os.getpid(),
            python="",
            packages={},
            cpu_count=1,
            memory_bytes=4 * _BLOBS_BYTES,
        )

    # As the supervisor's: see ControlHandler.

    def joined(self) -> None: ...

    def left(self) -> None: ...

    def told(self, command: Command, reply: Callable[[Report], None]) -> None:
        match command:
            case Ping():
                reply(Pong(n=command.n))
            case Fetch():
                self._blobs.fetch(command, reply)
            case _:
                pass

    def state(self) -> list[Report]:
        return []


def _cut_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family == socket.AF_INET:  # the event loop wakes itself by a pair of another family
                        found.getpeername()  # raises for a port that listens
                        found.shutdown(socket.SHUT_RDWR)


async def _serve(orders: Iterator[str]) -> None:
    loop = asyncio.get_running_loop()
    first = json.loads(next(orders))
    identity, folder, ranks = TlsIdentity(**first["identity"]), Path(first["folder"]), range(*first["ranks"])
    nodes = [_FarmedNode(rank, folder / str(rank), identity) for rank in ranks]
    print(json.dumps([(await node.listen()).to_json() for node in nodes]), flush=True)
    while await loop.run_in_executor(None, lambda: next(orders, "")):
        _cut_connections()


if __name__ == "__main__":
    raise_descriptor_limit()
    threading.stack_size(1 << 20)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(iter(sys.stdin)))
    os._exit(0)  # its threads wait for calls
