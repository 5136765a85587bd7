"""What `includes` may name, and what of it travels."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skyward.environment.image import Image
from skyward.errors import ConfigurationError
from skyward.request.includes import included_files, pack_files
from skyward.request.request import parse_request

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    (project / "pkg" / "__pycache__").mkdir(parents=True)
    (project / "pkg" / "__pycache__" / "a.cpython-311.pyc").touch()
    (project / "pkg" / "old.pyc").touch()
    (project / "pkg" / "a.py").write_text("x = 1\n")
    (project / "pkg" / "empty").mkdir()
    (project / "x.csv").write_text("1,2\n")
    monkeypatch.chdir(project)
    return project


def packed(*includes: str) -> dict[str, tarfile.TarInfo]:
    file = io.BytesIO()
    pack_files(included_files(includes), file)
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as archive:
        return {member.name: member for member in archive.getmembers()}


def test_folders_and_files_go_under_their_own_names_without_compiled_python(project: Path) -> None:
    assert sorted(packed("./pkg/", str(project / "x.csv"))) == ["pkg", "pkg/a.py", "pkg/empty", "x.csv"]


def test_a_folder_elsewhere_goes_under_its_last_name(tmp_path: Path) -> None:
    (tmp_path / "shared" / "lib").mkdir(parents=True)

    assert sorted(packed("../shared/lib")) == ["lib"]


def test_content_and_the_right_to_run_it_travel_and_owners_do_not(project: Path) -> None:
    (project / "pkg" / "a.py").chmod(0o6755)

    member = packed("pkg")["pkg/a.py"]

    assert (member.size, member.mode, member.uid, member.uname) == (6, 0o755, 0, "")


def test_links_within_stay_links_and_hard_links_become_files(project: Path) -> None:
    (project / "pkg" / "near").symlink_to("a.py")
    (project / "pkg" / "empty" / "far").symlink_to(project / "pkg" / "a.py")
    os.link(project / "pkg" / "a.py", project / "pkg" / "b.py")

    members = packed("pkg")

    assert members["pkg/near"].linkname == "a.py"
    assert members["pkg/empty/far"].linkname == "../a.py"
    assert members["pkg/b.py"].isreg()
    assert members["pkg/b.py"].size == 6


@pytest.mark.parametrize(
    ("links", "targets"),
    [
        ({"self": "self"}, {"self": "self"}),
        ({"one": "two", "two": "one"}, {}),
        ({"up": "."}, {"up": "."}),
        ({"empty/up": ".."}, {"empty/up": ".."}),
        ({"nowhere": "gone.py"}, {"nowhere": "gone.py"}),
    ],
    ids=repr,
)
def test_links_that_lead_round_in_circles_or_nowhere_stay_links(
    project: Path, links: dict[str, str], targets: dict[str, str]
) -> None:
    for name, target in links.items():
        (project / "pkg" / name).symlink_to(target)

    members = packed("pkg")

    assert all(members[f"pkg/{name}"].issym() for name in links)
    assert {name: members[f"pkg/{name}"].linkname for name in targets} == targets
    assert len(members) == 3 + len(links)


def test_names_of_odd_bytes_travel(project: Path) -> None:
    os.close(os.open(os.fsencode(project / "pkg") + b"/\xff\n" + b"x" * 248, os.O_CREAT))

    assert os.fsencode(max(packed("pkg"))) == b"pkg/\xff\n" + b"x" * 248


def test_a_file_that_grows_meanwhile_travels_as_it_was_and_one_that_shrinks_is_named(project: Path) -> None:
    log = project / "pkg" / "a.log"
    log.write_bytes(os.urandom(1 << 20))

    class Changing(io.BytesIO):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def write(self, data: ReadableBuffer, /) -> int:
            if self.tell() > 1 << 18:  # a part of it was read
                os.truncate(log, self.size)
            return super().write(data)

    grown = Changing(2 << 20)
    pack_files(included_files(["pkg"]), grown)
    with tarfile.open(fileobj=io.BytesIO(grown.getvalue())) as archive:
        assert archive.getmember("pkg/a.log").size == 1 << 20

    with pytest.raises(OSError, match=r"a\.log became shorter while it was read"):
        pack_files(included_files(["pkg"]), Changing(10))


def test_a_path_that_is_a_link_brings_what_it_points_to(project: Path) -> None:
    (project / "alias").symlink_to("pkg")

    assert "alias/a.py" in packed("alias")


@pytest.mark.parametrize(
    ("includes", "message"),
    [
        (["x.csv", "nothing"], r"includes\[1\] \('nothing'\) does not exist: there is no /.*/project/nothing"),
        (["."], r"includes\[0\] \('.'\) is /.*, which holds this program's current folder"),
        ([".."], "which holds this program's current folder"),
        (["x.csv", "../other/x.csv"], "has that name already"),
        (["../other"], "holds something that is neither a file nor a folder: .*/pipe"),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_else(includes: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.csv").touch()
    os.mkfifo(tmp_path / "other" / "pipe")

    with pytest.raises(ConfigurationError, match=message):
        parse_request(image=Image(includes=includes))


@pytest.mark.parametrize("target", ["../x.csv", "/etc/hostname"])
def test_a_link_that_leads_out_is_refused(target: str, project: Path) -> None:
    (project / "pkg" / "empty" / "out").symlink_to(target if target.startswith("/") else f"../{target}")

    with pytest.raises(ConfigurationError, match=r"includes\[0\] \('pkg'\) holds a link that leads out of it: .*/out"):
        included_files(["pkg"])


def test_wheels_that_are_nowhere_are_refused_where_no_machine_can_have_them() -> None:
    with pytest.raises(ConfigurationError, match=r"find_links\[1\] does not exist: there is no /.*/project/wheels"):
        parse_request(image=Image(find_links=["/on/the/machine", "wheels"]))


def test_a_request_does_not_depend_on_the_folder_that_is_current_later(project: Path) -> None:
    (project / "wheels").mkdir()

    image = parse_request(image=Image(includes=["./pkg"], find_links=["wheels", "file:///w", "https://w/"])).image

    assert image.includes == (f"{project}/pkg",)
    assert image.find_links == (f"{project}/wheels", "file:///w", "https://w/")


@pytest.mark.parametrize("requirement", ["skyward", "Skyward[sklearn]>=0.1", "skyward_fleet"])
def test_skyward_itself_is_no_requirement(requirement: str) -> None:
    with pytest.raises(ConfigurationError, match=r"pip\[0\] must not be .*nodes get the Skyward that runs here"):
        Image(pip=[requirement])


def test_packages_whose_names_only_begin_so_are() -> None:
    assert Image(pip=["skyward-else"]).pip == ("skyward-else",)
