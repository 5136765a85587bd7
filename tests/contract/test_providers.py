"""Every provider keeps the same contract."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from skyward.base.waiting import wait_until
from skyward.errors import UnreachableError
from skyward.machine.ssh import SSHAccess, SshTransport
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE
from skyward.providers.aws.provider import AWS
from skyward.providers.base import Instance, Provider
from skyward.providers.local import Local
from skyward.providers.registry import BUILT_IN
from skyward.providers.ssh import SSH
from skyward.testing.aws import AwsFault, LocalEC2, Looks, use_ec2
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from skyward.testing.provider import FakeProvider, Fate
from skyward.testing.provider_contract import Promise, ProviderContract
from support.clock import FakeClock
from support.clouds.aws_clients import remember_classes
from support.clouds.rest_service import FAULTS
from support.clouds.vendors import PROMPT, Vendor, opened, vendor_named

LIFE_MINUTES = 3
"""Of the shutdown timers of machines: their time-to-live of one minute, and two for the node to end by itself."""

THROTTLED = 429
POLLS = 10
"""Where each poll asks a real server, which costs a tenth of a second."""


class TestFakeProvider(ProviderContract):
    """Two machines on one network, each on a host of its own."""

    does_not_apply: Mapping[Promise, str] = {"made_again": "it exists in one process only, and no sweep looks for it"}
    networks: tuple[str, ...] = ("fake",)
    ends_itself = True
    may_end: bool | None = None

    def make_provider(self) -> Provider:
        provider = FakeProvider(networks=self.networks, clock=FakeClock())
        provider.ends_itself = self.ends_itself
        provider.may_end = self.may_end
        provider.fate = Fate(host="rack")
        return provider

    def lose_answer(self, provider: Provider) -> None:
        assert isinstance(provider, FakeProvider)
        provider.fail("create", UnreachableError("no answer"), done=True)

    def fail_create(self, provider: Provider) -> None:
        assert isinstance(provider, FakeProvider)
        provider.fail("create", UnreachableError("status 500"))

    def vendor_calls(self, provider: Provider) -> int:
        assert isinstance(provider, FakeProvider)
        return len(provider.calls)

    async def outlive_client(self, provider: Provider, instances: Sequence[Instance]) -> None:
        assert isinstance(provider, FakeProvider)
        provider.client_dies()

    async def passes_end_check(self, instance: Instance) -> bool:
        """Its machines run nothing."""
        assert bool(instance.end_check) == (self.may_end is not None)
        return self.may_end is not False

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        return len(set(self.networks)) == 1 and "" not in self.networks


class LateLister(FakeProvider):
    """Lists a new machine some time after its launch."""

    listing_s: ClassVar[float] = 0.2


def test_the_contract_waits_for_a_machine_that_is_listed_late() -> None:
    class Suite(TestFakeProvider):
        def make_provider(self) -> Provider:
            provider = LateLister()
            provider.fate = Fate(unlisted_s=provider.listing_s)
            return provider

    Suite().test_what_can_be_listed_is_what_was_launched_and_has_not_ended()


class TestFakeIslands(TestFakeProvider):
    """Two machines that reach nothing, and bill on without their client."""

    networks = ("",)
    ends_itself = False


class TestFakeConfirmed(TestFakeProvider):
    """Two machines that end themselves, and confirm that their provider lets them."""

    may_end: bool | None = True


class TestFakeRefused(TestFakeProvider):
    """Two machines that would end themselves, and are refused."""

    may_end: bool | None = False


class TestFakeNetworks(TestFakeProvider):
    """Two machines, each on a network of its own."""

    networks = ("one", "other")


class TestLocal(ProviderContract):
    does_not_apply: Mapping[Promise, str] = {
        "lose_answer": "a node is a folder that this process makes: there is no answer to lose",
        "fail_create": "the same: there is no server that fails",
        "vendor_calls": "nobody is asked: this process reads its own folders",
        "avoid": "there is one host, this machine, which the pool's user chose",
    }

    def make_provider(self) -> Provider:
        return Local()

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        assert other.access is not None
        with socket.create_server((other.access.address, 0)) as server:
            place = server.getsockname()
            return await asyncio.to_thread(_connects, *place)


class TestSSH(ProviderContract):
    # Each test has two hosts and costs a second of processor time; unit/providers/test_ssh.py has most of them too.
    often = ("launch_answers", "describe_keeps", "terminate_is_idempotent", "reach_each_other", "claims_to_end_itself")
    polls = POLLS
    calls_per_look = 2  # a command for each of the two hosts, which belong to nobody who could list them
    does_not_apply: Mapping[Promise, str] = {
        "lose_answer": "a node is a folder: the hosts list what is on them, and it costs nothing",
        "fail_create": "the same: there is no server that fails",
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

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        assert isinstance(one.access, SSHAccess)
        assert isinstance(other.access, SSHAccess)
        connect = f"import socket; socket.create_connection(({other.access.address!r}, {other.access.target.port}), 5)"
        transport = SshTransport(one.access.target)
        try:
            return (await transport.run([sys.executable, "-c", connect], timeout_s=30)).exit_code == 0
        finally:
            await transport.close()


class TestAWS(ProviderContract):
    polls = POLLS
    does_not_apply: Mapping[Promise, str] = {
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
        remember_classes()
        with LocalEC2(tmp_path, machines=machines, looks=looks, block=71) as ec2:
            use_ec2(ec2, monkeypatch, {"listing_s": 0.0})
            self._ec2 = ec2
            yield

    def make_provider(self) -> Provider:
        return AWS(endpoint_url=self._ec2.endpoint_url)

    def lose_answer(self, provider: Provider) -> None:
        self._ec2.fail(AwsFault(dropped="after"), action="RunInstances")

    def fail_create(self, provider: Provider) -> None:
        self._ec2.fail(AwsFault(code="InternalError", status=500), action="RunInstances")

    def vendor_calls(self, provider: Provider) -> int:
        return len(self._ec2.calls)

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        """No packet flows between records: both are in a group that admits everything from itself."""
        groups = self._ec2.client("ec2").describe_security_groups()["SecurityGroups"]
        open_to_itself = {
            group["GroupId"]
            for group in groups
            for rule in group["IpPermissions"]
            if rule["IpProtocol"] == "-1" and group["GroupId"] in [pair["GroupId"] for pair in rule["UserIdGroupPairs"]]
        }
        members = {
            each["InstanceId"]: {group["GroupId"] for port in each["NetworkInterfaces"] for group in port["Groups"]}
            for each in self._ec2.instances()
        }
        return bool(open_to_itself & members[one.id] & members[other.id])

    async def outlive_client(self, provider: Provider, instances: Sequence[Instance]) -> None:
        async def over() -> bool | None:
            self._ec2.elapse(LIFE_MINUTES)  # a machine may run by the records before it has booted
            await provider.describe([each.id for each in instances])  # states move on when they are looked at
            return {each["State"]["Name"] for each in self._ec2.instances()} == {"terminated"} or None

        await wait_until(over, deadline_s=30, interval_s=0.05, what="the timers of the machines")


class CloudContract(ProviderContract):
    """A cloud with a fake; machines are records, except where a test lets them end."""

    vendor: ClassVar[Vendor]
    ending_themselves: ClassVar[bool] = False
    polls = POLLS

    @pytest.fixture(autouse=True)
    def account(
        self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[None]:
        machines = request.function.__name__ == "test_a_machine_that_claims_to_end_itself_does"
        room = {"cache": request.getfixturevalue("ssh_cache")} if machines and self.vendor.containers else {}
        if machines:
            require_sshd()
        looks = Looks(pending=1, ending=0 if machines else 1)
        with opened(
            self.vendor, monkeypatch, tmp_path, machines=machines, looks=looks, provider=PROMPT, **room
        ) as cloud:
            self._cloud = cloud
            yield

    def make_provider(self) -> Provider:
        itself = self.vendor.ends_itself
        assert itself is not None or not self.ending_themselves
        return self.vendor.provider(self._cloud, **(itself(self._cloud) if itself and self.ending_themselves else {}))

    def lose_answer(self, provider: Provider) -> None:
        self._cloud.service.fail(FAULTS["lost after"], route=self.vendor.creating)

    def fail_create(self, provider: Provider) -> None:
        self._cloud.service.fail(FAULTS["failed before"], route=self.vendor.creating)

    def vendor_calls(self, provider: Provider) -> int:
        """Count the calls that were admitted: the pauses of a busy machine's threads let some come too early."""
        return sum(call.status != THROTTLED for call in self._cloud.service.calls)

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        return self._cloud.reaches(one.id, other.id)

    async def outlive_client(self, provider: Provider, instances: Sequence[Instance]) -> None:
        """The machines were given their secrets, if there are any, as the client does after the first login."""
        for each in instances:
            if (secret := await provider.secret(each)) is not None:
                assert isinstance(each.access, SSHAccess)
                transport = SshTransport(each.access.target)
                done = await transport.run(secret.command, stdin=secret.value.encode(), timeout_s=30)
                await transport.close()
                assert done.exit_code == 0, done
        await asyncio.to_thread(self._cloud.room.elapse)

        async def over() -> bool | None:
            machines = [self._cloud.room.machine(each.id) for each in instances]
            return all(each.off or each.ended for each in machines) or None

        await wait_until(over, deadline_s=60, interval_s=0.05, what="the machines to end or to power off")


