from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from skyward.errors import PoolStateError
from support.chaos import ChaosProxy, Link

MIB = 1 << 20
SILENCE_S = 0.2
ADDRESS = "127.0.1.1"


class Echo(socketserver.BaseRequestHandler):
    """Says what it hears; ``received`` counts it, ``ended`` tells how the last connection did."""

    received = 0
    ended = threading.Event()

    def handle(self) -> None:
        try:
            while data := self.request.recv(MIB):
                type(self).received += len(data)
                self.request.sendall(data)
        except ConnectionError:
            pass
        finally:
            type(self).ended.set()


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    Echo.received = 0
    Echo.ended.clear()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[ChaosProxy]:
    with ChaosProxy(ADDRESS, echo) as proxy:
        yield proxy


def dial(proxy: ChaosProxy) -> socket.socket:
    return socket.create_connection(proxy.place, timeout=20)


def ask(connection: socket.socket, data: bytes = b"hello") -> bytes:
    connection.sendall(data)
    return hear(connection, len(data))


def hear(connection: socket.socket, count: int) -> bytes:
    heard = bytearray()
    while len(heard) < count:
        if not (data := connection.recv(count - len(heard))):
            break
        heard += data
    return bytes(heard)


def hears_nothing(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(20)
    return False


class TestHealthy:
    def test_bytes_pass_both_ways_and_are_counted(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as one, dial(proxy) as other:
            assert ask(one, b"one") == b"one"
            assert ask(other, b"other") == b"other"

        assert (proxy.connections, proxy.bytes_up, proxy.bytes_down) == (2, 8, 8)

    def test_much_arrives_whole(self, proxy: ChaosProxy) -> None:
        sent = bytes(range(256)) * (20 * MIB // 256)
        with dial(proxy) as connection:
            sender = threading.Thread(target=connection.sendall, args=(sent,))
            sender.start()
            assert hear(connection, len(sent)) == sent
            sender.join()

    def test_end_of_one_way_leaves_the_other_open(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            connection.sendall(b"last words")
            connection.shutdown(socket.SHUT_WR)
            assert hear(connection, 10) == b"last words"
            assert connection.recv(1) == b""

    def test_end_reaches_the_target(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"

        assert Echo.ended.wait(10)

    def test_target_that_refuses_is_a_reset(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            with (
                ChaosProxy(ADDRESS, closed.getsockname()) as proxy,
                pytest.raises(ConnectionError),
                dial(proxy) as connection,
            ):
                ask(connection)

    def test_closing_twice_is_fine_and_nothing_works_afterwards(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.close()
            proxy.close()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with pytest.raises(PoolStateError, match="closed"):
            proxy.cut()


class TestLink:
    def test_latency_is_paid_each_way(self, echo: tuple[str, int]) -> None:
        with ChaosProxy(ADDRESS, echo, link=Link(latency_s=0.05)) as proxy, dial(proxy) as connection:
            began = time.monotonic()
            assert ask(connection) == b"hello"
            opened = time.monotonic()
            assert ask(connection) == b"hello"
            answered = time.monotonic()

        grain = 0.01  # timers of a loop may fire early by the grain of its clock
        assert opened - began >= 0.2 - grain
        assert 0.1 - grain <= answered - opened < opened - began

    def test_latency_does_not_limit_what_is_under_way(self, echo: tuple[str, int]) -> None:
        with ChaosProxy(ADDRESS, echo, link=Link(latency_s=0.2)) as proxy, dial(proxy) as connection:
            assert ask(connection) == b"hello"
            began = time.monotonic()
            sender = threading.Thread(target=connection.sendall, args=(bytes(8 * MIB),))
            sender.start()
            assert len(hear(connection, 8 * MIB)) == 8 * MIB
            sender.join()

        assert 0.4 <= time.monotonic() - began < 1.6  # what the kernel holds by itself would take many round trips

    def test_bandwidth_limits_each_way_by_itself(self, echo: tuple[str, int]) -> None:
        with ChaosProxy(ADDRESS, echo, link=Link(bytes_per_s=2 * MIB)) as proxy, dial(proxy) as connection:
            began = time.monotonic()
            sender = threading.Thread(target=connection.sendall, args=(bytes(2 * MIB),))
            sender.start()
            assert len(hear(connection, 2 * MIB)) == 2 * MIB
            sender.join()

        assert 0.9 <= time.monotonic() - began < 1.9

    def test_proxies_share_the_bandwidth_of_their_link(self, echo: tuple[str, int]) -> None:
        link = Link(bytes_per_s=4 * MIB)
        with ChaosProxy(ADDRESS, echo, link=link) as one, ChaosProxy(ADDRESS, echo, link=link) as other:
            began = time.monotonic()
            took_s = [0.0, 0.0]

            def send(index: int, proxy: ChaosProxy) -> None:
                with dial(proxy) as connection:
                    connection.sendall(bytes(MIB))
                    connection.shutdown(socket.SHUT_WR)
                    hear(connection, MIB)
                took_s[index] = time.monotonic() - began

            threads = [threading.Thread(target=send, args=item) for item in enumerate([one, other])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert min(took_s) >= 0.4


class TestCut:
    def test_connections_are_reset_and_new_ones_refused(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        assert Echo.ended.wait(10)
        with pytest.raises(ConnectionRefusedError):
            dial(proxy)

    def test_connections_that_have_just_come_are_reset_too(self, proxy: ChaosProxy) -> None:
        for _ in range(20):
            with dial(proxy) as connection:
                proxy.cut()
                with pytest.raises(ConnectionError):
                    ask(connection)
            proxy.heal()

    def test_healed_it_answers_at_the_same_place(self, proxy: ChaosProxy) -> None:
        place = proxy.place
        proxy.cut()
        proxy.cut()
        proxy.heal()
        proxy.heal()

        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
        assert proxy.place == place


class TestFreeze:
    def test_nothing_moves_and_nothing_ends(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.freeze()
            connection.sendall(b"anyone?")

            assert hears_nothing(connection)
            assert (Echo.received, Echo.ended.is_set()) == (5, False)

    def test_new_connections_are_accepted_and_never_answered(self, proxy: ChaosProxy) -> None:
        proxy.freeze()
        with dial(proxy) as connection:
            connection.sendall(b"anyone?")

            assert hears_nothing(connection)
            assert Echo.received == 0

    def test_forgotten_connections_stay_silent_and_drop_what_they_held(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as old:
            assert ask(old) == b"hello"
            proxy.freeze()
            old.sendall(b"lost")
            with dial(proxy) as opened_meanwhile, dial(proxy):
                proxy.heal()
                old.sendall(b"lost too")
                opened_meanwhile.sendall(b"lost as well")

                with dial(proxy) as new:
                    assert ask(new) == b"hello"
                assert hears_nothing(old)
                assert hears_nothing(opened_meanwhile)
                assert Echo.received == 10

    def test_forgotten_connections_take_any_amount_and_hold_none_of_it(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.freeze()
            proxy.heal()
            connection.sendall(bytes(64 * MIB))

        assert (Echo.received, proxy.bytes_up) == (5, 5)

    def test_resumed_connections_lose_nothing(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as old:
            assert ask(old) == b"hello"
            proxy.freeze()
            old.sendall(b"late")
            with dial(proxy) as opened_meanwhile:
                opened_meanwhile.sendall(b"later")
                assert hears_nothing(old)
                proxy.heal("resumed")

                assert hear(old, 4) == b"late"
                assert hear(opened_meanwhile, 5) == b"later"

    def test_reset_connections_say_so(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.freeze()
            proxy.heal("reset")
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"

    def test_what_a_frozen_link_holds_is_bounded(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.freeze()
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.sendall(bytes(64 * MIB))

    def test_cut_while_frozen_says_so(self, proxy: ChaosProxy) -> None:
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
            proxy.freeze()
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        proxy.heal()
        with dial(proxy) as connection:
            assert ask(connection) == b"hello"
