"""A port that is open at every address answers at one, and on loopback."""

from __future__ import annotations

import socket
import sys
from contextlib import closing, suppress
from ipaddress import ip_address

import psutil
import pytest
import stamina

from skyward.distributed._filter import only_reached_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux filters packets, others do not")

SILENCE_S = 0.3
ELSEWHERE = "10.255.255.254"
"""Not an address of this machine."""


def own_addresses() -> list[str]:
    """Of this machine, but for loopback: IPv4 ones first."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    addresses = []
    for text in found:
        with suppress(ValueError):  # of hardware
            addresses.append(ip_address(text))
    shown = [address for address in addresses if not address.is_loopback and not address.is_link_local]
    return [str(address) for address in sorted(shown, key=lambda address: address.version)]


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), SILENCE_S).close()
    except OSError:
        return False
    return True


def listen_everywhere(port: int = 0) -> socket.socket:
    """As gRPC does: one socket for both kinds of addresses."""
    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("::", port))
    listener.listen()
    return listener


@pytest.fixture
def port() -> int:
    with closing(listen_everywhere()) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def addresses() -> list[str]:
    found = own_addresses()
    if not found:
        pytest.skip("a machine without any network")
    return found


def accepted(listener: socket.socket, client: socket.socket) -> socket.socket:
    """The other end of ``client``, behind those that knocked before there was a filter."""
    while True:
        server, place = listener.accept()
        if place[1] == client.getsockname()[1]:
            return server
        server.close()


def closed_in_time(address: str, port: int) -> None:
    for attempt in stamina.retry_context(on=AssertionError, attempts=None, timeout=10.0, wait_max=0.1):
        with attempt:
            assert not answers(address, port)


def test_only_the_nodes_address_and_loopback_answer(addresses: list[str], port: int) -> None:
    with only_reached_at(ELSEWHERE, port), closing(listen_everywhere(port)):
        closed_in_time(addresses[0], port)
        assert [answers(address, port) for address in addresses] == [False] * len(addresses)
        assert answers("127.0.0.1", port)
        assert answers("127.0.0.7", port)
        assert answers("::1", port)


def test_the_nodes_own_address_answers_and_carries_data(addresses: list[str], port: int) -> None:
    own = addresses[0]
    with only_reached_at(own, port), closing(listen_everywhere(port)) as listener:
        for other in addresses[1:]:
            closed_in_time(other, port)
        with socket.create_connection((own, port), 10.0) as client, accepted(listener, client) as server:
            client.sendall(bytes(1_000_000))
            client.shutdown(socket.SHUT_WR)
            received = 0
            while part := server.recv(65536):
                received += len(part)
        assert received == 1_000_000


def test_what_is_opened_before_the_framework_does_so_is_left_alone(addresses: list[str], port: int) -> None:
    with closing(listen_everywhere()) as another, only_reached_at(ELSEWHERE, port), closing(listen_everywhere(port)):
        closed_in_time(addresses[0], port)
        assert answers(addresses[0], int(another.getsockname()[1]))


def test_a_port_that_is_never_opened_is_not_waited_for(port: int) -> None:
    with only_reached_at(ELSEWHERE, port):
        pass
