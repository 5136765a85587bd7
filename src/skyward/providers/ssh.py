"""Provider of machines that the user already has, reached over SSH.

A node is a folder on a host, and the processes that carry its id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Container, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from skyward._concurrency.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import (
    CapacityError,
    ConfigurationError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.accelerators import model_name
from skyward.request.checks import refusal, text, texts
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest
from skyward.transport.access import TAGS_FILE, SSHAccess, SSHTarget
from skyward.transport.base import Transport
from skyward.transport.ssh_transport import SshTransport

__all__ = ["SSH"]

T = TypeVar("T")

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^@:\s]+))(?::(?P<port>\d{1,5}))?")
_ID = re.compile(r"ssh-(\d+)-[0-9a-f]{12}")
_PORT = 22
_VERB_TIMEOUT_S = 60.0
_LOST_ONES_S = 3.0
"""Longest time between the loss of a node and the start of its termination."""
_ENDING_S = 60.0
_KIB_PER_GIB, _MIB_PER_GIB = 1 << 20, 1 << 10
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeTags:
    """Content of a node's tags file; a folder with that file is an instance."""

    instance_id: str
    pool_id: str
    key: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """Host that has answered.

    Attributes:
        index: its index in the list of hosts.
        target: its SSH target.
        spec: its hardware.
        address: the address at which it was reached.
        cache: its folder of environments; nodes' folders are in it.
    """

    index: int
    target: SSHTarget
    spec: InstanceSpec
    address: str
    cache: str

    def folder(self, instance_id: str) -> str:
        """Return the folder of one node."""
        return f"{self.cache}/nodes/{instance_id}"


