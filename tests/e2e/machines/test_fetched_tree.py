"""A tree of files comes from a machine as it is there, over each transport."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.fleet.node_files import NodeFiles
from skyward.fleet.outputs import FetchedFiles, fetch_files
from skyward.machine.access import Transport
from skyward.machine.local import LocalAccess, LocalTransport
from skyward.machine.ssh import SshTransport
from skyward.testing.hosts import SshHost, require_sshd

NAMES = {"-rf": 0o755, " a ": 0o600, "a\nb": 0o444, "\udcff": 0o400, "x" * 255: 0o751, "*": 0o644, "é": 0o555}
LINKS = {"latest": "-rf", "run/deep/up": "..", "run/deep/far": "../../*", "run/none": "gone"}
FOLDERS = {"run": 0o755, "run/deep": 0o555, "run/empty": 0o700}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHost]:
    require_sshd()
    with SshHost(tmp_path_factory.mktemp("hosts") / "one") as host:
        yield host


@pytest.fixture(params=["local", "ssh"])
async def transport(request: pytest.FixtureRequest, host: SshHost, tmp_path: Path) -> AsyncIterator[Transport]:
    if request.param == "local":
        transport = LocalTransport(LocalAccess(address="127.0.0.1", workdir=str(tmp_path / "work")))
    else:
        transport = SshTransport(host.target())
    yield transport
    await transport.close()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A tree with what trees have, among it a socket, a pipe and a link that leads out."""
    there = tmp_path / "there"
    for name, mode in FOLDERS.items():
        (there / name).mkdir(parents=True)
        (there / name).chmod(mode)
    for name, mode in NAMES.items():
        for path in (there / name, there / "run/deep" / name):
            path.write_text(name, errors="surrogateescape")
            path.chmod(mode | 0o6000)
    for name, target in LINKS.items():
        (there / name).symlink_to(target)
    (there / "run/password").symlink_to("/etc/passwd")
    os.mkfifo(there / "run/pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(there / "run/socket"))
    return there


async def fetched(transport: Transport, there: Path, patterns: Sequence[str], to: Path) -> FetchedFiles:
    files = NodeFiles(transport, python=sys.executable, folder=str(there), node=0)
    node: Any = SimpleNamespace(rank=0, working_files=lambda: files)
    return await fetch_files([node], patterns, to, apart=False)


async def test_a_tree_comes_as_it_is(transport: Transport, there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    await fetched(transport, there, ["*"], here)
    result = await fetched(transport, there, ["*"], here)  # over read-only files and folders

    assert result.failures == []
    assert result.left_out == [
        "run/password on node 0 (leads to /etc/passwd, out of the folder)",
        "run/pipe on node 0 (a named pipe)",
        "run/socket on node 0 (a socket)",
    ]
    files = {f"{folder}{name}": mode for name, mode in NAMES.items() for folder in ("", "run/deep/")}
    assert {str(path.relative_to(here)) for path in result.paths} == files.keys() | LINKS.keys()
    assert {str(path.relative_to(here)) for path in here.rglob("*")} == files.keys() | LINKS.keys() | FOLDERS.keys()
    assert {name: (here / name).lstat().st_mode & 0o7777 for name in files | FOLDERS} == files | FOLDERS
    assert {name: os.readlink(here / name) for name in LINKS} == LINKS
    assert all((here / name).read_bytes() == (there / name).read_bytes() for name in files)


async def test_a_link_whose_target_is_not_fetched_brings_its_content(
    transport: Transport, there: Path, tmp_path: Path
) -> None:
    (path,) = (await fetched(transport, there, ["latest"], tmp_path / "here")).paths

    assert (path.is_symlink(), path.read_text(), path.stat().st_mode & 0o7777) == (False, "-rf", 0o755)
