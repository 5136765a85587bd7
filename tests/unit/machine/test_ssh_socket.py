from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from skyward.machine.paramiko_parts import LiveSocket

SILENCE_S = 0.3
DEADLINE_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[LiveSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    live = LiveSocket(ours, silence_s=SILENCE_S)
    with theirs:
        yield live, theirs
        live.close()


def read(live: LiveSocket, nbytes: int = 100) -> bytes:
    """As paramiko does: again and again."""
    while True:
        with contextlib.suppress(TimeoutError):
            return live.recv(nbytes)


def test_silence_is_no_reason_to_worry_while_nobody_asks(ends: tuple[LiveSocket, socket.socket]) -> None:
    live, theirs = ends
    sender = threading.Timer(2 * SILENCE_S, theirs.sendall, (b"late",))
    sender.start()

    assert read(live) == b"late"
    sender.join()


def test_silence_that_asking_does_not_break_is_the_end(ends: tuple[LiveSocket, socket.socket]) -> None:
    live, theirs = ends
    asked: list[int] = []

    def ask() -> bool:
        asked.append(1)
        return True

    live.on_idle = ask

    with pytest.raises(ConnectionAbortedError, match=r"did not answer for 0\.3 s") as raised:
        read(live)

    assert len(raised.value.args) == 2  # paramiko's thread dies of fewer
    assert asked == [1, 1]
    assert live.reason == "the peer did not answer for 0.3 s"
    assert theirs.recv(1) == b""


def test_request_that_could_not_be_sent_is_sent_later_and_has_its_time(
    ends: tuple[LiveSocket, socket.socket],
) -> None:
    live, _ = ends
    may_ask = iter([False] * 15 + [True] * 3)
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(next(may_ask))
        return asked[-1]

    live.on_idle = ask
    with pytest.raises(ConnectionAbortedError, match="did not answer"):
        read(live)

    assert asked[:16] == [False] * 15 + [True]
    assert len(asked) == 18  # asked at tick 25, and at 30 and 40 again; the end is at 45


def test_silence_in_which_nothing_could_be_asked_is_the_end(ends: tuple[LiveSocket, socket.socket]) -> None:
    live, _ = ends
    live.on_idle = lambda: False

    with pytest.raises(ConnectionAbortedError, match="accepted nothing"):
        read(live)


def test_other_end_that_takes_nothing_is_the_end(ends: tuple[LiveSocket, socket.socket]) -> None:
    live, _ = ends

    with pytest.raises(ConnectionAbortedError, match="accepted nothing"):
        live.send(bytes(64 << 20))


async def test_socket_that_the_peer_does_not_empty_is_not_writable_until_it_does_or_ends(
    ends: tuple[LiveSocket, socket.socket],
) -> None:
    live, theirs = ends
    for end in (lambda: theirs.recv(1 << 22, socket.MSG_DONTWAIT), lambda: live.abort("given up"), live.close):
        with contextlib.suppress(OSError):
            while live.is_writable:
                live.send(bytes(1 << 10))
        waiting = asyncio.ensure_future(live.wait_writable())
        await asyncio.sleep(0)
        end()
        await asyncio.wait_for(waiting, DEADLINE_S)
        assert live.is_writable


@pytest.mark.parametrize("end", [LiveSocket.close, lambda live: live.abort("given up")])
def test_reader_in_another_thread_ends_at_once(end: Callable[[LiveSocket], None]) -> None:
    ours, theirs = socket.socketpair()
    live = LiveSocket(ours, silence_s=60)
    ended: list[bytes | OSError] = []

    def wait() -> None:
        try:
            ended.append(read(live))
        except OSError as error:
            ended.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    with theirs:
        end(live)
        reader.join(1)
    live.close()
    assert not reader.is_alive()
    assert ended == [b""] or isinstance(ended[0], OSError)


def test_closing_is_told_once() -> None:
    ours, theirs = socket.socketpair()
    told: list[int] = []
    live = LiveSocket(ours, silence_s=60, on_close=lambda: told.append(1))

    live.close()
    live.close()
    theirs.close()

    assert told == [1]
    assert live.closed
