"""A provider in a package of its own, as users install one: its pool runs, and what a crash leaves is swept."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from uv import find_uv_bin

from skyward.providers import INSTANCE_VARIABLE, Instance, LocalAccess, Provider
from skyward.testing.provider_contract import Promise, ProviderContract

PACKAGE = Path(__file__).parents[3] / "examples/extending/skyward-folders"
TOKEN = "open sesame"
CLIENT = """
import sys, threading
import skyward as sky
from skyward_folders import Folders

@sky.compute
def where():
    return sky.instance_info().node

pool = sky.ComputePool(provider=Folders(root=sys.argv[1], token="open sesame"), display="quiet", lease=600, timeout=600)
with pool:
    print(where() >> pool, flush=True)
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed."""
    folder = tmp_path_factory.mktemp("site")
    argv = [find_uv_bin(), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", sys.executable]
    subprocess.run([*argv, "--no-cache", "--target", str(folder), str(PACKAGE)], check=True, timeout=60)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


class User:
    """Someone who has installed the package."""

    def __init__(self, site: Path, home: Path) -> None:
        self.env = os.environ | {"PYTHONPATH": str(site), "FOLDERS_TOKEN": TOKEN}
        self.env |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("STATE", "DATA")}

    def skyward(self, *arguments: str, exit_code: int = 0, token: str = TOKEN) -> Any:
        argv = [sys.executable, "-m", "skyward", *arguments, "--json"]
        env = self.env | {"FOLDERS_TOKEN": token}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == exit_code, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def user(site: Path, tmp_path: Path) -> User:
    return User(site, tmp_path)


def processes_of(instance_id: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(INSTANCE_VARIABLE) == instance_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def killed(user: User, root: Path) -> Iterator[str]:
    """The machine that a killed client left; its id."""
    argv = [sys.executable, "-c", CLIENT, str(root)]
    with subprocess.Popen(argv, env=user.env, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "0\n"
        client.kill()
    (record,) = root.glob("*.json")
    yield record.stem
    for process in processes_of(record.stem):
        process.kill()


# In `make test`: clouds/test_killed_clients.py.
@pytest.mark.full
def test_a_sweep_ends_the_machine_of_a_killed_client(user: User, root: Path, killed: str) -> None:
    assert processes_of(killed)
    (machine,) = user.skyward("ls")["machines"]
    assert (machine["provider"], machine["instance"], machine["owner"]["alive"]) == ("folders", killed, False)
    assert TOKEN.encode() not in b"".join(
        path.read_bytes() for path in root.parent.glob("state/skyward/**/*") if path.is_file()
    )

    (left,) = user.skyward("sweep", token="wrong", exit_code=1)["left"]
    assert "set FOLDERS_TOKEN" in left["reason"]
    (ended,) = user.skyward("sweep")["ended"]

    assert ended["instance"] == killed
    assert processes_of(killed) == []
    assert list(root.iterdir()) == []
    assert user.skyward("ls")["machines"] == []


def test_the_package_imports_public_names_only() -> None:
    (module,) = PACKAGE.rglob("skyward_folders/*.py")
    imports = [
        node for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    ours = {
        node.module: {each.name for each in node.names} for node in imports if (node.module or "").startswith("skyward")
    }

    assert ours.keys() == {"skyward.errors", "skyward.providers"}
    assert [name for home, names in ours.items() for name in names - set(importlib.import_module(home).__all__)] == []


def test_the_command_takes_the_package_by_name(user: User, root: Path) -> None:
    place = ("--provider", "folders", "--set", f"root={root}")

    (offer,) = user.skyward("offers", *place)["offers"]
    findings = {each["what"]: each for each in user.skyward("doctor", *place)["findings"]}

    assert (offer["provider"], offer["region"], offer["on_demand_per_hour"]) == ("folders", str(root), 0.02)
    assert findings["folders"] == {"what": "folders", "state": "ok", "found": str(root), "fix": ""}
    assert user.skyward("sweep", *place)["unknown"] == []


class TestFolders(ProviderContract):
    """The contract, as a package binds its own provider to it."""

    does_not_apply: Mapping[Promise, str] = {
        "lose_answer": "a create call is a function of this process",
        "fail_create": "a create call is a function of this process",
        "vendor_calls": "nobody is asked: this process reads its own folders",
        "avoid": "there is one host, this machine",
    }

    @pytest.fixture(autouse=True)
    def installed(self, site: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("FOLDERS_TOKEN", TOKEN)
        self._root = root

    def make_provider(self) -> Provider:
        return importlib.import_module("skyward_folders").Folders(root=str(self._root))

    async def outlive_client(self, provider: Provider, instances: object) -> None:
        """Nothing ends a folder."""

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        assert isinstance(other.access, LocalAccess)
        with socket.create_server((other.access.address, 0)) as server:
            _, writer = await asyncio.open_connection(*server.getsockname())
            writer.close()
            await writer.wait_closed()
            return True
