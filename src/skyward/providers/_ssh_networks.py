"""Networks of hosts over SSH: which hosts reach each other, the networks' names, and the best hosts for a launch.

A host is identified by the key that its SSH server shows, never by an address: two machines behind two routers may both
be 192.168.1.5, and both reach *something* there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

from skyward.errors import SkywardError
from skyward.providers._ssh_hosts import Host, reaching

__all__ = ["Networks", "find_networks", "names_of", "preferred"]

T = TypeVar("T")

_CONNECT_S = 4.0
"""Time for a host to connect to another: room for two lost packets, and the cost of a firewall that drops them."""
_ATTEMPTS = 2
_FEW = 5
"""Largest number of hosts of which each pair is asked both ways at once, which saves five round trips. A connection
opens four channels at a time: of more hosts, one that reaches none would wait for many in vain."""
_OTHER_PORT = 10_240
"""One of the ports that nodes choose from, on which none listens: a host refuses it, a firewall drops the request."""
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
            f"{source.name} reaches the SSH server of {target.name}, and its port {_OTHER_PORT} does not answer: "
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
        return shown, await transport.answers(target.address, _OTHER_PORT, timeout_s=_CONNECT_S)


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
