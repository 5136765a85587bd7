"""Offers that a vendor shows to anyone: the same types and prices as with an account, whatever is in stock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from skyward.errors import UnreachableError
from skyward.providers.base import Offer, Provider
from skyward.request.request import parse_request
from support.clouds.vendors import VENDORS, opened, vendor_named

PUBLIC = {
    "runpod": ("POST /graphql", "H100"),
    "vastai": ("POST /api/v0/bundles/", "RTX-4090"),
    "verda": ("GET /instance-types", "H100"),
}
"""Call, and an accelerator of the fake, by the vendor's name."""


def asked(provider: Provider, accelerator: str, *, public: bool) -> Sequence[Offer]:
    request = parse_request(accelerator=accelerator, spot="if-available")

    async def ask() -> Sequence[Offer]:
        try:
            return await (provider.public_offers(request) if public else provider.offers(request))
        finally:
            await provider.close()

    return asyncio.run(ask())


def prices(offers: Sequence[Offer]) -> dict[tuple[str, bool], float | None]:
    return {(offer.spec.name, offer.spot): offer.price_per_hour for offer in offers}


def test_the_vendors_with_public_prices_are_these() -> None:
    assert {vendor.name for vendor in VENDORS if vendor.kind.supports("public_offers")} == PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_prices_without_credentials_are_those_with_an_account(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor, (route, accelerator) = vendor_named(name), PUBLIC[name]
    monkeypatch.setenv("HOME", str(tmp_path))
    with opened(vendor, monkeypatch, tmp_path) as cloud:
        cloud.service.paces.clear()
        with_account = prices(asked(vendor.provider(cloud), accelerator, public=False))
        assert vendor.kind.has_credentials()
        for variable in cloud.environment:
            monkeypatch.delenv(variable)

        without = prices(asked(vendor.provider(cloud), accelerator, public=True))

        assert with_account
        assert with_account.items() <= without.items()
        assert not vendor.kind.has_credentials()
        assert cloud.service.calls[-1].route == route
        assert "Authorization" not in cloud.service.calls[-1].headers


@pytest.mark.parametrize("name", [vendor.name for vendor in VENDORS])
def test_credentials_are_found_without_asking_anyone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = vendor_named(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with opened(vendor, monkeypatch, tmp_path) as cloud:
        assert vendor.kind.has_credentials()
        for variable in cloud.environment:
            monkeypatch.delenv(variable)

        assert not vendor.kind.has_credentials()
        assert cloud.service.calls == []


def test_a_request_for_several_accelerators_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(vendor_named("runpod"), monkeypatch, tmp_path) as cloud:
        provider = vendor_named("runpod").provider(cloud)
        wishes = [parse_request(accelerator=each) for each in ("H100", "L4", "A100")]

        async def ask() -> Sequence[Sequence[Offer]]:
            return await asyncio.gather(*map(provider.public_offers, wishes))

        assert all(asyncio.run(ask()))
        assert cloud.service.count("POST /graphql") == 1


@contextmanager
def answering(status: int, body: bytes) -> Generator[tuple[str, list[str]]]:
    """Answer every call in that way; yield the URL and the lines of the requests."""
    lines: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines.append(self.requestline)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the library
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", lines
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    "status,body,reason",
    [
        (503, b"busy", "no public prices now: status 503"),
        (401, b'{"error": "no key"}', "no public prices now: status 401"),
        (200, b"<html>", "no public prices now: an answer in HTML"),
        (200, b'{"data": null, "errors": [{"message": "gone"}]}', "was refused|cannot read|no list"),
        (200, b'{"offers": [{"id": 1}], "data": {"gpuTypes": [{"id": 1}]}}', "cannot read"),
    ],
)
def test_a_vendor_that_fails_or_answers_nonsense_is_asked_once(
    name: str, status: int, body: bytes, reason: str
) -> None:
    with answering(status, body) as (url, lines), pytest.raises(UnreachableError, match=reason):
        asked(vendor_named(name).kind(endpoint_url=url), PUBLIC[name][1], public=True)

    assert len(lines) == 1