class TestVerda(CloudContract):
    """Machines that go off and bill on without their client."""

    vendor = vendor_named("verda")
    does_not_apply: Mapping[Promise, str] = {
        "avoid": "Verda does not tell which physical machine an instance is on, nor lets one choose",
    }


class TestVerdaSelfDestruct(TestVerda):
    """Machines that delete themselves without their client."""

    same_calls = True  # as TestVerda makes
    ending_themselves = True


class TestDigitalOcean(CloudContract):
    vendor = vendor_named("digitalocean")
    calls_per_look = 2  # a list of droplets without GPUs, and one of those with GPUs
    does_not_apply: Mapping[Promise, str] = {
        "avoid": "DigitalOcean does not report which physical machine a droplet is on, nor lets one choose",
    }


class TestDigitalOceanReaped(TestDigitalOcean):
    """Droplets that hold a token by which they delete themselves."""

    same_calls = True  # as TestDigitalOcean makes
    ending_themselves = True


class TestRunPod(CloudContract):
    """Pods, which end by their own keys."""

    vendor = vendor_named("runpod")
    ending_themselves = True
    does_not_apply: Mapping[Promise, str] = {
        "avoid": "RunPod does not report which physical machine a pod is on, nor lets one choose",
    }


class TestVastAI(CloudContract):
    """Containers of a marketplace, each on a host of its own, which end by their own keys."""

    vendor = vendor_named("vastai")
    ending_themselves = True


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def suites(base: type[ProviderContract] = ProviderContract) -> Iterator[type[ProviderContract]]:
    for suite in base.__subclasses__():
        yield suite
        yield from suites(suite)


def test_every_provider_is_bound_and_what_does_not_apply_to_it_is_listed_with_a_reason() -> None:
    found: Mapping[str, Collection[str]] = {
        suite.__name__: sorted(suite.does_not_apply)
        for suite in suites()
        if suite.__module__ == __name__ and suite is not CloudContract
    }

    assert found == {
        "TestFakeProvider": ["made_again"],
        "TestFakeIslands": ["made_again"],
        "TestFakeConfirmed": ["made_again"],
        "TestFakeRefused": ["made_again"],
        "TestFakeNetworks": ["made_again"],
        "TestLocal": ["avoid", "fail_create", "lose_answer", "vendor_calls"],
        "TestSSH": ["fail_create", "lose_answer"],
        "TestAWS": ["avoid"],
        "TestDigitalOcean": ["avoid"],
        "TestDigitalOceanReaped": ["avoid"],
        "TestRunPod": ["avoid"],
        "TestVastAI": [],
        "TestVerda": ["avoid"],
        "TestVerdaSelfDestruct": ["avoid"],
    }
    assert {name.removeprefix("Test").lower() for name in found} >= BUILT_IN.keys()
    assert all(reason for suite in suites() for reason in suite.does_not_apply.values())
