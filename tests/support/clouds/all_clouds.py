"""Five clouds at once, the four fakes and EC2 on this machine, and one SSH host of the user's."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

import skyward as sky
from skyward.base.waiting import SystemClock
from skyward.errors import ConfigurationError
from skyward.providers.base import Provider
from skyward.providers.registry import make_provider
from skyward.testing.aws import Capacity, LocalEC2, Looks, use_ec2
from skyward.testing.bill import Bill
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.clouds.aws_clients import remember_classes
from support.clouds.fake_cloud import FakeCloud
from support.clouds.vendors import PATH, PROMPT, VENDORS, opened, use_own_state, vendor_named
from support.ssh_hosts import cached_host

__all__ = ["CLOUDS", "NAMES", "AllClouds", "all_clouds"]

CLOUDS: Final = ("aws", *(each.name for each in VENDORS))
NAMES: Final = (*CLOUDS, "ssh")
"""Names of the five clouds, and of the provider of the host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllClouds:
    """Accounts at five clouds, and a host, with their own ledger, caches and credentials.

    Attributes:
        ec2: the account at AWS.
        fakes: the other accounts, by the provider's name.
        host: the host.
        known_hosts: file with its key.
    """

    ec2: LocalEC2
    fakes: Mapping[str, FakeCloud]
    host: SshHost
    known_hosts: Path
    _ahead: list[float] = field(default_factory=list[float])

    def provider(self, name: str, **settings: Any) -> Provider:
        """Return a provider by its name."""
        if name == "aws":
            return sky.AWS(endpoint_url=self.ec2.endpoint_url, **settings)
        if name == "ssh":
            place = f"{self.host.address}:{self.host.port}"
            login = {"key_path": str(self.host.key_path), "known_hosts": str(self.known_hosts)}
            return make_provider(name, {"hosts": [place], **login, **settings})
        return vendor_named(name).provider(self.fakes[name], **settings)

    def providers(self, *names: str) -> list[Provider]:
        """Return the providers of these names; of all six without any."""
        return [self.provider(each) for each in names or NAMES]

    def limit(self, machines: int | None, *names: str) -> None:
        """Let clouds list what they have, and sell at most so many machines at a time; None is no limit."""
        for name in names:
            if name == "aws":
                self.ec2.market.limits = [] if machines is None else [Capacity(count=machines)]
            else:
                self.fakes[name].most_machines = math.inf if machines is None else machines

    def sell_out(self, *names: str) -> None:
        """Let clouds list what they have, and sell nothing."""
        self.limit(0, *names)

    def restock(self, *names: str) -> None:
        """Let clouds sell again what they list."""
        self.limit(None, *names)

    def take_back(self, name: str, machine: str) -> None:
        """Let a cloud take a machine back."""
        if name != "aws":
            self.fakes[name].destroy(machine)
            return
        try:
            self.ec2.preempt(machine, in_s=0.0)
        except ConfigurationError:  # on demand: the account's owner ends it
            self.ec2.client("ec2").terminate_instances(InstanceIds=[machine])

    def pass_time(self, seconds: float) -> None:
        """Set the clocks of all bills, and the one by which this process counts costs, forward."""
        self._ahead.append(seconds)

    def alive(self) -> Mapping[str, Sequence[str]]:
        """Return the ids of the machines that exist, by cloud; without clouds that have none."""
        found = {"aws": self.ec2.bill.open, **{name: cloud.alive for name, cloud in self.fakes.items()}}
        return {name: ids for name, ids in found.items() if ids}

    def bills(self) -> Mapping[str, float]:
        """Return what each cloud has charged, in USD."""
        return {name: bill.usd() for name, bill in self._bills().items()}

    def left(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """Return what is left at each cloud and on the host; empty for nothing."""
        regions = {call.region for call in self.ec2.calls if call.region}
        found: dict[str, Mapping[str, Sequence[str]]] = {f"aws {each}": self.ec2.left(each) for each in regions}
        found |= {name: cloud.left() for name, cloud in self.fakes.items()}
        found["ssh"] = {"processes": [" ".join(each.cmdline()) for each in self.host.processes()]}
        return {name: left for name, left in found.items() if any(left.values())}

    def share_clock(self, patch: pytest.MonkeyPatch) -> None:
        """Let bills, and this process, count the time that has passed here."""
        elapsed = SystemClock.elapsed

        def elapsed_here(clock: SystemClock) -> float:
            return elapsed(clock) + sum(self._ahead)

        patch.setattr(SystemClock, "elapsed", elapsed_here)
        for bill in self._bills().values():
            bill.clock = lambda: time.monotonic() + sum(self._ahead)

    def _bills(self) -> Mapping[str, Bill]:
        return {"aws": self.ec2.bill, **{name: cloud.service.bill for name, cloud in self.fakes.items()}}


@contextmanager
def all_clouds(
    patch: pytest.MonkeyPatch,
    folder: Path,
    *,
    cache: Path,
    machines: bool = False,
    image: sky.Image | None = None,
) -> Generator[AllClouds]:
    """Open an account at every cloud, and start a host.

    Args:
        patch: undone by the caller.
        folder: an existing folder.
        cache: folder of environments, shared by all machines.
        machines: True for a real host per machine, on which pools can be opened.
        image: image of the pools there; None is the default one. See :func:`opened`.
    """
    require_sshd()
    remember_classes()
    looks = Looks(pending=0, ending=0)
    room: dict[str, Any] = {"cache": cache, "env": {"PATH": PATH, "PIP_CONFIG_FILE": str(cache / "pip.conf")}}
    with ExitStack() as stack:
        fakes: dict[str, FakeCloud] = {}
        for vendor in VENDORS:
            (own := folder / vendor.name).mkdir()
            more: dict[str, Any] = {"machines": machines, "image": image, "looks": looks, "provider": PROMPT}
            cloud = stack.enter_context(opened(vendor, patch, own, **more, **room))
            cloud.service.paces.clear()
            fakes[vendor.name] = cloud
        use_own_state(patch, folder)
        # Opened last, so that it closes first: it restores the least size of machines, which the fakes have set before.
        ec2 = stack.enter_context(LocalEC2(folder / "aws", machines=machines, looks=looks, block=71, **room))
        use_ec2(ec2, patch, {**ec2.settings, "listing_s": 0.0})
        host = stack.enter_context(cached_host(folder / "own-host", "127.0.0.4", cache))
        known_hosts = write_known_hosts(folder / "known_hosts", host)
        clouds = AllClouds(ec2=ec2, fakes=fakes, host=host, known_hosts=known_hosts)
        clouds.share_clock(patch)
        yield clouds
