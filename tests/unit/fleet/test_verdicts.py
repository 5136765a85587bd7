"""A node is lost by two independent signals, never because somebody could not be asked: that buys machines in vain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.environment import supervisor_check
from skyward.environment.bootstrap import Environment
from skyward.errors import BootstrapError, HostKeyError, RateLimitError, UnreachableError
from skyward.fleet import node as nodes
from skyward.fleet.node import Node
from skyward.machine.access import Completed
from skyward.machine.ssh import SSHAccess, SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.market.choose import UnfitMachineError
from skyward.node.supervisor.lease import Lease
from skyward.providers.base import InstanceState
from skyward.testing.provider import FakeProvider
from skyward.wire.control import Ending
from support.clock import FakeClock
from support.nodes import node_config, node_instance, open_node

INSTANCE = node_instance()
CONFIG = node_config(node=1, total_nodes=2)
RUNS = Completed(exit_code=0, stdout="", stderr="")
GONE = Completed(exit_code=99, stdout="", stderr="")
NO_ROOM = [
    Completed(exit_code=2, stdout="", stderr="sh: 1: Cannot fork"),
    Completed(exit_code=1, stdout="", stderr="MemoryError"),
    Completed(exit_code=127, stdout="", stderr="python: not found"),
    Completed(exit_code=-9, stdout="", stderr=""),
]
TIMED_OUT = UnreachableError("no answer within 30 s")


class Machine:
    """A transport that answers the question whether the supervisor runs; the last answer stays."""

    def __init__(self, *answers: Completed | Exception) -> None:
        self.answers = deque(answers)
        self.asked = 0
        self.asked_again = asyncio.Event()

    async def run(self, argv: Sequence[str], **_: Any) -> Completed:
        self.asked += 1
        if self.asked > len(self.answers) + 1:
            self.asked_again.set()
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_JUDGE_S", 0.001)


def unlinked_node(machine: Machine, **reported: Any) -> Node:
    node = open_node(INSTANCE, rank=1, transport=machine, **reported)
    node._ready = SimpleNamespace(pid=1)  # type: ignore[assignment]
    node._environment = Environment(python="python")
    node._control = SimpleNamespace(connected=False)  # type: ignore[assignment]
    node._connection_lost()
    return node


@pytest.mark.parametrize("answer", [TIMED_OUT, OSError("no route"), RUNS, *NO_ROOM])
async def test_a_lost_connection_alone_is_no_loss(answer: Completed | Exception) -> None:
    machine = Machine(answer)
    waiting = asyncio.ensure_future(unlinked_node(machine).wait_gone())

    async with asyncio.timeout(10):
        await machine.asked_again.wait()

    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_machine_that_says_its_supervisor_is_gone_is_believed_once_it_can_be_asked() -> None:
    machine = Machine(TIMED_OUT, TIMED_OUT, GONE)

    async with asyncio.timeout(10):
        loss = await unlinked_node(machine).wait_gone()

    assert loss.reason == "its supervisor is gone"
    assert machine.asked == 3


@pytest.mark.parametrize(
    ("pid", "instance_id", "verdict"), [("self", "mine", 0), ("self", "other", 99), ("none", "mine", 99)]
)
def test_the_machine_is_asked_for_this_very_supervisor(pid: str, instance_id: str, verdict: int) -> None:
    with subprocess.Popen(["sleep", "60"], env={"SKYWARD_INSTANCE": "mine"}) as process:
        try:
            number = process.pid if pid == "self" else 1 << 22
            asked = [sys.executable, "-c", supervisor_check.IS_THERE, str(number), instance_id]
            assert subprocess.run(asked, check=False).returncode == verdict
        finally:
            process.kill()


@pytest.mark.parametrize(("lease_s", "away_s"), [(120, 1800), (600, 30), (1, 1)])
def test_a_node_that_is_given_up_has_ended(lease_s: float, away_s: float) -> None:
    """However long it took until somebody told it that the client's connection is closed."""
    limit_s = nodes.longest_absence_s(replace(CONFIG, lease_s=lease_s, away_s=away_s))
    for left_s in range(int(away_s) + 1):
        lease = Lease(timeout_s=1e9, lease_s=lease_s, away_s=away_s, now=0)
        lease.joined(0)
        lease.left(left_s)
        assert lease.end_reason(limit_s, age_s=limit_s)


# --- the provider's word ----------------------------------------------------------------------------------------------


