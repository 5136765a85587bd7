"""A new machine is waited for until it lets us in as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from skyward.environment import bootstrap as commands
from skyward.environment.bootstrap import let_in
from skyward.errors import AuthenticationError, HostKeyError, UnreachableError
from skyward.machine.access import Completed
from skyward.machine.ssh import SSHAccess
from skyward.machine.ssh_config import SSHTarget
from support.nodes import node_instance, open_node
from support.pools import simulated_time
from support.simulation import simulate


class Booting:
    """A transport to a machine that answers so many times in these ways, and then as it should."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.asked = 0

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        self.asked += 1
        if self.refusals:
            raise self.refusals.pop(0)
        return Completed(exit_code=0, stdout="", stderr="")

    async def put(self, data: Any, path: str, *, mode: int = 0o600) -> None:
        raise NotImplementedError

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def knocking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_KNOCK_S", 0.001)


def test_another_host_key_a_refused_user_and_silence_are_not_yet_the_end() -> None:
    machine = Booting(UnreachableError("no answer"), HostKeyError("the image's"), AuthenticationError("no key yet"))

    asyncio.run(let_in(machine, within_s=30, node=0))

    assert machine.asked == 4


def test_a_machine_that_is_not_new_is_not_asked() -> None:
    machine = Booting(HostKeyError("another one"))
    asyncio.run(let_in(machine, within_s=0, node=0))
    assert machine.asked == 0


@pytest.mark.parametrize("kind", [HostKeyError, AuthenticationError])
def test_who_refuses_us_to_the_end_is_told_as_that(kind: type[AuthenticationError]) -> None:
    machine = Booting(*[kind("it is another")] * 10_000)
    with pytest.raises(kind, match=r"node 3 did not let us in for 0.05 s: it is another") as told:
        asyncio.run(let_in(machine, within_s=0.05, node=3))
    assert type(told.value) is kind


def test_who_refuses_us_for_longer_than_a_boot_takes_is_not_waited_for() -> None:
    machine = Booting(UnreachableError("no answer"), *[AuthenticationError("no key")] * 10_000)
    with pytest.raises(AuthenticationError, match=r"node 3 refused the login for 0.05 s: no key"):
        asyncio.run(let_in(machine, within_s=600, node=3, refused_s=0.05))


OTHER, LOGIN, SILENCE = (
    HostKeyError("another machine's"),
    AuthenticationError("no such key"),
    UnreachableError("no answer"),
)


@pytest.mark.parametrize(
    ("answers", "error", "after_s"),
    [
        pytest.param([OTHER] * 999, HostKeyError, (10, 30), id="a wrong key, from the outset"),
        pytest.param([SILENCE] * 20 + [OTHER] * 999, HostKeyError, (10, 60), id="a wrong key, after some silence"),
        pytest.param([OTHER, SILENCE] * 999, HostKeyError, (10, 60), id="a wrong key, now and then"),
        pytest.param([OTHER, LOGIN] * 999, HostKeyError, (10, 60), id="two machines at one address"),
        pytest.param([OTHER] * 2, None, (0, 10), id="the key of the machine that had the address before"),
        pytest.param([LOGIN] * 999, AuthenticationError, (300, 330), id="a login that is never admitted"),
        pytest.param([LOGIN] * 5, None, (0, 60), id="a login that is admitted late in the boot"),
    ],
)
def test_a_wrong_host_key_is_final_soon_and_a_login_that_is_not_admitted_yet_is_not(
    answers: list[Exception],
    error: type[Exception] | None,
    after_s: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time from the first answer that was no silence."""
    monkeypatch.undo()
    machine = Booting(*answers)
    answered_at: list[float] = []

    async def knocking() -> tuple[type[BaseException] | None, float]:
        (refused,) = await asyncio.gather(
            let_in(machine, within_s=900, node=3, refused_s=300, other_key_s=10), return_exceptions=True
        )
        return None if refused is None else type(refused), commands.SYSTEM_CLOCK.monotonic()

    run = machine.run

    async def noted(*args: Any, **options: Any) -> Any:
        if not machine.refusals or machine.refusals[0] is not SILENCE:
            answered_at.append(commands.SYSTEM_CLOCK.monotonic())
        return await run(*args, **options)

    monkeypatch.setattr(machine, "run", noted)
    with simulated_time():
        refused, at = simulate(knocking)
    assert refused is error
    assert after_s[0] <= at - answered_at[0] <= after_s[1]


def test_silence_is_waited_for_as_long_as_the_offer_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    machine = Booting(*[UnreachableError("no answer")] * 30)
    access = SSHAccess(target=SSHTarget(host="h"), address="192.0.2.1", workdir="/w", boot_s=300.0)
    node = open_node(replace(node_instance(), access=access), transport=machine)
    with simulated_time():
        simulate(lambda: node.reach(900.0))
    assert machine.asked == 30 + 2


def test_who_does_not_answer_to_the_end_cannot_be_reached() -> None:
    machine = Booting(HostKeyError("the image's"), *[UnreachableError("no answer")] * 10_000)
    with pytest.raises(UnreachableError, match=r"waited 0.05 s for node 3 to let us in; last observed: no answer"):
        asyncio.run(let_in(machine, within_s=0.05, node=3))
