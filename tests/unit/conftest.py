"""What every unit test gets: a process without children."""

from __future__ import annotations

import pytest

from skyward.node.supervisor import template


@pytest.fixture(scope="session", autouse=True)
def no_template() -> None:
    """End the processes that pools of tests before were forked from: to look for other ones takes as long as a test."""
    template._templates.close()
