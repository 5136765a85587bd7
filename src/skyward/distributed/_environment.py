"""What a framework is told through the environment, and the network interface that its traffic shall use."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address

import psutil

__all__ = ["environment", "interface_of", "interfaces", "unless_set"]


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Have ``values`` in this process's environment, and afterwards what was there before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def unless_set(values: Mapping[str, str]) -> dict[str, str]:
    """Those of ``values`` that the user has not given another value."""
    return {name: value for name, value in values.items() if name not in os.environ}


def interfaces() -> dict[str, list[str]]:
    """The addresses of each network interface of this machine, by its name."""
    return {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}


def interface_of(address: str, interfaces: Mapping[str, Collection[str]]) -> str | None:
    """Name of the interface that carries ``address``; None if there is none.

    All of 127.0.0.0/8 is the loopback interface's, though it shows one address only.
    """
    wanted = ip_address(address)
    for name, addresses in interfaces.items():
        for text in addresses:
            if text == address or (wanted.is_loopback and _is_loopback(text)):
                return name
    return None


def _is_loopback(text: str) -> bool:
    try:
        return ip_address(text).is_loopback
    except ValueError:  # a hardware address
        return False
