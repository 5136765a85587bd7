"""A client whose address has changed: the machines let it in again, as soon as one of them does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, UnreachableError
from skyward.events import Notice, SkywardEvent
from skyward.fleet.node_setup import Admission, AdmittedTransport
from skyward.ledger.ledger import Ledger
from skyward.machine.access import Completed
from skyward.providers.base import Provider
from skyward.testing.provider import FakeProvider
from support.clock import FakeClock
from support.fleets import FleetStage

DONE = Completed(exit_code=0, stdout="", stderr="")


class Guarded(FakeProvider):
    """Its machines answer one address only."""

    def __init__(self) -> None:
        super().__init__()
        self.here = "203.0.113.7/32"
        self.open_to = self.here
        self.asked = 0
        self.failure: Exception | None = None

    async def admit(self, pool_id: str) -> str:
        assert pool_id == "pool"
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        changed, self.open_to = self.open_to != self.here, self.here
        return self.here if changed else ""


class Machine:
    """Answers whom its provider admits."""

    def __init__(self, provider: Guarded, refusal: Exception | None = None) -> None:
        self.provider = provider
        self.refusal = refusal
        self.closed = False

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        if self.refusal is not None:
            raise self.refusal
        if self.provider.open_to != self.provider.here:
            raise UnreachableError("no answer")
        return DONE

    async def put(self, data: bytes | memoryview | Sequence[memoryview], path: str, *, mode: int = 0o600) -> None:
        await self.run([path], timeout_s=1)

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        return (host, port)

    async def close(self) -> None:
        self.closed = True


def admission(provider: Provider, clock: FakeClock, events: list[SkywardEvent]) -> Admission:
    return Admission(provider=provider, pool_id="pool", publish=events.append, clock=clock)


async def test_a_machine_answers_again_once_its_provider_has_admitted_the_new_address() -> None:
    provider, clock, events = Guarded(), FakeClock(), list[SkywardEvent]()
    transport = AdmittedTransport(Machine(provider), admission(provider, clock, events))
    assert await transport.run(["true"], timeout_s=1) == DONE
    assert provider.asked == 0

    provider.here = "198.51.100.9/32"
    with pytest.raises(UnreachableError):
        await transport.run(["true"], timeout_s=1)
    await transport.put(b"", "/file")

    assert await transport.run(["true"], timeout_s=1) == DONE
    assert [event.message for event in events if isinstance(event, Notice)] == [
        "this machine's address is now 198.51.100.9/32: fake admits it, and no former one"
    ]
    assert await transport.forward("127.0.0.1", 1) == ("127.0.0.1", 1)


async def test_the_provider_is_asked_for_a_whole_pool_every_quarter_of_a_minute_at_most() -> None:
    provider, clock, events = Guarded(), FakeClock(), list[SkywardEvent]()
    shared = admission(provider, clock, events)
    dead = UnreachableError("it is down")
    transports = [AdmittedTransport(Machine(provider, dead), shared) for _ in range(3)]
    for _ in range(30):
        for transport in transports:
            with pytest.raises(UnreachableError, match="it is down"):
                await transport.run(["true"], timeout_s=1)
        clock.advance(1)

    assert provider.asked == 2
    assert events == []


async def test_trouble_with_the_provider_is_no_other_error() -> None:
    provider, clock, events = Guarded(), FakeClock(), list[SkywardEvent]()
    provider.failure = AuthenticationError("no rights")
    provider.open_to = "198.51.100.9/32"
    transport = AdmittedTransport(Machine(provider), admission(provider, clock, events))

    with pytest.raises(UnreachableError, match="no answer"):
        await transport.put(b"", "/file")

    assert (provider.asked, events) == (1, [])


async def test_a_machine_that_refuses_us_is_not_one_that_is_closed_to_our_address() -> None:
    provider, clock, events = Guarded(), FakeClock(), list[SkywardEvent]()
    machine = Machine(provider, AuthenticationError("wrong key"))

    with pytest.raises(AuthenticationError):
        await AdmittedTransport(machine, admission(provider, clock, events)).run(["true"], timeout_s=1)

    assert provider.asked == 0


async def test_a_fleets_nodes_renew_the_admission(tmp_path: Path) -> None:
    provider = Guarded()
    assert provider.supports("admit")
    fleet = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=provider).fleet()
    await fleet.start()
    node, *_ = fleet.nodes
    with pytest.raises(UnreachableError):
        await node.transport.run(["sleep", "60"], timeout_s=0.01)
    await fleet.stop()

    assert provider.asked == 1
