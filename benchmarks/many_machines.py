"""``python -m benchmarks.many_machines COUNT``: a fleet of rented machines, on a local double of DigitalOcean's API.

The calls are the real provider's, over HTTP. The machines are records only: their boot, and what a node does on them
before its workers run, take no time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.many_lanes import resident_bytes
from skyward.fleet.fleet import Fleet
from skyward.fleet.machine_size import MachineSize
from skyward.fleet.node import Node
from skyward.ledger.ledger import Ledger
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE
from skyward.providers.digitalocean import DigitalOcean
from skyward.request.image import ImageSettings
from skyward.request.request import parse_request
from skyward.scheduling.certificates import issue
from skyward.wire.control import Start
from skyward.wire.node_config import NodeConfig

__all__ = ["measure"]

_SIZE = "s-1vcpu-1gb"
_TESTS = Path(__file__).parents[1] / "tests"


class _DigitalOcean(DigitalOcean):
    """The provider, of whose machines none counts as too new for a list: a real pool is older when it ends."""

    unlisted_s: ClassVar[float] = 0.0


class _BootedNode(Node):
    """A node whose machine is a record: reached, prepared, started and stopped at once."""

    async def reach(self, within_s: float) -> MachineSize | None:  # noqa: ARG002
        """See :meth:`Node.reach`."""
        spec = self.instance.offer.spec
        return MachineSize(cpu=spec.cpu, memory_bytes=int(spec.memory_gib * (1 << 30)))

    async def prepare(self, image: ImageSettings, progress: Any) -> None:
        """See :meth:`Node.prepare`."""

    async def start(self, config: NodeConfig) -> None:
        """See :meth:`Node.start`."""

    def join(self, order: Start) -> None:
        """See :meth:`Node.join`."""

    async def stop(self, timeout_s: float) -> None:
        """See :meth:`Node.stop`."""


class _NoWork:
    """User of nodes that has no work for them."""

    def expect(self, ranks: Iterable[int]) -> None: ...

    def retire(self, ranks: Iterable[int], *, comes_back: bool = False) -> None: ...

    async def attach(self, node: Node) -> None: ...

    async def drain(self, rank: int) -> None: ...

    def detach(self, rank: int, reason: str, *, for_good: bool, preempted: bool = False) -> None: ...


class _Cloud:
    """The double of the API, in a process of its own.

    Attributes:
        url: its address.
        token: the account's token.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url, self.token = self._read()

    def calls(self) -> dict[str, int]:
        """Return the calls since the last time, by route."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def _cloud(machines: int) -> Iterator[_Cloud]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.many_machines", "--cloud", str(machines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])},
        text=True,
    ) as process:
        yield _Cloud(process)


def measure(machines: int) -> dict[str, float]:
    """Launch so many machines, and terminate them; return the figures."""
    with tempfile.TemporaryDirectory(prefix="machines-") as folder, _cloud(machines) as cloud:
        os.environ |= {"HOME": folder, "XDG_STATE_HOME": folder, CLIENT_CIDR_VARIABLE: "203.0.113.7/32"}
        return asyncio.run(_launch_and_end(cloud, machines))


async def _launch_and_end(cloud: _Cloud, machines: int) -> dict[str, float]:
    provider = _DigitalOcean(token=cloud.token, endpoint_url=cloud.url)
    request = parse_request(nodes=machines, machine=_SIZE, spot="never")
    fleet = Fleet(
        provider,
        request,
        pool_id="scale",
        tls=issue(),
        publish=lambda event: None,  # noqa: ARG005
        ledger=Ledger.of_user(),
        make_node=_BootedNode,
    )
    before, figures = resident_bytes(), {}
    try:
        for name, work in (("launch", lambda: fleet.start(_NoWork())), ("end", fleet.stop)):
            wall, cpu = time.perf_counter(), time.process_time()
            await work()
            figures[f"{name}_s"], figures[f"{name}_cpu_s"] = time.perf_counter() - wall, time.process_time() - cpu
            calls = cloud.calls()
            figures[f"{name}_calls"] = sum(calls.values())
            if name == "launch":
                figures["bytes_a_machine"] = (resident_bytes() - before) / machines
    finally:
        await fleet.stop()
        await provider.close()
    return figures


def _serve(machines: int) -> None:
    """Serve the double until the input ends."""
    from collections import Counter

    from support.clouds.digital_ocean_api import DigitalOceanApi

    with DigitalOceanApi() as cloud:
        cloud.droplet_limit = machines
        cloud.service.paces.clear()
        print(json.dumps([cloud.endpoint_url, cloud.token]), flush=True)
        for _ in sys.stdin:
            with cloud.service.lock:
                routes, cloud.service.calls[:] = Counter(cloud.service.routes), []
            print(json.dumps(routes), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--cloud":
        _serve(int(sys.argv[2]))
    else:
        print(json.dumps(measure(int(sys.argv[1])), indent=1))
