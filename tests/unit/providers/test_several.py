"""Several providers in one pool: what may be in the list, what is asked of each, who serves an order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    SkywardError,
    TerminationError,
    UnreachableError,
)
from skyward.providers.aws.provider import AWS
from skyward.providers.base import LaunchOrder, Offer, Provider
from skyward.providers.local import Local
from skyward.providers.registry import provider_settings
from skyward.providers.runpod import RunPod
from skyward.providers.several import Several, attempts, parse_provider, provider_record, recorded_provider
from skyward.providers.ssh import SSH
from skyward.providers.vastai import VastAI
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider
from support.simulation import simulate

REQUEST = parse_request(spot="never")


def offer(price: float, region: str = "", name: str = "m") -> Offer:
    return Offer(spec=InstanceSpec(name=name, cpu=2, memory_gib=4), region=region, price_per_hour=price)


def fake(name: str, *prices: float) -> FakeProvider:
    return FakeProvider([offer(price) for price in prices or (1.0,)], name=name)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "provider is an empty list"),
        ((), "provider is an empty list"),
        ([Local(), "aws"], r"provider\[1\] must be a provider object .* got str"),
        ([AWS], r"provider\[0\] must be .* got the class AWS: add parentheses"),
        ([Local(), [AWS()]], r"provider\[1\] must be .* got list"),
        ([Local(), None], r"provider\[1\] must be .* got NoneType"),
        (
            [AWS(region="eu-west-1"), Local(), AWS(region="eu-west-1")],
            r"provider\[2\] is the same as provider\[0\] \(aws",
        ),
        (
            [VastAI(api_key="k" * 20), Local(), VastAI(api_key="q" * 20)],
            r"provider\[0\] and provider\[2\] are accounts of vastai that a secret tells apart",
        ),
        (
            [RunPod(), RunPod(api_key="q" * 20, network_volume="agv6w2qcg7")],
            r"provider\[0\] and provider\[1\] are accounts of runpod that a secret tells apart",
        ),
        ({Local(): 1}, "provider must be a provider object such as .* got dict"),
    ],
)
def test_a_list_holds_different_providers_and_nothing_else(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_provider(value)


def test_a_list_of_one_is_that_provider() -> None:
    provider = Local()

    assert parse_provider([provider]) is provider


@pytest.mark.parametrize(
    ("providers", "labels"),
    [
        ((Local(), AWS()), ("local", "aws")),
        ((AWS(region="eu-central-1"), AWS(region="eu-west-1")), ("aws (eu-central-1)", "aws (eu-west-1)")),
        (
            (AWS(region="us-east-1", profile="x"), AWS(region="us-east-2", profile="x")),
            ("aws (us-east-1)", "aws (us-east-2)"),
        ),
        ((SSH(hosts=["a", "b"]), SSH(hosts=["c"])), ("ssh (a b)", "ssh (c)")),
        ((SSH(hosts=["a"], user="x"), SSH(hosts=["b"], user="y")), ("ssh (a)", "ssh (b)")),
        ((VastAI(api_key="k" * 20), Local(), VastAI(api_key="q" * 20)), ("vastai #1", "local", "vastai #2")),
    ],
)
def test_labels_tell_providers_of_one_name_apart(providers: tuple[Provider, ...], labels: tuple[str, ...]) -> None:
    assert Several(providers).labels == labels


def test_a_record_of_a_list_makes_it_again() -> None:
    several = parse_provider([SSH(hosts=["a"]), AWS(region="eu-west-1"), Local()])
    again = recorded_provider(*provider_record(several))

    assert [provider_settings(each) for each in again.members] == [provider_settings(each) for each in several.members]
    assert again.name == several.name
    assert provider_record(Local()) == ("local", {})


class Odd(FakeProvider):
    """Answers with something, or not at all."""

    def __init__(self, name: str, answer: Any = None) -> None:
        super().__init__(name=name)
        self.answer = answer

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        if self.answer is None:
            await asyncio.Event().wait()
        return cast("Sequence[Offer]", self.answer)


def test_an_answer_that_fails_after_its_time_is_no_ones_error() -> None:
    class FailsLate(FakeProvider):
        async def offers(self, request: PoolRequest) -> Sequence[Offer]:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                raise OSError("the connection broke") from None
            return ()

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        await Several((fake("fake"), FailsLate(name="late"))).offers(REQUEST)
        await asyncio.sleep(1)
        gc.collect()

    unheard: list[dict[str, Any]] = []
    simulate(ask)
    assert unheard == []


def test_who_hangs_or_answers_nonsense_is_named_and_the_others_answer() -> None:
    async def ask() -> tuple[Sequence[Offer], float, str]:
        loop = asyncio.get_running_loop()
        several = Several((Odd("mute"), fake("good", 3.0), Odd("mad", ["nonsense"]), _refusing("poor", "no key")))
        began = loop.time()
        return await several.offers(REQUEST), loop.time() - began, several.silence

    offers, seconds, silence = simulate(ask)

    assert [(each.provider, each.price_per_hour) for each in offers] == [("good", 3.0)]
    assert seconds == 10.0
    assert silence.startswith("no offers from 3 of 4 providers: mute: no answer within 10 s; mad: it failed: TypeError")
    assert silence.endswith("; poor: no key")


def _refusing(name: str, *reasons: str | SkywardError) -> FakeProvider:
    provider = fake(name)
    for reason in reasons:
        provider.fail("offers", AuthenticationError(reason) if isinstance(reason, str) else reason)
    return provider


async def test_who_has_no_offers_is_named_unless_it_is_sold_out() -> None:
    """A library or hosts may be missing: without a word, a member would never be used."""
    several = Several(
        (_refusing("a", ConfigurationError("SSH() has 2 hosts")), _refusing("b", CapacityError("out")), fake("c"))
    )

    assert [each.provider for each in await several.offers(REQUEST)] == ["c"]
    assert several.silence == "no offers from 1 of 3 providers: a: SSH() has 2 hosts"


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ((ConfigurationError("x"), ConfigurationError("y")), ConfigurationError),
        ((AuthenticationError("x"), ConfigurationError("y")), AuthenticationError),
        ((AuthenticationError("x"), CapacityError("y")), CapacityError),
        ((QuotaError("x"), AuthenticationError("y")), QuotaError),
        ((UnreachableError("x"), AuthenticationError("y")), UnreachableError),
    ],
)
async def test_if_none_has_offers_one_error_gives_each_reason(
    errors: tuple[SkywardError, SkywardError], kind: type[SkywardError]
) -> None:
    several = Several((_refusing("a", errors[0]), _refusing("b", errors[1])))

    with pytest.raises(SkywardError, match=r"(?s)no provider offers a machine.*\n- a: x\n- b: y$") as raised:
        await several.offers(REQUEST)
    assert type(raised.value) is kind


async def test_where_nodes_may_be_spread_no_provider_needs_room_for_all() -> None:
    asked: list[int] = []

    class Small(FakeProvider):
        async def offers(self, request: PoolRequest) -> Sequence[Offer]:
            asked.append(request.nodes)
            return await super().offers(request)

    several = Several((Small(name="a"), Small(name="b")))
    await several.offers(parse_request(nodes=8, spread=True))
    await several.offers(replace(parse_request(nodes=8, spread=True), one_network=True))
    await several.offers(parse_request(nodes=8))

    assert asked == [1, 1, 8, 8, 8, 8]


A1, A2, A3 = (replace(offer(price, "r", f"a{price:g}"), provider="a") for price in (1, 2, 4))
A_ELSEWHERE, B = replace(A2, region="s"), replace(offer(3), provider="b")
ISLANDS = (replace(A1, island=True), replace(A_ELSEWHERE, island=True))


@pytest.mark.parametrize(
    ("offers", "nodes", "expected"),
    [
        ([A1, A2, B, A3], 1, [[A1, A2], [B], [A3]]),
        ([A1, A2, B, A3], 2, [[A1, A2], [B], [A1, A2, A3]]),
        ([A1, A_ELSEWHERE, A3], 2, [[A1], [A_ELSEWHERE], [A1, A3]]),
        ([*ISLANDS, B], 2, [[*ISLANDS], [B]]),  # regions are no matter to machines that reach no other
    ],
)
def test_offers_are_tried_price_by_price(offers: list[Offer], nodes: int, expected: list[list[Offer]]) -> None:
    assert [[*attempt] for attempt in attempts(offers, nodes=nodes)] == expected


ORDER = LaunchOrder(pool_id="pool", keys=("k0", "k1"), timeout_s=60.0)


async def _ranked(several: Several) -> list[Offer]:
    return sorted(await several.offers(REQUEST), key=lambda each: each.price_per_hour or 0.0)


@pytest.mark.parametrize(
    "error",
    [CapacityError("sold out"), QuotaError("no quota"), AuthenticationError("403"), UnreachableError("no answer")],
)
async def test_a_refusal_leads_to_the_next_provider(error: SkywardError) -> None:
    cheap, dear = fake("cheap", 1.0), fake("dear", 2.0)
    several = Several((dear, cheap))
    cheap.fail("launch", error)
    made = await several.launch(await _ranked(several), ORDER)

    assert [each.offer.provider for each in made] == ["dear", "dear"]
    assert (cheap.alive, len(dear.alive)) == ([], 2)


@pytest.mark.parametrize(
    "error", [ConfigurationError("wrong request"), TerminationError("left", instance_ids=["i"]), KeyError("bug")]
)
async def test_a_wrong_request_is_no_reason_to_buy_elsewhere(error: Exception) -> None:
    cheap, dear = fake("cheap", 1.0), fake("dear", 2.0)
    several = Several((dear, cheap))
    cheap.fail("launch", error)

    with pytest.raises(type(error)):
        await several.launch(await _ranked(several), ORDER)
    assert dear.calls == ["offers"]


async def test_a_provider_that_refuses_the_credentials_is_tried_once() -> None:
    locked, dear = fake("locked", 1.0, 3.0), fake("dear", 2.0)
    several = Several((locked, dear))
    locked.fail("launch", AuthenticationError("403"), times=5)
    dear.fail("launch", CapacityError("sold out"))

    with pytest.raises(CapacityError, match=r"(?s)no provider has the machines.*\n- locked: 403\n- dear: sold out$"):
        await several.launch(await _ranked(several), ORDER)
    assert locked.calls.count("launch") == 1


async def test_all_attempts_at_one_place_are_one_line_with_their_types() -> None:
    a, b = FakeProvider([offer(1.0, "r", "x"), offer(3.0, "r", "y")], name="a"), fake("b", 2.0)
    several = Several((a, b))
    for provider in (a, b):
        provider.fail("launch", CapacityError("sold out"), times=9)

    with pytest.raises(CapacityError, match=r"in this order:\n- a r \(x, y\): sold out\n- b: sold out$"):
        await several.launch(await _ranked(several), ORDER)


async def test_a_list_does_not_answer_for_machines_of_its_members() -> None:
    several = Several((fake("a"), fake("b")))

    with pytest.raises(NotImplementedError, match="member_of"):
        await several.describe(["i-1"])
    with pytest.raises(NotImplementedError, match="member_of"):
        await several.terminate(["i-1"])
