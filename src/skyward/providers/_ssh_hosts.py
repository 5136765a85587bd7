"""Hosts of the SSH provider: their names, survey and verbs, and the networks through which they reach each other."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import TypeVar

from skyward.errors import ConfigurationError, SkywardError
from skyward.machine.ssh import SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.machine.ssh_probes import PortState
from skyward.request.accelerators import model_name
from skyward.request.checks import refusal, texts
from skyward.request.instance import InstanceSpec

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^@:\s]+))(?::(?P<port>\d{1,5}))?")
_PORT = 22
_VERB_TIMEOUT_S = 60.0
_KIB_PER_GIB, _MIB_PER_GIB = 1 << 20, 1 << 10
_NODE_PORT = 10_240
"""One of the ports that nodes choose from, on which none listens: a host refuses it, a firewall drops the request."""
_DAY_S = 86400.0
_CLOCK_S = 20 * 3600.0
"""Largest difference of clocks; certificates of a pool are valid from a day before it was opened."""
_REMEDIES = {
    "No space left": "Free space there, or inodes (`df -h`, `df -i`)",
    "quota": "Free space there (`quota -s`)",
    "Read-only": "Remount it writable, or make ~/.cache/skyward a link to a folder on another disk",
    "noexec": "Remount it with exec, or make ~/.cache/skyward a link to a folder on another disk",
    "no home folder": "Create it, and give it to the user, or log in as another user",
    "belongs to another": "Give it to the user (chown), or log in as another user",
    "Permission denied": "Give it to the user (chown -R)",
}
"""Next step, by the text of a fault; the first that is found counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host that has answered.

    Attributes:
        index: its index in the list of hosts.
        name: its name in that list.
        target: its SSH target.
        spec: its hardware.
        address: its own address, at which its SSH server was reached.
        port: the SSH server's port there.
        key: the public host key that it has shown.
        cache: its folder of environments; nodes' folders are in it.
        fault: what keeps nodes from running there, with the next step; empty if nothing does. Nodes that it has can be
            found and ended all the same.
    """

    index: int
    name: str
    target: SSHTarget
    spec: InstanceSpec
    address: str
    port: int
    key: str
    cache: str
    fault: str = ""

    @property
    def identity(self) -> str:
        """Fingerprint of its host key, short enough for a name."""
        return hashlib.sha256(b64decode(self.key.split()[1])).hexdigest()[:16]

    def folder(self, instance_id: str) -> str:
        """Return the folder of one node."""
        return f"{self.cache}/nodes/{instance_id}"


def checked_hosts(value: object) -> tuple[str, ...]:
    """Return the parameter ``hosts``, each host once."""
    hosts = texts("hosts", value)
    if not hosts:
        raise refusal("hosts", 'a list of at least one host, such as ["10.0.0.5", "gpu1:2222"]', hosts)
    seen: dict[tuple[str, int], str] = {}
    for host in hosts:
        parts = parse_host(host)
        place = (parts["v6"] or parts["name"]).lower(), int(parts["port"] or _PORT)
        if place in seen:
            raise ConfigurationError(f"hosts names one machine twice: {seen[place]!r} and {host!r}")
        seen[place] = host
    return hosts


def parse_host(host: str) -> Mapping[str, str]:
    """Return the parts of a host: ``user``, ``v6`` or ``name``, and ``port``."""
    found = _HOST.fullmatch(host)
    port = int(found["port"] or _PORT) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise refusal("hosts", 'a list of "host", "host:port" or "user@host:port"', host)
    return found.groupdict()


@asynccontextmanager
async def reaching(target: SSHTarget) -> AsyncGenerator[SshTransport]:
    """Open a transport for one use; only this context closes it."""
    transport = SshTransport(target)
    try:
        yield transport
    finally:
        await transport.close()


async def run_on(target: SSHTarget, verb: str, *arguments: str) -> str:
    """Run a verb of ``_ssh_host.sh`` and return its output.

    Raises:
        SkywardError: it failed.
        UnreachableError: the host does not answer.
    """
    async with reaching(target) as transport:
        completed = await transport.run([*_script(), verb, *arguments], timeout_s=_VERB_TIMEOUT_S)
    if completed.exit_code:
        raise SkywardError(completed.stderr.strip() or f"{verb} failed with exit code {completed.exit_code}")
    return completed.stdout


async def survey(index: int, name: str, target: SSHTarget) -> Host:
    """Ask a host for its hardware, address and key, and whether nodes can run there.

    Raises:
        ConfigurationError: the login runs no commands, the host lacks programs, does not run Linux, or was reached
            over IPv6.
    """
    async with reaching(target) as transport:
        showing = asyncio.ensure_future(transport.host_key())
        try:
            facts = await _asked_facts(target)
            key = await showing
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        if "lacking" in facts:
            raise ConfigurationError(
                f"hosts: {name} lacks programs, {facts['lacking'][0].strip()}: install them, or correct its PATH, "
                f"{facts['path'][0]}, which startup files may have set"
            )
        (system,), (address,), (port,), (folder,) = facts["system"], facts["address"], facts["port"], facts["cache"]
        if system != "Linux":
            raise ConfigurationError(f"hosts: {name} runs {system}; nodes run on Linux")
        if ":" in address:
            raise ConfigurationError(f"hosts: {name} was reached at {address}; use a name or address of IPv4")
        node_port = await transport.probe_port(address, _NODE_PORT, timeout_s=_CONNECT_S)
    fault = host_fault(facts, forwards=node_port is not PortState.PROHIBITED, now=time.time())
    gpus = [line.rsplit(",", 1) for line in facts.get("gpu", [])]
    spec = InstanceSpec(
        name=name,
        cpu=int(facts["cpu"][0]),
        memory_gib=round(int(facts["memory_kib"][0] or 0) / _KIB_PER_GIB, 1),
        accelerator=model_name(gpus[0][0].strip()) if gpus else None,
        accelerator_count=len(gpus),
        accelerator_memory_gib=_gibibytes(gpus[0][1]) if gpus else None,
    )
    return Host(
        index=index,
        name=name,
        target=target,
        spec=spec,
        address=address,
        port=int(port or _PORT),
        key=key,
        cache=folder,
        fault=f"hosts: {name} cannot be a node: {fault}" if fault else "",
    )


def host_fault(facts: Mapping[str, Sequence[str]], *, forwards: bool, now: float) -> str:
    """Return what keeps nodes from running on a host, and the next step; empty if nothing does. Pure.

    Args:
        facts: the survey's.
        forwards: False if the user may not have ports forwarded.
        now: this machine's time.
    """
    for fault in facts.get("fault", ()):
        remedy = next((advice for text, advice in _REMEDIES.items() if text in fault), "")
        return f"{fault}. {remedy}".strip()
    if not forwards:
        return (
            "its SSH server forwards no ports for this login, and nodes are reached through forwarded ports. Check "
            "AllowTcpForwarding, PermitOpen and DisableForwarding in its sshd_config, and `restrict`, "
            "`no-port-forwarding` and `permitopen` before the key in authorized_keys"
        )
    if facts["bits"][0] not in ("", "64"):
        return f"its system ({facts['machine'][0]}) has {facts['bits'][0]} bits; packages for nodes need 64"
    ahead_s = int(facts["time"][0]) - now
    if abs(ahead_s) > _CLOCK_S:
        return (
            f"its clock is {abs(ahead_s) / _DAY_S:.1f} days {'ahead of' if ahead_s > 0 else 'behind'} this machine's, "
            "and certificates count by it. Set the wrong one (timedatectl set-ntp true)"
        )
    return ""


async def _asked_facts(target: SSHTarget) -> Mapping[str, list[str]]:
    """Return the survey's facts. A login that runs no commands is named at once, while the survey would wait."""
    asking = asyncio.ensure_future(run_on(target, "survey"))
    try:
        async with reaching(target) as transport:
            await transport.check_login()
        return _facts(await asking)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def _gibibytes(mebibytes: str) -> float | None:
    """Parse a memory size; None if it is no number: in MIG mode the driver shows it to root only."""
    number = mebibytes.strip()
    return round(int(number) / _MIB_PER_GIB, 1) if number.isdecimal() else None


