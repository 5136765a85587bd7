"""Lanes to workers that are slow to come up, over real sockets."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from skyward.engine.certificates import issue
from skyward.engine.dispatch import WorkerId
from skyward.engine.lane import Lane
from skyward.node.lane import LaneServer
from skyward.wire.frames import client_context, server_context
from skyward.wire.session import Item


class Owner:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.linked, self.unlinked = asyncio.Event(), asyncio.Event()

    def lane_up(self, lane: Lane) -> None:
        self.events.append("up")

    def lane_linked(self, lane: Lane, *, linked: bool) -> None:
        self.events.append("linked" if linked else "unlinked")
        (self.linked if linked else self.unlinked).set()

    def lane_lost(self, lane: Lane) -> None:
        self.events.append("lost")

    def lane_items(self, lane: Lane, items: Sequence[Item]) -> None:
        raise AssertionError("nobody sends anything")


async def refuse_in_every_way(listening: socket.socket, times: int) -> None:
    """Reset connections at once, after a moment, in the middle of the handshake; or hang up in peace."""
    loop = asyncio.get_running_loop()
    for turn in range(times):
        sock, _ = await loop.sock_accept(listening)
        with sock:
            sock.settimeout(0)
            if turn % 4:
                await asyncio.sleep(random.random() * 0.003)
            if turn % 4 > 1:
                with suppress(OSError):
                    await loop.sock_recv(sock, 100)
            if turn % 4 == 3:
                with suppress(OSError):
                    await loop.sock_sendall(sock, b"\x16\x03\x03")
            if turn % 2 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("incarnations", [1, 2])
async def test_a_lane_outlasts_every_way_in_which_a_dial_can_fail(incarnations: int, tmp_path: Path) -> None:
    identity = issue()
    owner = Owner()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        listening.settimeout(0)
        host, port = listening.getsockname()
        lane = Lane(WorkerId(0, 0), f"{host}:{port}", client_context(identity), owner)
        try:
            for incarnation in range(incarnations):
                refusing = asyncio.ensure_future(refuse_in_every_way(listening, 40))
                while not refusing.done():
                    lane.nudge()
                    await asyncio.sleep(0.002)
                server = LaneServer(incarnation=str(incarnation), blob_dirs=[tmp_path])
                serving = asyncio.ensure_future(server.serve(listening, server_context(identity)))
                async with asyncio.timeout(20):
                    await owner.linked.wait()
                owner.linked.clear()
                assert lane.incarnation == str(incarnation)
                serving.cancel()
                server.close()
                async with asyncio.timeout(20):
                    await owner.unlinked.wait()
                owner.unlinked.clear()
        finally:
            await lane.close()
    again = ["lost", "up", "linked", "unlinked"]
    assert owner.events == ["up", "linked", "unlinked"] + again * (incarnations - 1)
