"""``Image.mirror``: with the real uv, and an index that is a folder of tiny wheels."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from skyward import ConfigurationError, Image
from skyward.environment.image_mirror import mirror_environment
from skyward.environment.index_lookup import passable_index
from skyward.environment.installed import Distribution, Origin, installed_distributions
from skyward.environment.local_wheels import local_wheel

from .conftest import make_wheel

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "sky-private"
version = "2.0"
"""
BACKEND = """\
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    open("built", "a").write("x")
    name = "sky_private-2.0-{tag}.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.write("sky_private.py")
        wheel.writestr("sky_private-2.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: sky-private\\nVersion: 2.0")
        wheel.writestr("sky_private-2.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n")
        wheel.writestr("sky_private-2.0.dist-info/RECORD", "")
    return name
"""


def make_project(folder: Path, tag: str = "py3-none-any") -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND.format(tag=tag))
    (folder / "sky_private.py").write_text("")
    return folder


def editable(folder: Path) -> dict[str, Any]:
    return {"url": folder.as_uri(), "dir_info": {"editable": True}}


def test_index_local_and_left_out_ones_are_told_apart_and_the_repr_is_a_table(site: Any, tmp_path: Path) -> None:
    """A main index that no one can reach here: all that is found comes from the folder, and is sent."""
    project = make_project(tmp_path / "project")
    site.install("sky-app", "1.0", "sky-private", "sky-tool; sys_platform == 'win32'", "msgpack")
    site.install("sky-private", "2.0", direct_url=editable(project), in_index=False)
    site.install("sky-tool")

    image = Image.mirror(only=["sky-app"])

    rows = [line.split(maxsplit=2) for line in repr(image).splitlines()[1:]]
    assert rows == [
        ["msgpack", rows[0][1], "left out: comes with Skyward, in this version"],
        ["sky-app", "1.0", "sent from this machine's package sources"],
        ["sky-private", "2.0", f"built here from {project}"],
    ]
    assert image.pip == ("sky-app==1.0", "sky-private==2.0")
    assert [[path.name for path in Path(folder).glob("*.whl")] for folder in image.find_links] == [
        ["sky_app-1.0-py3-none-any.whl"],
        ["sky_private-2.0-py3-none-any.whl"],
    ]
    merged = image.merged(pip=["b"], apt=["git"], includes=["./data"], env={"A": "1"})
    assert (merged.pip[-1], merged.apt, merged.includes, dict(merged.env)) == ("b", ("git",), ("./data",), {"A": "1"})
    assert merged.find_links == image.find_links