@dataclass(slots=True)
class _Reached:
    """State of a provider in use.

    Attributes:
        transports: one for each host that was ever used, by index; it keeps the host's connection open between uses.
        hosts: hosts that have answered, by index.
        taken: (pool, host index) of every node that is not confirmed gone, by instance id.
        ending: ids of nodes under termination.
        found: host index, by instance id, of listed nodes; other processes may have the hosts in another order.
    """

    transports: dict[int, Transport] = field(default_factory=dict[int, Transport])
    hosts: dict[int, _Host] = field(default_factory=dict[int, _Host])
    taken: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    ending: set[str] = field(default_factory=set[str])
    found: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class SSH:
    """Machines you already have, free of charge: each is one node of a pool, and is left unchanged afterwards.

    Only ``~/.cache/skyward`` stays on a host, with environments for the next pool
    (``skyward clean`` removes it). Hosts are never powered off.

    Args:
        hosts: the machines, each ``"host"``, ``"host:port"`` or ``"user@host:port"``; a host may be an alias of your
            SSH configuration, whose settings then count (``ProxyJump`` too). At least as many as the pool has nodes.
        user: name to log in with; by default the SSH configuration's, or your own.
        key_path: private key to log in with; by default the agent's, the configuration's, and the usual ones.
        known_hosts: file of host keys; by default yours and the system's. A host that is not in it is refused.

    Raises:
        ConfigurationError: no host, a malformed one, one twice, or a file that does not exist.
    """

    hosts: Sequence[str]
    user: str | None = None
    key_path: str | None = None
    known_hosts: str | None = None
    patience_s: ClassVar[float] = 15.0
    """Time for which connecting to an unresponsive host is retried."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", _checked_hosts(self.hosts))
        for name in ("key_path", "known_hosts"):
            object.__setattr__(self, name, _checked_file(name, getattr(self, name)))
        if self.user is not None:
            text("user", self.user)
        object.__setattr__(self, "_reached", _Reached())

    @property
    def name(self) -> str:
        """``"ssh"``."""
        return "ssh"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return one free offer: the weakest of the hosts that answer and satisfy the request.

        Raises:
            ConfigurationError: the request names a machine type, or needs more or stronger hosts.
            AuthenticationError: a host refuses the login, or shows another host key.
            UnreachableError: too few hosts answer.
        """
        _check(request, self.hosts)
        hosts = await self._answering(range(len(self.hosts)), needed=request.nodes)
        fitting = [host for host in hosts if not request.wish.shortfall(host.spec)]
        if len(fitting) < request.nodes:
            raise ConfigurationError(
                f"nodes={request.nodes} of {request.wish}: {len(fitting)} of the hosts have that; "
                f"hosts: {'; '.join(str(host.spec) for host in hosts)}"
            )
        weakest = min(fitting, key=lambda host: (host.spec.accelerator_count, host.spec.cpu, host.spec.memory_gib))
        spec = replace(weakest.spec, name="your hosts" if len(self.hosts) > 1 else weakest.spec.name)
        return [Offer(spec=spec, price_per_hour=0.0, on_demand_price_per_hour=0.0)]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Make a folder (0700) on a free host for each node.

        Raises:
            CapacityError: every host is a node of the pool already.
        """
        made: dict[str, Instance] = {}
        try:
            for key in order.keys:
                instance = await self._make(key, order, offers[0])
                made[instance.id] = instance
        except BaseException:
            await self.terminate(list(made))
            raise
        return list(made.values())

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
        hosts = await self._answering(range(len(self.hosts)), needed=len(self.hosts))
        tagged = await _all(map(self._tagged, hosts))
        for host, found in zip(hosts, tagged, strict=True):
            self._state.found.update((instance.id, host.index) for instance in found)
        return [instance for found in tagged for instance in found]

    async def close(self) -> None:
        """Close the connections."""
        transports = list(self._state.transports.values())
        self._state.transports.clear()
        self._state.hosts.clear()
        await _all(transport.close() for transport in transports)

    def target(self, index: int) -> SSHTarget:
        """Return the SSH target of the host of that index."""
        parts = _parse(self.hosts[index])
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

    async def _answering(self, indices: Sequence[int], *, needed: int) -> list[_Host]:
        """Return the hosts that answer; raise another's error if too few are left, or if retrying would not help."""
        outcomes = await asyncio.gather(*map(self._host, indices), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        hosts = [outcome for outcome in outcomes if isinstance(outcome, _Host)]
        for error in errors:
            if len(hosts) < needed or not isinstance(error, UnreachableError):
                raise error
            _logger.warning("a host is left out: %s", error)
        return hosts

    async def _host(self, index: int) -> _Host:
        if (known := self._state.hosts.get(index)) is not None:
            return known
        target = self.target(index)
        self._state.transports.setdefault(index, SshTransport(target))
        found = _facts(await _run(target, "survey"))
        host = self._state.hosts[index] = _host(index, self.hosts[index], target, found)
        return host

    async def _make(self, key: str, order: LaunchOrder, offer: Offer) -> Instance:
        instance_id, host = await self._take_host(order.pool_id, offer)
        tags = _NodeTags(instance_id=instance_id, pool_id=order.pool_id, key=key, created_at=time.time())
        folder = host.folder(instance_id)
        try:
            await _run(host.target, "prepare", folder)
            async with _reaching(host.target) as transport:
                await transport.put(json.dumps(asdict(tags)).encode(), f"{folder}/{TAGS_FILE}")
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

    async def _take_host(self, pool_id: str, offer: Offer) -> tuple[str, _Host]:
        """Return a new id and a host without a node of the pool; wait for a node under termination."""
        began = SYSTEM_CLOCK.monotonic()
        unreachable: UnreachableError | None = None
        shunned: set[int] = set()

        async def find() -> tuple[str, _Host] | NotYet:
            nonlocal unreachable
            while (index := self._free_index(pool_id, offer, shunned)) is not None:
                instance_id = f"ssh-{index}-{uuid.uuid4().hex[:12]}"
                self._state.taken[instance_id] = (
                    pool_id,
                    index,
                )  # before the first await, so that no other task takes the host
                try:
                    return instance_id, await self._host(index)
                except BaseException as error:
                    del self._state.taken[instance_id]
                    if not isinstance(error, UnreachableError):
                        raise
                    unreachable = error
                    shunned.add(index)
            ours = {each for each, (pool, _) in self._state.taken.items() if pool == pool_id}
            if not ours & self._state.ending and SYSTEM_CLOCK.monotonic() - began > _LOST_ONES_S:
                raise CapacityError(
                    f"every one of the {len(self.hosts)} hosts serves the pool already, or does not answer; "
                    "name more hosts, or request fewer nodes"
                ) from unreachable
            return NotYet("all are taken")

        what = f"one of the {len(self.hosts)} hosts to be free"
        return await wait_until(find, deadline_s=_ENDING_S, interval_s=0.05, what=what)

    def _free_index(self, pool_id: str, offer: Offer, shunned: Container[int]) -> int | None:
        taken = {index for pool, index in self._state.taken.values() if pool == pool_id}
        free = (index for index in range(len(self.hosts)) if index not in taken and index not in shunned)
        return next((index for index in free if not _is_weaker(self._state.hosts.get(index), offer)), None)

    async def _describe(self, instance_id: str) -> Instance:
        index = self._index(instance_id)
        if index < len(self.hosts):
            host = await self._host(index)
            found = [instance for instance in await self._tagged(host) if instance.id == instance_id]
            if found:
                return found[0]
        unknown = InstanceSpec(name="", cpu=0, memory_gib=0.0)
        return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=Offer(spec=unknown))

    async def _terminate(self, instance_id: str) -> None:
        index = self._index(instance_id)
        self._state.ending.add(instance_id)
        try:
            if index < len(self.hosts):
                host = await self._host(index)
                await _run(host.target, "end", instance_id, host.folder(instance_id))
            self._state.taken.pop(instance_id, None)
        finally:
            self._state.ending.discard(instance_id)

    async def _tagged(self, host: _Host) -> list[Instance]:
        lines = (await _run(host.target, "tagged", f"{host.cache}/nodes")).splitlines()
        named = [line.partition(" ") for line in lines]
        return [self._instance(host, instance_id, _key(tags) or instance_id) for instance_id, _, tags in named]

    def _index(self, instance_id: str) -> int:
        """Return the index of an instance's host; past the end of the list for a foreign id."""
        if (index := self._state.found.get(instance_id)) is not None:
            return index
        launched = _ID.fullmatch(instance_id)
        return int(launched[1]) if launched else len(self.hosts)

    def _instance(self, host: _Host, instance_id: str, key: str) -> Instance:
        access = SSHAccess(
            target=host.target,
            address=host.address,
            workdir=host.folder(instance_id),
            cache=host.cache,
        )
        offer = Offer(spec=host.spec, price_per_hour=0.0, on_demand_price_per_hour=0.0)
        return Instance(id=instance_id, key=key, state=InstanceState.RUNNING, offer=offer, access=access, network="ssh")


