"""Networks of hosts over SSH: who reaches whom, by the key that a host shows, and which hosts a pool gets."""

from __future__ import annotations

import itertools
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import CapacityError, ConfigurationError, UnreachableError
from skyward.providers._ssh_hosts import find_networks, names_of, preferred
from skyward.providers.base import Instance, LaunchOrder
from skyward.providers.ssh import SSH
from skyward.request.request import parse_request
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.ssh_islands import IslandHost, require_namespaces

require_sshd()

# --- pure parts ---------------------------------------------------------------------------------------------------


def knows(networks: Mapping[str, int], asked: list[str]) -> Callable[[str, str], Awaitable[bool]]:
    async def reach(one: str, other: str) -> bool:
        asked.append(one + other)
        return networks[one] == networks[other]

    return reach


@pytest.mark.parametrize(
    ("numbers", "found", "questions"),
    [
        ([], [], 0),
        ([1], ["a"], 0),
        ([1, 1], ["ab"], 1),
        ([1, 2], ["a", "b"], 1),
        ([1] * 8, ["abcdefgh"], 7),
        ([1, 2, 1, 2], ["ac", "bd"], 3 + 1),
        ([1, 2, 3, 4], ["a", "b", "c", "d"], 3 + 2 + 1),
    ],
)
async def test_hosts_are_compared_with_one_of_each_network(
    numbers: Sequence[int], found: Sequence[str], questions: int
) -> None:
    hosts = "abcdefgh"[: len(numbers)]
    asked: list[str] = []

    networks = await find_networks(hosts, knows(dict(zip(hosts, numbers, strict=True)), asked))

    assert ["".join(each) for each in networks] == found
    assert len(asked) == len(set(asked)) == questions


@given(st.lists(st.integers(0, 4), max_size=12))
async def test_networks_are_found_however_the_hosts_lie(numbers: list[int]) -> None:
    hosts = "abcdefghijkl"[: len(numbers)]
    where = dict(zip(hosts, numbers, strict=True))

    networks = await find_networks(hosts, knows(where, []))

    expected = [[host for host in hosts if where[host] == number] for number in dict.fromkeys(numbers)]
    assert sorted(networks) == sorted(expected)


@pytest.mark.parametrize(
    ("networks", "before", "names"),
    [
        (["a", "b"], {}, {"a": "", "b": ""}),
        (["ba", "c"], {}, {"a": "ssh:a", "b": "ssh:a", "c": ""}),
        (["dc", "ab"], {}, {"c": "ssh:c", "d": "ssh:c", "a": "ssh:a", "b": "ssh:a"}),
        (["abc"], {"b": "ssh:b", "c": "ssh:b"}, {"a": "ssh:b", "b": "ssh:b", "c": "ssh:b"}),  # a came later
        (["b"], {"a": "ssh:a", "b": "ssh:a"}, {"a": "ssh:a", "b": "ssh:a"}),  # a is away
        (["ad", "bc"], {"b": "ssh:a", "c": "ssh:a"}, {"a": "", "d": "", "b": "ssh:a", "c": "ssh:a"}),  # a has moved
    ],
)
def test_networks_are_called_after_their_smallest_member_and_keep_their_names(
    networks: Sequence[str], before: Mapping[str, str], names: Mapping[str, str]
) -> None:
    assert names_of(networks, before) == names


@pytest.mark.parametrize(
    ("networks", "beside", "wanted", "first"),
    [
        (["x", "y", "y"], [], 1, 0),
        (["x", "y", "y"], [], 2, 1),
        (["", "y", "y"], [], 2, 1),
        (["x", "y", "y", "x", "x"], [], 4, 0),
        (["x", "y", "y"], ["x", "y", "y"], 1, 1),
        (["x", "y", "z", "z"], ["y"], 2, 1),
        (["", ""], ["", "y"], 1, 0),
    ],
)
def test_a_pool_gets_hosts_of_as_few_networks_as_possible(
    networks: Sequence[str], beside: Sequence[str], wanted: int, first: int
) -> None:
    ranked = preferred(range(len(networks)), dict(enumerate(networks)), beside=beside, wanted=wanted)

    assert ranked[0] == first
    assert sorted(ranked) == list(range(len(networks)))


def test_a_network_that_is_none_of_the_two_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='network must be "auto" or "none", got \'lan\''):
        SSH(hosts=["gpu1"], network="lan")  # type: ignore[arg-type]


