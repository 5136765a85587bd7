"""Links over real TLS connections on loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skyward.base.waiting import wait_until
from skyward.scheduling.certificates import issue
from skyward.wire.frames import TlsIdentity, client_context, server_context, write_frame
from skyward.wire.lane import BrokenSessionError, Connection, Link, MessageError, Session, turn_to_dial
from skyward.wire.messages import EmittedEvent, PrintedLines, ResultChunk


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
    return here, there


@asynccontextmanager
async def connected(identity: TlsIdentity) -> AsyncIterator[tuple[Connection, Connection]]:
    here, there = sockets()
    client = Connection(here, client_context(identity))
    server = Connection(there, server_context(identity), server_side=True)
    try:
        await asyncio.gather(client.handshake(), server.handshake())
        yield client, server
    finally:
        client.close()
        server.close()


async def test_a_connection_takes_little_memory(identity: TlsIdentity) -> None:
    """A client of a thousand workers has a thousand."""
    async with connected(identity) as (client, server):  # and what is made once
        client.write("hello")
        client.send()
        await until(lambda: server.receive() == ["hello"])
    tracemalloc.start()
    try:
        async with connected(identity) as (client, server):
            client.write("hello")
            client.send()
            await until(lambda: server.receive() == ["hello"])
            taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken_bytes / 2 < 128 << 10


@pytest.mark.parametrize("silent", [False, True])
async def test_connections_are_opened_in_turns_which_silent_peers_do_not_keep(
    identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch, *, silent: bool
) -> None:
    monkeypatch.setattr("skyward.wire.lane._TURN_S", 0.01 if silent else 60.0)
    context, answered, opening = client_context(identity), asyncio.Event(), 0

    async def dial() -> None:
        nonlocal opening
        async with turn_to_dial(context):
            opening += 1
            await answered.wait()

    dialling = [asyncio.ensure_future(dial()) for _ in range(600)]
    await until(lambda: opening == (600 if silent else 256))
    answered.set()
    await asyncio.gather(*dialling)

    assert opening == 600


async def test_the_last_message_of_a_peer_that_ends_the_connection_counts(identity: TlsIdentity) -> None:
    ended = asyncio.Event()

    async def say_goodbye(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write_frame(writer, {"kind": "Ending"})
        writer.close()
        ended.set()

    async with await asyncio.start_server(say_goodbye, "127.0.0.1", 0, ssl=server_context(identity)) as server:
        client = Connection(socket.socket(), client_context(identity))
        await client.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await client.handshake()
        await ended.wait()
        await asyncio.sleep(0.05)  # both arrive in one read

        assert await client.next_message() == {"kind": "Ending"}
        with pytest.raises(ConnectionResetError):
            await client.next_message()
        client.close()


async def until(true: Callable[[], bool]) -> None:
    async def probe() -> bool | None:
        return true() or None

    await wait_until(probe, deadline_s=20, interval_s=0.002, what="the other end")


def _as_list(value: Any) -> Any:
    return [_as_list(entry) for entry in value] if isinstance(value, tuple) else value


class End:
    """One end of a lane."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.link = Link(Session(), self.take)

    def take(self, items: Sequence[Any]) -> None:
        self.got += map(_as_list, items)

    def say(self, *items: Any, bulk: bool = False) -> None:
        for item in items:
            self.link.session.push(item, 4 << 20 if bulk else 64, bulk=bulk)
        self.link.flush()


@asynccontextmanager
async def linked(identity: TlsIdentity, here: End, there: End) -> AsyncIterator[None]:
    """One connection between two ends, which tell each other first what they have seen."""
    async with connected(identity) as (client, server):
        here.link.session.resume(there.link.session.seen)
        there.link.session.resume(here.link.session.seen)
        running = [asyncio.ensure_future(here.link.run(client)), asyncio.ensure_future(there.link.run(server))]
        await asyncio.sleep(0)
        try:
            yield
        finally:
            here.link.abort()
            await asyncio.gather(*running)


@pytest.mark.parametrize("size", [0, 100, 20_000, 9_000_000])
async def test_messages_of_any_size_arrive_whole(identity: TlsIdentity, size: int) -> None:
    async with connected(identity) as (client, server):
        asking = asyncio.ensure_future(client.exchange(["question", b"x" * size]))
        assert await server.next_message() == ("question", b"x" * size)
        await asking


async def test_texts_that_have_no_utf_8_form_arrive(identity: TlsIdentity) -> None:
    """The text of an exception may be anything, and the name of a file on Linux."""
    async with connected(identity) as (client, server):
        asking = asyncio.ensure_future(client.exchange(["\ud800", "caf\udce9"]))
        assert await server.next_message() == ("\ud800", "caf\udce9")
        await asking


async def test_what_follows_the_next_message_at_once_is_not_lost(identity: TlsIdentity) -> None:
    async with connected(identity) as (client, server):
        client.write("greeting")
        client.write("more")
        await client.exchange("and more")
        assert await server.next_message() == "greeting"
        assert server.receive() == ["more", "and more"]


