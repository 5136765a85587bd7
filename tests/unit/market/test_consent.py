"""The most that a pool can cost, and the user's consent before anything is bought."""

from __future__ import annotations

import asyncio
import io
import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyward.errors import BudgetError, ConfigurationError
from skyward.events import InstanceLaunching
from skyward.ledger.ledger import Ledger
from skyward.market.choose import Batch
from skyward.market.consent import CONFIRM_ABOVE, Consent, Forecast, ask_on_terminal, limit_of
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider
from support.fleets import FleetStage

TWO_HOURS = Forecast(timeout_s=7200)


def offer(price: float | None, *, minimum_billed_s: float = 0.0, gpus: int = 0) -> Offer:
    spec = InstanceSpec(
        name=f"at {price}", cpu=2, memory_gib=4, accelerator="H100" if gpus else None, accelerator_count=gpus
    )
    return Offer(spec=spec, price_per_hour=price, minimum_billed_s=minimum_billed_s)


@pytest.mark.parametrize(
    ("forecast", "each", "count", "most"),
    [
        (TWO_HOURS, offer(1.5), 4, 12.0),
        (TWO_HOURS, offer(0.0), 4, 0.0),
        (TWO_HOURS, offer(None), 1, math.inf),
        (Forecast(timeout_s=7200, max_cost=5.0), offer(1.5), 4, 5.0),
        (Forecast(timeout_s=7200, max_cost=5.0), offer(None), 1, 5.0),
        (Forecast(timeout_s=60), offer(1.0, minimum_billed_s=3600.0), 2, 2.0),
    ],
)
def test_the_most_is_the_price_until_timeout_or_max_cost(
    forecast: Forecast, each: Offer, count: int, most: float
) -> None:
    assert forecast.most(each, count) == most


@pytest.mark.parametrize(("value", "limit"), [(None, math.inf), ("", math.inf), ("0", 0.0), (" 20 ", 20.0)])
def test_the_limit_is_the_users_variable(value: str | None, limit: float) -> None:
    assert limit_of({} if value is None else {CONFIRM_ABOVE: value}) == limit


@pytest.mark.parametrize("value", ["twenty", "-1", "nan", "inf", "$20"])
def test_a_limit_that_is_no_sum_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{CONFIRM_ABOVE} must be a sum in USD such as 20, got"):
        limit_of({CONFIRM_ABOVE: value})


