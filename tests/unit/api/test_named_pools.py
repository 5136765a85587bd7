"""Named settings: which file counts, what its values become, and errors with file and line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.api.named_pools import make_named, settings_files
from skyward.errors import ConfigurationError
from skyward.providers.local import Local

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "config" / "skyward"
    folder.mkdir(parents=True)
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())
    return path


def options(name: str, **changes: Any) -> dict[str, Any]:
    """Return the parameters that a pool would get."""
    return make_named(dict, name, changes)


def test_a_pool_has_the_parameters_of_its_table_and_those_given_instead(project: Path) -> None:
    write(
        project / "pyproject.toml",
        """
        [project]
        name = "mine"

        [tool.skyward.pools.big]
        provider = "local"
        nodes = 4
        env = { LEVEL = "3" }
        """,
    )

    assert repr(sky.ComputePool.named("big")) == "<ComputePool of 4 nodes of local: not open>"
    assert repr(sky.ComputePool.named("big", nodes=8)) == "<ComputePool of 8 nodes of local: not open>"
    assert options("big", env=None) == {"provider": Local(), "nodes": 4, "env": None}


def test_values_that_toml_cannot_say_are_made_of_tables(project: Path) -> None:
    write(
        project / "skyward.toml",
        """
        [pools.big]
        nodes = [0, 8]
        spot = 0.8
        accelerator = ["H100:2", { name = "A100", memory = "40GB" }, { memory = ">=200GB", vendor = "amd" }]
        volume = [{ mount_path = "/data", bucket = "my-bucket" }]

        [pools.big.image]
        pip = ["numpy"]
        includes = ["src", "~/shared"]

        [[pools.big.provider]]
        name = "aws"
        region = "eu-central-1"

        [[pools.big.provider]]
        name = "local"
        """,
    )

    found = options("big")

    assert found["nodes"] == (0, 8)
    assert found["spot"] == 0.8
    assert list(map(str, found["accelerator"])) == ["H100:2", "1x A100-40GB", "1x MI325X", "1x MI350X", "1x MI355X"]
    assert found["volume"] == [sky.S3Volume(mount_path="/data", bucket="my-bucket")]
    assert found["image"].includes == (str(project / "src"), str(Path.home() / "shared"))
    assert found["provider"] == [sky.AWS(region="eu-central-1"), Local()]
    for folder in found["image"].includes:
        Path(folder).mkdir()
    assert repr(sky.ComputePool.named("big")) == "<ComputePool of 8 nodes of aws, local: not open>"


def test_the_projects_settings_count_before_the_users_and_are_found_from_a_folder_within(
    project: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(user / "skyward.toml", "[pools.big]\nnodes = 1\n[pools.mine]\nnodes = 2\n")
    write(project / "pyproject.toml", "[tool.skyward.pools.big]\nnodes = 3\n[tool.skyward.pools.small]\nnodes = 4\n")
    write(project / "skyward.toml", "[pools.big]\nnodes = 5\n")
    write(project / "package" / "pyproject.toml", '[project]\nname = "no settings"\n')
    monkeypatch.chdir(project / "package")

    assert [options(name)["nodes"] for name in ("big", "small", "mine")] == [5, 4, 2]


def test_a_folder_in_which_everybody_can_put_files_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "shared" / "skyward.toml", "[pools.big]\nnodes = 1\n")
    (tmp_path / "shared" / "mine").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    monkeypatch.chdir(tmp_path / "shared" / "mine")

    assert settings_files() == []


MISTAKES = [
    ("[pools.big]\nprovider = 'local'\nnodes = 0", 3, "nodes must be a whole number"),
    ("[pools.big]\nprovider = 'local'\n\n# many\nnode = 3", 5, "did you mean nodes?"),
    ("[pools.big]\nprovider = 'lokal'", 2, "no provider 'lokal'; it has aws"),
    ("[pools.big]\nprovider = { name = 'aws', regoin = 'x' }", 2, "no parameter 'regoin'"),
    ("[pools.big]\nnodes = 1\n[pools.big.provider]\nregion = 'x'", 3, "provider needs a name"),
    ("[pools.big.provider]\nname = 'vastai'\napi_key = 'xyz'", 3, "api_key is secret"),
    ("[pools.big]\nprovider = 'local'\naccelerator = [\n  'T4',\n  'H10',\n]", 3, "closest: H100"),
    ("[pools.big]\nprovider = 'local'\n[pools.big.image]\npip = ['numpy']\npips = ['x']", 5, "did you mean pip?"),
    ("[pools.big]\nprovider = 'local'\nimage.pip = ['numpy']\nimage.includes = ['no']", 4, "there is no "),
    ("[pools.big]\nprovider = 'local'\nimage = 5", 3, "image must be a table"),
    ("[pools.big]\nprovider = 'local'\nimage = 'numpy'", 3, "image must be a table"),
    ("[pools.big]\nnodes = 2", 1, "ComputePool needs provider"),
    ("[pools.big]\nprovider = 'local'\naccelerator = { nme = 'H100' }", 3, "'nme' (did you mean name?)"),
    ("[pools.big]\nprovider = []", 2, 'provider = ["local"]'),
    ("[pools.big]\nprovider = 'local'\non_event = 'print'", 3, "pass it in the program"),
    ("[pools.big]\nprovider = 'local'\nself = 3", 3, "ComputePool has no option 'self'"),
    ("pool.big.nodes = 2", 1, "'pool' is unknown; closest: pools"),
    ("pools.big = 2", 1, "a pool is a table"),
    ("pools = 2", 1, "a pool is a table"),
    ("[pools.big]\nnodes = \n", 2, "this is not TOML"),
]


@pytest.mark.parametrize(("text", "line", "message"), MISTAKES)
def test_a_mistake_is_named_with_file_and_line(project: Path, text: str, line: int, message: str) -> None:
    path = write(project / "skyward.toml", text)

    with pytest.raises(ConfigurationError) as caught:
        sky.ComputePool.named("big")

    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "table"),
    [("tool = 5", 1, "tool"), ("\n[[tool]]", 2, "tool"), ("[tool]\nskyward = 1", 2, "tool.skyward")],
)
def test_a_table_of_pyproject_that_is_none_is_named(project: Path, text: str, line: int, table: str) -> None:
    path = write(project / "pyproject.toml", f"# first\n{text}")

    with pytest.raises(ConfigurationError, match=rf"^{path}:{line + 1}: {table} must be a table$"):
        settings_files()


def test_a_mistake_in_the_program_is_not_blamed_on_the_file(project: Path) -> None:
    write(project / "skyward.toml", "[pools.big]\nprovider = 'local'\nnodes = 2\n")

    with pytest.raises(ConfigurationError, match=r"^nodes must be"):
        sky.ComputePool.named("big", nodes=0)
    with pytest.raises(TypeError, match=r"^ComputePool has no option 'node'"):
        sky.ComputePool.named("big", node=3)


def test_an_unknown_name_gets_the_closest_and_the_files_that_were_read(project: Path, user: Path) -> None:
    with pytest.raises(ConfigurationError, match="Read: no file"):
        sky.ComputePool.named("big")
    path = write(user / "skyward.toml", "[pools.big]\nnodes = 2\n")
    own = write(project / "skyward.toml", "[pools.big]\nnodes = 2\n")
    with pytest.raises(ConfigurationError, match=f"'bgi' in the settings; closest: big. Read: {own} and {path}"):
        sky.ComputePool.named("bgi")


def test_front_ends_take_named_settings_too(project: Path) -> None:
    write(project / "skyward.toml", "[pools.big]\nprovider = 'local'\nnodes = 2\n")

    pool = sky.integrations.JoblibPool.named("big", nodes=3)

    assert isinstance(pool, sky.integrations.JoblibPool)
    with pytest.raises(TypeError, match=r"^JoblibPool has no option 'joblib' \(did you mean joblib_version\?\)"):
        sky.integrations.JoblibPool.named("big", joblib="1.0")
