"""Nodes give each other their blobs, and nothing else, to nobody else."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import ssl
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from skyward.node.storage.blob_port import BlobPort
from skyward.scheduling.certificates import issue
from skyward.wire.control import Fetch, Fetched
from skyward.wire.frames import TlsIdentity, client_context, read_frame, server_context, write_frame

ADDRESS = "127.83.2.1"
NOBODY = "127.83.2.9:9"
MIB = 1 << 20
CONTENT = random.Random(5).randbytes(MIB) * 5 + b"and a bit"
BLOB_ID = blake3(CONTENT).hexdigest()


class Place:
    """A node's blob port with a folder in memory and one on disk."""

    def __init__(self, port: BlobPort, address: str, folders: tuple[Path, Path]) -> None:
        self.port = port
        self.address = address
        self.memory, self.disk = folders
        self.answers: asyncio.Queue[Fetched] = asyncio.Queue()

    async def fetch(self, *sources: str, path: Path | None = None, blob_id: str = BLOB_ID) -> Fetched:
        self.begin(*sources, path=path, blob_id=blob_id)
        return await self.answer()

    def begin(self, *sources: str, path: Path | None = None, blob_id: str = BLOB_ID) -> None:
        order = Fetch(blob_id=blob_id, nbytes=len(CONTENT), path=str(path or self.memory / blob_id), sources=sources)
        self.port.fetch(order, self.answers.put_nowait)

    async def answer(self) -> Fetched:
        async with asyncio.timeout(20):
            return await self.answers.get()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.memory) + os.listdir(self.disk))


MakePlace = Callable[[], Awaitable[Place]]


@pytest.fixture(scope="module")
def identity() -> TlsIdentity:
    return issue()


@pytest.fixture
async def make_place(identity: TlsIdentity, tmp_path: Path) -> AsyncIterator[MakePlace]:
    ports: list[BlobPort] = []

    async def make() -> Place:
        folders = (tmp_path / f"memory{len(ports)}", tmp_path / f"disk{len(ports)}")
        for folder in folders:
            folder.mkdir(mode=0o700)
        port = BlobPort(identity, patience_s=5.0)
        ports.append(port)
        port.folders = tuple(map(str, folders))
        return Place(port, f"{ADDRESS}:{await port.listen(ADDRESS)}", folders)

    yield make
    for port in ports:
        await port.close()


@pytest.fixture
async def giver(make_place: MakePlace) -> Place:
    place = await make_place()
    (place.disk / BLOB_ID).write_bytes(CONTENT)
    return place


@pytest.fixture
async def getter(make_place: MakePlace) -> Place:
    return await make_place()