# --- real hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("networks")


@pytest.fixture(scope="module")
def mainland(folder: Path) -> Iterator[list[SshHost]]:
    """Two hosts that reach each other, at addresses at which no node of another test claims ports."""
    with ExitStack() as stack:
        yield [stack.enter_context(SshHost(folder / f"main-{n}", address=f"127.0.5.{n}")) for n in (2, 3)]


@pytest.fixture(scope="module")
def overseas(folder: Path) -> Iterator[list[SshHost]]:
    """Two networks: one host in the first, two in the second; each believes to be at port 22 of a loopback address."""
    require_namespaces()
    with ExitStack() as stack:
        alone = stack.enter_context(IslandHost(folder / "alone", address="127.0.0.4", island="127.0.0.1"))
        first = stack.enter_context(IslandHost(folder / "first", address="127.0.0.5", island="127.0.0.1"))
        second = IslandHost(folder / "second", address="127.0.0.6", island="127.0.0.3", neighbour=first)
        yield [alone, first, stack.enter_context(second)]


class Hasty(SSH):
    """Does not wait for who does not answer."""

    patience_s = 0.5


class Using:
    """A provider of hosts, closed at the end."""

    def __init__(self, folder: Path, *hosts: SshHost, **options: Any) -> None:
        self.names = [f"{host.address}:{host.port}" for host in hosts]
        known = write_known_hosts(folder / "known_hosts", *hosts)
        self.ssh = Hasty(hosts=self.names, key_path=str(hosts[0].key_path), known_hosts=str(known), **options)
        self.launched: list[Instance] = []
        self._keys = itertools.count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ssh.terminate([instance.id for instance in self.launched])
        await self.ssh.close()

    async def launch(self, nodes: int, **options: Any) -> list[Instance]:
        offers = await self.ssh.offers(parse_request(nodes=1))
        keys = tuple(f"key-{next(self._keys)}" for _ in range(nodes))
        order = LaunchOrder(pool_id="pool", keys=keys, timeout_s=60.0, **options)
        launched = list(await self.ssh.launch(offers, order))
        self.launched += launched
        return launched

    def numbers(self, instances: Sequence[Instance]) -> list[int]:
        return [self.names.index(instance.host) for instance in instances]


async def test_hosts_that_reach_each_other_share_a_network_of_the_same_name_in_every_process(
    mainland: list[SshHost], tmp_path: Path
) -> None:
    async with Using(tmp_path, *mainland) as using, Using(tmp_path, *reversed(mainland)) as other:
        (offer,) = await using.ssh.offers(parse_request(nodes=2))
        names = {instance.network for each in (using, other) for instance in await each.launch(2)}

    assert len(names) == 1
    assert names.pop().startswith("ssh:")
    assert (offer.island, offer.note) == (False, "")


async def test_hosts_that_believe_to_be_at_the_same_address_are_told_apart(
    overseas: list[SshHost], tmp_path: Path
) -> None:
    async with Using(tmp_path, *overseas) as using:
        (offer,) = await using.ssh.offers(parse_request(nodes=3))
        alone, first, second = using.names
        instances = {instance.host: instance for instance in await using.launch(3)}

    assert instances[alone].network == ""
    assert instances[first].network == instances[second].network != ""
    assert offer.note == (
        f"not all hosts reach each other: {first}, {second} reach each other; {alone} reaches no other"
    )


@pytest.mark.full
async def test_a_pool_and_its_replacements_get_hosts_of_one_network(
    overseas: list[SshHost], mainland: list[SshHost], tmp_path: Path
) -> None:
    alone, first, second = overseas
    async with Using(tmp_path, alone, first, mainland[0], second, mainland[1]) as using:
        pool = await using.launch(2)
        assert using.numbers(pool) == [1, 3]
        await using.ssh.terminate([pool[0].id])
        assert using.numbers(await using.launch(1)) == [1]
        await using.ssh.terminate([pool[1].id])
        (elsewhere,) = await using.launch(1, avoid=frozenset([using.names[3]]))
        assert using.numbers([elsewhere]) == [0]