def test_a_wheel_is_built_once_for_each_content(site: Any, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    site.install("sky-private", "2.0", direct_url=editable(project), in_index=False)

    first = Image.mirror(only=["sky-private"])
    (project / "built").unlink()  # a file that the build left, and which would count
    assert Image.mirror(only=["sky-private"]).find_links == first.find_links
    assert not (project / "built").exists()

    (project / "sky_private.py").write_text("changed = True\n")
    assert Image.mirror(only=["sky-private"]).find_links != first.find_links


def test_what_exists_nowhere_is_named_with_what_needs_it(site: Any) -> None:
    site.install("sky-app", "1.0", "sky-lost", "sky-gone")
    site.install("sky-lost", "3.0", in_index=False)
    site.install("sky-gone", "4.0", in_index=False)
    site.install("sky-other", "1.0", "sky-lost")

    for module in ("sky_lost", "sky_gone"):  # compiled: what is installed here may not run there
        with (site.installed / f"{module}-{'3.0' if module == 'sky_lost' else '4.0'}.dist-info/RECORD").open(
            "a"
        ) as file:
            file.write(f"{module}_fast.so,,\n")
        (site.installed / f"{module}_fast.so").touch()

    with pytest.raises(ConfigurationError) as raised:
        Image.mirror(only=["sky-app", "sky-other"])

    assert "sky-gone 4.0 (needed by sky-app), sky-lost 3.0 (needed by sky-app, sky-other)" in str(raised.value)
    assert "exclude=['sky-gone', 'sky-lost']" in str(raised.value)


def test_a_wheel_for_another_system_is_refused(site: Any, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", tag="cp311-cp311-win_amd64")
    site.install("sky-private", "2.0", direct_url=editable(project), in_index=False)
    mac = make_wheel(tmp_path, "sky_mac", "1.0", "", tag="cp311-cp311-macosx_14_0_arm64")
    site.install("sky-mac", "1.0", direct_url={"url": mac.as_uri(), "archive_info": {}}, in_index=False)

    with pytest.raises(ConfigurationError, match=r"sky-private 2\.0 from .*project is for win_amd64, and nodes run"):
        Image.mirror(only=["sky-private"])
    with pytest.raises(ConfigurationError, match=r"sky-mac 1\.0 .* is for macosx_14_0_arm64"):
        Image.mirror(only=["sky-mac"])


def test_sources_that_cannot_be_built_show_the_end_of_the_log(site: Any, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    (project / "backend.py").write_text("raise SystemExit('the compiler is missing')")
    site.install("sky-private", "2.0", direct_url=editable(project), in_index=False)

    with pytest.raises(ConfigurationError, match=r"(?s)no wheel of sky-private 2\.0 can be made here.*the compiler is"):
        Image.mirror(only=["sky-private"])
    project.rename(tmp_path / "moved")
    with pytest.raises(ConfigurationError, match=f"there is no {project}"):
        Image.mirror(only=["sky-private"])


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"only": ["sky-ap"]}, r"only names 'sky-ap', which is not installed here: did you mean sky-app\?"),
        ({"exclude": ["yaml_"]}, "exclude names 'yaml_'"),
        ({"only": ["_pytest"]}, "_pytest is a module of pytest: write that"),
        ({"only": "numpy"}, "only must be"),
        ({"exclude": ["msgpack"]}, "Skyward itself needs"),
    ],
)
def test_unknown_names_are_refused(site: Any, parameters: dict[str, Any], text: str) -> None:
    site.install("sky-app")

    with pytest.raises(ConfigurationError, match=text):
        Image.mirror(**parameters)


def test_a_build_for_processors_becomes_one_for_the_machine(site: Any) -> None:
    site.install("torch", "2.13.0+cpu", in_index=False)

    image = Image.mirror(only=["torch"])

    assert image.pip == ("torch==2.13.0",)
    assert dict(image.env) == {"UV_TORCH_BACKEND": "auto"}
    assert "2.13.0+cpu" in repr(image)
    assert "the build for the node's processors or GPUs" in repr(image)


def test_an_address_stays_one_and_a_repository_names_its_commit(site: Any) -> None:
    site.install("sky-far", direct_url={"url": "https://h/sky_far-1.0-py3-none-any.whl", "archive_info": {}})

    (row,) = mirror_environment(only=["sky-far"]).packages

    assert (row.source, row.requirement) == ("h", "sky-far @ https://h/sky_far-1.0-py3-none-any.whl")


def test_a_namespace_of_two_distributions_is_no_name_of_one(site: Any) -> None:
    for name in ("sky-left", "sky-right"):
        site.install(name)
        (site.installed / f"{name.replace('-', '_')}-1.0.dist-info/top_level.txt").write_text("sky_shared")

    with pytest.raises(ConfigurationError, match="sky_shared is a module of sky-left or sky-right: write that"):
        Image.mirror(only=["sky_shared"])


LIKE_SETUPTOOLS = """\
import configparser, os
settings = configparser.ConfigParser()
settings.read(os.environ.get("DIST_EXTRA_CONFIG", ""))
os.makedirs(settings.get("build", "build_base", fallback="build"), exist_ok=True)
os.makedirs(settings.get("egg_info", "egg_base", fallback=".") + "/sky_private.egg-info", exist_ok=True)
"""


