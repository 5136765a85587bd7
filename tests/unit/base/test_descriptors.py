from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from skyward.base.descriptors import raise_descriptor_limit

RAISE = """
import resource
from skyward.base.descriptors import raise_descriptor_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
"""


def test_a_supervisor_may_open_as_many_files_as_the_system_allows() -> None:
    subprocess.run([sys.executable, "-c", RAISE], check=True)


def test_where_the_limit_shown_is_not_allowed_that_of_macos_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, resource.RLIM_INFINITY)

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if wanted[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    for _ in range(2):
        raise_descriptor_limit()
        assert limits == (10_240, resource.RLIM_INFINITY)


NESTED = """
import resource
from skyward.base.descriptors import raised_descriptor_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
soft = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
with raised_descriptor_limit():
    with raised_descriptor_limit():
        assert soft() > 100
    assert soft() > 100
assert soft() == 100
with raised_descriptor_limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
assert soft() == 200
"""


def test_the_last_block_restores_the_limit_unless_the_program_has_changed_it() -> None:
    subprocess.run([sys.executable, "-c", NESTED], check=True)


OPEN = """
import resource
import skyward as sky

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
with sky.ComputePool(provider=sky.Local(), display="quiet"):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
"""


def test_an_open_pool_may_use_as_many_files_as_the_system_allows() -> None:
    subprocess.run([sys.executable, "-c", OPEN], check=True)