async def test_a_peer_of_another_pool_does_not_get_in(identity: TlsIdentity) -> None:
    here, there = sockets()
    client = Connection(here, client_context(issue()))
    server = Connection(there, server_context(identity), server_side=True)

    async def meet(end: Connection) -> None:
        try:
            await end.handshake()
        finally:
            end.close()

    outcomes = await asyncio.gather(meet(client), meet(server), return_exceptions=True)
    assert all(isinstance(outcome, OSError) for outcome in outcomes), outcomes


async def test_an_announcement_of_too_much_ends_the_connection(identity: TlsIdentity) -> None:
    async with connected(identity) as (client, server):
        client._tls.write(struct.pack("!I", 1 << 31))
        assert client.send()
        with pytest.raises(MessageError, match="2147483648 bytes"):
            await server.next_message()


async def test_items_pushed_by_many_threads_arrive_once_each_however_often_the_link_is_cut(
    identity: TlsIdentity,
) -> None:
    here, there = End(), End()
    pause = threading.Event()
    cuts = 0

    def speak(writer: int) -> None:
        for number in range(2000):
            here.say(["from", writer, number, b"." * (number % 700)])
            while cuts < number // 500:  # the last items are not said before the link was cut three times
                pause.wait(0.002)

    threads = [threading.Thread(target=speak, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    while len(there.got) < 6000 and cuts < 500:
        async with linked(identity, here, there):
            await asyncio.sleep(0.02)
        cuts += 1
    for thread in threads:
        thread.join()
    assert cuts > 3
    for writer in range(3):
        assert [number for _, who, number, _ in there.got if who == writer] == list(range(2000))


async def test_large_items_wait_for_the_reader_and_small_ones_pass_them(identity: TlsIdentity) -> None:
    here, there = End(), End()
    async with linked(identity, here, there):
        here.say(*[[ResultChunk.CODE, 1, 0, 0, number, bytes(4 << 20)] for number in range(20)], bulk=True)
        here.say([PrintedLines.CODE, 0, []])
        await until(lambda: len(there.got) == 21)
        await until(lambda: here.link.session.drained)
    kinds = [item[0] for item in there.got]
    assert kinds.index(PrintedLines.CODE) < 20
    assert [item[4] for item in there.got if item[0] == ResultChunk.CODE] == list(range(20))


async def test_both_ends_talk_at_the_same_time(identity: TlsIdentity) -> None:
    here, there = End(), End()
    async with linked(identity, here, there):
        here.say(*[[ResultChunk.CODE, 1, 0, 0, n, bytes(4 << 20)] for n in range(8)], bulk=True)
        there.say(*[[ResultChunk.CODE, 1, 0, 0, n, bytes(4 << 20)] for n in range(8)], bulk=True)
        await until(lambda: len(there.got) == len(here.got) == 8)


async def test_a_peer_that_skips_items_ends_the_link_with_an_error(identity: TlsIdentity) -> None:
    end = End()
    async with connected(identity) as (client, server):
        client.write([5, 0, [["item five"]]])
        assert client.send()
        with pytest.raises(BrokenSessionError, match="expected item 1, got 5"):
            await end.link.run(server)


async def test_items_that_cannot_be_handled_do_not_end_the_link(
    identity: TlsIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = End(), End()

    def refuse(items: list[Any]) -> None:
        if items == [("bad",)]:
            raise ValueError("what is this?")
        there.take(items)

    there.link = Link(Session(), refuse)
    async with linked(identity, here, there):
        here.say(["bad"])
        await until(lambda: there.link.session.seen == 1)
        here.say(["good"])
        await until(lambda: there.got == [["good"]])
    assert "what is this?" in caplog.text


async def test_a_finalizer_may_print_in_a_thread_that_reads_or_writes_at_that_moment(identity: TlsIdentity) -> None:
    here, there = End(), End()
    async with linked(identity, here, there):
        with here.link._lock:  # as the garbage collector may find it
            printing = threading.Thread(target=here.link.session.push, args=([PrintedLines.CODE, 0, []],), daemon=True)
            printing.start()
            printing.join(10)
            assert not printing.is_alive()
        here.link.flush()
        await until(lambda: there.got == [[PrintedLines.CODE, 0, []]])


@pytest.mark.parametrize("eager", [False, True])
async def test_a_thread_reads_in_place_of_the_loop_and_is_woken(identity: TlsIdentity, eager: bool) -> None:
    here, there = End(), End()
    readers: set[str] = set()
    there.link._on_items = lambda items: (readers.add(threading.current_thread().name), there.take(items))
    woken, waker = os.pipe()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if there.link.read_in_turn(woken, None, eager=eager):
                os.read(woken, 1)

    async with connected(identity) as (client, server):
        running = [
            asyncio.ensure_future(here.link.run(client)),
            asyncio.ensure_future(there.link.run(server, by_turns=True)),
        ]
        await asyncio.sleep(0)
        thread = threading.Thread(target=read, name="reader")
        thread.start()
        for number in range(500):
            here.say([EmittedEvent.CODE, number, b""])
            await until(lambda: len(there.got) == number + 1)  # noqa: B023
        over.set()
        os.write(waker, b"!")
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
        here.say([EmittedEvent.CODE, 500, b""])  # the loop reads on
        await until(lambda: len(there.got) == 501)
        here.link.abort()
        await asyncio.gather(*running)
    assert [item[1] for item in there.got] == list(range(501))
    assert "reader" in readers
    os.close(woken)
    os.close(waker)