@asynccontextmanager
async def source_that(
    act: Callable[[asyncio.StreamWriter], Awaitable[None]], identity: TlsIdentity
) -> AsyncIterator[str]:
    """A source that answers a request as it likes, then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        await act(writer)
        writer.close()

    server = await asyncio.start_server(serve, ADDRESS, 0, ssl=server_context(identity))
    async with server:
        yield f"{ADDRESS}:{server.sockets[0].getsockname()[1]}"


async def test_a_blob_arrives_whole_for_its_owner_alone(giver: Place, getter: Place) -> None:
    answer = await getter.fetch(giver.address)

    assert answer == Fetched(blob_id=BLOB_ID, path=str(getter.memory / BLOB_ID))
    assert (getter.memory / BLOB_ID).read_bytes() == CONTENT
    assert stat.S_IMODE((getter.memory / BLOB_ID).stat().st_mode) == 0o600
    assert getter.names() == [BLOB_ID]


async def test_a_blob_goes_to_the_folder_that_was_asked_for(giver: Place, getter: Place) -> None:
    answer = await getter.fetch(giver.address, path=getter.disk / BLOB_ID)

    assert not answer.error
    assert (getter.disk / BLOB_ID).read_bytes() == CONTENT


async def test_several_nodes_get_a_blob_at_once(giver: Place, make_place: MakePlace) -> None:
    getters = [await make_place() for _ in range(4)]
    answers = await asyncio.gather(*(getter.fetch(giver.address) for getter in getters))

    assert [answer.error for answer in answers] == [""] * 4


async def test_who_got_a_blob_gives_it(giver: Place, getter: Place, make_place: MakePlace) -> None:
    third = await make_place()
    await getter.fetch(giver.address)
    await giver.port.close()

    assert not (await third.fetch(getter.address)).error


async def test_a_blob_that_is_there_is_not_fetched_again(giver: Place) -> None:
    assert not (await giver.fetch(path=giver.disk / BLOB_ID)).error


async def test_an_order_given_twice_is_done_and_answered_once(getter: Place, identity: TlsIdentity) -> None:
    asked, go = asyncio.Queue[None](), asyncio.Event()

    async def send_later(writer: asyncio.StreamWriter) -> None:
        asked.put_nowait(None)
        await go.wait()
        write_frame(writer, {"nbytes": len(CONTENT)})
        writer.write(CONTENT)

    async with source_that(send_later, identity) as slow:
        getter.begin(slow)
        await asked.get()
        getter.begin(slow)
        getter.begin(slow, path=getter.disk / BLOB_ID)
        await asked.get()
        go.set()
        answers = [await getter.answer(), await getter.answer()]

    assert {answer.path for answer in answers} == {str(folder / BLOB_ID) for folder in (getter.memory, getter.disk)}
    assert getter.answers.empty()
    assert asked.empty()


async def test_the_next_source_is_asked_when_one_cannot_be_reached(giver: Place, getter: Place) -> None:
    answer = await getter.fetch(NOBODY, giver.address)

    assert (answer.error, answer.unreached) == ("", (NOBODY,))


async def test_the_next_source_is_asked_when_one_does_not_have_it(
    giver: Place, getter: Place, make_place: MakePlace
) -> None:
    without = await make_place()
    answer = await getter.fetch(without.address, giver.address)

    assert (answer.error, answer.unreached) == ("", ())


async def send_half(writer: asyncio.StreamWriter) -> None:
    write_frame(writer, {"nbytes": len(CONTENT)})
    writer.write(CONTENT[: len(CONTENT) // 2])


async def send_other_bytes(writer: asyncio.StreamWriter) -> None:
    write_frame(writer, {"nbytes": len(CONTENT)})
    writer.write(CONTENT[:-1] + b"!")


async def send_more(writer: asyncio.StreamWriter) -> None:
    write_frame(writer, {"nbytes": len(CONTENT) + 1})


async def send_nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3)


async def send_html(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.0 200 OK\r\n\r\n")


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (send_half, "stopped in the middle"),
        (send_other_bytes, "not what was asked for"),
        (send_more, f"has {len(CONTENT) + 1} bytes, not {len(CONTENT)}"),
        (send_nothing, "did not answer"),
        (send_html, "did not answer"),
    ],
)
async def test_a_source_that_fails_leaves_nothing_and_the_next_one_is_asked(
    act: Callable[[asyncio.StreamWriter], Awaitable[None]],
    complaint: str,
    giver: Place,
    getter: Place,
    identity: TlsIdentity,
) -> None:
    async with source_that(act, identity) as bad:
        failed = await getter.fetch(bad)
        assert complaint in failed.error
        assert (failed.errno, failed.unreached, getter.names()) == (0, (), [])
        assert not (await getter.fetch(bad, giver.address)).error
    assert (getter.memory / BLOB_ID).read_bytes() == CONTENT


async def test_no_source_at_all_is_an_error(getter: Place) -> None:
    assert (await getter.fetch()).error == "no source was named"


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_node_that_cannot_store_a_blob_says_which_error_it_was(giver: Place, getter: Place) -> None:
    with files_no_larger_than(2 * MIB + 77):
        answer = await getter.fetch(giver.address, giver.address)

    assert (answer.errno, answer.error) == (errno.EFBIG, "[Errno 27] File too large")
    assert getter.names() == []


def is_there(place: Path) -> bool:
    return os.path.lexists(place)


@pytest.mark.parametrize("path", ["/tmp/{}", "{memory}/../{}", "{memory}/other", "{memory}/x/{}", "{}"])
async def test_no_blob_is_put_elsewhere(path: str, giver: Place, getter: Place) -> None:
    place = Path(path.replace("{memory}", str(getter.memory)).replace("{}", BLOB_ID))

    assert "no blob may lie at" in (await getter.fetch(giver.address, path=place)).error
    assert not is_there(place)


@pytest.mark.parametrize("name", ["notes", f".{BLOB_ID}.tmp", "../secret", BLOB_ID.upper(), f"x/../{BLOB_ID}", ""])
async def test_only_blobs_are_given(name: str, giver: Place, identity: TlsIdentity) -> None:
    for path in (giver.disk / "notes", giver.disk / f".{BLOB_ID}.tmp", giver.disk.parent / "secret"):
        path.write_bytes(CONTENT)
    host, _, port = giver.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(identity))
    write_frame(writer, {"blob": name})

    assert await read_frame(reader) == {"error": "it does not have the blob"}
    writer.transport.abort()


async def test_a_name_that_is_no_hash_is_not_fetched(giver: Place, getter: Place) -> None:
    assert "no blob may lie at" in (await getter.fetch(giver.address, blob_id="../evil")).error


async def test_strangers_get_no_blob(giver: Place, identity: TlsIdentity) -> None:
    host, _, port = giver.address.rpartition(":")
    stranger = client_context(replace(issue(), ca=identity.ca))
    reader, writer = await asyncio.open_connection(host, int(port), ssl=stranger)
    write_frame(writer, {"blob": BLOB_ID})
    with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
        async with asyncio.timeout(5):
            await read_frame(reader)
    writer.transport.abort()


async def test_closing_gives_up_what_it_gives(giver: Place, identity: TlsIdentity) -> None:
    host, _, port = giver.address.rpartition(":")
    (giver.disk / BLOB_ID).write_bytes(CONTENT * 4)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(identity))
    write_frame(writer, {"blob": BLOB_ID})
    await read_frame(reader)
    giver.port._patience_s = 60
    async with asyncio.timeout(5):
        await giver.port.close()
        assert len(await reader.read()) < len(CONTENT * 4)
    writer.transport.abort()


async def test_closing_while_a_file_is_made_leaves_none(
    getter: Place, identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, closed = threading.Event(), threading.Event()
    make = os.open

    def make_slowly(path: str, *how: Any) -> int:
        if BLOB_ID in str(path):
            making.set()
            assert closed.wait(5)
        return make(path, *how)

    async with source_that(send_half, identity) as source:
        monkeypatch.setattr(os, "open", make_slowly)
        getter.begin(source)
        assert await asyncio.to_thread(making.wait, 5)
        closing = asyncio.create_task(getter.port.close())
        await asyncio.sleep(0)  # the transfer is cancelled, its thread is not
        closed.set()
        await closing

    assert getter.names() == []


async def test_closing_gives_up_what_is_on_its_way_and_leaves_nothing(getter: Place, identity: TlsIdentity) -> None:
    begun = asyncio.Event()

    async def stall(writer: asyncio.StreamWriter) -> None:
        await send_half(writer)
        await writer.drain()
        begun.set()
        await asyncio.sleep(1)

    async with source_that(stall, identity) as slow:
        getter.begin(slow)
        async with asyncio.timeout(5):
            await begun.wait()
        await getter.port.close()

    assert getter.answers.empty()
    assert getter.names() == []