class Seller(FakeProvider):
    """Says of the machine what it is told to."""

    def __init__(self, state: InstanceState, reason: str = "") -> None:
        super().__init__()
        self.instances["i-1"] = replace(INSTANCE, state=state, reason=reason)


def asking(machine: Machine, provider: FakeProvider, clock: FakeClock) -> Node:
    return unlinked_node(machine, provider=provider, clock=clock)


class Passing(FakeClock):
    """A second passes between two looks at it."""

    def monotonic(self) -> float:
        self.advance(1)
        return super().monotonic()


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (InstanceState.GONE, "fake reports that it is gone: Server.Reclaimed"),
        (InstanceState.STOPPING, "fake reports that it is stopping: Server.Reclaimed"),
        (InstanceState.FAILED, "fake reports that it is failed: Server.Reclaimed"),
    ],
)
@pytest.mark.parametrize("error", [TIMED_OUT, OSError("no route"), HostKeyError("another machine has its address")])
async def test_a_machine_that_cannot_be_asked_and_is_over_by_its_providers_word_is_lost(
    error: Exception, state: InstanceState, says: str
) -> None:
    async with asyncio.timeout(10):
        loss = await asking(Machine(error), Seller(state, "Server.Reclaimed"), Passing()).wait_gone()

    assert loss.reason == f"it cannot be reached, and {says}"


@pytest.mark.parametrize("state", [InstanceState.PENDING, InstanceState.RUNNING])
async def test_a_machine_that_cannot_be_asked_and_runs_by_its_providers_word_is_away(state: InstanceState) -> None:
    machine, provider = Machine(TIMED_OUT), Seller(state)
    waiting = asyncio.ensure_future(asking(machine, provider, Passing()).wait_gone())

    async with asyncio.timeout(10):
        while provider.calls.count("describe") < 3:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)

    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_provider_is_not_asked_while_the_machine_answers() -> None:
    machine, provider = Machine(RUNS), Seller(InstanceState.GONE)
    waiting = asyncio.ensure_future(asking(machine, provider, Passing()).wait_gone())

    async with asyncio.timeout(10):
        await machine.asked_again.wait()

    assert not waiting.done()
    assert provider.calls == []
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_provider_that_cannot_say_is_asked_again_and_believed_then() -> None:
    provider = Seller(InstanceState.GONE)
    provider.fail("describe", RateLimitError("later"), times=2)

    async with asyncio.timeout(10):
        loss = await asking(Machine(TIMED_OUT), provider, Passing()).wait_gone()

    assert loss.reason == "it cannot be reached, and fake reports that it is gone"
    assert provider.calls.count("describe") == 3


async def test_a_preemption_is_seen_although_the_first_who_asked_was_cancelled() -> None:
    node, asked = unlinked_node(Machine(GONE)), asyncio.Event()
    node.instance = replace(INSTANCE, offer=replace(INSTANCE.offer, spot=True))

    async def reported(*, at_once: bool = False) -> nodes.NodeLoss:
        if not asked.is_set():
            asked.set()
            await asyncio.Event().wait()
        return nodes.NodeLoss(reason="taken back", preempted=True, machine_over=at_once)

    node.machine_status = reported  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        first = asyncio.ensure_future(node.wait_gone())
        await asked.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        assert (await node.wait_gone()).preempted


async def test_a_provider_is_asked_no_oftener_than_every_five_seconds() -> None:
    provider, clock = Seller(InstanceState.RUNNING), FakeClock()
    node = asking(Machine(RUNS), provider, clock)
    for _ in range(20):
        assert await node.machine_status() is None
        clock.advance(1)

    assert provider.calls.count("describe") == 4


# --- machines that have moved -----------------------------------------------------------------------------------------


def ssh_access(port: int) -> SSHAccess:
    target = SSHTarget(host="127.0.0.1", port=port, user="root", patience_s=0.0)
    return SSHAccess(target=target, address="10.0.0.1", workdir="/nonexistent", boot_s=1.0)


def moving_node(transport: SshTransport, provider: FakeProvider) -> Node:
    instance = replace(INSTANCE, access=ssh_access(1))
    return open_node(instance, rank=1, transport=transport, provider=provider, clock=FakeClock())


class Moved(FakeProvider):
    """Reports the machine at another port."""

    def __init__(self, state: InstanceState = InstanceState.RUNNING) -> None:
        super().__init__()
        self.instances["i-1"] = replace(INSTANCE, state=state, access=ssh_access(2))


