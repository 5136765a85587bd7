"""A machine whose SSH server moves to another outside port, as a container's does: its node goes on there."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import skyward as sky
from skyward.events import Error, InstanceProvisioned, SkywardEvent
from skyward.machine.ssh import SSHAccess
from skyward.providers.base import Instance, LaunchOrder, Offer
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.chaos import ChaosProxy
from support.ssh_hosts import cached_host

require_sshd()
pytestmark = pytest.mark.timeout(300)  # the first pool builds an environment

CALLS = 200
BEFORE = 40
"""Calls that end before the port changes."""


@dataclass(frozen=True)
class Mapped(sky.SSH):
    """A host that is rented, and reached at a mapped port; the last place of ``places`` is the present one."""

    own_machines = False
    behind: SshHost | None = field(default=None, repr=False)
    places: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]], repr=False)

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`SSH.launch`."""
        return [self._mapped(each) for each in await super().launch(offers, order)]

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """See :meth:`SSH.describe`."""
        return [self._mapped(each) for each in await super().describe(instance_ids)]

    def _mapped(self, instance: Instance) -> Instance:
        assert self.behind is not None
        if not isinstance(instance.access, SSHAccess):
            return instance
        target = self.behind.target(self.places[-1])
        return replace(instance, access=replace(instance.access, target=target, boot_s=60.0))


@sky.compute
def note(path: str, number: int) -> tuple[int, int]:
    """A side effect that shows how often it happened, and where."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    time.sleep(0.02)
    return number, os.getppid()


# In `make test`: clouds/test_containers.py, where a port moves and a container comes back at another one.
@pytest.mark.full
def test_calls_go_on_where_the_machine_has_moved_during_set_up_and_again_during_calls(
    tmp_path: Path, ssh_cache: Path
) -> None:
    """Nothing is replaced, no call is lost, and none happens twice."""
    events: list[SkywardEvent] = []
    path = str(tmp_path / "noted")
    host = cached_host(tmp_path / "host", "127.0.4.2", ssh_cache)
    with ExitStack() as stack:
        stack.enter_context(host)
        place = (host.address, host.port)
        former, present, later = (stack.enter_context(ChaosProxy("127.0.4.3", place)) for _ in range(3))
        provider = Mapped(
            hosts=[f"{host.address}:{host.port}"],
            key_path=str(host.key_path),
            known_hosts=str(write_known_hosts(tmp_path / "known_hosts", host)),
            behind=host,
            places=[former.place],
        )

        def follow(event: SkywardEvent) -> None:
            events.append(event)
            if isinstance(event, InstanceProvisioned):
                former.cut()
                provider.places.append(present.place)

        with sky.ComputePool(provider=provider, nodes=1, display="quiet", on_event=follow) as pool:
            futures = [pool.submit(note.local, path, number) for number in range(CALLS)]
            assert [future.result(timeout=60)[0] for future in futures[:BEFORE]] == list(range(BEFORE))
            present.cut()
            provider.places.append(later.place)
            answers = [future.result(timeout=120) for future in futures]

    assert [number for number, _ in answers] == list(range(CALLS))
    assert len({parent for _, parent in answers}) == 1, "one supervisor, all the time"
    with open(path, encoding="utf-8") as file:
        assert Counter(map(int, file)) == Counter(range(CALLS))
    assert len([event for event in events if isinstance(event, InstanceProvisioned)]) == 1
    assert not [event for event in events if isinstance(event, Error)]
    assert later.connections == 1
