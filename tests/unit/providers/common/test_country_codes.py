"""Codes of countries."""

from __future__ import annotations

import pytest

from skyward.errors import ConfigurationError
from skyward.providers._common.machine_catalogue import checked_countries


def test_countries_are_known_by_two_letters() -> None:
    assert checked_countries("regions", ["US", "CA", "DE"]) == ("US", "CA", "DE")


@pytest.mark.parametrize(
    ("value", "words"), [("US", "a list"), ([], "at least one"), (["us"], "closest: US"), (["US", "EU"], "two-letter")]
)
def test_others_are_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"regions.*{words}"):
        checked_countries("regions", value)
