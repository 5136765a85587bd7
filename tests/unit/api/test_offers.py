"""``sky.offers``: machine types and prices, from Python, with an account and without one."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import skyward as sky
from skyward.api.offers import Offers, PriceBasis, PricedInstance, PriceSource, PriceSurvey, survey_prices
from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    SkywardError,
    UnreachableError,
)
from skyward.providers.base import Offer, Provider
from skyward.providers.runpod import RunPod
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest, parse_request
from skyward.testing.provider import FakeProvider


def offer(name: str, price: float | None, *, spot: bool = False, region: str = "", **more: Any) -> Offer:
    spec = InstanceSpec(name=name, cpu=4, memory_gib=16)
    return Offer(spec=spec, spot=spot, price_per_hour=price, region=region, **more)


PROVIDER = FakeProvider([offer("dear", 3.0), offer("spot", 2.5), offer("spot", 1.0, spot=True), offer("unknown", None)])


def test_types_come_once_with_both_prices_the_cheapest_first() -> None:
    found = sky.offers(PROVIDER)

    assert [(spec.name, spec.price_spot, spec.price_on_demand) for spec in found] == [
        ("spot", 1.0, 2.5),
        ("dear", None, 3.0),
        ("unknown", None, None),
    ]
    assert sky.select_instance(found, cpu=4).name == "spot"
    assert "launch" not in PROVIDER.calls


async def test_it_works_where_an_event_loop_runs() -> None:
    assert len(await asyncio.to_thread(sky.offers, PROVIDER)) == len(sky.offers(PROVIDER))


def test_a_wrong_parameter_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cpu"):
        sky.offers(PROVIDER, cpu=-1)
    with pytest.raises(ConfigurationError, match="provider must be a provider object"):
        sky.offers(FakeProvider)  # type: ignore[arg-type]


def test_offers_are_a_tuple_that_is_shown_as_a_table() -> None:
    found = sky.offers(PROVIDER)

    assert isinstance(found, tuple)
    assert repr(found).splitlines() == [
        "provider  type     accelerators  cores  GiB  spot  $/h   rests on",
        "fake      spot                   4      16   1.00  2.50  live",
        "fake      dear                   4      16   ?     3.00  live",
        "fake      unknown                4      16   ?     ?     live",
    ]
    assert "<td>dear</td>" in found._repr_html_()
    odd = PricedInstance(name="<b>", cpu=1, memory_gib=1, provider="p")
    assert "&lt;b&gt;" in Offers((odd,))._repr_html_()
    assert repr(Offers(())) == "no machine type satisfies the request"


def test_one_row_has_every_region_and_the_lowest_prices() -> None:
    (row,) = sky.offers(FakeProvider([offer("a", 2.0, region="eu"), offer("a", 1.5, region="us")]))

    assert (row.regions, row.price_on_demand) == (("us", "eu"), 1.5)
    assert row.cells[0] == "fake us +1"


# --- many providers -----------------------------------------------------------------------------------------------


class Shop(FakeProvider):
    """Provider whose answers with and without credentials are given."""

    def __init__(self, live: object, public: object = ()) -> None:
        super().__init__()
        self.live, self.public = live, public
        self.closed = 0

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        return await _given(self.live)

    async def public_offers(self, request: PoolRequest) -> Sequence[Offer]:
        return await _given(self.public)

    async def close(self) -> None:
        self.closed += 1


async def _given(answer: Any) -> Sequence[Offer]:
    if answer is HANGS:
        await asyncio.Event().wait()
    if isinstance(answer, Exception):
        raise answer
    return answer


HANGS = object()
REQUEST = parse_request(accelerator="H100", spot="if-available")
HERE = [offer("here", 1.0)]


def source(provider: Provider, name: str = "shop", *, account: bool = True) -> PriceSource:
    return PriceSource(name=name, vendor=name, make=lambda: provider, kind=type(provider), account=account)


def surveyed(*sources: PriceSource, limit_s: float = 5.0, **options: Any) -> PriceSurvey:
    return asyncio.run(survey_prices(sources, options.pop("request", REQUEST), limit_s=limit_s, **options))


LIVE, PUBLIC, LISTED = PriceBasis.LIVE, PriceBasis.PUBLIC, PriceBasis.LISTED


@pytest.mark.parametrize(
    "name,shop,account,basis,reason",
    [
        ("aws", Shop(HERE), True, LIVE, ""),
        ("aws", Shop(HERE, [offer("shown", 2.0)]), False, PUBLIC, ""),
        ("aws", Shop(AuthenticationError("wrong key"), [offer("shown", 2.0)]), True, PUBLIC, "wrong key"),
        ("aws", Shop(AuthenticationError("wrong key")), True, LISTED, "wrong key"),
        ("aws", Shop(HERE), False, LISTED, ""),  # it shows nothing for this request
        ("aws", Shop((), UnreachableError("status 503")), False, LISTED, "status 503"),
        ("aws", Shop(UnreachableError("no network")), True, LISTED, "no network"),
        ("aws", Shop(TypeError("nonsense")), True, LISTED, "it failed: TypeError: nonsense"),
        ("nobody", Shop(UnreachableError("no network")), True, None, "no network"),
        ("aws", Shop(CapacityError("sold out")), True, None, "sold out"),
        ("aws", Shop(QuotaError("no quota")), True, None, "no quota"),
        ("aws", Shop(ConfigurationError("none of these")), True, None, "none of these"),
    ],
)
def test_a_row_rests_on_the_best_answer(
    name: str, shop: Shop, account: bool, basis: PriceBasis | None, reason: str
) -> None:
    survey = surveyed(source(shop, name, account=account))

    assert {row.basis for row in survey.rows} == ({basis} if basis else set())
    assert {name: str(error) for name, error in survey.errors.items()} == ({name: reason} if reason else {})
    assert shop.closed == 1


def test_a_provider_that_hangs_delays_the_others_until_its_deadline_only() -> None:
    began = time.monotonic()
    survey = surveyed(source(Shop(HANGS), "aws"), source(Shop(HERE)), source(Shop(HANGS), "nobody"), limit_s=0.2)

    assert time.monotonic() - began < 4
    assert [(row.provider, row.basis) for row in survey.rows] == [("shop", LIVE), ("aws", LISTED)]
    assert survey.silence == ["aws, nobody: no answer within 0.2 s"]


@contextmanager
def accepts_and_says_nothing() -> Generator[str]:
    """Accept connections, and read nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("account", [True, False])
