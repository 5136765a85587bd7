from __future__ import annotations

import copy
import pickle

import pytest

from skyward.errors import ConfigurationError
from skyward.request.request import Spot, SpotLike, SpotStrategy, parse_spot


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("always", Spot.Always(retries=10, interval=1.0)),
        ("if-available", Spot.IfAvailable()),
        ("never", Spot.Never),
        (0.8, Spot.Percent(0.8)),
        (1, Spot.Percent(1.0)),
        (0, Spot.Percent(0.0)),
        (Spot.Always(retries=0), Spot.Always(retries=0, interval=1.0)),
        (Spot.Never(), Spot.Never),
        (Spot.Never, Spot.Never),
        (Spot.Percent(0.5), Spot.Percent(0.5)),
    ],
)
def test_short_forms_stand_for_strategies(given: SpotLike, parsed: SpotStrategy):
    assert parse_spot(given) == parsed


@pytest.mark.parametrize("given", ["sometimes", "Always", "", 1.5, -0.1, float("nan"), True, None, Spot.Always, {}])
def test_anything_else_is_refused_naming_what_is_allowed(given: SpotLike):
    with pytest.raises(ConfigurationError, match='spot must be "always", "if-available", "never", a share from 0 to 1'):
        parse_spot(given)


@pytest.mark.parametrize("arguments", [{"retries": -1}, {"retries": 1.5}, {"interval": -1}, {"interval": "1"}])
def test_always_checks_its_fields(arguments: dict[str, int]):
    with pytest.raises(ConfigurationError, match=f"{next(iter(arguments))} must be"):
        Spot.Always(**arguments)


def test_percent_is_a_share():
    with pytest.raises(ConfigurationError, match="share must be a number from 0 to 1, got 80"):
        Spot.Percent(80)


def test_strategies_are_values():
    for strategy in (Spot.Always(retries=2), Spot.IfAvailable(), Spot.Never, Spot.Percent(0.1)):
        assert pickle.loads(pickle.dumps(strategy)) == copy.copy(strategy) == strategy
    assert repr(Spot.Never) == "Spot.Never"
    assert repr(Spot.Percent(0.1)) == "Spot.Percent(share=0.1)"
