"""What we rely on inside paramiko without being promised it. A failure here means: read the named code again."""

from __future__ import annotations

import inspect
import re
import socket
import threading
from contextlib import closing
from typing import Any

import pytest
from paramiko import Channel, ECDSAKey, Message, ServerInterface, Transport
from paramiko.auth_handler import AuthHandler
from paramiko.buffered_pipe import BufferedPipe, PipeTimeout
from paramiko.common import cMSG_GLOBAL_REQUEST
from paramiko.packet import Packetizer

from skyward.machine.paramiko_parts import (
    ChannelBuffer,
    LiveSocket,
    client_class,
    end_handshake,
    packetizer_class,
    renews_keys,
    request_answer,
    take_output,
)


class Recorder:
    """A channel with both buffers replaced, and what was delivered."""

    def __init__(self) -> None:
        self.channel: Any = Channel(7)
        self.delivered: list[tuple[str, bytes]] = []
        self.ends: list[str] = []
        self.wakes = 0
        self.intakes: list[ChannelBuffer] = []

    def take(self) -> None:
        for buffer, name in (("in_buffer", "out"), ("in_stderr_buffer", "err")):
            self.intakes.append(
                take_output(
                    self.channel,
                    buffer,
                    deliver=lambda data, name=name: self.delivered.append((name, data)),
                    end=lambda name=name: self.ends.append(name),
                    wake=self.wake,
                )
            )

    def wake(self) -> None:
        self.wakes += 1

    def drain(self) -> None:
        for intake in self.intakes:
            intake.drain()


def data(content: bytes, *, code: int | None = None) -> Message:
    message: Any = Message()
    if code is not None:
        message.add_int(code)
    message.add_string(content)
    message.rewind()
    return message


def test_what_comes_on_a_channel_goes_into_its_buffers() -> None:
    recorder = Recorder()
    recorder.take()

    recorder.channel._feed(data(b"one"))
    recorder.channel._feed_extended(data(b"two", code=1))

    assert recorder.delivered == [("out", b"one"), ("err", b"two")]


def test_what_came_before_the_buffer_was_replaced_is_delivered_first() -> None:
    recorder = Recorder()
    recorder.channel._feed(data(b"one"))
    recorder.take()
    assert recorder.wakes == 1

    recorder.channel._feed(data(b"two"))

    assert recorder.delivered == [("out", b"one"), ("out", b"two")]


def test_what_was_on_its_way_into_the_old_buffer_is_asked_for() -> None:
    recorder = Recorder()
    old = recorder.channel.in_buffer
    recorder.take()
    assert recorder.wakes == 0

    old.feed(b"late")
    assert recorder.wakes == 1
    recorder.drain()

    assert recorder.delivered == [("out", b"late")]


def test_end_is_told_to_both_buffers_after_all_that_came() -> None:
    recorder = Recorder()
    recorder.channel._feed(data(b"one"))
    recorder.take()

    recorder.channel._handle_eof(None)

    assert recorder.delivered == [("out", b"one")]
    assert recorder.ends == ["out", "err"]
    assert recorder.channel.eof_received
    assert not recorder.channel.closed


def test_end_before_the_buffer_was_replaced_is_noticed() -> None:
    recorder = Recorder()
    recorder.channel._handle_eof(None)
    recorder.take()
    assert recorder.wakes == 2

    recorder.drain()

    assert recorder.ends == ["out", "err"]


def test_closing_is_told_to_both_buffers_when_it_is_already_so() -> None:
    recorder = Recorder()
    recorder.take()

    with recorder.channel.lock:
        recorder.channel._set_closed()

    assert recorder.ends == ["out", "err"]
    assert recorder.channel.closed


def test_window_is_opened_by_as_much_as_recv_returns() -> None:
    recorder = Recorder()
    channel = recorder.channel
    channel.active = True
    channel.in_window_threshold = 100
    sent: list[Message] = []
    channel.transport = type("Sent", (), {"_send_user_message": lambda self, message: sent.append(message)})()
    recorder.take()

    channel.recv(60)
    assert not sent
    channel.recv_stderr(60)

    message: Any = sent[0]
    message.rewind()
    assert (message.get_byte(), message.get_int(), message.get_int()) == (b"\x5d", 0, 120)
    channel.active = False  # else it says goodbye when it is collected


def test_send_without_a_window_is_a_timeout_when_it_may_not_wait() -> None:
    channel: Any = Channel(7)
    channel.settimeout(0)

    with pytest.raises(TimeoutError):
        channel.send(memoryview(b"x"))
    assert not channel.send_ready()


def test_empty_buffer_raises_an_os_error_when_it_may_not_wait() -> None:
    with pytest.raises(PipeTimeout):
        BufferedPipe().read(1, 0.0)
    assert issubclass(PipeTimeout, OSError)


