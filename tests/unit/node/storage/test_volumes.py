"""Volumes on a node: what becomes of keys, of changes, and of the folder."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from skyward.errors import ConfigurationError, SkywardError
from skyward.node.storage import mount_registry as places
from skyward.node.storage import volume_program as volumes
from skyward.node.storage.mirror import path_of
from skyward.node.storage.volume_program import VolumeOrder, perform
from skyward.providers.storage import StoredObject
from skyward.request.volume import GrantedVolume, S3Volume, StorageKey, VolumeAccess

SECRET = "not-for-anybody"


@dataclass
class FakeStore:
    """A store in memory that counts what is asked of it."""

    objects: dict[str, bytes] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    refuses: bool = False

    def open_store(self, granted: GrantedVolume) -> FakeStore:
        return self

    def listing(self) -> Iterable[StoredObject]:
        return [
            StoredObject(name=name, nbytes=len(data), tag=str(hash(data)), modified_at=1_700_000_000.0)
            for name, data in self.objects.items()
        ]

    def download(self, name: str, file: BinaryIO) -> None:
        if self.refuses:
            raise SkywardError("the store does not answer")
        self.downloads.append(name)
        if name not in self.objects:
            raise FileNotFoundError(name)
        file.write(self.objects[name])

    def upload(self, path: str, name: str) -> str:
        if self.refuses:
            raise SkywardError("the store does not answer")
        self.uploads.append(name)
        self.objects[name] = Path(path).read_bytes()
        return str(hash(self.objects[name]))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(volumes, "store_kind", lambda volume: store)
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(places, "_RECORDS", str(tmp_path / "records"))
    return store


class Node:
    """One node of a machine."""

    def __init__(self, workdir: Path, granted: GrantedVolume) -> None:
        self.order = VolumeOrder(verb="fetch", instance_id=workdir.name, workdir=str(workdir), volumes=(granted,))

    def fetch(self) -> list[str]:
        return perform(self.order)

    def push(self) -> None:
        perform(replace(self.order, verb="push"))

    def release(self) -> None:
        perform(replace(self.order, verb="release"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mnt" / "data"


@pytest.fixture
def node(tmp_path: Path, folder: Path) -> Callable[..., Node]:
    def make(name: str = "volumes-node-0", *, read_only: bool = True, bucket: str = "bucket") -> Node:
        volume = S3Volume(mount_path=str(folder), bucket=bucket, read_only=read_only)
        return Node(tmp_path / name, GrantedVolume(volume=volume, access=VolumeAccess()))

    return make


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("name", ["../x", "a/../x", "a/./x", "/etc/x", "a//b", "..", ".", "x\0y", "a/" + "n" * 256])
def test_a_key_that_would_leave_the_folder_or_be_no_file_has_no_path(name: str) -> None:
    assert path_of(name) is None


@pytest.mark.parametrize("name", ["x", "a/b/c.txt", "a b/ü", "..x", "a\\b", "-rf"])
def test_any_other_key_is_a_path_as_it_is(name: str) -> None:
    assert str(path_of(name)) == name


def test_the_folder_has_what_the_store_has(store: FakeStore, node: Callable[..., Node], folder: Path) -> None:
    store.objects = {"a.txt": b"a", "deep/er/b.txt": b"b", "empty/": b"", "../x": b"x", "both": b"1", "both/c": b"2"}

    notes = node().fetch()

    assert tree(folder) == {"a.txt": b"a", "deep/er/b.txt": b"b", "both/c": b"2"}
    assert (folder / "empty").is_dir()
    assert not (folder.parent / "x").exists()
    assert "'../x'" in notes[0]
    assert "'both'" in notes[0]
    assert (folder / "a.txt").stat().st_mtime == 1_700_000_000


def test_read_only_is_in_the_modes(store: FakeStore, node: Callable[..., Node], folder: Path) -> None:
    store.objects = {"deep/a.txt": b"a"}
    node().fetch()

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "deep", folder / "deep/a.txt")]
    assert modes == [0o555, 0o555, 0o444]


def test_what_is_there_unchanged_is_not_fetched_again(
    store: FakeStore, node: Callable[..., Node], folder: Path
) -> None:
    store.objects = {"a": b"a", "b": b"b", "gone": b"x"}
    node("volumes-node-0").fetch()
    store.downloads.clear()
    store.objects["b"] = b"new"
    del store.objects["gone"]

    node("volumes-node-1").fetch()

    assert store.downloads == ["b"]
    assert tree(folder) == {"a": b"a", "b": b"new"}


def test_a_read_only_file_that_was_changed_here_is_fetched_again(
    store: FakeStore, node: Callable[..., Node], folder: Path
) -> None:
    store.objects = {"a": b"a"}
    node("volumes-node-0").fetch()
    (folder / "a").chmod(0o644)
    (folder / "a").write_bytes(b"tampered")

    node("volumes-node-1").fetch()

    assert tree(folder) == {"a": b"a"}


def test_changes_are_written_back_and_nothing_is_deleted_from_the_store(
    store: FakeStore, node: Callable[..., Node], folder: Path
) -> None:
    store.objects = {"same": b"1", "changed": b"2", "removed": b"3"}
    writer = node(read_only=False)
    writer.fetch()
    (folder / "changed").write_bytes(b"22")
    (folder / "removed").unlink()
    (folder / "new").mkdir()
    (folder / "new/file").write_bytes(b"4")
    (folder / "link").symlink_to("/etc/passwd")
    for path in (folder / "changed", folder / "new/file"):
        age(path, 60)

    writer.push()

    assert sorted(store.uploads) == ["changed", "new/file"]
    assert store.objects == {"same": b"1", "changed": b"22", "removed": b"3", "new/file": b"4"}
    writer.push()
    assert len(store.uploads) == 2, "what was written back is not written back again"


def test_a_file_that_is_being_written_is_left_for_later(
    store: FakeStore, node: Callable[..., Node], folder: Path
) -> None:
    writer = node(read_only=False)
    writer.fetch()
    (folder / "half").write_bytes(b"ha")

    writer.push()
    assert store.uploads == []
    writer.release()
    assert store.objects == {"half": b"ha"}


def test_a_second_fetch_keeps_what_was_changed_here(store: FakeStore, node: Callable[..., Node], folder: Path) -> None:
    store.objects = {"a": b"store's"}
    node("volumes-node-0", read_only=False).fetch()
    (folder / "a").write_bytes(b"changed here")

    node("volumes-node-1", read_only=False).fetch()

    assert tree(folder) == {"a": b"changed here"}


@pytest.mark.parametrize("read_only", [True, False])
def test_nothing_is_left_once_the_last_node_has_ended(
    store: FakeStore, node: Callable[..., Node], folder: Path, tmp_path: Path, read_only: bool
) -> None:
    store.objects = {"deep/a": b"a", "empty/": b""}
    first, second = node("volumes-node-0", read_only=read_only), node("volumes-node-1", read_only=read_only)
    first.fetch()
    second.fetch()

    first.release()
    assert tree(folder) == {"deep/a": b"a"}
    second.release()

    assert not folder.parent.exists(), "parents that were made go too"
    assert list((tmp_path / "records").iterdir()) == []
    second.release()  # idempotent


def test_a_folder_that_was_there_stays_as_it_was(store: FakeStore, node: Callable[..., Node], folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o750)
    store.objects = {"a": b"a"}
    reader = node()
    reader.fetch()

    reader.release()

    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_folder_with_files_of_others_is_refused_and_left_alone(
    store: FakeStore, node: Callable[..., Node], folder: Path
) -> None:
    folder.mkdir(parents=True)
    (folder / "mine").write_bytes(b"precious")

    with pytest.raises(ConfigurationError, match=f"mount_path {folder} is not empty there, it has 'mine'"):
        node().fetch()

    assert tree(folder) == {"mine": b"precious"}


def test_another_volume_cannot_have_a_folder_that_is_in_use(store: FakeStore, node: Callable[..., Node]) -> None:
    node("volumes-node-0").fetch()

    with pytest.raises(ConfigurationError, match="in use there for s3://bucket/"):
        node("volumes-node-1", bucket="another").fetch()


def test_what_a_killed_node_left_gives_way_to_another_volume(
    store: FakeStore, node: Callable[..., Node], folder: Path, tmp_path: Path
) -> None:
    store.objects = {"old": b"old"}
    node("volumes-node-0").fetch()
    (tmp_path / "volumes-node-0").mkdir()
    (tmp_path / "volumes-node-0/supervisor.log").touch()  # it had started, and has no process any more
    store.objects = {"new": b"new"}

    node("volumes-node-1", bucket="another").fetch()

    assert tree(folder) == {"new": b"new"}


def test_children_of_the_program_itself_are_no_node_that_uses_a_volume(
    store: FakeStore, node: Callable[..., Node], folder: Path, tmp_path: Path
) -> None:
    store.objects = {"old": b"old"}
    node("volumes-node-0").fetch()
    (tmp_path / "volumes-node-0").mkdir()
    (tmp_path / "volumes-node-0/supervisor.log").touch()
    store.objects = {"new": b"new"}
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            node("volumes-node-1", bucket="another").fetch()
        finally:
            child.kill()

    assert tree(folder) == {"new": b"new"}


def test_what_a_killed_node_did_not_write_back_is_not_lost(
    store: FakeStore, node: Callable[..., Node], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node("volumes-node-0", read_only=False).fetch()
    (folder / "result").write_bytes(b"42")
    monkeypatch.setattr(places, "_STARTING_S", -1.0)

    with pytest.raises(ConfigurationError, match="could not write back, 'result'"):
        node("volumes-node-1", bucket="another").fetch()
    again = node("volumes-node-2", read_only=False)
    again.fetch()
    again.release()

    assert store.objects == {"result": b"42"}
    assert not folder.exists()


def test_a_fetch_that_fails_leaves_nothing(store: FakeStore, node: Callable[..., Node], folder: Path) -> None:
    store.objects, store.refuses = {"a": b"a"}, True

    with pytest.raises(SkywardError, match="does not answer"):
        node().fetch()

    assert not folder.parent.exists()


def test_changes_stay_on_the_machine_when_they_cannot_be_written_back(
    store: FakeStore, node: Callable[..., Node], folder: Path
) -> None:
    writer = node(read_only=False)
    writer.fetch()
    (folder / "result").write_bytes(b"42")
    store.refuses = True

    with pytest.raises(SkywardError, match="does not answer"):
        writer.release()

    assert tree(folder) == {"result": b"42"}


def test_a_cut_off_fetch_is_taken_up_where_it_ended(
    store: FakeStore, node: Callable[..., Node], folder: Path, tmp_path: Path
) -> None:
    store.objects = {name: name.encode() for name in "abc"}
    node("volumes-node-0").fetch()
    (record,) = (tmp_path / "records").rglob("*.files")
    known = [line for line in record.read_text().splitlines() if '"c"' not in line]
    record.write_text("\n".join([*known, '["c", {"tag']))
    folder.chmod(0o755)
    (folder / "c").rename(folder / f"{places.PART}c")
    store.downloads.clear()

    node("volumes-node-0").fetch()

    assert store.downloads == ["c"]
    assert tree(folder) == {name: name.encode() for name in "abc"}


def test_a_fetch_that_is_killed_at_a_changed_object_does_not_write_the_former_one_back(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    store.objects = {"a": b"former"}
    node(read_only=False).fetch()
    store.objects = {"a": b"present"}
    if (pid := os.fork()) == 0:
        rename = os.replace
        os.replace = lambda old, new: os._exit(9) if Path(new).name == "a" else rename(old, new)
        node(read_only=False).fetch()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9

    again = node(read_only=False)
    again.fetch()
    again.release()

    assert store.objects == {"a": b"present"}


def test_too_little_room_is_said_before_anything_is_fetched(
    store: FakeStore, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = StoredObject(name="huge", nbytes=1 << 60, tag="t", modified_at=0.0)
    monkeypatch.setattr(FakeStore, "listing", lambda self: [huge])

    with pytest.raises(ConfigurationError, match=r"GiB free, and 1073741824\.0 GiB have to be fetched"):
        node().fetch()

    assert store.downloads == []


def test_an_object_that_is_deleted_meanwhile_is_left_out(
    store: FakeStore, node: Callable[..., Node], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [*FakeStore(objects={"a": b"a", "gone": b""}).listing()]
    store.objects = {"a": b"a"}
    monkeypatch.setattr(FakeStore, "listing", lambda self: listed)

    node().fetch()

    assert tree(folder) == {"a": b"a"}


def test_an_order_travels_as_json_and_shows_no_key(tmp_path: Path) -> None:
    access = VolumeAccess(region="r", key=StorageKey(id="id", secret=SECRET, token=SECRET))
    granted = GrantedVolume(volume=S3Volume(mount_path="/data", bucket="bucket"), access=access)
    order = VolumeOrder(verb="push", instance_id="i", workdir=str(tmp_path), volumes=(granted,))

    assert VolumeOrder.from_json(order.to_json()) == order
    assert SECRET not in repr(order)
    assert json.loads(order.to_json())["verb"] == "push"


@pytest.fixture(autouse=True)
def removable(tmp_path: Path) -> Iterator[None]:
    """Read-only folders do not hinder pytest from removing what it made."""
    yield
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
