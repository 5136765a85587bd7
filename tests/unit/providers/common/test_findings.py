"""Findings of a check: a value, or an error cut into cause and advice."""

from __future__ import annotations

import pytest

from skyward.errors import AuthenticationError
from skyward.providers._common.refusals import finding
from skyward.providers.base import Finding


@pytest.mark.parametrize(
    ("message", "found", "fix"),
    [("no token. Set TOKEN. Or log in", "no token", "Set TOKEN. Or log in"), ("no token", "no token", "see the page")],
)
async def test_a_failed_check_gives_the_cause_and_the_advice(message: str, found: str, fix: str) -> None:
    async def look() -> str:
        raise AuthenticationError(message)

    assert await finding("cloud token", look(), fix="see the page") == Finding(
        what="cloud token", state="fail", found=found, fix=fix
    )


async def test_a_check_that_succeeds_gives_the_value() -> None:
    async def look() -> str:
        return "someone@example.com"

    assert await finding("cloud token", look(), fix="see the page") == Finding(
        what="cloud token", state="ok", found="someone@example.com"
    )