async def test_one_network_is_refused_before_anything_is_made_where_no_hosts_suffice(
    overseas: list[SshHost], tmp_path: Path
) -> None:
    async with Using(tmp_path, *overseas) as using:
        with pytest.raises(ConfigurationError, match="nodes=3 must reach each other, and no 3 of the hosts do") as got:
            await using.ssh.offers(replace(parse_request(nodes=3), one_network=True))
        assert all(name in str(got.value) for name in using.names)
        assert "finds another machine at 127.0.0.1 port 22" in str(got.value)

        assert using.numbers(await using.launch(2, one_network=True)) == [1, 2]
        with pytest.raises(CapacityError, match="does not reach its other hosts"):
            await using.launch(1, one_network=True)


async def test_hosts_that_may_not_connect_to_each_other_are_islands(mainland: list[SshHost], tmp_path: Path) -> None:
    first = mainland[0]
    shut = SshHost(
        tmp_path / "shut", address="127.0.0.7", client_key=first.key_path, sshd_options=["PermitOpen 127.0.0.7:*"]
    )
    with shut:
        async with Using(tmp_path, first, shut) as using:
            (offer,) = await using.ssh.offers(parse_request(nodes=2))
            assert [instance.network for instance in await using.launch(2)] == ["", ""]
            (finding,) = await using.ssh.check()

    assert offer.island
    assert (finding.what, finding.state) == ("networks", "warn")
    assert f"{using.names[1]} does not reach 127.0.5.2 port {first.port}" in finding.fix


async def test_hosts_between_which_a_firewall_admits_ssh_only_are_islands(
    mainland: list[SshHost], tmp_path: Path
) -> None:
    address = (mainland[1].address, 10_240)
    with socket.create_server(address, backlog=0), ExitStack() as stack:
        for _ in range(2):  # a full queue drops further requests, as a firewall does
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        async with Using(tmp_path, *mainland) as using:
            (offer,) = await using.ssh.offers(parse_request(nodes=2))
            (finding,) = await using.ssh.check()

    assert offer.island
    assert "port 10240 does not answer: a firewall in between must admit every port" in finding.fix


async def test_hosts_with_the_same_host_key_are_islands(mainland: list[SshHost], tmp_path: Path) -> None:
    first = mainland[0]
    (tmp_path / "copy").mkdir()
    shutil.copy(first.home.parent / "host_key", tmp_path / "copy/host_key")
    with SshHost(tmp_path / "copy", address="127.0.0.7", client_key=first.key_path) as copy:
        async with Using(tmp_path, first, copy) as using:
            assert [instance.network for instance in await using.launch(2)] == ["", ""]
            (finding,) = await using.ssh.check()

    assert "show the same host key" in finding.fix
    assert finding.found.endswith("show the same host key: one machine twice, or a copied key")


async def test_no_host_is_asked_with_network_none(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = [stack.enter_context(SshHost(tmp_path / f"{n}", address=f"127.0.0.{n}")) for n in (7, 8)]
        async with Using(tmp_path, *hosts, network="none") as using:
            (offer,) = await using.ssh.offers(parse_request(nodes=2))
            networks = [instance.network for instance in await using.launch(2)]
            with pytest.raises(ConfigurationError, match='SSH\\(network="none"\\) keeps them apart'):
                await using.ssh.offers(replace(parse_request(nodes=2), one_network=True))

    assert (offer.island, offer.note, networks) == (True, "", ["", ""])
    logs = [host.log.read_text(encoding="utf-8") for host in hosts]
    # OpenSSH 10 has two such lines of the connection without a byte by which SshHost sees that it listens.
    looks = [2 * log.count("kex_exchange_identification: Connection closed by remote host [preauth]") for log in logs]
    assert [log.count("[preauth]") for log in logs] == looks


async def test_a_host_that_was_away_is_asked_again_and_its_network_keeps_its_name(
    mainland: list[SshHost], tmp_path: Path
) -> None:
    third = SshHost(tmp_path / "third", address="127.0.0.7", client_key=mainland[0].key_path)
    with third:
        async with Using(tmp_path, third, *mainland) as using:
            first, *others = await using.launch(3)
            assert {each.network for each in others} == {first.network} != {""}

            third.stop()
            with pytest.raises(UnreachableError):
                await using.ssh.describe([first.id])
            third.start()
            assert (await using.ssh.describe([first.id]))[0].network == ""
            await using.ssh.offers(parse_request(nodes=3))
            assert (await using.ssh.describe([first.id]))[0].network == first.network
