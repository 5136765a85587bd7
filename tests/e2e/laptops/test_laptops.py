"""Clients of an interpreter without Linux's own calls: the nearest to a Mac that Linux shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.testing.hosts import SshHost, require_sshd, share_cache, write_known_hosts

HERE = Path(__file__).parent
PARTS = """
import os, select, socket, tempfile
from pathlib import Path
import skyward, skyward.api.pool, skyward_dask
from skyward.base import platform
from skyward.ledger.ownership import Owner
from skyward.wire.frames import client_context
from skyward.scheduling.certificates import issue

assert not hasattr(os, "memfd_create") and not hasattr(select, "epoll") and not os.path.exists("/proc/self")
client_context(issue())
assert platform.usable_cores() == os.cpu_count()
assert platform.mutable_events(0) is None
assert platform.BOOT_CLOCK is not None
assert platform.ephemeral_ports() == (32_768, 65_535)
with tempfile.TemporaryDirectory() as home, socket.socket(socket.AF_UNIX) as server:
    (deep := Path(home, "deep" * 25)).mkdir()
    before = platform.open_descriptors()
    with platform.socket_path(deep, "name") as address:
        server.bind(address)
    with platform.readable_path("key") as path:
        assert Path(path).read_text() == "key"
    assert (deep / "name").is_socket() and not os.path.lexists(os.path.dirname(address))
    assert platform.open_descriptors() == before
assert not platform.wait_for_end(os.getpid(), within_s=0)
me = Owner.this_process()
assert me.lives() and (me.boot, me.namespace) == ("", "")
"""


def run_without_linux(program: Path, *arguments: str, folder: Path) -> dict[str, Any]:
    """Run a program; return what it printed as JSON."""
    home = folder / ("a-home-as-deep-as-that-of-a-person-with-a-very-long-name" + "-and-more" * 3)
    home.mkdir()
    here = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    done = subprocess.run(
        [sys.executable, HERE / "no_linux.py", program, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env=here | {"HOME": str(home), "TMPDIR": "/tmp"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return {name: value for line in done.stdout.splitlines() for name, value in json.loads(line).items()}


def test_skyward_imports_and_its_parts_have_substitutes(tmp_path: Path) -> None:
    program = tmp_path / "parts.py"
    program.write_text(PARTS, encoding="utf-8")

    assert run_without_linux(program, folder=tmp_path) == {}


def expected(nodes: int, provider: str) -> dict[str, Any]:
    return {
        "platform": "darwin",
        "call": "linux",
        "broadcast": [[node, "linux"] for node in range(nodes)],
        "gather": [50_000_000 * factor for factor in range(4)],
        "joblib": [0, 1, 4, 9, 16],
        "ls": [provider] * nodes,
        "top": [nodes],
        "graph": 1_000_000,
        "task": "linux",
        "interrupted": "linux",
        "left": [],
    }


@pytest.mark.full
@pytest.mark.timeout(300)  # the pool builds an environment
def test_a_pool_over_ssh_does_everything(tmp_path: Path, ssh_cache: Path) -> None:
    require_sshd()
    env = {"PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    with ExitStack() as stack:
        hosts = [stack.enter_context(SshHost(tmp_path / f"host-{n}", address="127.0.0.1", env=env)) for n in range(2)]
        for host in hosts:
            share_cache(host.home, ssh_cache)
        settings = {
            "hosts": [f"{host.address}:{host.port}" for host in hosts],
            "key_path": str(hosts[0].key_path),
            "known_hosts": str(write_known_hosts(tmp_path / "known_hosts", *hosts)),
        }
        shown = run_without_linux(HERE / "client_program.py", json.dumps(settings), folder=tmp_path)
        left = [path for host in hosts for path in (host.home / ".cache/skyward/nodes").glob("*")]

    assert shown == expected(2, "ssh")
    assert left == []


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_pool_of_this_machine_does_everything_and_leaves_no_process(tmp_path: Path) -> None:
    shown = run_without_linux(HERE / "client_program.py", "null", folder=tmp_path)

    assert shown == expected(2, "local")
    assert [process for process in psutil.process_iter() if _lies_in(process, tmp_path)] == []


def _lies_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("HOME", "").startswith(str(folder))
    except psutil.Error:
        return False
