"""``pool.plan()``: what the opening would do, from the code that opens; nothing is created."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import skyward as sky
from skyward.api.plan import Plan
from skyward.environment.skyward_wheel import engine_pins
from skyward.errors import AuthenticationError, CapacityError
from skyward.integrations import JoblibPool
from skyward.ledger.fleet_record import FleetFolder
from skyward.market.consent import CONFIRM_ABOVE
from skyward.providers.base import Offer
from skyward.request.instance import InstanceSpec
from skyward.testing.provider import FakeProvider


class Cloud(FakeProvider):
    """Rents machines that are not this one."""

    this_machine = False


def offer(name: str, price: float | None, *, spot: bool = False, **facts: Any) -> Offer:
    spec = InstanceSpec(name=name, cpu=4, memory_gib=16, accelerator="H100", accelerator_count=2)
    return Offer(spec=spec, spot=spot, price_per_hour=price, on_demand_price_per_hour=price, region="eu", **facts)


OFFERS = (offer("dear", 3.0), offer("cheap", 2.0), offer("cheap", 1.0, spot=True), offer("unknown", None))


def planned(*offers: Offer, provider: FakeProvider | None = None, **parameters: Any) -> Plan:
    provider = provider or Cloud(offers or OFFERS)
    pool = sky.ComputePool(
        provider=provider, image=parameters.pop("image", sky.Image(mirror=False)), display="quiet", **parameters
    )
    plan = pool.plan()
    assert {*provider.calls} <= {"offers"}
    return plan


def rows(plan: Plan) -> list[tuple[Any, ...]]:
    return [(each.nodes, each.attempt, each.machine, each.spot, each.at_most) for each in plan.offers]


@pytest.mark.parametrize(
    ("parameters", "expected", "at_most"),
    [
        ({"spot": "always", "nodes": 2}, [(2, 1, "cheap", True, 2.0)], 2.0),
        (
            {"spot": "if-available", "timeout": 1800},
            [
                (1, 1, "cheap", True, 0.5),
                (1, 2, "cheap", False, 1.0),
                (1, 3, "dear", False, 1.5),
                (1, 4, "unknown", False, None),
            ],
            None,
        ),
        (
            {"spot": 0.5, "nodes": 3, "max_price_per_hour": 2.5},
            [(1, 1, "cheap", False, 2.0), (2, 1, "cheap", True, 2.0)],
            4.0,
        ),
        (
            {"spot": "never", "nodes": 2, "max_cost": 5.0},
            [(2, 1, "cheap", False, 4.0), (2, 2, "dear", False, 5.0)],
            5.0,
        ),
        ({"spot": "always", "nodes": (0, 4)}, [(1, 1, "cheap", True, 1.0)], None),
        ({"spot": "always", "nodes": (2, 4), "max_cost": 7.0}, [(2, 1, "cheap", True, 2.0)], 7.0),
    ],
)
def test_offers_come_in_the_order_in_which_they_are_tried(
    parameters: dict[str, Any], expected: list[tuple[Any, ...]], at_most: float | None
) -> None:
    plan = planned(**parameters)

    assert rows(plan) == expected
    assert plan.at_most == at_most
    assert plan.problems == ()


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"max_cost": 0.001, "spot": "never"}, "max_cost must be at least"),
        ({"max_price_per_hour": 0.5}, "below every offer of fake"),
    ],
)
def test_what_would_stop_the_opening_is_a_problem_of_the_plan(parameters: dict[str, Any], problem: str) -> None:
    plan = planned(**parameters)

    (found,) = plan.problems
    assert problem in found
    assert plan.offers == ()
    assert repr(plan).startswith("This pool would not open.")


def test_what_the_opening_waits_for_is_a_problem_of_the_moment() -> None:
    provider = Cloud(OFFERS)
    provider.fail("offers", CapacityError("sold out"))

    plan = planned(provider=provider, wait_for_capacity="2h")

    assert plan.problems == ("sold out",)
    assert (plan.notes, plan.waits_s) == ((), 7200.0)
    assert repr(plan).startswith("This pool would not open now: it would wait for capacity, for up to 2 h 0 min.\n")


def test_what_waiting_does_not_cure_is_not_waited_for() -> None:
    provider = Cloud(OFFERS)
    provider.fail("offers", AuthenticationError("no key"))

    plan = planned(provider=provider, wait_for_capacity="2h")

    assert (plan.problems, plan.waits_s) == (("no key",), 0.0)
    assert repr(plan).startswith("This pool would not open.\n")


def test_refused_credentials_are_a_problem() -> None:
    provider = Cloud(OFFERS)
    provider.fail("offers", AuthenticationError("no key"))

    assert planned(provider=provider).problems == ("no key",)


def test_of_several_providers_all_are_asked_and_who_is_silent_is_noted() -> None:
    east, west, north = (Cloud(OFFERS[:2], name="east"), Cloud([offer("mid", 2.5)], name="west"), Cloud(name="north"))
    north.fail("offers", AuthenticationError("no key"))
    west.ends_itself = False

    plan = sky.ComputePool(
        provider=[east, west, north], image=sky.Image(mirror=False), spot="never", nodes=2, display="quiet"
    ).plan()

    assert [(each.provider, each.machine, each.attempt, each.ends_itself) for each in plan.offers] == [
        ("east", "cheap", 1, True),
        ("west", "mid", 2, False),
        ("east", "dear", 3, True),
    ]
    assert plan.at_most == 6.0
    assert plan.notes == ("no offers from 1 of 3 providers: north: no key",)
    assert "machines of west cannot end their own bill" in " ".join(repr(plan).split())


def test_only_providers_that_have_offers_are_named_and_only_machines_elsewhere_install() -> None:
    silent = Cloud(name="silent")
    silent.fail("offers", AuthenticationError("no key"))
    near, far = FakeProvider([offer("near", 1.0)], name="near"), Cloud([offer("far", 2.0)], name="far")

    alone = sky.ComputePool(provider=[near, silent], spot="never", pip=["click"], display="quiet").plan()
    silent.fail("offers", AuthenticationError("no key"))
    both = sky.ComputePool(provider=[near, silent, far], spot="never", pip=["click"], display="quiet").plan()

    assert repr(alone).startswith("Opening this pool would get 1 node of near, for ")
    assert (alone.packages, [each.installs for each in alone.offers]) == ((), [False])
    assert repr(both).startswith("Opening this pool would get 1 node of near, far, for ")
    assert (both.packages[-len(engine_pins()) :], [each.installs for each in both.offers]) == (
        engine_pins(),
        [False, True],
    )
    assert " packages on machines of far: " in repr(both)


def test_no_package_is_listed_twice() -> None:
    packages = planned(image=sky.Image(pip=["pytest", "Click>1"])).packages

    names = [canonicalize_name(Requirement(line).name) for line in packages]
    assert {"pytest", "click"} <= {*names}
    assert sorted(names) == sorted({*names})


def test_the_question_above_the_users_limit_is_noted_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIRM_ABOVE, "0.5")

    plan = planned(nodes=2)

    (note,) = plan.notes
    assert note.startswith("the opening asks: 2 of cheap on the spot market")
    assert plan.problems == ()


def test_nodes_get_packages_and_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "empty").mkdir(parents=True)
    (data / "a.csv").write_text("1,2,3")

    plan = planned(image=sky.Image(mirror=False, pip=["polars==1.0"], apt=["ffmpeg"], includes=[str(data)]))

    assert plan.packages == ("polars==1.0", *engine_pins())
    assert plan.apt == ("ffmpeg",)
    assert (plan.files, plan.files_bytes) == (("data/a.csv",), 5)


def test_nodes_on_this_machine_install_nothing() -> None:
    plan = sky.ComputePool(provider=sky.Local(), nodes=2).plan()

    assert (plan.packages, plan.problems) == ((), ())
    assert repr(plan).startswith("Opening this pool would get 2 nodes of local, for nothing.")


def test_pools_of_joblib_have_plans_with_the_versions_of_this_process() -> None:
    pool = JoblibPool(provider=Cloud(OFFERS), image=sky.Image(mirror=False), display="quiet")

    assert f"joblib=={version('joblib')}" in pool.plan().packages


def test_what_nodes_could_not_do_is_told() -> None:
    provider = Cloud([offer("alone", 1.0, spot=True, island=True)])
    provider.ends_itself = False

    text = " ".join(repr(planned(provider=provider, nodes=2)).split())

    assert "nodes do not reach each other" in text
    assert "machines of fake cannot end their own bill" in text


def test_a_fleet_that_another_pool_has_is_a_problem() -> None:
    folder = FleetFolder("llm")
    folder.path.mkdir(parents=True)
    assert folder.try_hold()
    try:
        (problem,) = planned(name="llm", keep="5m").problems
        assert "this process has the kept fleet 'llm' open already" in problem
    finally:
        folder.release()


def test_a_plan_is_a_table_of_80_columns_html_and_json() -> None:
    plan = planned(spot="if-available", nodes=2)

    lines = repr(plan).splitlines()
    assert lines[1] == "nodes  try  place    machine  accelerators  market     $/h     at most"
    assert lines[2] == "2      1    fake eu  cheap    2 x H100      spot       1.0000  $2.00"
    assert max(map(len, lines)) <= 80
    assert "<td>cheap</td>" in plan._repr_html_()
    assert json.loads(json.dumps(plan.document()))["offers"][0]["machine"] == "cheap"


def test_a_region_that_the_label_names_comes_once() -> None:
    plan = planned(spot="never")
    labels = [("aws (eu-central-1)", "eu-central-1"), ("aws", "eu-central-1"), ("runpod", "")]
    offers = tuple(replace(plan.offers[0], provider=label, region=region) for label, region in labels)

    shown = repr(replace(plan, offers=offers)).splitlines()

    places = [cells[2] for line in shown if len(cells := re.split(" {2,}", line)) == 8]
    assert places[1:] == ["aws (eu-central-1)", "aws eu-central-1", "runpod"]


def test_many_offers_are_cut_in_the_table_only() -> None:
    plan = planned(*(offer(f"m{number}", 1.0 + number) for number in range(30)), spot="never")

    assert len(plan.offers) == 30
    assert "10 more, which are tried after these" in repr(plan)
