"""Pools for trainings: on this machine, and on two machines that SSH servers stand in for."""

from __future__ import annotations

import shlex
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

import skyward as sky
from skyward.testing.hosts import SshHost, find_openssh, write_known_hosts

NODES, CONCURRENCY = 2, 2

# Each host's environment is its own, and made as any, but for what stands for uv here: instead of gigabytes to install
# it gets a line that names the packages of these tests; being those of the host's user as well, they count as installed
# there, and not as the user's own code. Skyward itself is sent and unpacked as always.
_PACKAGES = shlex.quote(sysconfig.get_path("purelib"))
_USERS = f"$HOME/.local/lib/python3.{sys.version_info.minor}"
UV = f"""\
#!/bin/sh
for last; do :; done
case $1 in
--version) echo uv 0.9.0 ;;
venv)
    site="$last/lib/python3.{sys.version_info.minor}/site-packages"
    mkdir -p "$last/bin" "$site"
    ln -s {shlex.quote(sys.executable)} "$last/bin/python"
    echo 'home = {sys.base_prefix}/bin' >"$last/pyvenv.cfg"
    echo {_PACKAGES} >"$site/these.pth"
    mkdir -p "{_USERS}"
    ln -sfn {_PACKAGES} "{_USERS}/site-packages"
    ;;
esac
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes import gigabytes here, on however few cores."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


class OpenPool(Protocol):
    """Makes a pool whose workers may import any framework."""

    def __call__(self, **options: Any) -> sky.ComputePool: ...


@pytest.fixture(scope="session")
def open_pool(tmp_path_factory: pytest.TempPathFactory) -> OpenPool:
    """On this machine, if not told otherwise."""
    # Frameworks leave files in the temporary folder when their process is killed, and some in any case.
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}

    def open_pool(**options: Any) -> sky.ComputePool:
        return sky.ComputePool(**{"provider": sky.Local(), "display": "quiet", "timeout": 1800, "env": env} | options)

    return open_pool


@pytest.fixture(scope="module")
def pool(
    request: pytest.FixtureRequest, open_pool: OpenPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sky.ComputePool]:
    """Two nodes: ``local`` ones of two workers, ``small`` local ones of one worker, or such ones by ``ssh``."""
    with ExitStack() as stack:
        provider = two_hosts(stack, tmp_path_factory.mktemp("hosts")) if request.param == "ssh" else sky.Local()
        concurrency = CONCURRENCY if request.param == "local" else 1
        yield stack.enter_context(open_pool(provider=provider, nodes=NODES, concurrency=concurrency))


@pytest.fixture(scope="module")
def local_pool(open_pool: OpenPool) -> Iterator[sky.ComputePool]:
    """Two nodes of two workers on this machine."""
    with open_pool(nodes=NODES, concurrency=CONCURRENCY) as pool:
        yield pool


@pytest.fixture(scope="module")
def small_pool(open_pool: OpenPool) -> Iterator[sky.ComputePool]:
    """Two nodes of one worker on this machine: TensorFlow's import takes each worker 7 s of processor time."""
    with open_pool(nodes=NODES) as pool:
        yield pool


def two_hosts(stack: ExitStack, folder: Path) -> sky.SSH:
    if not (find_openssh("sshd") and find_openssh("ssh")):
        pytest.skip("there is no sshd, or no ssh: tools/sshd installs them")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "uv").write_text(UV, encoding="utf-8")
    (programs / "uv").chmod(0o755)
    hosts = [
        stack.enter_context(
            SshHost(folder / f"host-{n}", address=f"127.0.3.{n}", path=f"{programs}:/usr/local/bin:/usr/bin:/bin")
        )
        for n in (2, 3)
    ]
    return sky.SSH(
        hosts=[f"{host.address}:{host.port}" for host in hosts],
        key_path=str(hosts[0].key_path),
        known_hosts=str(write_known_hosts(folder / "known_hosts", *hosts)),
    )
