"""Programs in environments without Dask: everything but Dask works there, and nodes get none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.testing.hosts import require_sshd, write_known_hosts
from support.ssh_hosts import cached_host

require_sshd()

WITHOUT = """
import sys

sys.modules.update(dict.fromkeys(("dask", "distributed", "tornado")))  # as if they were not installed
"""

CALLS = """
import skyward as sky
from joblib import Parallel, delayed
from skyward.integrations import JoblibPool


@sky.compute
def loaded() -> list[str]:
    import sys

    return [name for name in ("dask", "distributed") if sys.modules.get(name)]  # tenacity imports tornado, if it can


def run(provider):
    with JoblibPool(provider=provider, nodes=1, concurrency=2, display="quiet") as pool:
        print(loaded() >> pool)
        print(len(loaded() @ pool))
        print(sky.gather(*(square(n) for n in range(3))) >> pool)
        with pool.executor() as executor:
            print(list(executor.map(abs, range(-3, 0))))
        print(Parallel(n_jobs=2)(delayed(pow)(n, 2) for n in range(4)))
        try:
            pool.dask_client()
        except sky.ConfigurationError as error:
            print(error)


@sky.compute
def square(x: int) -> int:
    return x * x
"""

EXPECTED = ["[]", "2", "(0, 1, 4)", "[3, 2, 1]", "[0, 1, 4, 9]"]


def run(program: str, *arguments: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + CALLS + program, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_calls_and_joblib_run_on_local_nodes(tmp_path: Path) -> None:
    *printed, refused = run("run(sky.Local())", cwd=tmp_path)

    assert printed == EXPECTED
    assert refused == (
        "a Dask client of a pool needs dask and distributed in this environment, and they are not installed here: "
        "pip install 'skyward-fleet[dask]'"
    )


NOT_THERE = """
provider = sky.SSH(hosts=[sys.argv[1]], key_path=sys.argv[2], known_hosts=sys.argv[3])
run(provider)


@sky.compute
def installed() -> list[str]:
    import importlib.util

    return [name for name in ("dask", "distributed", "tornado", "cloudpickle") if importlib.util.find_spec(name)]


with sky.ComputePool(provider=provider, display="quiet") as pool:
    print(installed() >> pool)
"""


@pytest.mark.full
@pytest.mark.timeout(300)  # the pool builds an environment
def test_calls_and_joblib_run_over_ssh_on_nodes_that_have_no_dask(tmp_path: Path, ssh_cache: Path) -> None:
    with cached_host(tmp_path / "host", "127.0.0.2", ssh_cache) as host:
        known_hosts = write_known_hosts(tmp_path / "known_hosts", host)
        place = f"{host.address}:{host.port}"
        *printed, refused, installed = run(NOT_THERE, place, str(host.key_path), str(known_hosts), cwd=tmp_path)

    assert printed == EXPECTED
    assert "pip install 'skyward-fleet[dask]'" in refused
    assert installed == "['cloudpickle']"
