"""Machines of one's own as a provider: what it refuses, what it makes on a host, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    TerminationError,
    UnreachableError,
)
from skyward.machine.ssh import SSHAccess
from skyward.providers.base import Instance, InstanceState, LaunchOrder
from skyward.providers.ssh import SSH
from skyward.request.accelerators import Accelerator
from skyward.request.request import parse_request
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts

require_sshd()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SshHost]]:
    folder = tmp_path_factory.mktemp("hosts")
    with (
        SshHost(folder / "first", address="127.0.0.2") as first,
        SshHost(folder / "second", address="127.0.0.3") as second,
    ):
        yield [first, second]


class Hasty(SSH):
    """Does not wait for who does not answer."""

    patience_s = 0.5


def provider_of(hosts: Sequence[SshHost], tmp_path: Path, **options: Any) -> SSH:
    known = write_known_hosts(tmp_path / "known_hosts", *hosts)
    key = {"key_path": str(hosts[0].key_path)} | options
    return Hasty(hosts=[f"{host.address}:{host.port}" for host in hosts], known_hosts=str(known), **key)


@pytest.fixture
async def provider(hosts: list[SshHost], tmp_path: Path) -> AsyncIterator[SSH]:
    provider = provider_of(hosts, tmp_path)
    yield provider
    await provider.close()


def order(*keys: str, pool_id: str = "pool") -> LaunchOrder:
    return LaunchOrder(pool_id=pool_id, keys=keys, timeout_s=60.0)


async def launch(provider: SSH, *keys: str, pool_id: str = "pool") -> Sequence[Instance]:
    (offer,) = await provider.offers(parse_request(nodes=1))
    return await provider.launch([offer], order(*keys, pool_id=pool_id))


def access_of(instance: Instance) -> SSHAccess:
    assert isinstance(instance.access, SSHAccess)
    return instance.access


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "hosts must be a list of at least one host"),
        ("gpu1", "hosts must be a list of strings"),
        ([3], "hosts"),
        ([""], "hosts"),
        (["gpu1", "GPU1"], "one machine twice: 'gpu1' and 'GPU1'"),
        (["gpu1:22", "me@gpu1:22"], "one machine twice"),
        (["gpu1:22", "gpu1"], "one machine twice"),
        (["gpu1:22", "gpu1:022"], "one machine twice"),
        (["gpu1:0"], "host:port"),
        (["gpu1:99999"], "host:port"),
        (["gpu1:ssh"], "host:port"),
        (["gpu1 gpu2"], "host:port"),
    ],
)
def test_hosts_that_are_none_are_refused(hosts: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SSH(hosts=hosts)


@pytest.mark.parametrize("parameter", ["key_path", "known_hosts"])
def test_files_that_do_not_exist_are_refused(parameter: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{parameter}: there is no /nonexistent/x"):
        SSH(hosts=["gpu1"], **{parameter: "/nonexistent/x"})
    with pytest.raises(ConfigurationError, match=f"{parameter}: /dev/null is no file"):
        SSH(hosts=["gpu1"], **{parameter: "/dev/null"})


@pytest.mark.parametrize(
    "host", ["gpu1", "10.0.0.5", "gpu1:2222", "me@gpu1", "me@gpu1:2222", "[2001:db8::1]:22", "[::1]"]
)
def test_hosts_are_read_as_they_are_written_elsewhere(host: str) -> None:
    target = SSH(hosts=[host], user="other").target(0)

    assert target.user == ("me" if "@" in host else "other")
    assert target.port == (int(host.rpartition(":")[2]) if host.endswith(("22", "2222")) else None)
    assert target.host in host


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nodes": 3}, "nodes=3: SSH.* has 2 hosts.*; add hosts, or list other providers .*spread=True"),
        ({"cpu": 100_000}, "nodes=1 of 100000 cores: 0 of the hosts have that"),
        ({"accelerator": "H100"}, "nodes=1 of .*H100.*: 0 of the hosts have that"),
        ({"machine": "p5.48xlarge"}, "machine='p5.48xlarge': SSH"),
        ({"accelerator": Accelerator.NVIDIA.H100(mig="3g.40gb")}, "nodes=1 of .*H100.*: 0 of the hosts have that"),
    ],
)
async def test_what_the_hosts_do_not_have_is_refused(provider: SSH, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        await provider.offers(parse_request(**asked))


async def test_the_offer_is_a_host_for_nothing_and_on_demand(provider: SSH) -> None:
    (offer,) = await provider.offers(parse_request(nodes=2, spot="always"))
    await provider.close()

    assert (offer.price_per_hour, offer.spot) == (0.0, False)
    assert offer.spec.cpu > 0
    assert offer.spec.memory_gib > 0


async def test_a_node_is_a_folder_that_only_its_user_may_enter_and_nothing_of_it_stays(
    provider: SSH, hosts: list[SshHost]
) -> None:
    first, second = await launch(provider, "key-0", "key-1")
    folders = [Path(access_of(each).workdir) for each in (first, second)]

    assert [access_of(each).address for each in (first, second)] == ["127.0.0.2", "127.0.0.3"]
    assert [folder.is_relative_to(host.home / ".cache/skyward") for folder, host in zip(folders, hosts, strict=True)]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    await provider.terminate([first.id, second.id])
    assert [list((host.home / ".cache/skyward").iterdir()) for host in hosts] == [[], []]


async def test_processes_that_carry_the_id_are_killed_wherever_they_are(provider: SSH) -> None:
    (instance,) = await launch(provider, "key-0")
    orphan = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], env={"SKYWARD_INSTANCE": instance.id, "PATH": "/bin"}, check=True)
    await provider.terminate([instance.id])
    left = subprocess.run(
        ["grep", "-lz", instance.id, *map(str, Path("/proc").glob("[0-9]*/environ"))],
        check=False,
        capture_output=True,
    )
    assert left.stdout == b""


async def test_a_host_serves_a_pool_once_and_is_free_again_when_its_node_has_ended(provider: SSH) -> None:
    first, second = await launch(provider, "key-0", "key-1")
    with pytest.raises(CapacityError, match="every one of the 2 hosts serves the pool already"):
        await launch(provider, "key-2")
    (other,) = await launch(provider, "key-2", pool_id="another")
    ending = asyncio.ensure_future(provider.terminate([first.id]))
    (again,) = await launch(provider, "key-3")  # waits for that
    await ending
    assert access_of(again).address == "127.0.0.2"
    assert (await provider.describe([first.id]))[0].state is InstanceState.GONE
    await provider.terminate([again.id, second.id, other.id])


async def test_launches_at_the_same_time_get_hosts_of_their_own(provider: SSH) -> None:
    launched = await asyncio.gather(launch(provider, "key-0"), launch(provider, "key-1"))
    instances = [instance for some in launched for instance in some]
    assert sorted(access_of(each).address for each in instances) == ["127.0.0.2", "127.0.0.3"]
    await provider.terminate([each.id for each in instances])


async def test_one_login_a_host_serves_all_that_a_pool_asks_of_it(provider: SSH, hosts: list[SshHost]) -> None:
    def logins() -> list[int]:
        return [host.log.read_text(encoding="utf-8").count("Accepted publickey") for host in hosts]

    before = logins()
    instances = await launch(provider, "key-0", "key-1")
    assert sorted(access_of(each).address for each in instances) == ["127.0.0.2", "127.0.0.3"]
    await provider.describe([each.id for each in instances])
    await provider.terminate([each.id for each in instances])
    assert logins() == [count + 1 for count in before]


async def test_closing_for_one_pool_does_not_disturb_another(provider: SSH) -> None:
    launching = asyncio.ensure_future(launch(provider, "key-0"))
    while not launching.done():
        await asyncio.sleep(0.01)
        await provider.close()
    (instance,) = await launching
    await provider.terminate([instance.id])


async def test_tags_that_a_crash_or_another_skyward_left_hinder_nobody(provider: SSH, hosts: list[SshHost]) -> None:
    left = dict(enumerate(["", '{"instance_id": "ssh-', "[]", '{"key": "known", "later": 1}']))
    folders = {number: hosts[0].home / f".cache/skyward/nodes/ssh-0-{number:012x}" for number in left}
    for number, tags in left.items():
        folders[number].mkdir(parents=True)
        (folders[number] / "instance.json").write_text(tags)
    (instance,) = await launch(provider, "key-0")
    assert (await provider.describe([instance.id]))[0].state is InstanceState.RUNNING
    keys = {each.id: each.key for each in await provider.tagged()}
    known = {folder.name: "known" if "known" in left[number] else folder.name for number, folder in folders.items()}
    assert keys == {instance.id: "key-0"} | known
    await provider.terminate([*keys])
    assert not any(folder.exists() for folder in folders.values())


async def test_a_node_is_found_and_ended_whatever_the_order_of_hosts(
    provider: SSH, hosts: list[SshHost], tmp_path: Path
) -> None:
    elsewhere = provider_of([hosts[1], hosts[0]], tmp_path)
    (instance,) = await launch(provider, "key-0")
    found = await elsewhere.tagged()
    assert [each.id for each in found] == [instance.id]
    assert [each.state for each in await elsewhere.describe([instance.id])] == [InstanceState.RUNNING]
    await elsewhere.terminate([instance.id])
    assert [each.state for each in await provider.describe([instance.id])] == [InstanceState.GONE]
    await elsewhere.close()


async def test_a_spare_host_takes_the_place_of_one_that_does_not_answer(hosts: list[SshHost], tmp_path: Path) -> None:
    provider = Hasty(
        hosts=["127.0.0.9:9", f"127.0.0.2:{hosts[0].port}"],
        key_path=str(hosts[0].key_path),
        known_hosts=str(write_known_hosts(tmp_path / "known", hosts[0], through={("127.0.0.9", 9): hosts[1]})),
    )
    try:
        (instance,) = await launch(provider, "key-0")
        assert access_of(instance).address == "127.0.0.2"
        await provider.terminate([instance.id])
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.9"):
            await provider.offers(parse_request(nodes=2))
    finally:
        await provider.close()


async def test_hosts_that_do_not_resolve_or_have_no_key_on_file_are_left_out_where_others_do(
    hosts: list[SshHost], tmp_path: Path
) -> None:
    known = write_known_hosts(tmp_path / "known", hosts[0])
    provider = Hasty(
        hosts=["no-such-host.invalid", f"127.0.0.3:{hosts[1].port}", f"127.0.0.2:{hosts[0].port}"],
        key_path=str(hosts[0].key_path),
        known_hosts=str(known),
    )
    try:
        (offer,) = await provider.offers(parse_request(nodes=1))
        unresolved, unknown = offer.note.split("; host left out: ")
        assert unresolved.startswith("host left out: ")
        assert "no-such-host.invalid port 22 cannot be reached" in unresolved
        assert "ame" in unresolved, "of the name or service"
        assert "key" not in unresolved
        assert "127.0.0.3" in unknown
        assert "is not a known host" in unknown
        with pytest.raises(UnreachableError, match=r"no-such-host\.invalid port 22 cannot be reached"):
            await provider.offers(parse_request(nodes=2))
    finally:
        await provider.close()


async def test_a_home_that_cannot_be_written_to_is_said_so(tmp_path: Path) -> None:
    with SshHost(tmp_path / "host", address="127.0.0.4") as host:
        shutil.rmtree(host.home / ".cache", ignore_errors=True)
        (host.home / ".cache").write_text("a file where a folder should be")
        provider = provider_of([host], tmp_path)
        try:
            with pytest.raises(ConfigurationError, match=r"/\.cache/skyward cannot be written to: .*Not a directory"):
                await launch(provider, "key-0")
        finally:
            await provider.close()


async def test_a_wrong_key_is_an_error_even_where_other_hosts_would_do(hosts: list[SshHost], tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    provider = provider_of(hosts, tmp_path, key_path=str(tmp_path / "other"))
    try:
        async with asyncio.timeout(5):
            with pytest.raises(AuthenticationError):
                await provider.offers(parse_request(nodes=1))
    finally:
        await provider.close()


async def test_nodes_of_a_host_that_is_gone_are_named_and_may_still_be_there(tmp_path: Path) -> None:
    with SshHost(tmp_path / "host", address="127.0.0.4") as host:
        provider = provider_of([host], tmp_path)
        try:
            (instance,) = await launch(provider, "key-0")
            host.stop()
            with pytest.raises(TerminationError, match=r"127\.0\.0\.4") as raised:
                await provider.terminate([instance.id])
            assert raised.value.instance_ids == (instance.id,)
            host.start()
            assert [each.id for each in await provider.tagged()] == [instance.id]
            await provider.terminate([instance.id])
            assert await provider.tagged() == []
        finally:
            await provider.close()