def test_a_vendor_that_says_nothing_holds_up_neither_the_answer_nor_the_threads(account: bool) -> None:
    threads = threading.active_count()
    with accepts_and_says_nothing() as url:
        began = time.monotonic()
        survey = surveyed(source(RunPod(endpoint_url=url, api_key="k" * 20), "runpod", account=account), limit_s=0.3)

        assert time.monotonic() - began < 4  # of 30 s that a call may otherwise take
    assert {row.basis for row in survey.rows} == {LISTED}
    assert threading.active_count() <= threads


def test_a_missing_package_leaves_the_list_and_a_wrong_setting_is_an_error() -> None:
    def refuse() -> Provider:
        raise ConfigurationError("needs boto3")

    default = PriceSource(name="aws", vendor="aws", make=refuse, kind=Shop, account=True)
    configured = PriceSource(name="aws", vendor="aws", make=refuse, kind=Shop, account=True, configured=True)

    assert {row.basis for row in surveyed(default).rows} == {LISTED}
    assert surveyed(default).silence == ["aws: needs boto3"]
    assert surveyed(configured).rows == []
    assert surveyed(configured).silence == ["aws: needs boto3"]


@pytest.mark.parametrize("facts", [{"named": True}, {"configured": True}, {}])
def test_why_a_provider_has_no_such_machine_is_told_of_those_that_are_named(facts: dict[str, bool]) -> None:
    shop = Shop(ConfigurationError("there is no such profile"))
    survey = surveyed(PriceSource(name="aws", vendor="aws", make=lambda: shop, kind=Shop, account=True, **facts))

    assert survey.silence == (["aws: there is no such profile"] if facts else [])
    assert str(survey.no_rows(REQUEST)).splitlines()[1:] == [f"  {line}" for line in survey.silence]


def costs_one(offer: Offer, _: PriceBasis) -> bool:
    return offer.price_per_hour == 1.0


def test_a_list_of_providers_is_asked_with_their_accounts() -> None:
    east, west = FakeProvider([offer("a", 2.0)], name="east"), FakeProvider([offer("b", 1.0)], name="west")

    assert [(row.provider, row.name) for row in sky.offers([east, west])] == [("west", "b"), ("east", "a")]
    with pytest.raises(ConfigurationError, match="empty list"):
        sky.offers([])


def test_rows_of_all_are_sorted_and_those_that_are_not_accepted_counted() -> None:
    cheap, dear = Shop([offer("b", 2.0), offer("a", 0.5)]), Shop([offer("c", 1.0), offer("d", None)])

    everything = surveyed(source(cheap, "one"), source(dear, "two"))
    affordable = surveyed(source(cheap, "one"), source(dear, "two"), accepts=costs_one)

    assert [row.name for row in everything.rows] == ["a", "c", "b", "d"]
    assert [row.name for row in affordable.rows] == ["c"]
    assert not everything.left_out
    assert [row.name for row in affordable.left_out] == ["a", "b", "d"]


@pytest.mark.parametrize(
    "wanted,errors,kind,words",
    [
        ("GH200", {}, ConfigurationError, "no provider sells GH200; closest: H200"),
        ("H100:16", {}, ConfigurationError, "16x H100-80GB now: the most on a machine is 8"),
        ("H100", {"one": CapacityError("sold out")}, CapacityError, "has 1x H100-80GB now\n  one: sold out"),
        ("H100", {"one": ConfigurationError("none of these")}, ConfigurationError, "no provider has 1x H100-80GB now$"),
    ],
)
def test_what_nobody_has_is_one_error(
    wanted: str, errors: dict[str, SkywardError], kind: type[SkywardError], words: str
) -> None:
    error = PriceSurvey(rows=(), errors=errors).no_rows(parse_request(accelerator=wanted))

    assert type(error) is kind
    assert re.search(words, str(error))


def test_lines_say_what_prices_that_are_not_live_rest_on() -> None:
    assert surveyed(source(Shop(HERE))).basis == []
    listed = surveyed(source(Shop(()), "aws", account=False))

    assert listed.rows[0].cells[-1].startswith("list ")
    assert listed.basis[0].startswith("list: aws asked these prices on 2026-")
    assert "may be out of stock" in listed.basis[-1]


def test_without_a_request_machines_with_accelerators_and_without_are_listed() -> None:
    rows = surveyed(source(Shop(()), "aws", account=False), request=parse_request(spot="if-available")).rows

    assert {bool(row.accelerator) for row in rows} == {True, False}
