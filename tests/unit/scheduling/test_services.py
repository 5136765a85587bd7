"""Services of front-ends on nodes: when they are ordered, awaited and emptied."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.errors import ConfigurationError, PoolStateError
from skyward.events import Progress, SkywardEvent
from skyward.scheduling.certificates import issue
from skyward.scheduling.services import Services
from skyward.wire.control import ServiceExit, ServiceRunning

PACKAGES = {"cloudpickle": version("cloudpickle")}


class Service:
    name = "dask"
    module = "its.module"
    distributions = ("cloudpickle",)

    def __init__(self) -> None:
        self.drained: list[tuple[str, ...]] = []
        self.forgotten: list[tuple[str, ...]] = []
        self.joined: list[tuple[str, ...]] = []

    async def wait_joined(self, access: Any, workers: Any) -> None:
        self.joined.append(tuple(workers))

    async def drain(self, access: Any, workers: Any) -> None:
        assert access.address == "127.0.0.1:7000"
        self.drained.append(tuple(workers))

    async def forget(self, access: Any, workers: Any) -> None:
        assert access.address == "127.0.0.1:7000"
        self.forgotten.append(tuple(workers))


class Node:
    def __init__(self, rank: int, *, address: str = "", packages: dict[str, str] = PACKAGES) -> None:
        self.rank = rank
        self.instance = SimpleNamespace(id=f"i-{rank}")
        self.ready = SimpleNamespace(
            service=f"10.0.0.{rank}:7000", control="127.0.0.1:1", python="3.11.1", packages=packages, guests=("",)
        )
        self.transport = self
        self.orders: list[tuple[str, str, str]] = []

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def run_service(self, *, name: str, module: str, address: str) -> None:
        self.orders.append((name, module, address))


@dataclass
class Nodes:
    nodes: list[Node] = field(default_factory=lambda: [Node(0), Node(1)])
    apart: str = ""

    def started_nodes(self) -> Any:
        return self.nodes

    def head(self) -> Any:
        for node in self.nodes:
            if node.rank == 0:
                return node
        raise PoolStateError("the head node is being replaced")

    def separation(self) -> str:
        return self.apart


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr("platform.python_version", lambda: "3.11.9")
    return Nodes()


@pytest.fixture
def events() -> list[SkywardEvent]:
    return []


def services_on(nodes: Nodes, events: list[SkywardEvent], **options: Any) -> Services:
    return Services(nodes, tls=issue(), publish=events.append, **options)


async def test_a_service_is_ordered_on_every_node_at_its_first_use_and_awaited(nodes: Nodes, events: Any) -> None:
    services, service = services_on(nodes, events), Service()
    using = asyncio.create_task(services.use(service))
    await asyncio.sleep(0.05)
    assert not using.done()
    assert [node.orders for node in nodes.nodes] == [[("dask", "its.module", "10.0.0.0:7000")]] * 2

    services.handle(nodes.nodes[0], ServiceRunning(name="dask", address="10.0.0.0:7000"))
    access = await using
    assert (access.address, access.tunnelled) == ("127.0.0.1:7000", False)
    assert (await services.use(service)).address == access.address
    assert service.joined == [("node0-worker0", "node1-worker0")]
    assert len(nodes.nodes[0].orders) == 1


async def test_nodes_that_come_later_get_the_orders_and_all_of_them_a_new_heads(nodes: Nodes, events: Any) -> None:
    services = services_on(nodes, events, opened_with=("dask", "its.module"))
    services.order(nodes.nodes[1])
    assert nodes.nodes[1].orders == [("dask", "its.module", "10.0.0.0:7000")]
    _, other = nodes.nodes
    nodes.nodes = [other]
    services.order(other)  # its head is gone
    assert len(other.orders) == 1

    head = Node(0)
    head.ready.service = "10.0.0.9:7000"
    nodes.nodes = [head, other]
    services.order(head)
    assert head.orders == [("dask", "its.module", "10.0.0.9:7000")] == other.orders[1:]


async def test_nodes_with_other_versions_are_refused_by_name(nodes: Nodes, events: Any) -> None:
    nodes.nodes[1] = Node(1, packages={})
    with pytest.raises(ConfigurationError, match=rf"node 1: cloudpickle {PACKAGES['cloudpickle']} here, none there"):
        await services_on(nodes, events).use(Service())
    assert nodes.nodes[0].orders == []


async def test_nodes_that_do_not_reach_each_other_are_refused(nodes: Nodes, events: Any) -> None:
    nodes.apart = "nodes 0, 1 reach no other"
    with pytest.raises(ConfigurationError, match="Dask's workers have to reach each other, but nodes 0, 1 reach no"):
        await services_on(nodes, events).use(Service())


async def test_only_services_in_use_are_emptied_and_told_who_is_gone(nodes: Nodes, events: Any) -> None:
    services, service = services_on(nodes, events, opened_with=("dask", "its.module")), Service()
    await services.drain(1, ["node1-worker0"])
    await services.forget(["node1-worker0"])
    services.handle(nodes.nodes[0], ServiceRunning(name="dask", address="10.0.0.0:7000"))
    await services.use(service)
    await services.drain(1, ["node1-worker0"])
    await services.forget(["node1-worker0"])
    assert service.drained == service.forgotten == [("node1-worker0",)]

    nodes.nodes = [nodes.nodes[1]]
    await services.forget(["node1-worker0"])  # without a head there is nothing to tell
    assert len(service.forgotten) == 1


def test_a_service_that_ends_takes_its_work_along(nodes: Nodes, events: list[SkywardEvent]) -> None:
    services, (first, second) = services_on(nodes, events), nodes.nodes

    services.handle(first, ServiceRunning(name="dask", address=""))
    services.handle(first, Progress(label="inc", done=1, total=5, running=2))
    services.handle(first, ServiceRunning(name="dask", address=""))  # after a loss of the connection
    services.handle(first, ServiceExit(name="dask", reason=""))
    services.handle(first, Progress(label="dec", done=1, total=2, failed=0, running=1))
    services.handle(second, ServiceRunning(name="dask", address=""))
    services.handle(second, ServiceRunning(name="dask", address=""))

    assert events == [
        Progress("inc", 1, 5, running=2),
        Progress("inc", 1, 5, cancelled=4),
        Progress("dec", 1, 2, running=1),
        Progress("dec", 1, 2, cancelled=1),
    ]
