"""The client sends a blob once; nodes get it from nodes, and what stands in their way costs one upload more."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from blake3 import blake3

from skyward.base.waiting import wait_until
from skyward.errors import UnreachableError
from skyward.fleet.node import Node
from skyward.machine.access import Access, Completed
from skyward.machine.local import LocalAccess
from skyward.machine.ssh import SSHAccess
from skyward.machine.ssh_config import SSHTarget
from skyward.scheduling.worker_link import AttachedNode
from skyward.shipping.blobs import Blob, Exchange, NodeBlobs
from skyward.wire.control import Fetch, Fetched

NBYTES = 1000


def blob_of(number: int) -> Blob:
    content = bytes([number]) * NBYTES
    return Blob(id=blake3(content).hexdigest(), view=memoryview(content))


@dataclass
class Ready:
    blobs: str
    blob_dir: str = "/memory"
    blob_dir_disk: str = "/disk"
    blob_budget_bytes: int = 10 * NBYTES
    call_ports: tuple[int, ...] = ()


@dataclass
class Transfer:
    """What a node gets, from the client or from another node: it ends when the test says so."""

    to: int
    path: str
    sources: tuple[int, ...] = ()
    ended: asyncio.Future[Fetched | Exception | None] = field(default_factory=asyncio.Future)


class FakeNode:
    """A node with files, and the transport to it."""

    def __init__(self, net: Net, rank: int, network: str = "a") -> None:
        self.rank = rank
        self.instance = SimpleNamespace(network=network)
        self.linked = True
        self.ready = Ready(blobs=f"10.0.0.{rank}:7", call_ports=(1,))
        self.transport = self
        self.files: set[str] = set()
        self.cuts: set[int] = set()
        self.access: Access = SSHAccess(target=SSHTarget(host="10.0.0.1"), address="10.0.0.1", workdir="/w")
        self._net = net

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        assert isinstance(data, memoryview)
        self._net.sent_bytes += data.nbytes
        await self._net.carry(Transfer(self.rank, path))
        self.files.add(path)

    async def fetch(self, order: Fetch) -> Fetched:
        sources = tuple(int(source.removesuffix(":7").rpartition(".")[2]) for source in order.sources)
        said = await self._net.carry(Transfer(self.rank, order.path, sources))
        if said is not None:
            return said
        unreached = tuple(address for rank, address in zip(sources, order.sources, strict=True) if rank in self.cuts)
        if len(unreached) == len(sources):
            return Fetched(blob_id=order.blob_id, path=order.path, error="refused", unreached=unreached)
        self.files.add(order.path)
        return Fetched(blob_id=order.blob_id, path=order.path, unreached=unreached)

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        self.files.difference_update(argv[2:])
        return Completed(exit_code=0, stdout="", stderr="")


class Net:
    """Nodes, and what is on its way between them."""

    def __init__(self) -> None:
        self.exchange = Exchange(look_again_s=0.01)
        self.exchanges = defaultdict(lambda: Exchange(look_again_s=0.01))
        self.sent_bytes = 0
        self.nodes: list[FakeNode] = []
        self.blobs: list[NodeBlobs] = []
        self.under_way: list[Transfer] = []
        self.begun: list[Transfer] = []
        self.most_from_one: Counter[int] = Counter()
        self.holding: list[asyncio.Task[None]] = []

    def add(self, count: int) -> None:
        for _ in range(count):
            self.nodes.append(FakeNode(self, len(self.nodes)))
            self.blobs.append(self.exchange.join(self.nodes[-1]))

    async def carry(self, transfer: Transfer) -> Fetched | None:
        self.under_way.append(transfer)
        self.begun.append(transfer)
        for rank, count in Counter(other.sources[0] for other in self.under_way if other.sources).items():
            self.most_from_one[rank] = max(self.most_from_one[rank], count)
        try:
            outcome = await transfer.ended
        finally:
            self.under_way.remove(transfer)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def hold(self, blob: Blob, *ranks: int) -> list[asyncio.Task[None]]:
        """Calls on these nodes need a blob; the tasks end when it is there."""

        async def use(blobs: NodeBlobs) -> None:
            blobs.release(await blobs.hold([blob]))

        tasks = [asyncio.create_task(use(self.blobs[rank])) for rank in ranks]
        self.holding += tasks
        return tasks

    async def settle(self) -> None:
        """Let everything happen that does not wait for a transfer."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def sending(self, *ranks: int) -> list[Transfer]:
        """The transfers under way, once they are those to these nodes."""

        async def probe() -> bool | None:
            return True if sorted(transfer.to for transfer in self.under_way) == sorted(ranks) else None

        await wait_until(probe, deadline_s=5, interval_s=0.002, what=f"transfers to {ranks}")
        return list(self.under_way)

    async def deliver_all(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """End every transfer well, until these calls have what they need."""
        async with asyncio.timeout(10):
            while not all(task.done() for task in tasks):
                for transfer in self.under_way:
                    if not transfer.ended.done():
                        transfer.ended.set_result(None)
                await asyncio.sleep(0)
        for task in tasks:
            task.result()

    def uploads(self) -> list[int]:
        return [transfer.to for transfer in self.begun if not transfer.sources]

    def fetches(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(transfer.to, transfer.sources) for transfer in self.begun if transfer.sources]


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    for blobs in net.blobs:
        await blobs.close()
    await asyncio.gather(*net.holding, return_exceptions=True)


async def test_nodes_that_need_a_blob_at_once_get_it_from_the_one_it_was_sent_to(net: Net) -> None:
    net.add(3)
    tasks = net.hold(blob_of(1), 0, 1, 2)
    (upload,) = await net.sending(0)
    await net.settle()
    assert net.under_way == [upload]

    upload.ended.set_result(None)
    await net.sending(1, 2)
    await net.deliver_all(tasks)
    assert net.uploads() == [0]
    assert net.fetches() == [(1, (0,)), (2, (0,))]


@pytest.mark.parametrize(
    ("access", "uploads"),
    [
        (LocalAccess(address="127.0.0.1", workdir="/w"), [0, 1]),
        (SSHAccess(target=SSHTarget(host="10.0.0.1"), address="10.0.0.1", workdir="/w"), [0]),
    ],
    ids=["local", "ssh"],
)
async def test_only_nodes_elsewhere_get_blobs_from_each_other(net: Net, access: Access, uploads: list[int]) -> None:
    for rank in (0, 1):
        node = FakeNode(net, rank)
        node.access = access
        net.nodes.append(node)
        net.blobs.append(AttachedNode(cast("Node", node), net.exchanges).blobs)
    for rank in (0, 1):
        await net.deliver_all(net.hold(blob_of(1), rank))

    assert net.uploads() == uploads


async def test_a_blob_leaves_the_client_once_for_each_network_and_once_for_each_island(net: Net) -> None:
    networks = ["a", "b", "a", "", "b", ""]
    for rank, network in enumerate(networks):
        node = FakeNode(net, rank, network)
        net.nodes.append(node)
        net.blobs.append(AttachedNode(cast("Node", node), net.exchanges).blobs)
    await net.deliver_all(net.hold(blob_of(1), *range(len(networks))))

    assert sorted(net.uploads()) == [0, 1, 3, 5]
    assert net.sent_bytes == 4 * NBYTES
    assert sorted(net.fetches()) == [(2, (0,)), (4, (1,))]


async def test_a_node_that_needs_it_later_gets_it_from_another(net: Net) -> None:
    net.add(2)
    await net.deliver_all(net.hold(blob_of(1), 1))
    await net.deliver_all(net.hold(blob_of(1), 0))

    assert (net.uploads(), net.fetches()) == ([1], [(0, (1,))])


async def test_different_blobs_are_sent_to_different_nodes_at_once(net: Net) -> None:
    net.add(2)
    tasks = net.hold(blob_of(1), 0) + net.hold(blob_of(2), 1)
    await net.sending(0, 1)
    await net.deliver_all(tasks)

    assert net.uploads() == [0, 1]


async def test_a_node_gives_a_blob_to_two_at_a_time_and_those_give_it_on(net: Net) -> None:
    net.add(16)
    tasks = net.hold(blob_of(1), *range(16))
    await net.deliver_all(tasks)

    assert net.uploads() == [0]
    assert len(net.fetches()) == 15
    assert max(net.most_from_one.values()) == 2
    assert len(net.most_from_one) >= 4
    assert all(f"/memory/{blob_of(1).id}" in node.files for node in net.nodes)


@pytest.mark.parametrize("count", [30, 300])
async def test_a_fan_out_takes_few_looks_at_other_nodes_for_each_node(net: Net, count: int) -> None:
    looks = 0

    class CountedNode(FakeNode):
        @property
        def ready(self) -> Ready:
            nonlocal looks
            looks += 1
            return self.told

        @ready.setter
        def ready(self, ready: Ready) -> None:
            self.told = ready

    for rank in range(count):
        net.nodes.append(CountedNode(net, rank))
        net.blobs.append(net.exchange.join(net.nodes[-1]))
    await net.deliver_all(net.hold(blob_of(1), *range(count)))

    assert net.uploads() == [0]
    assert looks < 40 * count


async def test_a_node_that_reaches_others_is_told_of_several_sources(net: Net) -> None:
    net.add(5)
    for number in (1, 2):
        await net.deliver_all(net.hold(blob_of(number), 0, 1, 2, 3))
        await net.deliver_all(net.hold(blob_of(number), 4))

    first, second = (sources for to, sources in net.fetches() if to == 4)
    assert (len(first), len(set(second))) == (1, 3)


async def test_a_node_that_reached_no_other_in_two_trials_tries_no_more(net: Net) -> None:
    net.add(5)
    net.nodes[4].cuts.update(range(4))
    await net.deliver_all(net.hold(blob_of(1), 0, 1, 2, 3))
    await net.deliver_all(net.hold(blob_of(1), 4))

    assert len([to for to, _ in net.fetches() if to == 4]) == 2
    assert net.uploads() == [0, 4]


async def test_a_node_that_cannot_reach_another_is_sent_the_blob_and_does_not_try_again(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    net.add(2)
    net.nodes[1].cuts.add(0)
    with caplog.at_level(logging.WARNING, "skyward"):
        for number in (1, 2, 3):
            await net.deliver_all(net.hold(blob_of(number), 0))
            await net.deliver_all(net.hold(blob_of(number), 1))

    assert net.fetches() == [(1, (0,))]
    assert net.uploads() == [0, 1, 0, 1, 0, 1]
    assert len(caplog.messages) == 1
    assert "node 1 cannot get large arguments from other nodes" in caplog.messages[0]


async def test_a_node_in_the_place_of_one_that_was_not_reached_is_tried(net: Net) -> None:
    net.add(2)
    net.nodes[1].cuts.add(0)
    await net.deliver_all(net.hold(blob_of(1), 0))
    await net.deliver_all(net.hold(blob_of(1), 1))
    net.nodes[1].cuts.clear()
    net.exchange.leave(0)
    net.nodes[0] = FakeNode(net, 0)
    net.nodes[0].ready.blobs = "10.1.0.0:7"
    net.blobs[0] = net.exchange.join(net.nodes[0])
    await net.deliver_all(net.hold(blob_of(2), 0))
    await net.deliver_all(net.hold(blob_of(2), 1))

    assert net.fetches()[-1] == (1, (0,))


async def test_where_no_node_reaches_another_each_is_sent_the_blob(net: Net) -> None:
    net.add(4)
    for node in net.nodes:
        node.cuts.update(range(4))
    await net.deliver_all(net.hold(blob_of(1), *range(4)))
    assert sorted(net.uploads()) == [0, 1, 2, 3]
    for number in (2, 3, 4):
        await net.deliver_all(net.hold(blob_of(number), *range(4)))

    assert sorted(net.uploads()) == sorted([0, 1, 2, 3] * 4)
    assert all(count <= 2 for count in Counter(to for to, _ in net.fetches()).values())
    tasks = net.hold(blob_of(5), *range(4))
    await net.sending(0, 1, 2, 3)
    await net.deliver_all(tasks)


def failed(blob: Blob) -> Fetched:
    return Fetched(blob_id=blob.id, path="", error="the source stopped in the middle")


async def test_a_node_whose_sources_fail_is_sent_the_blob(net: Net) -> None:
    net.add(2)
    blob = blob_of(1)
    await net.deliver_all(net.hold(blob, 0))
    tasks = net.hold(blob, 1)
    (fetch,) = await net.sending(1)
    fetch.ended.set_result(failed(blob))
    await net.deliver_all(tasks)

    assert net.uploads() == [0, 1]
    await net.deliver_all(net.hold(blob_of(2), 0))
    await net.deliver_all(net.hold(blob_of(2), 1))
    assert net.uploads() == [0, 1, 0], "a source that failed once is asked again for the next blob"


async def test_when_the_first_upload_fails_one_of_those_that_wait_is_sent_the_blob(net: Net) -> None:
    net.add(4)
    tasks = net.hold(blob_of(1), 0, 1, 2, 3)
    (upload,) = await net.sending(0)
    upload.ended.set_result(UnreachableError("the machine is going down"))
    (second,) = await net.sending(1)
    await net.settle()
    assert net.under_way == [second]
    await net.deliver_all(tasks[1:])

    with pytest.raises(UnreachableError):
        await tasks[0]
    assert net.uploads() == [0, 1]


@pytest.mark.parametrize("how", ["unlinked", "left"])
async def test_nobody_waits_for_an_upload_to_a_node_that_is_lost(net: Net, how: str) -> None:
    net.add(3)
    net.hold(blob_of(1), 0)
    await net.sending(0)
    tasks = net.hold(blob_of(1), 1, 2)
    await net.settle()
    if how == "left":
        net.exchange.leave(0)
    net.nodes[0].linked = False
    await net.sending(0, 1)
    (upload,) = [transfer for transfer in net.under_way if transfer.to == 1]
    upload.ended.set_result(None)
    (fetch,) = [transfer for transfer in await net.sending(0, 2) if transfer.to == 2]
    fetch.ended.set_result(None)
    await asyncio.gather(*tasks)

    assert net.uploads() == [0, 1]


async def test_a_connected_source_is_asked_before_one_that_is_away(net: Net) -> None:
    net.add(3)
    await net.deliver_all(net.hold(blob_of(1), 0, 1))
    net.nodes[0].linked = False
    await net.deliver_all(net.hold(blob_of(1), 2))

    assert net.fetches()[-1] == (2, (1,))


async def test_a_fetch_is_ordered_again_after_the_connection_was_lost(net: Net) -> None:
    net.add(2)
    await net.deliver_all(net.hold(blob_of(1), 0))
    (task,) = net.hold(blob_of(1), 1)
    (fetch,) = await net.sending(1)
    fetch.ended.set_result(UnreachableError("lost while it got a large argument"))
    with pytest.raises(UnreachableError):
        await task
    await net.deliver_all(net.hold(blob_of(1), 1))

    assert net.fetches() == [(1, (0,)), (1, (0,))]
    assert net.uploads() == [0]


async def test_a_blob_stays_where_another_node_gets_it_from(net: Net) -> None:
    net.add(2)
    blob = blob_of(1)
    net.nodes[0].ready.blob_budget_bytes = NBYTES
    await net.deliver_all(net.hold(blob, 0))
    tasks = net.hold(blob, 1)
    (fetch,) = await net.sending(1)
    other = net.hold(blob_of(2), 0)
    (upload,) = [transfer for transfer in await net.sending(0, 1) if transfer.to == 0]
    assert upload.path == f"/disk/{blob_of(2).id}"
    upload.ended.set_result(None)
    await asyncio.gather(*other)
    assert f"/memory/{blob.id}" in net.nodes[0].files
    fetch.ended.set_result(None)
    await asyncio.gather(*tasks)

    await net.deliver_all(net.hold(blob_of(3), 0))
    assert f"/memory/{blob.id}" not in net.nodes[0].files, "it may go once the other node has it"


async def test_a_node_without_room_in_memory_gets_the_blob_onto_its_disk(net: Net) -> None:
    net.add(2)
    blob = blob_of(1)
    await net.deliver_all(net.hold(blob, 0))
    tasks = net.hold(blob, 1)
    (fetch,) = await net.sending(1)
    full = Fetched(blob_id=blob.id, path=fetch.path, error="no space left on device", errno=errno.ENOSPC)
    fetch.ended.set_result(full)
    await net.deliver_all(tasks)

    assert net.nodes[1].files == {f"/disk/{blob.id}"}
    assert net.uploads() == [0]


async def test_a_blob_that_a_node_has_not_after_all_comes_from_another(net: Net) -> None:
    net.add(2)
    blob = blob_of(1)
    await net.deliver_all(net.hold(blob, 0, 1))
    net.blobs[0].forget([blob.id])
    await net.deliver_all(net.hold(blob, 0))

    assert net.uploads() == [0]
    assert net.fetches() == [(1, (0,)), (0, (1,))]


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_fails_every_node_has_the_blob_at_last(net: Net, seed: int) -> None:
    """Transfers end in any order, well or badly; nodes lose and regain their connection."""
    import random

    draw = random.Random(seed)
    net.add(6)
    blobs = [blob_of(number) for number in range(3)]

    async def insist(rank: int, blob: Blob) -> None:
        while True:
            try:
                net.blobs[rank].release(await net.blobs[rank].hold([blob]))
            except UnreachableError:
                await asyncio.sleep(0)
            else:
                return

    def outcome(transfer: Transfer) -> Fetched | Exception | None:
        if draw.random() > 0.4:
            return None
        if draw.random() < 0.5 or not transfer.sources:
            return UnreachableError("lost")
        return Fetched(blob_id="", path="", error="stopped", unreached=("10.0.0.3:7",) if draw.random() < 0.5 else ())

    tasks = [asyncio.create_task(insist(rank, blob)) for blob in blobs for rank in range(6)]
    net.holding += tasks
    async with asyncio.timeout(20):
        while not all(task.done() for task in tasks):
            open_ones = [transfer for transfer in net.under_way if not transfer.ended.done()]
            if open_ones:
                chosen = draw.choice(open_ones)
                chosen.ended.set_result(outcome(chosen))
            draw.choice(net.nodes).linked = draw.random() < 0.8
            await asyncio.sleep(0)

    assert all(node.files == {f"/memory/{blob.id}" for blob in blobs} for node in net.nodes)
    assert all(stored.users == 0 for blobs_of in net.blobs for stored in blobs_of._stored.values())