class Asked:
    """A user who answers so, and the questions."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer
        self.questions: list[str] = []

    async def __call__(self, question: str) -> bool | None:
        self.questions.append(question)
        return self.answer


def given(consent: Consent, *offers: Offer, nodes: int = 1, beside: Sequence[Offer] = ()) -> Sequence[Offer]:
    batches = [Batch(nodes=nodes, offers=offers)]
    (batch,) = asyncio.run(consent.given(batches, beside, provider="cloud"))
    return batch.offers


def test_up_to_the_limit_nobody_is_asked_and_dearer_offers_are_left_out() -> None:
    user = Asked(answer=None)
    assert given(Consent(TWO_HOURS, limit=20.0, ask=user), offer(1.0), offer(10.0), offer(10.1)) == (
        offer(1.0),
        offer(10.0),
    )
    assert given(Consent(TWO_HOURS, limit=math.inf, ask=user), offer(None)) == (offer(None),)
    assert user.questions == []


def test_above_the_limit_the_user_is_asked_once_and_may_agree() -> None:
    user = Asked(answer=True)
    consent = Consent(TWO_HOURS, limit=20.0, ask=user)
    assert given(consent, offer(6.0), offer(7.0), nodes=2) == (offer(6.0),)
    (question,) = user.questions
    assert question == (
        "2 of at 6.0 on demand ($6 an hour) at cloud can cost up to $24.00 until timeout, more than "
        "SKYWARD_CONFIRM_ABOVE=20. Buy? [y/N] "
    )
    assert given(consent, offer(6.5), beside=[offer(6.0)]) == (offer(6.5),), "a replacement is agreed to"
    with pytest.raises(BudgetError, match=r"together with .* 3 nodes, more than .*an open pool does not ask"):
        given(consent, offer(6.0), beside=[offer(6.0)] * 2)
    assert len(user.questions) == 1


def test_replacements_keep_the_limit_of_a_pool_that_nobody_was_asked_about() -> None:
    user = Asked(answer=True)
    consent = Consent(TWO_HOURS, limit=20.0, ask=user)
    assert given(consent, offer(4.0), nodes=2) == (offer(4.0),)
    assert given(consent, offer(4.0), offer(6.0), offer(6.1), beside=[offer(4.0)]) == (offer(4.0), offer(6.0))
    with pytest.raises(BudgetError, match=r"up to \$118\.00 until timeout.*an open pool does not ask"):
        given(consent, offer(55.0), beside=[offer(4.0)])
    assert user.questions == []


def test_an_unknown_price_is_asked_about() -> None:
    user = Asked(answer=True)
    assert given(Consent(TWO_HOURS, limit=20.0, ask=user), offer(None), offer(1.0)) == (offer(None), offer(1.0))
    assert "can cost an unknown sum, since no price is known" in user.questions[0]


@pytest.mark.parametrize(
    ("max_cost", "total"),
    [(math.inf, "an unknown sum, since they come and go, and max_cost is not set"), (30.0, r"up to \$30\.00")],
)
def test_an_elastic_pool_asks_before_it_opens_and_not_when_it_grows(max_cost: float, total: str) -> None:
    user = Asked(answer=True)
    consent = Consent(Forecast(timeout_s=7200, max_cost=max_cost), limit=20.0, ask=user)
    assert not consent.covers_elastic
    asyncio.run(consent.given_to_elastic([Batch(nodes=8, offers=(offer(1.0),))], provider="cloud"))
    assert re.search(f"8 of at 1.0 .* can cost {total}, more than SKYWARD_CONFIRM_ABOVE=20. Buy?", user.questions[0])
    assert given(consent, offer(5.0), nodes=4, beside=[offer(1.0)] * 4) == (offer(5.0),)
    assert len(user.questions) == 1


def test_an_elastic_pool_within_the_limit_or_of_machines_without_a_price_asks_nobody() -> None:
    user = Asked(answer=None)
    assert Consent(Forecast(timeout_s=7200, max_cost=20.0), limit=20.0, ask=user).covers_elastic
    consent = Consent(TWO_HOURS, limit=20.0, ask=user)
    asyncio.run(consent.given_to_elastic([Batch(nodes=8, offers=(offer(0.0),))], provider="local"))
    assert given(consent, offer(0.0), nodes=8) == (offer(0.0),)
    assert user.questions == []


def test_an_elastic_pool_without_consent_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIRM_ABOVE, "3")
    stage = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=FakeProvider([offer(2.0)]))
    with pytest.raises(BudgetError, match=r"8 of at 2\.0 .* max_cost is not set, more than SKYWARD_CONFIRM_ABOVE=3"):
        asyncio.run(stage.fleet(nodes=(0, 8), timeout=3600).start())


@pytest.mark.parametrize(("answer", "why"), [(False, "it was not confirmed"), (None, "nobody can confirm it here")])
def test_without_consent_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool | None, why: str
) -> None:
    monkeypatch.setenv(CONFIRM_ABOVE, "3")
    stage = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=FakeProvider([offer(2.0, gpus=8)]))
    fleet = stage.fleet(nodes=2, timeout=3600)
    if answer is not None:
        fleet._machines.consent.ask = Asked(answer)
    with pytest.raises(
        BudgetError, match=rf"up to \$4\.00 until timeout, more than SKYWARD_CONFIRM_ABOVE=3, and {why}"
    ):
        asyncio.run(fleet.start())
    assert (stage.provider.instances, stage.ledger.entries()) == ({}, ())


def test_a_launch_says_how_many_accelerators_are_bought_and_the_most_they_cost(tmp_path: Path) -> None:
    stage = FleetStage(ledger=Ledger(tmp_path / "ledger.db"), provider=FakeProvider([offer(2.0, gpus=8)]))

    async def live() -> None:
        fleet = stage.fleet(nodes=2, timeout=1800, accelerator="H100")
        await fleet.start()
        await fleet.stop()

    asyncio.run(live())
    (launch,) = [event for event in stage.events if isinstance(event, InstanceLaunching)]
    assert (launch.accelerator, launch.accelerators, launch.accelerators_asked, launch.at_most) == ("H100", 8, 1, 2.0)


@pytest.mark.parametrize(("typed", "answer"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False)])
def test_a_terminal_is_asked(typed: str, answer: bool) -> None:
    with ExitStack() as stack:
        keyboard, terminal = os.openpty()
        stack.callback(os.close, keyboard)
        read = stack.enter_context(os.fdopen(os.dup(terminal), encoding="utf-8"))
        write = stack.enter_context(os.fdopen(terminal, "w", encoding="utf-8"))
        os.write(keyboard, typed.encode())
        assert asyncio.run(ask_on_terminal("Buy? ", stdin=read, stderr=write)) is answer
        shown = b""
        while b"Buy? " not in shown:  # after the echo of what was typed, which may come by itself
            shown += os.read(keyboard, 1024)


def test_without_a_terminal_nobody_is_asked(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+", encoding="utf-8") as file:
        assert asyncio.run(ask_on_terminal("Buy? ", stdin=file, stderr=file)) is None
        assert file.tell() == 0


def test_a_terminal_without_a_descriptor_as_in_editors_is_none() -> None:
    class Window(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert asyncio.run(ask_on_terminal("Buy? ", stdin=Window(), stderr=Window())) is None
