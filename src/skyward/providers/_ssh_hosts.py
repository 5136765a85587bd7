"""Hosts of the SSH provider: their names as the user writes them, their survey, and the verbs run on them."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Mapping, Sequence
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

__all__ = ["Host", "checked_hosts", "host_fault", "parse_host", "reaching", "run_on", "survey"]

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^@:\s]+))(?::(?P<port>\d{1,5}))?")
_PORT = 22
_VERB_TIMEOUT_S = 60.0
_KIB_PER_GIB, _MIB_PER_GIB = 1 << 20, 1 << 10
_NODE_PORT = 10_240
"""One of the ports that nodes choose from, on which none listens."""
_FORWARD_S = 4.0
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
        return await _run(transport, verb, *arguments)


async def survey(index: int, name: str, target: SSHTarget) -> Host:
    """Ask a host for its hardware, address and key, and whether nodes can run there.

    Raises:
        ConfigurationError: the login runs no commands, the host lacks programs, does not run Linux, or was reached
            over IPv6.
    """
    async with reaching(target) as transport:
        facts = await _asked_facts(transport)
        key = await transport.host_key()
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
        forwards = await transport.forwards(address, _NODE_PORT, timeout_s=_FORWARD_S)
    fault = host_fault(facts, forwards=forwards, now=time.time())
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


async def _asked_facts(transport: SshTransport) -> Mapping[str, list[str]]:
    """Return the survey's facts. A login that runs no commands is named at once, while the survey would wait."""
    asking = asyncio.ensure_future(_run(transport, "survey"))
    try:
        await transport.check_login()
        return _facts(await asking)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


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
    return ("/bin/sh", "-c", files("skyward.providers").joinpath("_ssh_host.sh").read_text(encoding="utf-8"), "sh")
