"""``skyward config check``: the named settings of a project and a user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyward.cli import main


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_pool_of_the_project_and_the_user_is_checked(project: Path, tmp_path: Path) -> None:
    (project / "skyward.toml").write_text(
        "[pools.good]\nprovider = 'local'\nnodes = 2\n[pools.bare]\n[pools.bad]\ncpu = 0\n"
    )
    (tmp_path / "config" / "skyward").mkdir(parents=True)
    (tmp_path / "config" / "skyward" / "skyward.toml").write_text("[pools.good]\nprovider = 'local'\n")

    told = CliRunner().invoke(main, ["config", "check"])

    at = project / "skyward.toml"
    assert told.output.splitlines() == [
        f"ok   {at}:1: good: <ComputePool of 2 nodes of local: not open>",
        f"ok   {at}:4: bare: sound; a program has to pass its provider",
        f"fail {at}:5: bad: {at}:6: pool 'bad': cpu must be a whole number ≥ 1, got 0",
        f"warn {tmp_path}/config/skyward/skyward.toml:1: good: not used: {at}:1 has a pool of that name, which counts",
    ]
    assert told.exit_code == 1
    found = json.loads(CliRunner().invoke(main, ["config", "check", "--json"]).output)["pools"]
    assert [(each["pool"], each["state"]) for each in found] == [
        ("good", "ok"),
        ("bare", "ok"),
        ("bad", "fail"),
        ("good", "warn"),
    ]


def test_no_settings_are_no_mistake() -> None:
    told = CliRunner().invoke(main, ["config", "check"])

    assert (told.exit_code, told.output) == (0, "There are no named settings here\n")


def test_a_file_that_is_not_toml_is_named_with_its_line(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.skyward.pools.big]\nnodes = = 2\n")

    told = CliRunner().invoke(main, ["config", "check"])

    assert told.exit_code == 1
    assert f"Error: {project / 'pyproject.toml'}:2: this is not TOML: " in told.output
