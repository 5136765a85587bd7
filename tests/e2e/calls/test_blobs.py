"""Large arguments between real nodes: supervisors on this machine, reached as if they were elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from skyward.environment.image import Image
from skyward.fleet.node import Node
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.scheduling.certificates import issue
from skyward.shipping.blobs import Blob, Exchange, NodeBlobs, identify
from skyward.submission import ArgumentMemo
from skyward.wire.control import Fetch, Fetched, Message, Ping, Pong, from_frame, to_frame
from skyward.wire.frames import TlsIdentity, client_context, read_frame, write_frame
from skyward.wire.node_config import NodeConfig
from support.nodes import open_node

DEADLINE_S = 60.0
MIB = 1 << 20


class CountingTransport:
    """The transport to this machine, and how many bytes of blobs went over it."""

    def __init__(self, access: LocalAccess) -> None:
        self._inner = LocalTransport(access)
        self.blob_bytes = 0

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        if isinstance(data, memoryview):
            self.blob_bytes += data.nbytes
        await self._inner.put(data, path, mode=mode)

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        return await self._inner.run(argv, env=env, stdin=stdin, timeout_s=timeout_s)

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        return await self._inner.forward(host, port)

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Nodes:
    """Nodes whose workers were never told to start."""

    tls: TlsIdentity
    handles: list[Node] = field(default_factory=list)
    blobs: list[NodeBlobs] = field(default_factory=list)
    heard: list[tuple[int, Message]] = field(default_factory=list)

    async def hold(self, blob: Blob, *ranks: int) -> list[Path]:
        async with asyncio.timeout(DEADLINE_S):
            held = await asyncio.gather(*(self.blobs[rank].hold([blob]) for rank in ranks))
        return [Path(stored.path) for (stored,) in held]

    def blob_bytes(self) -> list[int]:
        return [node.transport.blob_bytes for node in self.handles]  # type: ignore[attr-defined]

    def fetched(self) -> list[int]:
        return sorted(rank for rank, message in self.heard if isinstance(message, Fetched))


@asynccontextmanager
async def running(count: int, folder: Path) -> AsyncIterator[Nodes]:
    tls, pool, exchange = issue(), f"e2e-{uuid.uuid4().hex[:12]}", Exchange()
    nodes = Nodes(tls)

    def handle(rank: int) -> Node:
        access = LocalAccess(address=f"127.61.8.{rank + 1}", workdir=str(folder / f"node{rank}"))
        instance = Instance(
            id=f"{pool}-{rank}",
            key="key",
            state=InstanceState.RUNNING,
            offer=Offer(spec=InstanceSpec(name="here", cpu=1, memory_gib=1)),
            access=access,
        )
        return open_node(
            instance,
            rank=rank,
            transport=CountingTransport(access),
            on_message=lambda node, message: nodes.heard.append((node.rank, message)),
        )

    def config(node: Node) -> NodeConfig:
        return NodeConfig(
            pool_id=pool,
            instance_id=node.instance.id,
            node=node.rank,
            total_nodes=count,
            workers=1,
            head=False,
            address=node.access.address,
            workdir=node.access.workdir,
            env={},
            tls_ca=tls.ca,
            tls_cert=tls.cert,
            tls_key=tls.key,
            lease_s=5.0,
            collect_metrics=False,
        )

    nodes.handles += [handle(rank) for rank in range(count)]
    for node in nodes.handles:
        await node.prepare(Image(), lambda step: None)
    try:
        await asyncio.gather(*(node.start(config(node)) for node in nodes.handles))
        nodes.blobs += [exchange.join(node) for node in nodes.handles]
        yield nodes
    finally:
        for blobs in nodes.blobs:
            await blobs.close()
        await asyncio.gather(*(node.stop(DEADLINE_S) for node in nodes.handles))


def blob_of(nbytes: int) -> Blob:
    array = np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype="u1")
    (blob,) = identify([memoryview(array)], ArgumentMemo())
    return blob


def left_half_done(path: Path) -> list[str]:
    return [name for name in os.listdir(path.parent) if path.name in name and name != path.name]


async def test_the_client_sends_a_blob_once_and_every_node_has_it(tmp_path: Path) -> None:
    blob = blob_of(24 * MIB + 5)
    async with running(3, tmp_path) as nodes:
        paths = await nodes.hold(blob, 0, 1, 2)

        assert sorted(nodes.blob_bytes()) == [0, 0, blob.view.nbytes]
        assert len(set(paths)) == 3
        assert all(path.read_bytes() == blob.view for path in paths)
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert not [name for path in paths for name in left_half_done(path)]
        assert len(nodes.fetched()) == 2
        await pings_are_answered_while_a_blob_is_on_its_way(nodes)
    assert not any(path.exists() for path in paths)


async def pings_are_answered_while_a_blob_is_on_its_way(nodes: Nodes) -> None:
    blob = blob_of(40 * MIB)
    await nodes.hold(blob, 0)
    giver, getter = (nodes.handles[rank].ready for rank in (0, 1))
    order = Fetch(blob_id=blob.id, nbytes=blob.view.nbytes, path=f"{getter.blob_dir}/{blob.id}", sources=(giver.blobs,))
    host, _, port = getter.control.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(nodes.tls))
    write_frame(writer, to_frame(order))
    pongs = 0
    async with asyncio.timeout(DEADLINE_S):
        write_frame(writer, to_frame(Ping(n=0)))
        while not isinstance(message := from_frame(await read_frame(reader)), Fetched):
            if isinstance(message, Pong):
                pongs += 1
                write_frame(writer, to_frame(Ping(n=pongs)))
    writer.transport.abort()

    assert message.error == ""
    assert pongs >= 5


async def test_a_node_whose_source_was_killed_is_sent_the_blob(tmp_path: Path) -> None:
    first, second = blob_of(2 * MIB), blob_of(3 * MIB)
    async with running(2, tmp_path) as nodes:
        await nodes.hold(first, 0)
        await nodes.hold(second, 0, 1)
        killed = nodes.handles[0]
        os.kill(killed.ready.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await killed.wait_gone()
        (path,) = await nodes.hold(first, 1)
        shutil.rmtree(killed.ready.blob_dir)

        assert path.read_bytes() == first.view
        assert nodes.blob_bytes() == [5 * MIB, 2 * MIB]
        assert nodes.fetched() == [1, 1]
