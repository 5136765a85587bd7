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

from skyward.errors import UnreachableError
from skyward.node.config import NodeConfig
from skyward.node.lease import Lease
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.provision import nodes
from skyward.provision.nodes import NodeHandle
from skyward.spec.instance import InstanceSpec
from skyward.transport.access import LocalAccess
from skyward.transport.base import Completed

INSTANCE = Instance(
    id="i-1",
    key="key",
    state=InstanceState.RUNNING,
    offer=Offer(spec=InstanceSpec(name="fake", cpu=1, memory_gib=1)),
    access=LocalAccess(address="127.0.0.1", workdir="/nonexistent"),
)
CONFIG = NodeConfig(
    pool_id="pool",
    instance_id="i-1",
    node=1,
    total_nodes=2,
    workers=1,
    head=False,
    address="127.0.0.1",
    workdir="/nonexistent",
    env={},
    tls_ca="ca",
    tls_cert="cert",
    tls_key="key",
)
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


def unlinked_node(machine: Machine) -> NodeHandle:
    node = NodeHandle(instance=INSTANCE, rank=1, transport=machine, on_message=lambda node, message: None)  # type: ignore[arg-type]
    node._ready = SimpleNamespace(pid=1)  # type: ignore[assignment]
    node._environment = SimpleNamespace(python="python")  # type: ignore[assignment]
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
            asked = [sys.executable, "-c", nodes._IS_THERE, str(number), instance_id]
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
        assert lease.end_reason(limit_s)
