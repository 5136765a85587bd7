"""Metadata as conda, old tools, broken installations and careless installers leave it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from skyward import ConfigurationError, Image
from skyward.cli import main as command
from skyward.environment.image_mirror import mirror_environment
from skyward.environment.installed import InstalledDistributions, Origin
from skyward.request.checks import bare_url

from .conftest import make_wheel

SECRET = "T0kenT0kenT0kenT0ken"
HEAD = "Metadata-Version: 2.1\nName: sky-odd\nVersion: 1.0\n"
BUILDERS_FOLDER: dict[str, object] = {
    "url": "file:///home/conda/feedstock_root/build_artifacts/odd_1/work",
    "dir_info": {},
}


def install(folder: Path, files: dict[str, str | bytes], info: str = "sky_odd-1.0.dist-info") -> Path:
    """Metadata beside one module, ``sky_odd``; every file can be replaced."""
    place = folder / info
    place.mkdir(parents=True)
    (folder / "sky_odd.py").write_text("")
    for name, text in ({"METADATA": HEAD, "RECORD": "sky_odd.py,,\n"} | files).items():
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"direct_url.json": json.dumps(BUILDERS_FOLDER), "INSTALLER": "conda\n"}, id="conda"),
        pytest.param({"direct_url.json": json.dumps(BUILDERS_FOLDER)}, id="folder that is gone"),
        pytest.param(
            {"direct_url.json": '{"url": "file:///no/odd-1.0.tar.gz", "archive_info": {}}'}, id="archive gone"
        ),
        pytest.param({"direct_url.json": '{"url": "file:///", "dir_info": {}}'}, id="folder without a project"),
        pytest.param({"direct_url.json": '{"url": "https://h/r.git", "vcs_info": {"vcs": "git"}}'}, id="no commit"),
        pytest.param({"direct_url.json": '{"url": "https://h/r.git", "vcs_info": null}'}, id="null"),
        pytest.param({"direct_url.json": '{"url": "https://[h/x.whl", "archive_info": {}}'}, id="no URL"),
        pytest.param({"direct_url.json": "{}"}, id="no place"),
        pytest.param({"direct_url.json": "[]"}, id="a list"),
        pytest.param({"direct_url.json": ""}, id="zero length"),
        pytest.param({"direct_url.json": b"\xff\xfe\x00"}, id="not text"),
        pytest.param({"METADATA": HEAD.encode() + b"Author: J\xf6rg\n"}, id="another encoding"),
        pytest.param({"METADATA": ""}, id="empty metadata"),
        pytest.param({"METADATA": HEAD.replace("Version: 1.0\n", "")}, id="no version"),
        pytest.param({"METADATA": HEAD.replace("1.0", "None")}, id="version None"),
        pytest.param({"METADATA": HEAD + "Requires-Dist: (((\nRequires-Dist:\n"}, id="requirements"),
        pytest.param({"RECORD": ",,\n\nsky_odd.py,,\n"}, id="record with blank rows"),
        pytest.param({"RECORD": 'sky_odd.py,,\n"open,,\n\0\n'}, id="record with an open quotation"),
        pytest.param({"RECORD": ""}, id="empty record"),
        pytest.param({"top_level.txt": b"\xff\xfe"}, id="top levels"),
        pytest.param({"INSTALLER": b"\xff"}, id="installer"),
    ],
)
def test_damaged_or_foreign_metadata_leaves_a_version_to_ask_an_index_for(
    files: dict[str, Any], tmp_path: Path
) -> None:
    install(tmp_path, files)

    here = InstalledDistributions([str(tmp_path)])

    odd = here["sky-odd"]
    assert (odd.version, odd.origin, odd.place, odd.needs_login) == ("1.0", Origin.INDEX, "", False)
    assert here.owners_of("sky_odd") == ["sky-odd"]


@pytest.mark.parametrize(
    ("version", "name", "requirement"),
    [
        ("1.0+computecanada", "sky_odd", "sky-odd==1.0"),
        ("1.0+cu121", "sky_odd", "sky-odd==1.0"),
        ("0.0.0", "sky_odd", "sky-odd==0.0.0"),
    ],
)
def test_a_vendors_build_becomes_the_release_that_an_index_has(
    version: str, name: str, requirement: str, site: Any
) -> None:
    site.install("sky-odd", version, in_index=False)
    (site.installed / f"{name}-{version}.dist-info" / "RECORD").write_text("sky_odd.so,,\n")
    make_wheel(site.wheels, name, version.partition("+")[0], HEAD.replace("1.0", version.partition("+")[0]))

    (row,) = mirror_environment(only=["sky-odd"]).packages

    assert row.requirement == requirement


@pytest.mark.parametrize("label", ["5.g1f3a9c2", "dirty", "d20240101", "1f3a9c2e"])
def test_a_state_of_a_repository_is_no_release(label: str, site: Any) -> None:
    """The release of that number has other code: what is installed is sent, as it is Python alone."""
    site.install("sky-odd", f"1.0+{label}", in_index=False)
    make_wheel(site.wheels, "sky_odd", "1.0", HEAD)

    (row,) = mirror_environment(only=["sky-odd"]).packages

    assert row.requirement == f"sky-odd==1.0+{label}"
    assert (row.source, row.note) == ("sent as installed here", f"no index has 1.0+{label}")


def test_what_no_index_has_is_sent_as_it_is_installed_if_it_is_python_alone(site: Any) -> None:
    site.install("sky-odd", "1.0", f"sky-part @ git+https://{SECRET}@h/part.git ; python_version > '3'", in_index=False)
    site.install("sky-part")

    mirror = mirror_environment(only=["sky-odd"])

    (wheel,) = [row.wheel for row in mirror.packages if row.name == "sky-odd"]
    assert wheel is not None
    with zipfile.ZipFile(wheel) as made:
        texts = {name: made.read(name).decode() for name in made.namelist()}
    assert {*texts} == {"sky_odd.py", *(f"sky_odd-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD"))}
    (required,) = [each for each in texts["sky_odd-1.0.dist-info/METADATA"].splitlines() if "Requires" in each]
    assert " ".join(required.split()) == 'Requires-Dist: sky-part ; python_version > "3"'
    assert SECRET not in "".join(texts.values())


def test_all_that_cannot_be_had_is_in_one_message(site: Any) -> None:
    for name, version in (("sky-left", "1.0"), ("sky-right", "2.0"), ("sky-torn", "")):
        site.install(name, version, in_index=False)
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        (site.installed / info / "RECORD").write_text(f"{name.replace('-', '_')}.so,,\n")

    with pytest.raises(ConfigurationError) as raised:
        Image.mirror(only=["sky-left", "sky-right", "sky-torn"])

    text = str(raised.value)
    assert "sky-left 1.0" in text
    assert "sky-right 2.0" in text
    assert "sky-torn (no version) (needed by this program itself; its metadata is damaged: install it again)" in text


def test_a_mirror_of_everything_leaves_out_what_states_no_version(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("sky-torn", "", in_index=False)
    monkeypatch.setattr("sys.path", [str(site.installed)])

    (row,) = mirror_environment().packages

    assert row.left_out == "its metadata is damaged and states no version: install it again"


@pytest.mark.parametrize("info", ["~ky_odd-1.0.dist-info", "-ky_odd-1.0.dist-info", "\udcff-1.0.dist-info", "-info"])
def test_leftovers_of_installers_are_no_distributions(info: str, tmp_path: Path) -> None:
    install(tmp_path, {}, info)

    assert [*InstalledDistributions([str(tmp_path)])] == []


@pytest.mark.parametrize(
    ("places", "version"),
    [
        ([("a", "sky_odd-1.0"), ("a", "sky_odd-2.0")], "2.0"),
        ([("a", "sky_odd-2.0"), ("a", "Sky.Odd-1.10")], "2.0"),
        ([("a", "sky_odd-1.9"), ("a", "sky_odd-1.10")], "1.10"),
        ([("a", "sky_odd-1.0"), ("b", "sky_odd-2.0")], "1.0"),
        ([("a", "sky_odd-3.0 torn"), ("a", "sky_odd-2.0")], "2.0"),
        ([("a", "sky_odd-3.0 torn"), ("b", "sky_odd-2.0")], "2.0"),
    ],
)
def test_of_two_with_one_name_the_first_that_can_be_read_counts(
    places: list[tuple[str, str]], version: str, tmp_path: Path
) -> None:
    for folder, written in places:
        name, _, torn = written.partition(" ")
        text = "" if torn else HEAD.replace("1.0", name.partition("-")[2])
        install(tmp_path / folder, {"METADATA": text}, f"{name}.dist-info")

    assert InstalledDistributions([str(tmp_path / "a"), str(tmp_path / "b")])["sky-odd"].version == version


def test_metadata_of_setuptools_counts_as_a_file_in_an_egg_and_beside_sources(tmp_path: Path) -> None:
    (tmp_path / "sky_file-1.0.egg-info").write_bytes(b"Name: sky-file\nVersion: 1.0\nAuthor: J\xf6rg\n")
    (tmp_path / "sky_file.py").touch()
    egg = tmp_path / "sky_egg-2.0-py3.11.egg"
    (egg / "EGG-INFO").mkdir(parents=True)
    (egg / "EGG-INFO" / "PKG-INFO").write_text("Name: sky-egg\nVersion: 2.0\n")
    (egg / "EGG-INFO" / "requires.txt").write_text("numpy\n\n[fast:python_version > '3']\nnumba>=1\n")
    project = tmp_path / "project"
    (project / "sky_linked.egg-info").mkdir(parents=True)
    (project / "sky_linked.egg-info" / "PKG-INFO").write_text("Name: sky-linked\nVersion: 3.0\n")
    (project / "setup.py").touch()

    here = InstalledDistributions([str(tmp_path), str(egg), str(project)])

    assert {name: each.version for name, each in here.items()} == {
        "sky-file": "1.0",
        "sky-egg": "2.0",
        "sky-linked": "3.0",
    }
    assert here.packages_of("sky-file") == {"sky_file"}
    assert [str(each) for each in here["sky-egg"].requires] == [
        "numpy",
        'numba>=1; python_version > "3" and extra == "fast"',
    ]
    assert (here["sky-linked"].origin, here["sky-linked"].place) == (Origin.FOLDER, str(project))


@pytest.mark.parametrize(
    "stated",
    [
        {"url": f"https://me:{SECRET}@h/sky_odd-1.0-py3-none-any.whl", "archive_info": {}},
        {"url": f"https://{SECRET}@h/sky_odd-1.0-py3-none-any.whl", "archive_info": {}},
        {"url": f"https://h/sky_odd-1.0-py3-none-any.whl?token={SECRET}", "archive_info": {}},
        {"url": f"https://h/sky_odd-1.0-py3-none-any.whl?X-Amz-Signature={SECRET}&sv=1", "archive_info": {}},
        {"url": f"https://h/sky_odd-1.0-py3-none-any.whl#{SECRET}", "archive_info": {}},
        {"url": f"https://h/{SECRET}/sky_odd-1.0-py3-none-any.whl", "archive_info": {}},
        {"url": f"https://{SECRET}@h/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
        {"url": f"ssh://git:{SECRET}@h/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
    ],
)
def test_a_secret_in_an_installation_stays_on_this_machine(
    stated: dict[str, Any], site: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither for nodes nor for people: such a distribution is sent as it is installed."""
    install(site.installed, {"direct_url.json": json.dumps(stated), "METADATA": HEAD})

    image = Image.mirror(only=["sky-odd"])
    command(["env", "--only", "sky-odd", "--json"], standalone_mode=False)

    sent = b"".join(path.read_bytes() for folder in image.find_links for path in Path(folder).iterdir())
    assert image.pip == ("sky-odd==1.0",)
    assert SECRET not in repr(image) + "".join(capsys.readouterr())
    assert SECRET.encode() not in sent


