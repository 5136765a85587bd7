"""A node that does not come up says why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from skyward.environment.image import Image
from skyward.errors import BootstrapError, PoolStateError
from skyward.fleet.node import Node
from skyward.machine.access import Access, Completed, Transport
from skyward.machine.ssh import SSHAccess
from skyward.machine.ssh_config import SSHTarget
from skyward.providers.base import Instance, InstanceState
from skyward.testing.provider import FakeProvider
from support.nodes import node_config, node_instance, open_node

RUNNING = node_instance()
CONFIG = node_config(node=3, total_nodes=4, env={"TOKEN": "secret"})


class Answering:
    """A transport whose commands all end in one way."""

    def __init__(self, answer: Completed) -> None:
        self.answer = answer
        self.argv: list[str] = []
        self.env: Mapping[str, str] = {}
        self.stdin = b""
        self.written: dict[str, tuple[bytes, int]] = {}
        self.closed = False

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        self.argv, self.env, self.stdin = list(argv), env or {}, stdin
        return self.answer

    async def put(self, data: Any, path: str, *, mode: int = 0o600) -> None:
        self.written[path] = (bytes(data), mode)

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        return (host, port)

    async def close(self) -> None:
        self.closed = True


def node_on(transport: Answering) -> Node:
    return open_node(rank=3, transport=transport)


async def start(node: Node) -> None:
    await node.prepare(Image(), lambda step: None)
    await node.start(CONFIG)


@pytest.mark.parametrize("said", ["", "not json", "{}", "[]"])
def test_a_supervisor_that_does_not_announce_itself_is_an_error_with_what_it_said(said: str) -> None:
    transport = Answering(Completed(exit_code=1, stdout=said, stderr="Traceback: no module"))

    with pytest.raises(BootstrapError, match=r"node 3 did not start \(exit code 1\)") as raised:
        asyncio.run(start(node_on(transport)))

    assert (raised.value.step, raised.value.log_tail) == ("server", "Traceback: no module")
    assert raised.value.log_path == "/nonexistent/supervisor.log"


@pytest.mark.parametrize(
    ("network", "bind", "address"),
    [
        ("vpc", "", "203.0.113.7"),
        ("vpc", "10.0.0.2", "203.0.113.7"),
        ("", "10.0.0.2", "10.0.0.2"),
        ("", "", "203.0.113.7"),
    ],
)
def test_a_node_is_known_by_the_address_that_others_reach_and_an_island_by_the_one_it_binds_to(
    network: str, bind: str, address: str
) -> None:
    access = SSHAccess(target=SSHTarget(host="h"), address="203.0.113.7", workdir="/w", bind=bind)
    node = open_node(replace(RUNNING, access=access, network=network))
    asyncio.run(node.transport.close())

    assert (node.address, node.bind) == (address, bind)


def test_secrets_travel_in_the_programs_input_only() -> None:
    transport = Answering(Completed(exit_code=1, stdout="", stderr=""))
    with pytest.raises(BootstrapError) as raised:
        asyncio.run(start(node_on(transport)))

    assert json.loads(transport.stdin)["env"] == {"TOKEN": "secret"}
    assert not transport.written
    assert "secret" not in f"{transport.argv} {transport.env} {raised.value!r}"


def test_every_process_of_the_node_will_carry_its_id() -> None:
    transport = Answering(Completed(exit_code=1, stdout="", stderr=""))
    with pytest.raises(BootstrapError):
        asyncio.run(start(node_on(transport)))

    assert transport.env == {"SKYWARD_INSTANCE": "i-1"}


def test_a_node_that_never_started_can_be_stopped_twice() -> None:
    transport = Answering(Completed(exit_code=0, stdout="", stderr=""))
    node = node_on(transport)

    async def scenario() -> None:
        await node.stop(1.0)
        await node.stop(1.0)

    asyncio.run(scenario())
    assert transport.closed


def test_what_needs_a_connection_says_so() -> None:
    node = node_on(Answering(Completed(exit_code=0, stdout="", stderr="")))

    with pytest.raises(PoolStateError, match="node 3 is not connected"):
        asyncio.run(node.kill_worker(0, "x"))
    with pytest.raises(PoolStateError, match="node 3 has not started"):
        _ = node.ready


def test_a_machine_that_cannot_be_reached_yet_is_no_node() -> None:
    pending = Instance(id="i-2", key="key", state=InstanceState.PENDING, offer=RUNNING.offer)

    with pytest.raises(PoolStateError, match="i-2 of node 0 cannot be reached yet"):
        open_node(pending)


@dataclass(frozen=True, kw_only=True)
class JobAccess:
    """A provider's own way to its machines: the jobs of a scheduler."""

    job: int
    address: str = "10.0.0.9"
    workdir: str = "/scratch/node"
    cache: str = "/scratch/cache"
    bind: str = ""
    on_this_machine: bool = False
    boot_s: float = 0.0
    other_key_s: float = 0.0
    opened: list[Answering] = field(default_factory=list[Answering])

    def open(self) -> Transport:
        self.opened.append(Answering(Completed(exit_code=0, stdout="", stderr="")))
        return self.opened[-1]

    def move(self, present: Access, transport: Transport) -> Access:
        assert transport is self.opened[0]
        return present


def test_a_provider_may_bring_its_own_way_to_its_machines() -> None:
    access = JobAccess(job=1)
    provider = FakeProvider()
    node = open_node(replace(RUNNING, access=access), provider=provider)
    provider.instances["i-1"] = replace(RUNNING, access=JobAccess(job=2, address="10.0.0.10"))

    assert node.transport is access.opened[0]
    assert (node.files, node.fresh) == ("/scratch/node/files", False)
    assert asyncio.run(node.reach(1.0)) is None
    assert asyncio.run(node.machine_status()) is None
    assert node.access.address == "10.0.0.10"