def test_setuptools_leaves_nothing_in_the_sources(site: Any, tmp_path: Path) -> None:
    """Else modules that are deleted later would still be in the next wheel."""
    project = make_project(tmp_path / "project")
    (project / "backend.py").write_text(LIKE_SETUPTOOLS + BACKEND.format(tag="py3-none-any"))
    site.install("sky-private", "2.0", direct_url=editable(project), in_index=False)

    Image.mirror(only=["sky-private"])

    assert not [*project.glob("build"), *project.glob("*.egg-info")]


def test_a_wheel_that_another_process_has_built_meanwhile_is_taken(site: Any, tmp_path: Path) -> None:
    """The backend puts it there, as that process does."""
    project = make_project(tmp_path / "project")
    other = tmp_path / "cache/skyward/wheels"
    backend = BACKEND.format(tag="py3-none-any").replace(
        "    return name", f"    import meanwhile; meanwhile.put(folder + '/' + name, {str(other)!r})\n    return name"
    )
    (project / "backend.py").write_text(backend)
    (project / "meanwhile.py").write_text(
        "import pathlib, shutil\n"
        "def put(wheel, cache):\n"
        "    for name in pathlib.Path(__file__).parents[1].joinpath('key').read_text().split():\n"
        "        pathlib.Path(cache, name).mkdir()\n"
        "        shutil.copy(wheel, pathlib.Path(cache, name))\n"
    )
    distribution = Distribution(name="sky-private", version="2.0", origin=Origin.FOLDER, place=str(project))
    (tmp_path / "key").touch()
    first = local_wheel(distribution, {})
    shutil.rmtree(first.parent)
    (project / "built").unlink()
    (tmp_path / "key").write_text(first.parent.name)

    assert local_wheel(distribution, {}) == first


@pytest.mark.parametrize(
    ("url", "passed"),
    [
        ("https://index.example/simple", True),
        ("https://me:secret@index.example/simple", False),
        ("https://token@index.example/simple", False),
        ("https://index.example/simple?token=secret", False),
        ("https://dl.example/xK9dQ2mZ7pLr4TvB/ours/simple/", False),
        ("https://login.example/simple", False),
        ("file:///srv/simple", False),
        ("", False),
    ],
)
def test_nodes_get_the_index_of_this_machine_without_anyones_password(
    url: str, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine login.example login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    assert passable_index({"index-url": url}) == (url if passed else None)
    assert passable_index({"index-url": url, "keyring-provider": "subprocess"}) is None


@pytest.mark.parametrize(
    ("stated", "place"),
    [
        ({"url": "https://me:secret@h/a.whl", "archive_info": {}}, "https://h/a.whl"),
        ({"url": "https://token@h/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "git+https://h/r.git@1"),
        ({"url": "ssh://git@h/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "git+ssh://git@h/r.git@1"),
    ],
)
def test_credentials_in_metadata_stay_there(site: Any, stated: dict[str, Any], place: str) -> None:
    site.install("sky-secret", direct_url=stated)

    assert installed_distributions()["sky-secret"].place == place


def test_the_newest_builds_are_kept_and_builds_and_caches_are_no_sources(tmp_path: Path, site: Any) -> None:
    project = make_project(tmp_path / "project")
    distribution = Distribution(name="sky-private", version="2.0", origin=Origin.FOLDER, place=str(project))
    (project / "backend.py").write_text(BACKEND.format(tag="py3-none-any").replace('open("built", "a").write("x")', ""))

    built: list[Path] = []
    for number in range(5):
        (project / "sky_private.py").write_text(f"NUMBER = {number}")
        built.append(local_wheel(distribution, {}))
        for name in ("build", "dist", ".git", "__pycache__", "sky_private.egg-info"):
            (project / name).mkdir(exist_ok=True)
            (project / name / "file").write_text(str(number))
        assert local_wheel(distribution, {}) == built[-1]

    assert [each.exists() for each in built] == [False, False, True, True, True]
