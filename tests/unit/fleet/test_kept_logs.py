"""Logs of nodes that are copied before their machines end: the newest part, within bounds, never an error."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from skyward.errors import UnreachableError
from skyward.fleet import node_logs as kept_logs
from skyward.fleet.node_logs import keep_logs
from skyward.machine.access import Completed, Transport
from skyward.machine.local import LocalAccess
from skyward.machine.ssh import SSHAccess
from skyward.machine.ssh_config import SSHTarget

SSH = SSHAccess(target=SSHTarget(host="h"), address="10.0.0.1", workdir="")


class Shell:
    """Runs commands here; the rest of a transport is not used."""

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        done = subprocess.run(argv, capture_output=True, timeout=timeout_s, check=False, encoding="utf-8")
        return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


class Gone(Shell):
    async def run(self, *_: Any, **__: Any) -> Completed:
        raise UnreachableError("gone")


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    (tmp_path / "node/supervisor.log").write_text("one\ntwo\n")
    (tmp_path / "node/worker-0.log").write_text("x" * 50 + "end")
    (tmp_path / "node/other").write_text("no log")
    return tmp_path / "node"


def kept(folder: Path) -> dict[str, str]:
    return {f"{path.parent.name}/{path.name}": path.read_text() for path in folder.glob("*/*")}


@pytest.mark.parametrize("local", [True, False])
async def test_the_newest_part_of_each_log_is_kept(
    local: bool, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_logs, "_NEWEST_BYTES", 10)
    access = LocalAccess(address="127.0.0.1", workdir=str(workdir)) if local else None
    await keep_logs(
        cast("Transport", Shell()),
        access or SSHAccess(target=SSH.target, address=SSH.address, workdir=str(workdir)),
        tmp_path / "kept",
        "node-0-i",
    )
    assert kept(tmp_path / "kept") == {"node-0-i/supervisor.log": "one\ntwo\n", "node-0-i/worker-0.log": "xxxxxxxend"}


async def test_a_machine_that_is_gone_is_no_error(tmp_path: Path) -> None:
    await keep_logs(cast("Transport", Gone()), SSH, tmp_path / "kept", "node-0-i")
    assert not (tmp_path / "kept").exists()


async def test_the_logs_of_the_last_nodes_are_kept(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_logs, "_POOL_BYTES", 100)
    access = LocalAccess(address="127.0.0.1", workdir=str(workdir))
    (tmp_path / "kept").mkdir()
    for node in range(3):
        await keep_logs(cast("Transport", Shell()), access, tmp_path / "kept", f"node-{node}")
    assert sum(map(len, kept(tmp_path / "kept").values())) <= 100
    assert any(name.startswith("node-2") for name in kept(tmp_path / "kept"))


class Liar(Shell):
    """A machine whose shell answers with names that are paths."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def run(self, argv: Sequence[str], **_: Any) -> Completed:
        mark = argv[5]
        return Completed(exit_code=0, stdout="".join(f"\n{mark} {name}\ntext" for name in self._names), stderr="")


async def test_names_from_a_machine_that_lies_do_not_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    names = "worker-0.log", "../../out.log", f"{tmp_path}/absolute.log", "..", "a/b.log"
    await keep_logs(cast("Transport", Liar(*names)), SSH, tmp_path / "kept", "node-0-i")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")] == ["kept/node-0-i/worker-0.log"]
    assert (tmp_path / "kept/node-0-i/worker-0.log").stat().st_mode & 0o777 == 0o600
