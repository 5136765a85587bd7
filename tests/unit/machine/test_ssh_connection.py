from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from skyward.errors import AuthenticationError, UnreachableError
from skyward.machine import ssh_connection
from skyward.machine.paramiko_parts import StaleConnectionError
from skyward.machine.ssh_config import SSHTarget
from skyward.machine.ssh_connection import SSHConnections
from skyward.machine.ssh_login import Dial, SSHSession
from skyward.wire.node_config import HANDSHAKE_S

TARGET = SSHTarget(host="box", config_path="/dev/null")
DEADLINE_S = 10.0


class FakeClient:
    """A connection that is there until it is lost."""

    def __init__(self) -> None:
        self.active = True

    def is_active(self) -> bool:
        return self.active

    def close(self) -> None:
        self.active = False

    def join(self, timeout: float | None = None) -> None:
        pass


class FakeSocket:
    def __init__(self) -> None:
        self.on_idle: Callable[[], bool] | None = None
        self.reason = ""

    def close(self) -> None:
        pass


class Machine:
    """Hands out connections once it may, and counts them."""

    def __init__(self) -> None:
        self.clients: list[FakeClient] = []
        self.may = threading.Event()
        self.may.set()
        self.failures: list[Exception] = []

    async def connect(
        self, target: SSHTarget, by_jump: Dial | None, report: Callable[[str], None], gate: threading.Lock
    ) -> SSHSession:
        assert await asyncio.to_thread(self.may.wait, DEADLINE_S)
        self.clients.append(FakeClient())
        if self.failures:
            raise self.failures.pop(0)
        return SSHSession(client=cast("Any", self.clients[-1]), socket=cast("Any", FakeSocket()))


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def links(machine: Machine) -> Iterator[SSHConnections]:
    links = SSHConnections(machine.connect)
    held = links.acquire((TARGET,))
    yield links
    links.release(held)


def who(links: SSHConnections) -> Future[object]:
    link = links.acquire((TARGET,))
    try:
        return link.perform(lambda client: client)
    finally:
        links.release(link)


def test_all_who_ask_meanwhile_share_one_attempt(links: SSHConnections, machine: Machine) -> None:
    machine.may.clear()
    answers = [who(links) for _ in range(20)]
    machine.may.set()

    assert {answer.result(DEADLINE_S) for answer in answers} == set(machine.clients)
    assert len(machine.clients) == 1


def test_lost_connection_is_made_again_by_the_next_use(links: SSHConnections, machine: Machine) -> None:
    first = who(links).result(DEADLINE_S)
    machine.clients[0].active = False

    assert who(links).result(DEADLINE_S) is machine.clients[1]
    assert first is machine.clients[0]


def test_who_finds_the_connection_stale_gets_another_once(links: SSHConnections, machine: Machine) -> None:
    link = links.acquire((TARGET,))
    used: list[object] = []

    def use(client: object) -> str:
        used.append(client)
        if client is machine.clients[0]:
            machine.clients[0].active = False
            raise StaleConnectionError("it has just ended")
        return "done"

    def never(_client: object) -> None:
        machine.clients[-1].active = False
        raise StaleConnectionError("again")

    assert link.perform(use).result(DEADLINE_S) == "done"
    assert used == machine.clients
    with pytest.raises(StaleConnectionError, match="again"):
        link.perform(never).result(DEADLINE_S)
    assert len(machine.clients) == 3
    links.release(link)


def test_failure_is_told_to_all_and_tried_again_later(links: SSHConnections, machine: Machine) -> None:
    machine.failures.append(UnreachableError("not there"))
    machine.may.clear()
    answers = [who(links) for _ in range(3)]
    machine.may.set()

    for answer in answers:
        with pytest.raises(UnreachableError, match="not there"):
            answer.result(DEADLINE_S)
    assert who(links).result(DEADLINE_S) is machine.clients[1]


def test_refusal_is_not_asked_for_again_at_once(links: SSHConnections, machine: Machine) -> None:
    machine.failures += [AuthenticationError("go away"), AuthenticationError("I said go away")]

    for _ in range(5):
        with pytest.raises(AuthenticationError, match=r"^go away$"):
            who(links).result(DEADLINE_S)
    assert len(machine.clients) == 1


def test_closing_answers_everybody_who_still_waits(machine: Machine) -> None:
    links = SSHConnections(machine.connect)
    link = links.acquire((TARGET,))
    busy = threading.Barrier(5)
    release = threading.Event()

    def hold(_client: object) -> bool:
        busy.wait(DEADLINE_S)
        return release.wait(DEADLINE_S)

    held = [link.perform(hold) for _ in range(4)]
    waiting = [link.perform(lambda client: client) for _ in range(10)]
    busy.wait(DEADLINE_S)
    closer = threading.Thread(target=links.release, args=(link,))
    closer.start()
    assert not wait([*held, *waiting], DEADLINE_S).not_done
    release.set()
    closer.join()

    for future in (*held, *waiting):
        assert isinstance(future.exception(), UnreachableError)
    with pytest.raises(UnreachableError, match="was closed"):
        link.perform(lambda client: client).result(DEADLINE_S)
    with pytest.raises(UnreachableError, match="was closed"):
        link.listen("127.0.0.1", 1)
    assert not machine.clients[0].active


def test_equal_ways_share_a_link_until_the_last_user_leaves(machine: Machine) -> None:
    links = SSHConnections(machine.connect)
    one, two = links.acquire((TARGET,)), links.acquire((SSHTarget(host="box", config_path="/dev/null"),))
    other = links.acquire((SSHTarget(host="gate"), TARGET))

    assert one is two
    assert one is not other
    links.release(one)
    assert two.perform(lambda client: client).result(DEADLINE_S)
    links.release(two)
    links.release(other)
    fresh = links.acquire((TARGET,))
    assert fresh is not one
    links.release(fresh)


