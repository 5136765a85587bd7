"""Every provider keeps the same contract."""

from __future__ import annotations

from skyward.providers.base import Provider
from skyward.providers.local import Local
from skyward.testing.provider import FakeProvider, ProviderContract


class TestFakeProvider(ProviderContract):
    def make_provider(self) -> Provider:
        return FakeProvider()


class TestLocal(ProviderContract):
    def make_provider(self) -> Provider:
        return Local()