@pytest.mark.parametrize(("state", "port"), [(InstanceState.RUNNING, 2), (InstanceState.STOPPING, 1)])
async def test_a_node_follows_a_running_machine_to_its_present_port(state: InstanceState, port: int) -> None:
    transport = SshTransport(ssh_access(1).target)
    node = moving_node(transport, Moved(state))
    await node.machine_status()

    assert node.access == ssh_access(port)
    try:
        with pytest.raises(HostKeyError, match=rf"127\.0\.0\.1 port {port} is not a known host"):
            await transport.run(["true"], timeout_s=30)
    finally:
        await transport.close()


async def test_the_record_is_read_while_a_check_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_BLINK_S", 0.001)
    moved = asyncio.Event()

    class Silent(Machine):
        """Answers once it is dialled at its present address."""

        async def run(self, argv: Sequence[str], **_: Any) -> Completed:
            await moved.wait()
            return await super().run(argv)

    node = asking(Silent(GONE), Moved(), Passing())
    access: Any = SimpleNamespace(move=lambda present, transport: moved.set() or present, bind="", boot_s=0.0)
    node.access = access
    async with asyncio.timeout(10):
        loss = await node.wait_gone()

    assert loss.reason == "its supervisor is gone"


async def test_a_check_that_hangs_does_not_swallow_the_report_of_the_machines_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "_BLINK_S", 0.001)
    provider = Seller(InstanceState.GONE)

    class Hanging(Machine):
        async def run(self, argv: Sequence[str], **_: Any) -> Completed:
            while not provider.calls:  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.001)
            return await super().run(argv)

    async with asyncio.timeout(10):
        loss = await asking(Hanging(TIMED_OUT), provider, FakeClock()).wait_gone()

    assert loss.machine_over
    assert provider.calls == ["describe"]


async def test_a_failure_on_a_machine_that_moved_meanwhile_is_the_machines() -> None:
    """It was restarted: its files, or the processes of its set-up, may be gone."""
    transport = SshTransport(ssh_access(1).target)
    node = moving_node(transport, Moved())

    async def work() -> None:
        raise HostKeyError("another machine has its address")

    with pytest.raises(UnfitMachineError, match="was restarted while its node started: another machine"):
        await nodes.unless_gone(node, work(), loss=asyncio.Event().wait())  # type: ignore[arg-type]
    await transport.close()


@pytest.mark.parametrize(("python", "verdict"), [(sys.executable, 0), ("/nonexistent/python", 99)])
def test_a_disk_without_the_nodes_environment_has_no_supervisor(python: str, verdict: int) -> None:
    asked = ["sh", "-c", supervisor_check.UNLESS_WIPED, "sh", python, "-c", "pass"]
    assert subprocess.run(asked, check=False).returncode == verdict


# --- nodes whose time is over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "reason"),
    [("timeout", "its timeout of 40 s is over"), ("max_cost", "the 40 s that max_cost allows it are over")],
)
@pytest.mark.parametrize("reported", [True, False])
async def test_a_node_that_ends_at_its_cap_names_it_even_if_it_could_not_report_that(
    monkeypatch: pytest.MonkeyPatch, cap: str, reason: str, *, reported: bool
) -> None:
    """No other node takes its place: the first one's time was all there is."""
    clock = FakeClock()
    monkeypatch.setattr(nodes, "SYSTEM_CLOCK", clock)
    node = unlinked_node(Machine(GONE))
    node.cap = cap
    with pytest.raises(BootstrapError, match="did not start"):
        await node.start(replace(CONFIG, timeout_s=40.0))
    clock.advance(39.0 if reported else 41.0)
    if reported:
        node._receive(Ending(reason="its timeout of 40 s is over", timed_out=True))
    async with asyncio.timeout(10):
        loss = await node.wait_gone()

    assert (loss.reason, loss.timed_out) == (reason, True)


async def test_a_node_that_is_lost_before_its_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(nodes, "SYSTEM_CLOCK", clock)
    node = unlinked_node(Machine(GONE))
    with pytest.raises(BootstrapError, match="did not start"):
        await node.start(replace(CONFIG, timeout_s=40.0))
    clock.advance(39.0)
    async with asyncio.timeout(10):
        loss = await node.wait_gone()

    assert (loss.reason, loss.timed_out) == ("its supervisor is gone", False)