def _facts(lines: str) -> Mapping[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for line in lines.splitlines():
        name, _, value = line.partition("=")
        facts.setdefault(name, []).append(value)
    return facts


@cache
def _script() -> tuple[str, ...]:
    return ("/bin/sh", "-c", files("skyward.providers").joinpath("_ssh_host.sh").read_text(encoding="utf-8"), "sh")


T = TypeVar("T")

_CONNECT_S = 4.0
"""Time for a host to connect to another: room for two lost packets, and the cost of a firewall that drops them."""
_ATTEMPTS = 2
_FEW = 5
"""Largest number of hosts of which each pair is asked both ways at once, which saves five round trips. A connection
opens four channels at a time: of more hosts, one that reaches none would wait for many in vain."""
_VISITORS = 8
"""Unauthenticated connections to one SSH server at a time; it drops some of more than ten (MaxStartups)."""
_logger = logging.getLogger("skyward")


class Networks:
    """Networks of a provider's hosts. Each pair of hosts is asked at most once, until one of them is forgotten."""

    def __init__(self) -> None:
        self._refusals: dict[frozenset[str], str] = {}
        self._names: dict[str, str] = {}

    def name(self, host: Host) -> str:
        """Return the name of the host's network; empty if it reaches none of the others, or was not asked."""
        return self._names.get(host.identity, "")

    def in_words(self, hosts: Iterable[Host]) -> str:
        """Return the networks in words: ``"gpu1, gpu2 reach each other; gpu3 reaches no other"``."""
        members: dict[str, list[str]] = {}
        same_key: dict[str, list[str]] = {}
        for host in hosts:
            members.setdefault(self.name(host), []).append(host.name)
            same_key.setdefault(host.identity, []).append(host.name)
        twins = [names for names in same_key.values() if len(names) > 1]
        alone = [name for name in members.pop("", []) if not any(name in names for names in twins)]
        parts = [f"{', '.join(names)} reach each other" for names in members.values() if len(names) > 1]
        alone += [names[0] for names in members.values() if len(names) == 1]
        parts += [f"{', '.join(alone)} {'reaches' if len(alone) == 1 else 'reach'} no other"] if alone else []
        parts += [f"{', '.join(names)} show the same host key: one machine twice, or a copied key" for names in twins]
        return "; ".join(parts)

    def first_refusal(self, hosts: Iterable[Host]) -> str:
        """Return why two of the hosts do not reach each other: the first two; empty if all do."""
        for one, other in combinations(hosts, 2):
            if one.identity == other.identity:
                return f"{one.name} and {other.name} show the same host key, and cannot be told apart"
            if why := self._refusals.get(frozenset((one.identity, other.identity))):
                return why
        return ""

    async def ask(self, hosts: Sequence[Host]) -> None:
        """Find out which of the hosts reach each other, in both directions, over connections made by the hosts.

        Networks keep their names while one of their members is known.
        """
        shown = Counter(host.identity for host in hosts)
        turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_VISITORS))

        async def reach(one: Host, other: Host) -> bool:
            pair = frozenset((one.identity, other.identity))
            if pair not in self._refusals:
                answer = await _comparison(one, other, turns, at_once=len(hosts) <= _FEW)
                self._refusals[pair] = answer
                _logger.debug("%s and %s: %s", one.name, other.name, answer or "they reach each other")
            return not self._refusals[pair]

        found = await find_networks([host for host in hosts if shown[host.identity] == 1], reach)
        known = {identity: name for identity, name in self._names.items() if shown[identity] <= 1}
        self._names = names_of([[host.identity for host in each] for each in found], known)

    def forget(self, host: Host) -> None:
        """Drop all answers about a host that was away, since it may come back elsewhere."""
        self._names.pop(host.identity, None)
        self._refusals = {pair: why for pair, why in self._refusals.items() if host.identity not in pair}


