"""Every provider keeps the same contract."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from skyward._concurrency.waiting import wait_until
from skyward.errors import UnreachableError
from skyward.providers.aws.network import CLIENT_CIDR_VARIABLE
from skyward.providers.aws.provider import AWS
from skyward.providers.base import Instance, Provider
from skyward.providers.local import Local
from skyward.providers.registry import PROVIDERS
from skyward.providers.ssh import SSH
from skyward.testing.aws import AwsFault, LocalEC2, Looks, use_ec2
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from skyward.testing.provider import FakeProvider, Fate
from skyward.testing.provider_contract import Promise, ProviderContract

MINUTE_S = 0.2
"""Of the shutdown timers of machines; their time-to-live is one minute."""


POLLS = 10
"""Where each poll asks a real server, which costs a tenth of a second."""


class TestFakeProvider(ProviderContract):
    """Two machines on one network, each on a host of its own."""

    networks: tuple[str, ...] = ("fake",)
    ends_itself = True

    def make_provider(self) -> Provider:
        provider = FakeProvider(networks=self.networks)
        provider.ends_itself = self.ends_itself
        provider.fate = Fate(host="rack")
        return provider

    def lose_answer(self, provider: Provider) -> None:
        assert isinstance(provider, FakeProvider)
        provider.fail("create", UnreachableError("no answer"), done=True)

    def vendor_calls(self, provider: Provider) -> int:
        assert isinstance(provider, FakeProvider)
        return len(provider.calls)

    async def outlive_client(self, provider: Provider, instances: Sequence[Instance]) -> None:
        assert isinstance(provider, FakeProvider)
        provider.client_dies()

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        return len(set(self.networks)) == 1 and "" not in self.networks


class TestFakeIslands(TestFakeProvider):
    """Two machines that reach nothing, and bill on without their client."""

    networks = ("",)
    ends_itself = False


class TestFakeNetworks(TestFakeProvider):
    """Two machines, each on a network of its own."""

    networks = ("one", "other")


class TestLocal(ProviderContract):
    does_not_apply: Mapping[Promise, str] = {
        "lose_answer": "a node is a folder that this process makes: there is no answer to lose",
        "vendor_calls": "nobody is asked: this process reads its own folders",
        "outlive_client": "not yet",
        "reaches": "not yet",
        "avoid": "there is one host, this machine, which the pool's user chose",
    }

    def make_provider(self) -> Provider:
        return Local()


class TestSSH(ProviderContract):
    polls = POLLS
    calls_per_look = 2  # a command for each of the two hosts, which belong to nobody who could list them
    does_not_apply: Mapping[Promise, str] = {
        "lose_answer": "a node is a folder: the hosts list what is on them, and it costs nothing",
        "outlive_client": "not yet",
        "reaches": "not yet",
        "avoid": "not yet",
    }

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

    def vendor_calls(self, provider: Provider) -> int:
        return sum(host.log.read_text(encoding="utf-8").count("Starting session") for host in self._hosts)


class TestAWS(ProviderContract):
    polls = POLLS
    does_not_apply: Mapping[Promise, str] = {
        "outlive_client": "not yet",
        "reaches": "not yet",
        "avoid": "EC2 does not tell which physical machine an instance is on, nor lets one choose",
    }

    @pytest.fixture(autouse=True)
    def account(
        self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[None]:
        monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
        machines = request.function.__name__ == "test_a_machine_that_claims_to_end_itself_does"
        if machines:
            require_sshd()
        looks = Looks(pending=1, ending=0 if machines else 1)
        with LocalEC2(tmp_path, machines=machines, minute_s=MINUTE_S, looks=looks, block=71) as ec2:
            use_ec2(ec2, monkeypatch, {"listing_s": 0.0})
            self._ec2 = ec2
            yield

    def make_provider(self) -> Provider:
        return AWS(endpoint_url=self._ec2.endpoint_url)

    def lose_answer(self, provider: Provider) -> None:
        self._ec2.fail(AwsFault(dropped="after"), action="RunInstances")

    def vendor_calls(self, provider: Provider) -> int:
        return len(self._ec2.calls)

    async def outlive_client(self, provider: Provider, instances: Sequence[Instance]) -> None:
        async def over() -> bool | None:
            states = {each["State"]["Name"] for each in self._ec2.instances()}
            return states <= {"shutting-down", "terminated"} or None

        await wait_until(over, deadline_s=60 * MINUTE_S, interval_s=MINUTE_S, what="the timers of the machines")


def suites(base: type[ProviderContract] = ProviderContract) -> Iterator[type[ProviderContract]]:
    for suite in base.__subclasses__():
        yield suite
        yield from suites(suite)


def test_every_provider_is_bound_and_what_does_not_apply_to_it_is_listed_with_a_reason() -> None:
    found: Mapping[str, Collection[str]] = {
        suite.__name__: sorted(suite.does_not_apply) for suite in suites() if suite.__module__ == __name__
    }

    assert found == {
        "TestFakeProvider": [],
        "TestFakeIslands": [],
        "TestFakeNetworks": [],
        "TestLocal": ["avoid", "lose_answer", "outlive_client", "reaches", "vendor_calls"],
        "TestSSH": ["avoid", "lose_answer", "outlive_client", "reaches"],
        "TestAWS": ["avoid", "outlive_client", "reaches"],
    }
    assert {name.removeprefix("Test").lower() for name in found} >= PROVIDERS.keys()
    assert all(reason for suite in suites() for reason in suite.does_not_apply.values())
