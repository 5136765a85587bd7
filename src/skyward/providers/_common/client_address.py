"""Public address of this machine, which machines admit over SSH and no other."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import urllib.request
from typing import Final

from skyward.errors import ConfigurationError

__all__ = ["ADDRESS_URL", "CLIENT_CIDR_VARIABLE", "client_cidr"]

CLIENT_CIDR_VARIABLE: Final = "SKYWARD_CLIENT_CIDR"
"""Environment variable with the client's public address or network, such as ``203.0.113.7/32``."""

ADDRESS_URL: Final = "https://checkip.amazonaws.com"
"""Web page that answers with the client's public address, and nothing else."""

_ASK_TIMEOUT_S: Final = 5.0


async def client_cidr(address_url: str = ADDRESS_URL, *, otherwise: str = "") -> str:
    """Return the client's network: from the environment, else its public address as reported by ``address_url``.

    Args:
        address_url: web page that answers with the address.
        otherwise: another remedy for the error message, such as ``"use VM(tunnel=True)"``; empty for none.

    Raises:
        ConfigurationError: the value is malformed, or the address is in neither place.
    """
    given = os.environ.get(CLIENT_CIDR_VARIABLE)
    if given:
        return _cidr(given, f"{CLIENT_CIDR_VARIABLE} in the environment")
    try:
        seen = await asyncio.to_thread(_ask, address_url)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"this machine's public address could not be read from {address_url}: {error}. Machines admit only that "
            f"address over SSH: set {CLIENT_CIDR_VARIABLE}, e.g. to 203.0.113.7/32{otherwise and f', or {otherwise}'}"
        ) from error
    return _cidr(seen, f"the answer of {address_url}")


def _ask(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an HTTP URL")
    with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as answer:  # noqa: S310 - checked above
        return str(answer.read(100).decode("ascii"))


def _cidr(text: str, source: str) -> str:
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError as error:
        raise ConfigurationError(f"{source} must be an address or a network, got {text[:60]!r}") from error
    if network.prefixlen == 0:
        raise ConfigurationError(f"{source} is the whole internet, got {text[:60]!r}: name this machine's own address")
    return str(network)
