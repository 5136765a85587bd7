"""A node told to get a large argument answers, or its connection is lost: nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from skyward.base.waiting import wait_until
from skyward.environment.image import Image
from skyward.errors import UnreachableError
from skyward.fleet.node import Node, NodeLoss
from skyward.machine.access import Completed
from skyward.node.supervisor.control_server import ControlServer
from skyward.scheduling.certificates import issue
from skyward.wire.control import Command, Ending, Fetch, Fetched, Ping, Pong, Report, Stop
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeReady
from support.nodes import node_config, node_instance, open_node

ADDRESS = "127.83.3.1"
ORDER = Fetch(blob_id="ab", nbytes=5, path="/memory/ab", sources=("10.0.0.1:1",))
DONE = Fetched(blob_id="ab", path="/memory/ab")


class Supervisor:
    """A real control server; what is behind it, and the transport to it, is the test."""

    def __init__(self) -> None:
        self.server = ControlServer(self)
        self.port = 0
        self.deaf = False
        self.orders: asyncio.Queue[Fetch] = asyncio.Queue()

    def joined(self) -> None: ...

    def left(self) -> None: ...

    def state(self) -> list[Report]:
        return []

    def told(self, command: Command, reply: Callable[[Report], None]) -> None:
        match command:
            case Fetch():
                self.orders.put_nowait(command)
            case Ping(n=n):
                reply(Pong(n=n))
            case Stop() if not self.deaf:
                reply(Ending(reason="asked"))
                for writer in tuple(self.server._writers):
                    writer.close()
            case _:
                pass

    async def order(self) -> Fetch:
        async with asyncio.timeout(5):
            return await self.orders.get()

    def hang_up(self) -> None:
        for writer in tuple(self.server._writers):
            writer.transport.abort()

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        ready = NodeReady(
            control=f"{ADDRESS}:{self.port}",
            service="",
            guests=(),
            lanes=(),
            blobs="",
            call_ports=(),
            blob_dir="/memory",
            blob_dir_disk="/disk",
            blob_budget_bytes=0,
            pid=1,
            python=sys.version,
            packages={},
            cpu_count=1,
            memory_bytes=1,
        )
        return Completed(exit_code=0, stdout=ready.to_json(), stderr="")

    async def put(self, data: Any, path: str, *, mode: int = 0o600) -> None: ...

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


@pytest.fixture
async def supervisor(identity: TlsIdentity) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    supervisor.port = await supervisor.server.listen(ADDRESS, identity)
    yield supervisor
    await supervisor.server.close()


@pytest.fixture
async def node(supervisor: Supervisor, identity: TlsIdentity) -> AsyncIterator[Node]:
    node = open_node(node_instance(ADDRESS), rank=3, transport=supervisor)
    await node.prepare(Image(), lambda step: None)
    await node.start(node_config(identity, node=3, total_nodes=4, address=ADDRESS))
    yield node
    with contextlib.suppress(UnreachableError):  # some tests leave nobody who would say goodbye
        await node.stop(0.2)


async def linked(node: Node, *, linked: bool) -> None:
    async def probe() -> bool | None:
        return True if node.linked is linked else None

    await wait_until(probe, deadline_s=5, interval_s=0.005, what="the connection to change")


async def test_the_node_is_given_the_order_and_its_answer_returned(node: Node, supervisor: Supervisor) -> None:
    fetching = asyncio.ensure_future(node.fetch(ORDER))
    assert await supervisor.order() == ORDER
    supervisor.server.broadcast(Fetched(blob_id="cd", path="/memory/cd"))
    supervisor.server.broadcast(replace(DONE, error="why not"))

    assert await fetching == replace(DONE, error="why not")


async def test_two_that_want_the_same_give_one_order(node: Node, supervisor: Supervisor) -> None:
    first = asyncio.ensure_future(node.fetch(ORDER))
    second = asyncio.ensure_future(node.fetch(ORDER))
    await supervisor.order()
    first.cancel()
    supervisor.server.broadcast(DONE)

    assert await second == DONE
    assert supervisor.orders.empty()


async def test_a_lost_connection_ends_the_wait_and_the_order_may_be_given_again(
    node: Node, supervisor: Supervisor
) -> None:
    fetching = asyncio.ensure_future(node.fetch(ORDER))
    await supervisor.order()
    supervisor.hang_up()
    with pytest.raises(UnreachableError, match="the connection to node 3 was lost"):
        await fetching
    await linked(node, linked=True)
    fetching = asyncio.ensure_future(node.fetch(ORDER))
    await supervisor.order()
    supervisor.server.broadcast(DONE)

    assert await fetching == DONE


async def test_no_order_waits_for_a_connection(node: Node, supervisor: Supervisor) -> None:
    await supervisor.server.close()
    await linked(node, linked=False)
    with pytest.raises(UnreachableError):
        await asyncio.wait_for(node.fetch(ORDER), 5)


@pytest.mark.parametrize("link", ["lost", "silent"])
@pytest.mark.parametrize("over", [True, False], ids=["ended from outside", "alive"])
async def test_a_node_whose_machine_is_over_has_ended_and_another_that_does_not_answer_has_not(
    node: Node, supervisor: Supervisor, link: str, *, over: bool
) -> None:
    async def reported(*, at_once: bool = False) -> NodeLoss | None:
        assert at_once
        return NodeLoss(reason="it is gone", machine_over=True) if over else None

    node.machine_status = reported  # type: ignore[method-assign]
    supervisor.deaf = True
    if link == "lost":
        await supervisor.server.close()
        await linked(node, linked=False)
    with contextlib.nullcontext() if over else pytest.raises(UnreachableError, match=r"did not end within 0\.05 s"):
        await asyncio.wait_for(node.stop(0.05), 5)


async def test_ending_the_node_ends_the_wait(node: Node, supervisor: Supervisor) -> None:
    fetching = asyncio.ensure_future(node.fetch(ORDER))
    await supervisor.order()
    supervisor.deaf = True
    with pytest.raises(UnreachableError, match="did not end"):
        await node.stop(0.05)
    with pytest.raises(UnreachableError, match="was lost while"):
        await asyncio.wait_for(fetching, 5)
