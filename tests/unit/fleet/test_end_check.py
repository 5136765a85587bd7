"""A machine whose provider may refuse its end counts as ending itself only once it was seen that it may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import UnreachableError
from skyward.events import Notice
from skyward.fleet.machines import Machines
from skyward.fleet.node_setup import refusal_of_end, warning_of_bill
from skyward.ledger.ledger import Ledger, Purchase
from skyward.machine.access import Completed
from skyward.providers.base import Instance
from skyward.request.instance import InstanceSpec
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider
from support.clock import FakeClock
from support.fleets import FleetStage
from support.nodes import node_instance, open_node


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


class Answering:
    """A node whose machine answers every command in one way."""

    rank = 0

    def __init__(self, answer: Completed | Exception) -> None:
        self.instance, self.transport = replace(node_instance(), end_check=("may-end",)), self
        self._answer = answer

    async def run(self, argv: Any, *, timeout_s: float) -> Completed:
        assert argv == ("may-end",)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("no: status 403", "machine i-1 cannot end its own bill (no: status 403)"),
        ("unsure: status 403", "machine i-1 may be unable to end its own bill (unsure: status 403)"),
    ],
)
def test_a_warning_says_no_more_than_is_known(reason: str, words: str) -> None:
    node = Answering(Completed(exit_code=1, stdout=reason, stderr=""))
    node.instance = replace(node.instance, id="i-1")
    assert words in warning_of_bill(cast("Any", node), reason)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Completed(exit_code=0, stdout="yes", stderr=""), ""),
        (Completed(exit_code=1, stdout="no: status\n403\n", stderr=""), "no: status 403"),
        (Completed(exit_code=127, stdout="", stderr=""), "may-end ended with exit status 127"),
        (Completed(exit_code=1, stdout="x" * 9999, stderr=""), "x" * 300),
        (UnreachableError("may-end did not end within 120 s"), "may-end did not end within 120 s"),
    ],
)
async def test_anything_but_a_good_answer_is_a_refusal(answer: Completed | Exception, reason: str) -> None:
    assert await refusal_of_end(cast("Any", Answering(answer))) == reason


@pytest.mark.parametrize("may_end", [True, False])
async def test_a_claim_counts_once_it_was_checked_and_a_refusal_is_a_notice(ledger: Ledger, *, may_end: bool) -> None:
    provider = FakeProvider()
    provider.may_end = may_end
    stage = FleetStage(ledger=ledger, provider=provider, clock=cast("Any", SYSTEM_CLOCK))
    fleet, billed = stage.fleet(), list[int]()

    def contacted(instance: Instance) -> InstanceSpec:
        billed.append(len(ledger.billed_entries("fake")))
        return provider.hardware(instance.id)

    stage.nodes.hardware = contacted
    await fleet.start()
    after = ledger.billed_entries("fake")
    told = {each.instance_id: each.message for each in stage.events if isinstance(each, Notice) and each.instance_id}

    await fleet.stop()

    assert billed[0] == 2, "before the check a claim does not count"
    assert len(after) == (0 if may_end else 2)
    assert sorted(told) == ([] if may_end else ["fake-0", "fake-1"])
    for machine, message in told.items():
        assert f"machine {machine} cannot end its own bill (no: status 403)" in message
        assert "`skyward sweep` removes it" in message


async def test_the_outcome_outlasts_the_providers_word(ledger: Ledger) -> None:
    """A later record, with another price, states the provider's claim again."""
    provider, clock = FakeProvider(), FakeClock()
    machines = Machines(
        provider, parse_request(nodes=1), pool_id="p", publish=lambda event: None, ledger=ledger, clock=clock
    )
    claim = replace(node_instance(), ends_itself=True, end_check=("may-end",))
    machine = open_node(claim)
    ledger.reserve({claim.key: 0}, Purchase(pool_id="p", provider="fake"))

    await machines.note_end(machine, may_end=False)
    await machines.observe(machine, replace(claim, price_per_hour=7.0))

    assert (machine.instance.price_per_hour, machine.instance.ends_itself) == (7.0, False)
    assert [entry.purchase.ends_itself for entry in ledger.open_entries()] == [False]