async def _comparison(one: Host, other: Host, turns: Mapping[str, asyncio.Semaphore], *, at_once: bool) -> str:
    """Return why the two do not reach each other in both directions; empty if they do."""
    if at_once:
        there, back = await asyncio.gather(_refusal(other, one, turns), _refusal(one, other, turns))
        return there or back
    return await _refusal(other, one, turns) or await _refusal(one, other, turns)


async def _refusal(source: Host, target: Host, turns: Mapping[str, asyncio.Semaphore]) -> str:
    """Return why ``source`` does not reach ``target``; empty if it does. Asks again where no answer came in time."""
    why = ""
    # One loaded test run reported a connected host as unconnected: a busy host may be slow once.
    for _ in range(_ATTEMPTS):
        try:
            async with turns[target.identity]:
                shown, open_to_all = await _ask(source, target)
        except SkywardError as error:
            why = str(error)
            continue
        if shown != target.key:
            return f"{source.name} finds another machine at {target.address} port {target.port} than {target.name}"
        if open_to_all:
            return ""
        why = (
            f"{source.name} reaches the SSH server of {target.name}, and its port {_NODE_PORT} does not answer: "
            "a firewall in between must admit every port"
        )
    return why


async def _ask(source: Host, target: Host) -> tuple[str, bool]:
    """Return the host key that ``source`` finds at the target's address, and True if the target answers on all ports.

    Raises:
        SkywardError: it finds none, or not in time.
    """
    async with reaching(source.target) as transport:
        shown = await transport.key_at(target.address, target.port, kind=target.key.split()[0], timeout_s=_CONNECT_S)
        if shown != target.key:
            return shown, False
        node_port = await transport.probe_port(target.address, _NODE_PORT, timeout_s=_CONNECT_S)
        return shown, node_port is not PortState.SILENT