def test_a_secret_shows_in_no_error_when_compiled_parts_need_their_url(site: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    url = f"https://me:{SECRET}@127.0.0.1:9/r.git"
    stated = json.dumps({"url": url, "vcs_info": {"vcs": "git", "commit_id": "1f3a9c2"}})
    install(site.installed, {"direct_url.json": stated, "RECORD": "sky_odd.so,,\n"})

    with pytest.raises(ConfigurationError, match=r"let git or ~/\.netrc know it") as raised:
        Image.mirror(only=["sky-odd"])

    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("https://h/a/b.whl", "https://h/a/b.whl"),
        ("https://me:secret@h:8080/a?token=x#y", "https://h:8080/a"),
        ("ssh://git@h/r.git", "ssh://git@h/r.git"),
        ("git+ssh://git@h/r.git", "git+ssh://git@h/r.git"),
        ("ssh://me:secret@h/r.git", "ssh://h/r.git"),
        ("https://files.pythonhosted.org/packages/a1/0123456789abcdef0123/x.whl",) * 2,
        ("https://github.com/Org2024/StyleGAN2-ADA-PyTorch",) * 2,
        ("https://dl.example/xK9dQ2mZ7pLr4TvB/ours/x.whl", "https://dl.example/***/ours/x.whl"),
    ],
)
def test_a_bare_url_holds_nothing_that_may_be_a_secret(url: str, bare: str) -> None:
    assert bare_url(url) == bare
