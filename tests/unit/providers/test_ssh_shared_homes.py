"""Hosts that share a home: a node is where its processes are, and only there it is seen to end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest

from skyward.errors import TerminationError
from skyward.providers.base import InstanceState, LaunchOrder
from skyward.providers.ssh import SSH
from skyward.request.request import parse_request
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.users import OTHER_USER

SCRIPT = str(files("skyward.providers").joinpath("_ssh_host.sh"))
LATER = str(1 << 40)
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def verb(*words: str | Path, address: str = "10.0.0.5") -> subprocess.CompletedProcess[str]:
    """Run a verb on this machine, as if it had been reached at that address."""
    env = {**os.environ, "SSH_CONNECTION": f"10.0.0.1 50000 {address} 22"}
    return subprocess.run(["sh", SCRIPT, *map(str, words)], env=env, capture_output=True, text=True, check=False)


def test_a_node_whose_calls_made_folders_read_only_leaves_nothing(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, OTHER_USER, OTHER_USER)
    user = OTHER_USER if os.geteuid() == 0 else None  # permissions do not hold for root
    script = Path(SCRIPT).read_text(encoding="utf-8")
    make = "mkdir -p $2/a/b/c && touch $2/a/b/x && chmod 000 $2/a/b/c && chmod 500 $2/a/b && chmod 100 $2/a"
    for command in (("sh", "-c", script, "sh", "prepare"), ("sh", "-c", make, "sh"), ("sh", "-c", script, "sh", "end")):
        words = ["nodes/n"] if "prepare" in command else ["n", "nodes/n"]
        done = subprocess.run([*command, *words], cwd=tmp_path, user=user, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    assert list(tmp_path.rglob("n")) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "nodes/ssh-0-0123456789ab"
    assert verb("prepare", folder).returncode == 0
    return folder


def rewrite(folder: Path, *, boot: str = "", pids: str = "", machine: str = "", host: str = "", made: str = "") -> None:
    """Make the note of a node's host say something else."""
    life, runs_on, since = (folder / "host").read_text().splitlines()
    old_boot, old_pids = life.split()
    *ids, old_host, address, port = runs_on.split()
    note = [f"{boot or old_boot} {pids or old_pids}", " ".join([*([machine] if machine else ids), host or old_host])]
    (folder / "host").write_text(f"{note[0]}\n{note[1]} {address} {port}\n{made or since}\n")


HERE, OVER = "here", "over"
PLACES: Sequence[tuple[str, dict[str, str], str, str]] = [
    ("the same host", {}, "10.0.0.5", HERE),
    ("the same host at another address", {}, "192.168.0.7", HERE),
    ("the same host under another name", {"host": "other"}, "10.0.0.5", HERE),
    ("the same host after a restart", {"boot": "b", "pids": "p", "made": "1"}, "10.0.0.5", OVER),
    ("the same container after a restart", {"pids": "p", "made": "1"}, "10.0.0.5", OVER),
    ("a container of the same name on the same host", {"pids": "p", "made": "1"}, "10.0.0.6", ""),
    ("a host of the same name and image", {"boot": "b", "made": "1"}, "10.0.0.6", ""),
    ("a host at the same address that began earlier", {"boot": "b", "pids": "p", "made": LATER}, "10.0.0.5", ""),
    ("a host that was installed again", {"boot": "b", "machine": "m", "made": "1"}, "10.0.0.5", ""),
    ("another host", {"boot": "b", "machine": "m", "host": "h"}, "10.0.0.6", "h"),
]


@pytest.mark.parametrize(("note", "address", "place"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_a_node_belongs_to_the_host_on_which_its_processes_are(
    note: dict[str, str], address: str, place: str, folder: Path
) -> None:
    rewrite(folder, **note)

    named = verb("place", folder, address=address).stdout.strip()
    ended = verb("end", folder.name, folder, address=address)

    if place in (HERE, OVER):
        assert named == place
        assert (ended.returncode, folder.exists()) == (0, False)
    else:
        assert named.endswith("(10.0.0.5:22)")
        assert named.startswith(place or os.uname().nodename)
        assert (ended.returncode, folder.exists()) == (1, True)
        assert named in ended.stderr


@pytest.mark.parametrize("text", [None, "", "half a line"])
def test_a_node_without_a_note_is_taken_to_be_here(text: str | None, folder: Path) -> None:
    (folder / "host").unlink()
    if text is not None:
        (folder / "host").write_text(text)

    assert verb("place", folder).stdout == "here\n"
    assert verb("place", folder.parent / "none").stdout == "here\n"


@pytest.fixture
def shared(tmp_path: Path) -> Sequence[SshHost]:
    require_sshd()
    one, other = (SshHost(tmp_path / name, address=f"127.0.0.{last}") for last, name in ((6, "one"), (7, "other")))
    shutil.rmtree(other.home)
    other.home.symlink_to(one.home)
    return one, other


async def test_a_node_elsewhere_is_listed_once_and_never_said_to_have_ended(
    shared: Sequence[SshHost], tmp_path: Path
) -> None:
    one, other = shared
    with one, other:
        provider = SSH(
            hosts=[f"{host.address}:{host.port}" for host in shared],
            key_path=str(one.key_path),
            known_hosts=str(write_known_hosts(tmp_path / "known_hosts", *shared)),
        )
        try:
            (offer,) = await provider.offers(parse_request(nodes=2))
            keys = LaunchOrder(pool_id="pool", keys=("a", "b"), timeout_s=60.0)
            here, elsewhere = await provider.launch([offer], keys)
            rewrite(one.home / ".cache/skyward/nodes" / elsewhere.id, boot="b", host="gpu9", made="1")

            assert sorted(each.key for each in await provider.tagged()) == ["a", "b"]
            with pytest.raises(TerminationError, match=r"on another host, gpu9\(127\.0\.0\.7:\d+\), .* name that host"):
                await provider.terminate([here.id, elsewhere.id])
            states = [each.state for each in await provider.describe([here.id, elsewhere.id])]
            assert states == [InstanceState.GONE, InstanceState.RUNNING]
            rewrite(
                one.home / ".cache/skyward/nodes" / elsewhere.id,
                boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            )
            await provider.terminate([elsewhere.id])
            assert await provider.tagged() == []
        finally:
            await provider.close()
