"""Every provider keeps the same contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.providers.aws.network import CLIENT_CIDR_VARIABLE
from skyward.providers.aws.provider import AWS
from skyward.providers.base import Provider
from skyward.providers.local import Local
from skyward.providers.ssh import SSH
from skyward.testing.aws import LocalEC2, Looks, use_ec2
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from skyward.testing.provider import FakeProvider, ProviderContract


class TestFakeProvider(ProviderContract):
    def make_provider(self) -> Provider:
        return FakeProvider()


class TestLocal(ProviderContract):
    def make_provider(self) -> Provider:
        return Local()


class TestSSH(ProviderContract):
    @pytest.fixture(autouse=True)
    def hosts(self, tmp_path: Path) -> Iterator[None]:
        require_sshd()
        with (
            SshHost(tmp_path / "first", address="127.0.0.2") as first,
            SshHost(tmp_path / "second", address="127.0.0.3") as second,
        ):
            self._hosts = (first, second)
            self._known_hosts = write_known_hosts(tmp_path / "known_hosts", first, second)
            yield

    def make_provider(self) -> Provider:
        return SSH(
            hosts=[f"{host.address}:{host.port}" for host in self._hosts],
            key_path=str(self._hosts[0].key_path),
            known_hosts=str(self._known_hosts),
        )


class TestAWS(ProviderContract):
    @pytest.fixture(autouse=True)
    def account(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
        with LocalEC2(looks=Looks(pending=1, ending=1), block=71) as ec2:
            use_ec2(ec2, monkeypatch, {"listing_s": 0.0})
            self._endpoint_url = ec2.endpoint_url
            yield

    def make_provider(self) -> Provider:
        return AWS(endpoint_url=self._endpoint_url)
