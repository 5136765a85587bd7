"""The client's address: from the environment, or from a web page."""

from __future__ import annotations

import asyncio

import pytest

from skyward.errors import ConfigurationError
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE, client_cidr


@pytest.mark.parametrize(
    ("told", "cidr"),
    [
        ("203.0.113.7", "203.0.113.7/32"),
        ("203.0.113.7/24\n", "203.0.113.0/24"),
        ("2001:db8::7", "2001:db8::7/128"),
    ],
)
def test_the_client_may_say_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, told: str, cidr: str) -> None:
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, told)
    assert asyncio.run(client_cidr("http://127.71.0.9:9")) == cidr


def test_an_address_that_is_no_web_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLIENT_CIDR_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match="is not an HTTP URL"):
        asyncio.run(client_cidr("file:///etc/passwd"))


@pytest.mark.parametrize("told", ["0.0.0.0/0", "::/0", "here", "<html>"])
def test_the_whole_internet_and_no_network_are_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, told)
    with pytest.raises(ConfigurationError, match=CLIENT_CIDR_VARIABLE):
        asyncio.run(client_cidr())


def test_where_no_page_answers_the_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLIENT_CIDR_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=rf"set {CLIENT_CIDR_VARIABLE}.*/32, or use Cloud\(tunnel=True\)$"):
        asyncio.run(client_cidr("http://127.71.0.9:9", otherwise="use Cloud(tunnel=True)"))