def test_channels_are_kept_by_nobody() -> None:
    assert "WeakValueDictionary" in inspect.getsource(inspect.getmodule(Transport))  # hence SSHConnection.tunnels


def test_no_more_is_asked_of_the_socket_than_ours_has() -> None:
    source = inspect.getsource(Packetizer) + inspect.getsource(Transport)
    of_addresses = {"connect", "split"}
    ours, theirs = socket.socketpair()
    with closing(theirs), closing(LiveSocket(ours, silence_s=60)) as live:
        assert set(re.findall(r"(?:\bsock|__socket)\.(\w+)", source)) - of_addresses <= set(dir(live))


def test_keys_are_renewed_by_a_limit_that_can_be_set() -> None:
    assert Packetizer.REKEY_BYTES == 1 << 29
    assert "self.REKEY_BYTES" in inspect.getsource(Packetizer.send_message)
    assert "packetizer_class or Packetizer" in inspect.getsource(Transport.__init__)


def test_messages_are_read_by_a_method_that_can_be_overridden() -> None:
    assert inspect.isfunction(Packetizer.read_message)
    assert "self.packetizer.read_message()" in inspect.getsource(Transport)


def test_connection_has_the_limits_that_are_set_and_our_packetizer() -> None:
    ours, theirs = socket.socketpair()
    source = inspect.getsource(Transport) + inspect.getsource(AuthHandler)
    with closing(theirs), closing(LiveSocket(ours, silence_s=60)) as live:
        client: Any = Transport(live, packetizer_class=packetizer_class())

        assert type(client.packetizer) is packetizer_class()
        for limit in ("banner_timeout", "handshake_timeout", "auth_timeout"):
            assert limit in vars(client)
            assert len(re.findall(rf"\b(?:self|transport)\.{limit}\b", source)) > 1  # set and used


def test_requests_can_be_sent_without_waiting_for_their_answers() -> None:
    ours, theirs = socket.socketpair()
    with closing(theirs), closing(LiveSocket(ours, silence_s=60)) as live:
        client: Any = Transport(live)
        sent: list[Any] = []
        client._send_user_message = sent.append

        assert renews_keys(client)  # the first ones
        client.clear_to_send.set()
        assert not renews_keys(client)
        request_answer(client, "keepalive@openssh.com")
        client._parse_request_failure(Message())  # nobody waits

    source = inspect.getsource(Transport.global_request)
    assert "self._send_user_message(m)" in source
    message = sent[0]
    message.rewind()
    assert (message.get_byte(), message.get_text(), message.get_boolean()) == (
        cMSG_GLOBAL_REQUEST,
        "keepalive@openssh.com",
        True,
    )


def test_timer_of_the_handshake_can_be_ended() -> None:
    class Silent:
        def close(self) -> None:
            pass

    packetizer: Any = Packetizer(Silent())
    before = threading.active_count()
    packetizer.start_handshake(60)
    assert threading.active_count() == before + 1

    end_handshake(type("Client", (), {"packetizer": packetizer})())


def test_an_event_says_when_a_channel_has_output_or_has_ended_and_another_that_its_status_came() -> None:
    channel: Any = Channel(7)
    arrived = threading.Event()
    channel.in_buffer.set_event(arrived)
    assert not arrived.is_set()

    channel._feed(data(b"out"))

    assert arrived.is_set()
    assert channel.recv(10) == b"out"
    assert not arrived.is_set()
    assert not channel.status_event.is_set()
    assert not channel.exit_status_ready()

    channel.in_buffer.close()

    assert arrived.is_set()
    assert channel.recv(10) == b""


def test_connection_tells_what_the_other_side_offers_and_knows_curve25519_by_its_name() -> None:
    ours, theirs = socket.socketpair()
    with closing(client_class()(ours)) as client, closing(Transport(theirs)) as server:
        server.add_server_key(ECDSAKey.generate())
        server.start_server(event=threading.Event(), server=ServerInterface())
        client.start_client(timeout=10)

        assert client.offered["server_encrypt_algo_list"] == list(server.get_security_options().ciphers)
        assert {"curve25519-sha256", "mlkem768x25519-sha256"} <= {*client.get_security_options().kex}


def test_keys_are_renewed_after_a_time_that_can_be_set() -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        packetizer = packetizer_class()(LiveSocket(ours, silence_s=15))
        packetizer.renew_keys_after(1000, 0)
        assert packetizer.REKEY_BYTES == 1000
        assert not packetizer.need_rekey()

        packetizer.renew_keys_after(0, 1)
        assert not packetizer.need_rekey()
        packetizer._renewed_at -= 1
        assert packetizer.need_rekey()
        assert not packetizer.need_rekey()
