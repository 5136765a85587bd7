"""Mounting, with programs that stand in for the real ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skyward.errors import SkywardError
from skyward.node.storage import volume_program as mounting
from skyward.node.storage.volume_program import mount, unmount
from skyward.providers.storage import MountWay

MOUNTS = """#!/bin/sh
env >"$0.env"
touch "$1/.mounted"
"""
FAILS = """#!/bin/sh
echo "no such file system"
exit 7
"""
UNMOUNTS = """#!/bin/sh
rm "$2/.mounted"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is all there is beside the system's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SKYWARD_INSTANCE", "node-0")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path, ".mounted").exists())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def way(name: str, folder: Path, *, key: str = "", install: dict[str, list[tuple[str, ...]]] | None = None) -> MountWay:
    env = {"KEY_FILE": "{key_file}"}
    return MountWay(program=name, argv=(name, str(folder)), env=env, key_text=key, install=install or {})


def test_the_first_way_that_works_is_taken(programs: Path, folder: Path, tmp_path: Path) -> None:
    program(programs, "second", FAILS)
    program(programs, "third", MOUNTS)
    ways = [way(name, folder, key="secret") for name in ("missing", "second", "third", "fourth")]

    assert mount(ways, folder, tmp_path / "key") == "third"


def test_the_key_is_in_a_file_that_nobody_else_reads(programs: Path, folder: Path, tmp_path: Path) -> None:
    program(programs, "tool", MOUNTS)
    key_file = tmp_path / "node" / "volume-0.key"

    mount([way("tool", folder, key="secret")], folder, key_file)

    assert key_file.read_text() == "secret"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    environment = (programs / "tool.env").read_text()
    assert f"KEY_FILE={key_file}" in environment
    assert "secret" not in environment


def test_a_mount_does_not_end_with_the_nodes_processes(programs: Path, folder: Path, tmp_path: Path) -> None:
    program(programs, "tool", MOUNTS)

    mount([way("tool", folder)], folder, tmp_path / "key")

    assert "SKYWARD_INSTANCE" not in (programs / "tool.env").read_text()


def test_where_nothing_works_nothing_is_left(programs: Path, folder: Path, tmp_path: Path) -> None:
    program(programs, "tool", FAILS)

    assert mount([way("tool", folder, key="secret")], folder, tmp_path / "key") == ""
    assert not (tmp_path / "key").exists()


def test_a_program_is_installed_by_the_installer_that_is_there(programs: Path, folder: Path, tmp_path: Path) -> None:
    program(programs, "real", MOUNTS)
    program(programs, "sudo", '#!/bin/sh\nshift\n"$@"\n')
    install = {"no-such-installer": [("false",)], "cp": [("cp", str(programs / "real"), str(programs / "tool"))]}

    assert mount([way("tool", folder, install=install)], folder, tmp_path / "key") == "tool"


def test_an_installation_that_fails_leads_to_the_next_way(programs: Path, folder: Path, tmp_path: Path) -> None:
    program(programs, "sudo", '#!/bin/sh\nshift\n"$@"\n')
    program(programs, "other", MOUNTS)
    broken = way("tool", folder, install={"cp": [("false",), ("cp", "/nonexistent", str(programs))]})

    assert mount([broken, way("other", folder)], folder, tmp_path / "key") == "other"


def test_a_program_that_hangs_is_given_up(
    programs: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "tool", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(mounting, "_MOUNT_S", 0.2)

    assert mount([way("tool", folder)], folder, tmp_path / "key") == ""


def test_unmounting_takes_whichever_program_can(programs: Path, folder: Path) -> None:
    program(programs, "fusermount3", FAILS)
    program(programs, "fusermount", UNMOUNTS)
    (folder / ".mounted").touch()

    unmount(folder)

    assert not (folder / ".mounted").exists()


def test_what_cannot_be_unmounted_is_said(programs: Path, folder: Path) -> None:
    for name in ("fusermount3", "fusermount", "umount"):
        program(programs, name, FAILS)
    (folder / ".mounted").touch()

    with pytest.raises(SkywardError, match="cannot be unmounted"):
        unmount(folder)
