"""A provider with other settings repeats its contract in ``make test-full``, but for what the settings change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

CHANGED = ("makes_the_provider_again", "claims_to_end_itself")
"""Parts of the names of tests that see the settings."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark as full the tests of every class with ``same_calls``, but for those that see its settings.

    Of a class with ``often``, those whose names have none of these parts are marked.
    """
    for item in items:
        suite = getattr(item, "cls", None)
        often = CHANGED if getattr(suite, "same_calls", False) else getattr(suite, "often", ())
        if often and not any(part in item.name for part in often):
            item.add_marker(pytest.mark.full)
