"""Provider of machines that the user already has, reached over SSH.

A node is a folder on a host, and the processes that carry its id.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Container, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from skyward.base.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import (
    CapacityError,
    ConfigurationError,
    HostKeyError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.machine.access import TAGS_FILE
from skyward.machine.ssh import SSHAccess, SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.providers._ssh_hosts import Host, Networks, checked_hosts, parse_host, preferred, run_on, survey
from skyward.providers.base import Finding, Instance, InstanceState, LaunchOrder, Offer, Provider, check_settings
from skyward.request.checks import explain_options, refusal, text
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

T = TypeVar("T")

_ID = re.compile(r"ssh-(\d+)-[0-9a-f]{12}")
_LOST_ONES_S = 3.0
"""Longest time between the loss of a node and the start of its termination."""
_ENDING_S = 60.0
_READY_WITHIN_S = 60.0
"""The host runs already: it must answer, after one loss of its connection at most."""


@dataclass(slots=True)
class _Reached:
    """State of a provider in use.

    Attributes:
        transports: one for each host that was ever used, by index; it keeps the host's connection open between uses.
        hosts: hosts that have answered, by index.
        taken: (pool, host index) of every node that is not confirmed gone, by instance id.
        ending: ids of nodes under termination.
        found: host index, by instance id, of listed nodes; other processes may have the hosts in another order.
        networks: networks of the hosts that have answered.
        left_out: errors of the hosts that were left out last.
    """

    transports: dict[int, SshTransport] = field(default_factory=dict[int, SshTransport])
    hosts: dict[int, Host] = field(default_factory=dict[int, Host])
    taken: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    ending: set[str] = field(default_factory=set[str])
    found: dict[str, int] = field(default_factory=dict[str, int])
    networks: Networks = field(default_factory=Networks)
    left_out: list[str] = field(default_factory=list[str])


@explain_options
@dataclass(frozen=True, kw_only=True)
class SSH(Provider):
    """Machines you already have, free of charge: each is one node of a pool, and is left unchanged afterwards.

    Only ``~/.cache/skyward`` stays on a host, with environments for the next pool
    (``skyward clean`` removes it). Hosts are never powered off.

    Args:
        hosts: the machines, each ``"host"``, ``"host:port"`` or ``"user@host:port"``; a host may be an alias of your
            SSH configuration, whose settings then count (``ProxyJump`` too). At least as many as the pool has nodes.
        user: name to log in with; by default the SSH configuration's, or your own.
        key_path: private key to log in with; by default the agent's, the configuration's, and the usual ones.
        known_hosts: file of host keys; by default yours and the system's. A host that is not in it is refused.
        network: ``"auto"`` asks the hosts once, when a pool opens, which of them reach each other. ``"none"`` asks
            nothing, and lets no node connect to another.

    Raises:
        ConfigurationError: no host, a malformed one, one twice, a file that does not exist, or another ``network``.
    """

    hosts: Sequence[str]
    user: str | None = None
    key_path: str | None = None
    known_hosts: str | None = None
    network: Literal["auto", "none"] = "auto"
    own_machines: ClassVar[bool] = True
    patience_s: ClassVar[float] = 15.0
    """Time for which connecting to an unresponsive host is retried."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", checked_hosts(self.hosts))
        check_settings(self, key_path=_checked_file, known_hosts=_checked_file, user=text)
        if self.network not in ("auto", "none"):
            raise refusal("network", '"auto" or "none"', self.network)
        object.__setattr__(self, "_reached", _Reached())

    @property
    def name(self) -> str:
        """``"ssh"``."""
        return "ssh"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return one free offer: the weakest of the hosts that answer and satisfy the request.

        Raises:
            ConfigurationError: the request names a machine type, needs more or stronger hosts, or hosts that reach
                each other; or nodes cannot run on one, for the reason in the message.
            AuthenticationError: a host refuses the login, or shows another host key; or too few have one on file.
            UnreachableError: too few hosts answer.
        """
        _check(request, self.hosts)
        hosts = self._usable(await self._answering(needed=request.nodes), needed=request.nodes)
        fitting = [host for host in hosts if not request.wish.shortfall(host.spec)]
        if len(fitting) < request.nodes:
            raise ConfigurationError(
                f"nodes={request.nodes} of {request.wish}: {len(fitting)} of the hosts have that; "
                f"hosts: {'; '.join(str(host.spec) for host in hosts)}"
            )
        networks = await self._settle(hosts)
        largest = max(Counter(networks.name(host) or host.name for host in fitting).values())
        if request.one_network and largest < request.nodes:
            raise ConfigurationError(
                f"nodes={request.nodes} must reach each other, and no {request.nodes} of the hosts do: "
                f"{networks.in_words(fitting)}. {self._advice(networks, fitting)}"
            )
        weakest = min(fitting, key=lambda host: (host.spec.accelerator_count, host.spec.cpu, host.spec.memory_gib))
        spec = replace(weakest.spec, name="your hosts" if len(self.hosts) > 1 else weakest.spec.name)
        split = self.network == "auto" and request.nodes > 1 and largest < len(fitting)
        notes = [f"host left out: {error}" for error in self._state.left_out]
        notes += [f"not all hosts reach each other: {networks.in_words(fitting)}"] if split else []
        return [replace(_offer(spec), note="; ".join(notes), island=not any(map(networks.name, fitting)))]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Make a folder (0700) on a free host for each node; hosts of one network come first.

        Raises:
            CapacityError: every host is a node of the pool already, or none is left in its network.
        """
        if not self._state.hosts:
            await self._answering(needed=0)
        made: list[Instance] = []

        async def make(key: str, instance_id: str, host: Host) -> None:
            made.append(await self._make(key, order, instance_id, host))

        hosts = await self._take_hosts(order, offers[0])
        making = [make(key, *taken) for key, taken in zip(order.keys, hosts.items(), strict=True)]
        try:
            outcomes = await asyncio.gather(*making, return_exceptions=True)  # none goes on after an error is raised
            for error in filter(None, outcomes):
                raise error
        except BaseException:
            await self.terminate([instance.id for instance in made])
            raise
        return sorted(made, key=lambda instance: order.keys.index(instance.key))

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the nodes: running as long as the folder has its tags file, with or without processes; else gone."""
        return await _all(self._describe(instance_id) for instance_id in instance_ids)

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Kill every process of the nodes until none is left, and remove their folders."""
        outcomes = await asyncio.gather(*map(self._terminate, instance_ids), return_exceptions=True)
        left: dict[str, BaseException] = {
            instance_id: outcome
            for instance_id, outcome in zip(instance_ids, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }
        for error in left.values():
            if not isinstance(error, SkywardError | OSError):
                raise error
        if left:
            why = "; ".join(f"{self.hosts[self._index(each)]}: {error}" for each, error in left.items())
            raise TerminationError(f"hosts do not confirm that their nodes have ended: {why}", instance_ids=[*left])

    async def tagged(self) -> Sequence[Instance]:
        """Return every node on the hosts, of any process that launched it."""
        hosts = await self._answering(needed=len(self.hosts))
        found: dict[str, Instance] = {}
        for host, nodes in zip(hosts, await _all(map(self._tagged, hosts)), strict=True):
            for instance, is_here in nodes:
                # Hosts that share a home list each other's nodes; the one with the processes counts.
                if is_here or instance.id not in found:
                    found[instance.id] = instance
                    self._state.found[instance.id] = host.index
        return [*found.values()]

    async def check(self) -> Sequence[Finding]:
        """Report which of the hosts reach each other."""
        try:
            hosts = await self._answering(needed=2)
        except SkywardError as error:
            return [Finding(what="networks", state="fail", found=str(error), fix="check each host by itself")]
        networks = await self._settle(hosts)
        split = len({networks.name(host) or host.name for host in hosts}) > 1
        fix = self._advice(networks, hosts) if split else ""
        return [Finding(what="networks", state="warn" if split else "ok", found=networks.in_words(hosts), fix=fix)]

    async def close(self) -> None:
        """Close the connections. Networks are forgotten unless a pool has nodes in them."""
        transports = list(self._state.transports.values())
        self._state.transports.clear()
        self._state.hosts.clear()
        if not self._state.taken:
            self._state.networks = Networks()
        await _all(transport.close() for transport in transports)

    def target(self, index: int) -> SSHTarget:
        """Return the SSH target of the host of that index."""
        parts = parse_host(self.hosts[index])
        return SSHTarget(
            host=parts["v6"] or parts["name"],
            port=int(parts["port"]) if parts["port"] else None,
            user=parts["user"] or self.user,
            key_path=self.key_path,
            known_hosts=self.known_hosts,
            patience_s=self.patience_s,
        )

    @property
    def _state(self) -> _Reached:
        return cast("_Reached", self.__dict__["_reached"])

    async def _answering(self, *, needed: int) -> list[Host]:
        """Return the hosts that answer; raise another's error if too few are left, or if retrying would not help."""
        outcomes = await asyncio.gather(*map(self._host, range(len(self.hosts))), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        hosts = [outcome for outcome in outcomes if isinstance(outcome, Host)]
        for error in errors:
            if len(hosts) < needed or not _is_out_of_reach(error):
                raise error
        self._state.left_out = [str(error) for error in errors]
        return hosts

    def _usable(self, hosts: Sequence[Host], *, needed: int) -> list[Host]:
        """Return the hosts on which nodes can run; raise another's fault if too few are left."""
        usable = [host for host in hosts if not host.fault]
        faults = [host.fault for host in hosts if host.fault]
        if faults and len(usable) < needed:
            raise ConfigurationError(faults[0])
        self._state.left_out += faults
        return usable

    async def _host(self, index: int) -> Host:
        if (known := self._state.hosts.get(index)) is not None:
            return known
        target = self.target(index)
        self._state.transports.setdefault(index, SshTransport(target)).keep_connection()
        host = self._state.hosts[index] = await survey(index, self.hosts[index], target)
        return host

    async def _run(self, host: Host, verb: str, *arguments: str) -> str:
        """Run a verb on a host; one that does not answer is surveyed again when it comes back."""
        try:
            return await run_on(host.target, verb, *arguments)
        except UnreachableError:
            self._state.hosts.pop(host.index, None)
            self._state.networks.forget(host)
            raise

    async def _settle(self, hosts: Iterable[Host]) -> Networks:
        """Return the networks once it is known which of the hosts reach each other."""
        networks = self._state.networks
        if self.network == "auto":
            await networks.ask(sorted(hosts, key=lambda host: host.index))
        return networks

    def _advice(self, networks: Networks, hosts: Sequence[Host]) -> str:
        """Return the reason why two of the hosts do not reach each other."""
        if self.network == "none":
            return 'SSH(network="none") keeps them apart: leave it out'
        return f"The first reason: {networks.first_refusal(hosts)}"

    async def _make(self, key: str, order: LaunchOrder, instance_id: str, host: Host) -> Instance:
        tags = {"instance_id": instance_id, "pool_id": order.pool_id, "key": key, "created_at": time.time()}
        folder = host.folder(instance_id)
        try:
            await self._run(host, "prepare", folder, TAGS_FILE, json.dumps(tags))
        except UnreachableError:
            with suppress(OSError, SkywardError):  # the folder may exist all the same
                await self._terminate(instance_id)
            raise
        except (OSError, SkywardError) as error:
            await self._terminate(instance_id)
            raise ConfigurationError(
                f"hosts: {self.hosts[host.index]} cannot store a node's files in {host.cache}: {error}"
            ) from error
        return self._instance(host, instance_id, key)

    async def _take_hosts(self, order: LaunchOrder, offer: Offer) -> Mapping[str, Host]:
        """Return a host by new id for each machine of the order."""
        hosts: dict[str, Host] = {}
        try:
            for wanted in range(len(order.keys), 0, -1):
                instance_id, host = await self._take_host(order, offer, wanted=wanted)
                hosts[instance_id] = host
        except BaseException:
            for instance_id in hosts:
                del self._state.taken[instance_id]
            raise
        return hosts

    async def _take_host(self, order: LaunchOrder, offer: Offer, *, wanted: int) -> tuple[str, Host]:
        """Return a new id and the best host without a node of the pool; wait for a node under termination.

        It is the first of ``wanted``.
        """
        began = SYSTEM_CLOCK.monotonic()
        useless: UnreachableError | ConfigurationError | None = None
        shunned: set[int] = set()

        async def find() -> tuple[str, Host] | NotYet:
            nonlocal useless
            await self._settle(self._state.hosts.values())
            while (index := self._free_index(order, offer, shunned, wanted=wanted)) is not None:
                instance_id = f"ssh-{index}-{uuid.uuid4().hex[:12]}"
                # Before the first await, so that no other task takes the host.
                self._state.taken[instance_id] = (order.pool_id, index)
                try:
                    host = await self._host(index)
                    await self._settle({**self._state.hosts, index: host}.values())
                    if host.fault:
                        raise ConfigurationError(host.fault)
                except BaseException as error:
                    del self._state.taken[instance_id]
                    if not isinstance(error, UnreachableError | ConfigurationError):
                        raise
                    useless = error
                    shunned.add(index)
                else:
                    return instance_id, host
            ours = {each for each, (pool, _) in self._state.taken.items() if pool == order.pool_id}
            if not ours & self._state.ending and SYSTEM_CLOCK.monotonic() - began > _LOST_ONES_S:
                raise CapacityError(
                    f"every one of the {len(self.hosts)} hosts serves the pool already, or does not answer"
                    f"{', or has failed it before' if order.avoid else ''}"
                    f"{', or does not reach its other hosts' if order.one_network else ''}; "
                    "name more hosts, or request fewer nodes"
                ) from useless
            return NotYet("all are taken")

        what = f"one of the {len(self.hosts)} hosts to be free"
        return await wait_until(find, deadline_s=_ENDING_S, interval_s=0.05, what=what)

    def _free_index(self, order: LaunchOrder, offer: Offer, shunned: Container[int], *, wanted: int) -> int | None:
        state = self._state
        taken = {index for pool, index in state.taken.values() if pool == order.pool_id}
        names = {index: state.networks.name(host) for index, host in state.hosts.items()}
        free = [
            index
            for index, name in enumerate(self.hosts)
            if index not in taken
            and index not in shunned
            and name not in order.avoid
            and not _is_weaker(state.hosts.get(index), offer)
        ]
        beside = [names.get(index, "") for index in taken]
        known = preferred([index for index in free if index in names], names, beside=beside, wanted=wanted)
        if order.one_network and beside:
            return next((index for index in known if names[index] and names[index] in beside), None)
        return next(iter([*known, *(index for index in free if index not in names)]), None)

    async def _describe(self, instance_id: str) -> Instance:
        index = self._index(instance_id)
        if index < len(self.hosts):
            host = await self._host(index)
            for instance, _ in await self._tagged(host):
                if instance.id == instance_id:
                    return instance
        unknown = InstanceSpec(name="", cpu=0, memory_gib=0.0)
        return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=Offer(spec=unknown))

    async def _terminate(self, instance_id: str) -> None:
        index = self._index(instance_id)
        self._state.ending.add(instance_id)
        try:
            if index < len(self.hosts):
                host = await self._host(index)
                await self._run(host, "end", instance_id, host.folder(instance_id))
            self._state.taken.pop(instance_id, None)
        finally:
            self._state.ending.discard(instance_id)

    async def _tagged(self, host: Host) -> list[tuple[Instance, bool]]:
        """Return the nodes whose folders a host sees, each with False if its processes are on another one."""
        nodes: list[tuple[Instance, bool]] = []
        for line in (await self._run(host, "tagged", f"{host.cache}/nodes")).splitlines():
            instance_id, place, tags = line.split(" ", 2)
            instance = self._instance(host, instance_id, _key(tags) or instance_id)
            nodes.append((instance, place in ("here", "over")))
        return nodes

    def _index(self, instance_id: str) -> int:
        """Return the index of an instance's host; past the end of the list for a foreign id."""
        if (index := self._state.found.get(instance_id)) is not None:
            return index
        launched = _ID.fullmatch(instance_id)
        return int(launched[1]) if launched else len(self.hosts)

    def _instance(self, host: Host, instance_id: str, key: str) -> Instance:
        access = SSHAccess(
            target=host.target,
            address=host.address,
            workdir=host.folder(instance_id),
            cache=host.cache,
        )
        return Instance(
            id=instance_id,
            key=key,
            state=InstanceState.RUNNING,
            offer=_offer(host.spec),
            access=access,
            network=self._state.networks.name(host),
            host=host.name,
            ends_itself=True,
        )


def _offer(spec: InstanceSpec) -> Offer:
    return Offer(spec=spec, price_per_hour=0.0, on_demand_price_per_hour=0.0, ready_within_s=_READY_WITHIN_S)


def _is_out_of_reach(error: BaseException) -> bool:
    """Return True for a host that may be left out: it does not answer, has no key on file, or runs no commands."""
    return isinstance(error, UnreachableError | ConfigurationError) or (
        isinstance(error, HostKeyError) and not error.on_file
    )


def _check(request: PoolRequest, hosts: Sequence[str]) -> None:
    if request.nodes > len(hosts):
        there = f"{len(hosts)} host" + "s" * (len(hosts) > 1)
        raise ConfigurationError(
            f"nodes={request.nodes}: SSH() has {there}, and each serves one node; add hosts, or list other providers "
            "beside it with spread=True"
        )
    if request.machine is not None:
        raise ConfigurationError(f"machine={request.machine!r}: SSH() has the machines in hosts; leave it out")


def _checked_file(parameter: str, value: object) -> str:
    path = Path(value if isinstance(value, Path) else text(parameter, value)).expanduser()
    if not path.is_file():
        raise ConfigurationError(
            f"{parameter}: {path} is no file" if path.exists() else f"{parameter}: there is no {path}"
        )
    return str(path.absolute())


def _is_weaker(host: Host | None, offer: Offer) -> bool:
    if host is None:
        return False
    mine, asked = host.spec, offer.spec
    same = mine.accelerator == asked.accelerator and mine.accelerator_memory_gib == asked.accelerator_memory_gib
    enough = (
        mine.accelerator_count >= asked.accelerator_count
        and mine.cpu >= asked.cpu
        and mine.memory_gib >= asked.memory_gib
    )
    return not (enough and (same or asked.accelerator is None))


def _key(tags: str) -> str:
    """Return the ledger key in a node's tags; empty if a crash or another version of Skyward left malformed ones."""
    try:
        return str(json.loads(tags)["key"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*work))
