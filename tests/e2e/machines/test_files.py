"""Files that calls write: in a folder of their pool's, fetched on request and before a node ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import ConfigurationError, FetchError
from support.eventually import eventually


@sky.compute
def write(name: str, text: str) -> list[str]:
    names = sorted(path.name for path in Path().iterdir())
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(f"{text} {sky.instance_info().node}", encoding="utf-8")
    return names


@sky.compute
def read(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("program")
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def notices() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pool(home: Path, notices: list[str]) -> Iterator[sky.ComputePool]:
    image = sky.Image(outputs=["models/", "*.csv"])
    with sky.ComputePool(provider=sky.Local(), nodes=2, image=image, display="quiet") as pool:
        pool.on(sky.Notice, lambda event: notices.append(event.message))
        yield pool


def test_the_folder_is_empty_at_first_and_kept_between_calls(pool: sky.ComputePool) -> None:
    assert write("models/a.bin", "a") @ pool == ([], [])
    assert write("b.bin", "b") @ pool == (["models"], ["models"])


def test_files_of_several_nodes_are_kept_apart(pool: sky.ComputePool, home: Path) -> None:
    found = pool.fetch("*.bin", to="results")

    assert found == [home / "results/0/b.bin", home / "results/1/b.bin"]
    assert [path.read_text(encoding="utf-8") for path in found] == ["b 0", "b 1"]
    assert pool.fetch(["models/"], to=home, node=1) == [home / "models/a.bin"]


@sky.compute
def make_tree() -> None:
    Path("tree/empty").mkdir(parents=True)
    Path("tree/run.sh").touch(0o755)
    Path("tree/run.sh").chmod(0o555)
    Path("tree/last").symlink_to("run.sh")
    os.mkfifo("tree/pipe")


def test_modes_links_and_empty_folders_come_and_the_rest_is_named(
    pool: sky.ComputePool, home: Path, notices: list[str]
) -> None:
    make_tree() @ pool
    before = len(notices)

    assert pool.fetch("tree", to="results", node=0) == [home / "results/tree/run.sh", home / "results/tree/last"]

    assert (home / "results/tree/run.sh").stat().st_mode & 0o7777 == 0o555
    assert (home / "results/tree/last").readlink() == Path("run.sh")
    assert list((home / "results/tree/empty").iterdir()) == []
    for attempt in eventually(10):  # by the event thread
        with attempt:
            assert notices[before:] == ["not fetched: tree/pipe on node 0 (a named pipe)"]


@pytest.mark.parametrize(
    ("patterns", "node", "message"),
    [
        ("../x", None, "patterns must stay in the working folder"),
        (["a", "/etc/passwd"], None, "patterns must stay in the working folder"),
        ("*.csv", None, r"no file matches '\*\.csv'.* on node 0 there are b\.bin, models, tree"),
        ("*", 7, r"node must be the rank of a node that is ready \(0, 1\), got 7"),
    ],
)
def test_a_wrong_request_is_refused(
    pool: sky.ComputePool, home: Path, patterns: str, node: int | None, message: str
) -> None:
    with pytest.raises((ConfigurationError, FetchError), match=message):
        pool.fetch(patterns, to=home / "none", node=node)
    assert not (home / "none").exists()


def test_a_missing_file_says_where_it_was_looked_for(pool: sky.ComputePool) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read("data/x.csv") >> pool
    (note,) = [note for note in caught.value.__notes__ if "looked up" in note]
    assert "/files on the node, the working folder of the pool's calls" in note
    assert "Image(includes=[" in note

    with pytest.raises(FileNotFoundError) as caught:
        read("/nowhere/x.csv") >> pool
    assert not [note for note in getattr(caught.value, "__notes__", []) if "looked up" in note]


def test_outputs_are_fetched_before_their_nodes_end(pool: sky.ComputePool, home: Path, notices: list[str]) -> None:
    """The last one: the pool is closed here."""
    pool.scale(1).result(60)
    (outputs,) = (home / "outputs").iterdir()
    assert (outputs / "1/models/a.bin").read_text(encoding="utf-8") == "a 1"
    assert not (outputs / "0").exists()

    pool.close()
    assert (outputs / "0/models/a.bin").read_text(encoding="utf-8") == "a 0"
    assert [text.partition(" (")[0] for text in notices if text.startswith("outputs")] == [
        f"outputs in {outputs}: 1/models/a.bin",
        f"outputs in {outputs}: 0/models/a.bin",
    ]
    assert all(r"no file matches '*.csv'" in text for text in notices if text.startswith("outputs"))
