"""Providers by name: Skyward's own, and those of installed packages, broken ones included."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyward.cli import main
from skyward.errors import ConfigurationError
from skyward.providers.base import Provider
from skyward.providers.local import Local
from skyward.providers.registry import (
    BUILT_IN,
    make_provider,
    provider_names,
    provider_settings,
    provider_type,
    taken_names,
)

ROOT = Path(__file__).parents[3]

Install = Callable[..., None]

FIELDS = "region: str = 'here'\n    spare: int = 0\n    token: str | None = field(default=None, repr=False)"
MODULE = """
from dataclasses import dataclass, field
from skyward.testing.provider import FakeProvider

@dataclass
class Barn(FakeProvider):
    {fields}
    name = {name!r}
    def __post_init__(self):
        super().__init__()
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one entry point where Python looks."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def install(
        name: str = "barn", *, package: str = "hay", own_name: str | None = None, entry: str = "", code: str = ""
    ) -> None:
        module = f"{package}_{tmp_path.name}"  # no other test has imported it
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry or f"[skyward.providers]\n{name} = {module}:Barn\n")
        text = code or MODULE.format(name=own_name or name, fields=FIELDS)
        (site / f"{module}.py").write_text(text)

    return install


def answer(*arguments: str, exit_code: int = 0) -> Any:
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def test_skywards_own_metadata_registers_the_classes_that_a_checkout_uses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["entry-points"]["skyward.providers"] == BUILT_IN
    assert all(provider_type(name).__name__.lower() == name for name in BUILT_IN)


def test_an_installed_package_adds_its_provider(install: Install) -> None:
    install()

    made = make_provider("barn", {"region": "there"})

    assert provider_names() == (*BUILT_IN, "barn")
    assert provider_settings(made) == {"region": "there", "spare": 0}
    assert provider_settings(make_provider("barn", provider_settings(made))) == provider_settings(made)
    assert not made.own_machines


def test_a_package_with_unreadable_entry_points_is_named(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(entry="[skyward.providers]\nbarn\n")

    assert "barn" not in provider_names()
    assert "cannot read the entry points of hay: " in caplog.text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_package_that_does_not_load_is_named_and_leaves_the_others_alone(
    install: Install, code: str, why: str
) -> None:
    install(code=code or "Other = 1")

    with pytest.raises(ConfigurationError, match=rf"'barn' cannot be loaded from 'hay_\S+' of hay 1.0: {why}"):
        make_provider("barn", {})
    assert make_provider("local", {}) == Local()
    (finding,) = [each for each in answer("doctor")["findings"] if each["what"] == "provider barn"]
    assert finding["state"] == "warn"
    assert why in finding["found"]


@pytest.mark.parametrize("entry", ["[skyward.providers]\nbarn = !\n", "barn\n[[", "[skyward.providers]\nbarn\n"])
def test_malformed_metadata_of_a_package_leaves_the_others_alone(install: Install, entry: str) -> None:
    install(entry=entry)

    with pytest.raises(ConfigurationError, match="'barn'"):
        make_provider("barn", {})
    assert make_provider("local", {}) == Local()


def test_no_package_takes_one_of_skywards_own_names(install: Install) -> None:
    install("local")

    assert provider_names() == tuple(BUILT_IN)
    assert make_provider("local", {}) == Local()
    assert taken_names() == {"local": "hay"}
    (finding,) = [each for each in answer("doctor")["findings"] if each["what"] == "provider local"]
    assert "hay registers it too, and is ignored" in finding["found"]


def test_two_packages_with_one_name_are_both_refused_by_name(install: Install) -> None:
    install(package="hay")
    install(package="straw")

    with pytest.raises(ConfigurationError, match=r"hay 1\.0 and .* of straw 1\.0: uninstall all but one"):
        make_provider("barn", {})


def test_a_class_under_another_name_than_its_own_is_refused_since_no_sweep_would_find_it(install: Install) -> None:
    install(own_name="stable")

    with pytest.raises(ConfigurationError, match="registered as provider 'barn', but its name is 'stable'"):
        make_provider("barn", {})


def test_a_registered_object_that_is_no_provider_is_refused(install: Install) -> None:
    install(code="class Barn: pass")

    with pytest.raises(ConfigurationError, match="provider must be a provider object"):
        make_provider("barn", {})


def test_a_provider_without_a_package_is_an_error_with_the_next_step() -> None:
    with pytest.raises(ConfigurationError, match="install that package"):
        make_provider("barn", {})


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_takes_any_installed_provider_with_its_parameters(install: Install) -> None:
    install()

    offered = answer("offers", "--provider", "barn", "--region", "there", "--set", "spare=2")
    asked = answer("sweep", "--provider", "barn")
    checked = answer("doctor", "--provider", "barn", exit_code=answer_code("doctor"))

    assert [each["provider"] for each in offered["offers"]] == ["barn"]
    assert asked["unasked"] == []
    assert {"what": "barn", "state": "ok", "found": "installed; it has no checks of its own", "fix": ""} in checked[
        "findings"
    ]


def answer_code(*arguments: str) -> int:
    return CliRunner().invoke(main, arguments).exit_code


def test_unknown_providers_and_parameters_are_errors_that_list_the_known_ones(install: Install) -> None:
    install()

    unknown = CliRunner().invoke(main, ["offers", "--provider", "atlantis"])
    refused = answer("offers", "--provider", "barn", "--set", "depth=4", exit_code=1)

    assert unknown.exit_code == 2
    assert "'atlantis' is not one of aws, " in unknown.output
    assert "barn" in unknown.output
    assert refused["errors"] == {"barn": "provider 'barn' has no parameter 'depth'; it has region, spare, token"}


def test_secrets_are_refused_on_a_command_line(install: Install) -> None:
    install()

    for command in ("offers", "sweep"):
        done = CliRunner().invoke(main, [command, "--provider", "barn", "--set", "token=hush"])

        assert done.exit_code == 1
        assert "--set token=: it is secret" in done.stderr
        assert "hush" not in done.output


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("true", True), ("x", "x")])
def test_values_have_the_types_of_the_parameters(install: Install, text: str, value: object) -> None:
    from skyward.cli._base import Providers

    install()

    made: Provider = Providers(names=[], parameters={"spare": text, "region": "3"}).make("barn")

    assert provider_settings(made) == {"region": "3", "spare": value}


def test_a_provider_that_fails_in_its_own_way_leaves_the_answers_of_the_others(install: Install) -> None:
    code = MODULE.format(name="barn", fields=FIELDS) + "    async def offers(self, request): raise KeyError('hay')\n"
    install(code=code)

    answered = answer("offers", "--provider", "barn", "--provider", "local")

    assert [each["provider"] for each in answered["offers"]] == ["local"]
    assert answered["errors"] == {"barn": "it failed: KeyError: 'hay'"}
