"""Undocumented parts of dask and distributed, by their table: a failure names the part that a release lacks."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from skyward.environment.skyward_wheel import engine_pins
from skyward.errors import ConfigurationError
from skyward_dask.dask_parts import (
    NEWEST_RELEASE,
    OLDEST_RELEASE,
    OVERRIDDEN,
    READ,
    check_parts,
    missing_parts,
    names_of_parts,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("owner", OVERRIDDEN)
def test_the_installed_release_has_every_part_that_is_overridden(owner: str) -> None:
    assert missing_parts({owner: OVERRIDDEN[owner]}) == []


@pytest.mark.parametrize("owner", READ)
def test_the_installed_release_has_every_attribute_that_is_read(owner: str) -> None:
    module, _, cls = owner.partition(":")
    bases = getattr(importlib.import_module(module), cls).__mro__[:-1]
    source = "".join(inspect.getsource(base) for base in bases if base.__module__.startswith("distributed"))

    lacking = [name for name in READ[owner].split() if not re.search(rf"\b{name}\b", source)]

    assert lacking == []


def test_few_parts_are_in_use() -> None:
    assert len([*names_of_parts(OVERRIDDEN), *names_of_parts(READ)]) <= 24


def test_a_release_that_lacks_a_part_is_refused_by_the_parts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    monkeypatch.delattr(distributed.Client, "_send_to_scheduler")

    with pytest.raises(ConfigurationError, match=r"lacks distributed\.client:Client\._send_to_scheduler.*2026\."):
        check_parts()


def test_the_matrix_and_the_requirement_cover_the_same_releases() -> None:
    releases = re.findall(r"^dasks := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    required = {each.name: each.specifier for each in map(Requirement, extras["dask"])}
    year, month, _ = map(int, NEWEST_RELEASE.split("."))

    assert len(releases) >= 5
    assert (releases[0], releases[-1]) == (OLDEST_RELEASE, NEWEST_RELEASE)
    for name in ("dask", "distributed"):
        assert [release for release in releases if not required[name].contains(release)] == []
        assert required[name].contains(f"{year}.{month}.99")
        assert not required[name].contains(f"{year}.{month + 1}.0")


def test_a_submodule_of_distributed_is_imported_by_one_module_only() -> None:
    found = [
        f"{path.name}: {name}"
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "dask_parts.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
        if name.startswith("distributed.") and name != "distributed.core"
    ]

    assert found == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


# --- without Dask -------------------------------------------------------------------------------------------------


@pytest.fixture
def without_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dask", "distributed"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_dask")
def test_nodes_of_a_client_without_dask_get_none() -> None:
    assert not {pin.partition("==")[0] for pin in engine_pins.__wrapped__()} & {"dask", "distributed", "tornado"}


def test_nodes_of_a_client_with_dask_get_its_release() -> None:
    assert f"distributed=={version('distributed')}" in engine_pins.__wrapped__()


@pytest.mark.usefixtures("without_dask")
def test_the_dask_front_end_without_dask_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "skyward_dask"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ImportError, match=r"pip install 'skyward-fleet\[dask\]'"):
        importlib.import_module("skyward_dask")
