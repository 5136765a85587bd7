"""Pools on machines of their own."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest


@pytest.fixture(scope="module", autouse=True)
def functions_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Send the file's functions by value: its nodes have no pytest, which the file itself imports."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