async def find_networks(hosts: Sequence[T], reach: Callable[[T, T], Awaitable[bool]]) -> list[list[T]]:
    """Group hosts into networks, in the order of ``hosts``; each is compared with one representative per network.

    In each round all remaining hosts are compared with the first of them, with twice as many in the next round. One
    network takes one round with one question per host, and many of them take few rounds.
    """
    networks: list[list[T]] = []
    left: list[T] = list(hosts)
    width = 1
    while left:
        pairs = [(index, other) for index in range(min(width, len(left))) for other in range(index + 1, len(left))]
        answers = await asyncio.gather(*(reach(left[one], left[other]) for one, other in pairs))
        reached = {pair for pair, answer in zip(pairs, answers, strict=True) if answer}
        grouped: set[int] = set()
        for index in range(min(width, len(left))):
            if index not in grouped:
                members = [index, *(n for n in range(len(left)) if (index, n) in reached and n not in grouped)]
                networks.append([left[member] for member in members])
                grouped.update(members)
        left = [host for index, host in enumerate(left) if index not in grouped]
        width *= 2
    return networks


def names_of(networks: Iterable[Sequence[str]], before: Mapping[str, str]) -> dict[str, str]:
    """Return the names of networks by member; the same in every process that sees the same hosts.

    A network is called after its smallest member, except that it keeps its name as members come and go. A host that
    reaches no other has no network. Members that are not in ``networks`` keep their names.
    """
    names = dict(before)
    used: set[str] = set()
    for members in sorted(networks, key=lambda each: not any(before.get(member) for member in each)):
        kept = [name for member in members if (name := before.get(member, "")) and name not in used]
        new = f"ssh:{min(members)}" if len(members) > 1 else ""
        name = min(kept, default=new if new not in used else "")
        used.add(name)
        names.update(dict.fromkeys(members, name))
    return names


def preferred(free: Sequence[T], network: Mapping[T, str], *, beside: Iterable[str], wanted: int) -> list[T]:
    """Rank free hosts for ``wanted`` machines of one pool, so that they span as few networks as possible.

    First those in the network of most machines of the pool (``beside`` has the network of each), then those in a
    network that is large enough for all, then those in the largest one; among equals the order of ``free``.
    """
    present = Counter(name for name in beside if name)
    sizes = Counter(network[host] for host in free)

    def rank(host: T) -> tuple[int, int]:
        name = network[host]
        return -present[name], -min(sizes[name] if name else 1, wanted)

    return sorted(free, key=rank)
