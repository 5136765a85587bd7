"""Hosts of the SSH provider: their names as the user writes them, their survey, and the verbs run on them."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from skyward.errors import ConfigurationError, SkywardError
from skyward.request.accelerators import model_name
from skyward.request.checks import refusal, texts
from skyward.request.instance import InstanceSpec
from skyward.transport.access import SSHTarget
from skyward.transport.ssh_transport import SshTransport

__all__ = ["Host", "checked_hosts", "parse_host", "reaching", "run_on", "survey"]

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^@:\s]+))(?::(?P<port>\d{1,5}))?")
_PORT = 22
_VERB_TIMEOUT_S = 60.0
_KIB_PER_GIB, _MIB_PER_GIB = 1 << 20, 1 << 10


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
    """

    index: int
    name: str
    target: SSHTarget
    spec: InstanceSpec
    address: str
    port: int
    key: str
    cache: str

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
        return await _run(transport, verb, *arguments)


async def survey(index: int, name: str, target: SSHTarget) -> Host:
    """Ask a host for its hardware, address and key.

    Raises:
        ConfigurationError: it does not run Linux, or was reached over IPv6.
    """
    async with reaching(target) as transport:
        facts = _facts(await _run(transport, "survey"))
        key = await transport.host_key()
    (system,), (address,), (port,), (folder,) = facts["system"], facts["address"], facts["port"], facts["cache"]
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
    return Host(
        index=index,
        name=name,
        target=target,
        spec=spec,
        address=address,
        port=int(port or _PORT),
        key=key,
        cache=folder,
    )


async def _run(transport: SshTransport, verb: str, *arguments: str) -> str:
    completed = await transport.run([*_script(), verb, *arguments], timeout_s=_VERB_TIMEOUT_S)
    if completed.exit_code:
        raise SkywardError(completed.stderr.strip() or f"{verb} failed with exit code {completed.exit_code}")
    return completed.stdout


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
    return ("sh", "-c", files("skyward.providers").joinpath("_ssh_host.sh").read_text(encoding="utf-8"), "sh")