def _check(request: PoolRequest, hosts: Sequence[str]) -> None:
    if request.nodes > len(hosts):
        raise ConfigurationError(f"nodes={request.nodes}: SSH() has {len(hosts)} hosts, and each serves one node")
    if request.machine is not None:
        raise ConfigurationError(f"machine={request.machine!r}: SSH() has the machines in hosts; leave it out")


def _checked_hosts(value: object) -> tuple[str, ...]:
    hosts = texts("hosts", value)
    if not hosts:
        raise refusal("hosts", 'a list of at least one host, such as ["10.0.0.5", "gpu1:2222"]', hosts)
    seen: dict[tuple[str, int], str] = {}
    for host in hosts:
        parts = _parse(host)
        place = (parts["v6"] or parts["name"]).lower(), int(parts["port"] or _PORT)
        if place in seen:
            raise ConfigurationError(f"hosts names one machine twice: {seen[place]!r} and {host!r}")
        seen[place] = host
    return hosts


def _parse(host: str) -> Mapping[str, str]:
    found = _HOST.fullmatch(host)
    port = int(found["port"] or _PORT) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise refusal("hosts", 'a list of "host", "host:port" or "user@host:port"', host)
    return found.groupdict()


def _checked_file(parameter: str, value: object) -> str | None:
    if value is None:
        return None
    path = Path(value if isinstance(value, Path) else text(parameter, value)).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"{parameter}: there is no file {path}")
    return str(path.absolute())


def _is_weaker(host: _Host | None, offer: Offer) -> bool:
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


def _host(index: int, name: str, target: SSHTarget, facts: Mapping[str, list[str]]) -> _Host:
    (system,), (address,), (folder,) = facts["system"], facts["address"], facts["cache"]
    if system != "Linux":
        raise ConfigurationError(f"hosts: {name} runs {system}; nodes run on Linux")
    if ":" in address:
        raise ConfigurationError(f"hosts: {name} was reached at {address}; use a name or address of IPv4")
    gpus = [line.rsplit(",", 1) for line in facts.get("gpu", [])]
    spec = InstanceSpec(
        name=name,
        cpu=int(facts["cpu"][0]),
        memory_gib=round(int(facts["memory_kib"][0] or 0) / _KIB_PER_GIB, 1),
        accelerator=model_name(gpus[0][0].strip()) if gpus else None,
        accelerator_count=len(gpus),
        accelerator_memory_gib=_gibibytes(gpus[0][1]) if gpus else None,
    )
    return _Host(index=index, target=target, spec=spec, address=address, cache=folder)


def _gibibytes(mebibytes: str) -> float | None:
    """Parse a memory size; None if it is no number: in MIG mode the driver shows it to root only."""
    number = mebibytes.strip()
    return round(int(number) / _MIB_PER_GIB, 1) if number.isdecimal() else None


def _facts(survey: str) -> Mapping[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for line in survey.splitlines():
        name, _, value = line.partition("=")
        facts.setdefault(name, []).append(value)
    return facts


@cache
def _script() -> tuple[str, ...]:
    return ("sh", "-c", files("skyward.providers").joinpath("_ssh_host.sh").read_text(encoding="utf-8"), "sh")


@asynccontextmanager
async def _reaching(target: SSHTarget) -> AsyncGenerator[Transport]:
    """Open a transport for one use; only this context closes it."""
    transport = SshTransport(target)
    try:
        yield transport
    finally:
        await transport.close()


async def _run(target: SSHTarget, verb: str, *arguments: str) -> str:
    async with _reaching(target) as transport:
        completed = await transport.run([*_script(), verb, *arguments], timeout_s=_VERB_TIMEOUT_S)
    if completed.exit_code:
        raise SkywardError(completed.stderr.strip() or f"{verb} failed with exit code {completed.exit_code}")
    return completed.stdout


def _key(tags: str) -> str:
    """Return the ledger key in a node's tags; empty if a crash or another version of Skyward left malformed ones."""
    try:
        return str(json.loads(tags)["key"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*work))
