from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_DATA

from skyward.machine.paramiko_parts import LiveSocket, packetizer_class


@pytest.fixture
def gate() -> threading.Lock:
    return threading.Lock()


@pytest.fixture
def ends(gate: threading.Lock) -> Iterator[tuple[LiveSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    live = LiveSocket(ours, silence_s=60, gate=gate)
    with theirs:
        yield live, theirs
        live.close()


def packet(kind: int) -> bytes:
    """As it is before keys are agreed on."""
    content = struct.pack(">BI", kind, 7)
    padding = 16 - 5 - len(content)
    return struct.pack(">IB", 1 + len(content) + padding, padding) + content + bytes(padding)


def test_nobody_sends_while_it_is_answered_that_a_channel_was_closed(
    ends: tuple[LiveSocket, socket.socket], gate: threading.Lock
) -> None:
    live, theirs = ends
    packets = packetizer_class()(live)
    theirs.sendall(packet(MSG_CHANNEL_DATA) + packet(MSG_CHANNEL_CLOSE) + packet(MSG_CHANNEL_DATA))

    seen = [(packets.read_message()[0], gate.locked()) for _ in range(3)]

    assert seen == [(MSG_CHANNEL_DATA, False), (MSG_CHANNEL_CLOSE, True), (MSG_CHANNEL_DATA, False)]


def test_answer_waits_until_what_is_being_sent_is_sent(
    ends: tuple[LiveSocket, socket.socket], gate: threading.Lock
) -> None:
    live, theirs = ends
    packets = packetizer_class()(live)
    read = threading.Thread(target=lambda: (packets.read_message(), live.close()))

    with gate:
        theirs.sendall(packet(MSG_CHANNEL_CLOSE))
        read.start()
        read.join(0.1)
        assert read.is_alive()
    read.join()


def test_gate_is_open_again_when_the_connection_has_ended(
    ends: tuple[LiveSocket, socket.socket], gate: threading.Lock
) -> None:
    live, theirs = ends
    packets = packetizer_class()(live)
    theirs.sendall(packet(MSG_CHANNEL_CLOSE))

    def read() -> None:
        packets.read_message()
        live.close()  # as paramiko does at its thread's end

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()

    assert not gate.locked()


def test_who_closes_the_connection_elsewhere_does_not_open_the_gate(
    ends: tuple[LiveSocket, socket.socket], gate: threading.Lock
) -> None:
    live, _ = ends
    live.shut_gate()

    closer = threading.Thread(target=live.close)
    closer.start()
    closer.join()
    assert gate.locked()

    live.open_gate()
    live.open_gate()
    assert not gate.locked()
