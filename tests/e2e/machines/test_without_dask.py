"""A client that has no Dask: its nodes over SSH bring their own, and calls and joblib run there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyward.testing.hosts import require_sshd, write_known_hosts
from support.ssh_hosts import cached_host

require_sshd()

PROGRAM = """
import sys

sys.modules["dask"] = sys.modules["distributed"] = None

import skyward as sky
from joblib import Parallel, delayed
from skyward.integrations import JoblibPool


@sky.compute
def release() -> str:
    import distributed

    return distributed.__version__


provider = sky.SSH(hosts=[sys.argv[1]], key_path=sys.argv[2], known_hosts=sys.argv[3])
with JoblibPool(provider=provider, nodes=1, concurrency=2, display="quiet") as pool:
    print(release() >> pool)
    print(len(release() @ pool))
    print(Parallel(n_jobs=2)(delayed(pow)(n, 2) for n in range(4)))
    try:
        pool.dask_client()
    except sky.ConfigurationError as error:
        print(error)
"""


@pytest.mark.full
@pytest.mark.timeout(300)  # the pool builds an environment
def test_calls_and_joblib_run_over_ssh_from_a_client_without_dask(tmp_path: Path, ssh_cache: Path) -> None:
    with cached_host(tmp_path / "host", "127.0.0.2", ssh_cache) as host:
        known_hosts = write_known_hosts(tmp_path / "known_hosts", host)
        place = f"{host.address}:{host.port}"
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, place, str(host.key_path), str(known_hosts)],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            cwd=tmp_path,
        )

    assert done.returncode == 0, done.stderr
    release, workers, squares, refused = done.stdout.splitlines()
    assert release == "2026.8.0"
    assert workers == "2"
    assert squares == "[0, 1, 4, 9]"
    assert "pip install 'skyward-fleet[dask]'" in refused