def test_connection_to_a_forward_is_reset_when_the_machine_is_not_to_be_had(
    links: SSHConnections, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="skyward")
    link = links.acquire((TARGET,))
    machine.failures.append(UnreachableError("not there"))

    place = link.listen("127.0.0.1", 9)
    with pytest.raises(ConnectionError), socket.create_connection(place, DEADLINE_S) as sock:
        assert not sock.recv(1)
    links.release(link)
    told = [record.levelname for record in caplog.records if "does not answer" in record.getMessage()]
    assert told == ["DEBUG"]  # a node that starts is dialled several times: programs that log INFO do not show it


def test_forwarded_connections_that_never_open_delay_others_for_seconds_only(
    links: SSHConnections, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load a machine may answer no request for a channel; the next dials, which it would answer, wait behind."""
    assert ssh_connection._OPENING_S <= HANDSHAKE_S
    monkeypatch.setattr(ssh_connection, "_OPENING_S", 0.2)
    opened = threading.Event()

    def open_channel(_: Any, kind: str, destination: tuple[str, int], *rest: Any, timeout: float, **more: Any) -> None:
        if destination[1] == 9:
            threading.Event().wait(timeout)
        else:
            opened.set()
        raise paramiko.SSHException("no channel")

    monkeypatch.setattr(FakeClient, "open_channel", open_channel, raising=False)
    link = links.acquire((TARGET,))
    silent, good = link.listen("127.0.0.1", 9), link.listen("127.0.0.1", 10)
    with ExitStack() as dialled:
        for place in (silent, silent, good):
            dialled.enter_context(socket.create_connection(place, DEADLINE_S))
        assert opened.wait(DEADLINE_S)
    links.release(link)


def test_an_attempt_at_a_machine_that_stays_silent_ends_when_it_is_stopped() -> None:
    key = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with socket.create_server(("127.0.0.1", 0)) as machine:
        port = machine.getsockname()[1]
        target = SSHTarget(
            host="127.0.0.1",
            port=port,
            user="me",
            host_keys=(key,),
            config_path="/dev/null",
            patience_s=60,
            silence_s=3,
        )
        links = SSHConnections()
        link = links.acquire((target,))
        attempt = link.perform(lambda client: client)
        connection, _ = machine.accept()
        began = time.monotonic()
        with connection:
            links.release(link)

    assert time.monotonic() - began < DEADLINE_S
    assert isinstance(attempt.exception(), UnreachableError)


def test_a_moved_machine_is_dialled_at_its_new_address_only_and_its_forwards_keep_their_ports() -> None:
    """An attempt at the former address, which nobody answers, ends at once."""
    dialled: list[str] = []
    dialling = threading.Event()

    async def connect(target: SSHTarget, *_: object) -> SSHSession:
        dialled.append(target.host)
        dialling.set()
        if target == TARGET:
            await asyncio.Event().wait()
        return SSHSession(client=cast("Any", FakeClient()), socket=cast("Any", FakeSocket()))

    links, moved = SSHConnections(connect), replace(TARGET, host="elsewhere")
    link = links.acquire((TARGET,))
    try:
        port = link.listen("127.0.0.1", 9)
        waiting = link.perform(lambda client: client)
        assert dialling.wait(DEADLINE_S)
        links.move(link, moved)
        with pytest.raises(UnreachableError, match="has another address now"):
            waiting.result(DEADLINE_S)

        assert link.perform(FakeClient.is_active).result(DEADLINE_S)  # type: ignore[arg-type]
        assert (dialled, link.target) == (["box", "elsewhere"], moved)
        assert link.listen("127.0.0.1", 9) == port
        assert links.acquire((moved,)) is link
        other = links.acquire((TARGET,))
        assert other is not link, "another machine may have the former address by now"
        links.release(other)
        links.release(link)
    finally:
        links.release(link)


def test_an_attempt_at_the_new_address_is_not_ended_for_the_former_one() -> None:
    async def connect(*_: object) -> SSHSession:
        await asyncio.sleep(0)
        return SSHSession(client=cast("Any", FakeClient()), socket=cast("Any", FakeSocket()))

    async def use() -> object:
        return await link.use(lambda client: client)

    def move_as_somebody_asks() -> None:
        asking.append(asyncio.ensure_future(use()))
        links.move(link, replace(TARGET, host="elsewhere"))
        asking[0].add_done_callback(lambda _: asked.set())

    links, asking, asked = SSHConnections(connect), list[asyncio.Future[object]](), threading.Event()
    link = links.acquire((TARGET,))
    try:
        link.request(move_as_somebody_asks)
        assert asked.wait(DEADLINE_S)
        assert isinstance(asking[0].result(), FakeClient)
    finally:
        links.release(link)


def test_connection_whose_loop_has_ended_is_replaced(links: SSHConnections, machine: Machine) -> None:
    link = links.acquire((TARGET,))
    links.release(link)
    who(links).result(DEADLINE_S)
    link.listen("127.0.0.1", 9)
    link._loop_thread.end()  # as it does when user code closes its descriptors

    with pytest.raises(UnreachableError, match="descriptors were closed"):
        link.perform(lambda client: client).result(DEADLINE_S)
    with pytest.raises(UnreachableError, match="descriptors were closed"):
        link.listen("127.0.0.1", 9)
    successor = links.acquire((TARGET,))
    try:
        assert who(links).result(DEADLINE_S) is machine.clients[1]
    finally:
        links.release(successor)
