"""Variables that frameworks read from the environment, and the network interface that they use."""

from __future__ import annotations

import os

import psutil
import pytest

from skyward.distributed._gang import environment
from skyward.distributed._torch import interface_of, interfaces, unless_set

INTERFACES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth0": ["10.1.2.3", "fe80::1%eth0", "02:fc:00:00:00:01"],
    "eth1": ["192.168.7.1"],
}


@pytest.mark.parametrize(
    "address, name",
    [
        ("10.1.2.3", "eth0"),
        ("192.168.7.1", "eth1"),
        ("127.0.0.1", "lo"),
        ("127.0.0.3", "lo"),
        ("127.9.9.9", "lo"),
        ("10.1.2.4", None),
    ],
)
def test_the_interface_is_the_one_that_carries_the_address(address: str, name: str | None) -> None:
    assert interface_of(address, INTERFACES) == name


def test_this_machines_loopback_has_an_interface() -> None:
    assert interface_of("127.0.0.2", interfaces()) in psutil.net_if_addrs()


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "before")
    monkeypatch.delenv("UNSET", raising=False)
    with pytest.raises(KeyError), environment({"SET": "during", "UNSET": "during"}):
        assert (os.environ["SET"], os.environ["UNSET"]) == ("during", "during")
        os.environ["UNSET"] = "changed"
        raise KeyError
    assert os.environ["SET"] == "before"
    assert "UNSET" not in os.environ


def test_what_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "mine")
    monkeypatch.delenv("UNSET", raising=False)
    assert unless_set({"SET": "theirs", "UNSET": "theirs"}) == {"UNSET": "theirs"}
