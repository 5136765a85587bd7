"""Machines get the secret by which they end their own bill over SSH, and newer ones in time."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import CapacityError, UnreachableError
from skyward.fleet.node_setup import deliver_secret, renew_secrets
from skyward.ledger.ledger import Ledger
from skyward.machine.access import Completed
from skyward.market.choose import UnfitMachineError
from skyward.providers.base import Instance, MachineSecret
from skyward.testing.provider import FakeProvider
from support.clock import FakeClock
from support.fleets import FleetStage
from support.nodes import open_node

RENEWED_S = 1200.0


class Entrusting(FakeProvider):
    """Has a numbered secret for each delivery."""

    def __init__(self, *command: str) -> None:
        super().__init__()
        self.given = 0
        self.command = command

    async def secret(self, instance: Instance) -> MachineSecret | None:
        self.given += 1
        return MachineSecret(command=self.command, value=f"secret-{self.given}", renewed_s=RENEWED_S)


class Reached:
    """A machine that notes what arrives on the standard input of commands."""

    def __init__(self, clock: FakeClock, **outcome: Any) -> None:
        self.node = open_node(transport=self)
        self.clock = clock
        self.outcome = outcome
        self.arrived: list[tuple[float, bytes]] = []
        self.failing = 0
        self.moved = asyncio.Event()

    async def run(self, argv: Any, *, stdin: bytes, timeout_s: float, env: Any = None) -> Completed:
        assert b"secret" not in repr(argv).encode()
        if self.failing:
            self.failing -= 1
            raise UnreachableError("no answer")
        self.arrived.append((self.clock.elapsed(), stdin))
        self.moved.set()
        return replace(Completed(exit_code=0, stdout="", stderr=""), **self.outcome)


def machines(clock: FakeClock, *reached: Reached) -> Any:
    provider = Entrusting("take")
    return SimpleNamespace(
        provider=provider,
        provider_of=lambda _: provider,
        clock=clock,
        unended=lambda: [each.node for each in reached if not each.node.ended],
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


async def renewed_until(machines: Any, reached: Reached, count: int) -> None:
    task = asyncio.ensure_future(renew_secrets(machines))
    while len(reached.arrived) < count:
        reached.moved.clear()
        await reached.moved.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_newer_secrets_follow_before_the_former_ones_expire() -> None:
    clock = FakeClock()
    reached = Reached(clock)
    pool = machines(clock, reached)

    await deliver_secret(pool, reached.node)
    await renewed_until(pool, reached, 3)

    assert reached.arrived == [(0.0, b"secret-1"), (RENEWED_S, b"secret-2"), (2 * RENEWED_S, b"secret-3")]


async def test_delivery_to_a_machine_that_does_not_answer_is_repeated_every_minute() -> None:
    clock = FakeClock()
    reached = Reached(clock)
    pool = machines(clock, reached)
    await deliver_secret(pool, reached.node)

    reached.failing = 2
    await renewed_until(pool, reached, 2)

    assert [at for at, _ in reached.arrived] == [0.0, RENEWED_S + 120]


async def test_ended_machines_get_no_newer_secret() -> None:
    clock = FakeClock()
    over, other = Reached(clock), Reached(clock)
    pool = machines(clock, over, other)
    await deliver_secret(pool, over.node)
    await deliver_secret(pool, other.node)
    over.node.mark_ended(0.0)

    await renewed_until(pool, other, 2)

    assert len(over.arrived) == 1


async def test_a_machine_that_does_not_take_its_secret_is_unfit_and_the_secret_is_in_no_message() -> None:
    clock = FakeClock()
    reached = Reached(clock, exit_code=2, stderr="secret-1: not found")

    with pytest.raises(UnfitMachineError, match="exit status 2") as raised:
        await deliver_secret(machines(clock), reached.node)

    assert "secret-1" not in str(raised.value)
    assert "secret-1" not in repr(await Entrusting("take").secret(reached.node.instance))


async def test_a_fleet_delivers_each_machine_its_secret_before_the_environment(ledger: Ledger, tmp_path: Path) -> None:
    provider = Entrusting("sh", "-c", f'cat >"{tmp_path}/taken-$$"')
    assert provider.supports("secret")
    stage = FleetStage(ledger=ledger, provider=provider, clock=cast("Any", SYSTEM_CLOCK))
    fleet = stage.fleet()

    await fleet.start()
    await fleet.stop()

    assert sorted(path.read_text(encoding="utf-8") for path in tmp_path.glob("taken-*")) == ["secret-1", "secret-2"]


async def test_a_machine_that_never_takes_its_secret_is_exchanged_until_none_is_sound(ledger: Ledger) -> None:
    stage = FleetStage(ledger=ledger, provider=Entrusting("false"), clock=cast("Any", SYSTEM_CLOCK))

    with pytest.raises(CapacityError, match="does not take the secret"):
        await stage.fleet(nodes=1).start()

    assert not stage.provider.alive
