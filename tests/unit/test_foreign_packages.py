"""Packages that the user happens to have beside Skyward: what Skyward does and prints does not depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OPTIONAL = (
    *("structlog", "prometheus_client", "sentry_sdk", "ddtrace", "logfire", "loguru"),  # logs and traces
    *("uvloop", "winloop", "nest_asyncio", "trio", "curio"),  # event loops
    *("orjson", "ujson", "rapidjson", "simplejson"),
    *("IPython", "ipywidgets", "colorama", "setproctitle", "tqdm_loggable"),  # displays
    *("gssapi", "sspi", "invoke", "awscrt", "socks", "h2"),  # paramiko, botocore, urllib3
    *("crick", "xxhash", "mmh3", "cityhash", "lz4", "snappy", "rmm", "jupyter_server_proxy"),  # dask, distributed
)
"""Packages that libraries in use import where they find them, and their neighbours."""

LOUD = """
class _Loud(Exception):
    def __init__(self, *args, **kwargs): print(__name__, "is used", flush=True)
    def __call__(self, *args, **kwargs): print(__name__, "is used", flush=True); return self
    def __getattr__(self, name): return _Loud()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Loud
"""

RETRIES = """
import skyward as sky

tries = []

@sky.compute(retries=2, retry=(OSError,))
def flaky():
    tries.append(1)
    if len(tries) < 3:
        raise OSError("not yet")
    return len(tries)

print(flaky().invocation().fn())
"""

TERMINATION = """
from skyward.errors import RateLimitError
from skyward.ledger.termination import end_instances
from skyward.request.request import parse_request
from skyward.providers.base import LaunchOrder
from skyward.testing.provider import FakeProvider

class Busy(FakeProvider):
    tries = 0

    async def terminate(self, instance_ids):
        self.tries += 1
        if self.tries < 3:
            raise RateLimitError("busy")
        await super().terminate(instance_ids)

async def main():
    provider = Busy()
    (offer,) = await provider.offers(parse_request())
    (made,) = await provider.launch([offer], LaunchOrder(pool_id="pool", keys=("key",), timeout_s=60.0))
    await end_instances(provider, [made.id], clock=FakeClock())
    print(provider.tries)

asyncio.run(main())
"""

LOOPS = """
from skyward.base.waiting import keep

async def main():
    tries = []

    async def live():
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")

    await keep(live, what="the loop", clock=FakeClock(), report=print)
    print(len(tries))

asyncio.run(main())
"""

DISPLAY = """
from skyward.cli import main

main(["offers", "--help"], standalone_mode=False)
"""


@pytest.mark.parametrize("program", [RETRIES, TERMINATION, LOOPS, DISPLAY], ids=["retries", "end", "loops", "display"])
def test_what_is_printed_is_the_same_whichever_packages_are_installed(tmp_path: Path, program: str) -> None:
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text(LOUD)
    alone, among = (output(program, folder) for folder in (None, tmp_path))

    assert among == alone
    assert alone.endswith("\n")


def output(program: str, beside: Path | None) -> str:
    """Standard output of the program, then its log, without the numbers of lines."""
    head = "import asyncio, sys\nfrom support.clock import FakeClock\n"
    path = os.pathsep.join(str(folder) for folder in (Path(__file__).parents[1], beside) if folder)
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout
