"""Undocumented parts of dask and distributed, by their table: a failure names the part that a release lacks."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from skyward.errors import ConfigurationError
from skyward.providers.local import Local
from skyward.provision.preparing.distribution import engine_pins
from skyward.request.request import parse_request
from skyward.wire import dask_parts
from skyward.wire.dask_parts import NODE_RELEASE, OLDEST_RELEASE, OVERRIDDEN, READ, check_parts, missing_parts

ROOT = Path(__file__).parents[4]


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


@pytest.mark.parametrize("name", sorted(dask_parts._HOMES))
def test_the_installed_release_has_every_part_that_is_imported(name: str) -> None:
    assert getattr(dask_parts, name) is not None


def test_a_release_that_lacks_a_part_is_refused_by_the_parts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    monkeypatch.delattr(distributed.Nanny, "_on_worker_exit_sync")

    with pytest.raises(ConfigurationError, match=r"lacks distributed\.nanny:Nanny\._on_worker_exit_sync.*2026\."):
        check_parts()


def test_a_part_that_cannot_be_imported_is_an_import_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed.batched

    monkeypatch.delattr(distributed.batched, "BatchedSend")
    monkeypatch.delitem(vars(dask_parts), "BatchedSend", raising=False)

    with pytest.raises(ImportError, match=r"lacks distributed\.batched:BatchedSend"):
        _ = dask_parts.BatchedSend


def test_the_matrix_and_the_requirement_cover_the_same_releases() -> None:
    releases = re.findall(r"^dasks := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    local = {each.name: each.specifier for each in map(Requirement, extras["local"])}

    assert len(releases) >= 5
    assert (releases[0], releases[-1]) == (OLDEST_RELEASE, NODE_RELEASE)
    assert [r for r in releases if not all(each.contains(r) for each in local.values())] == []
    assert local.keys() == {"dask", "distributed"}


def test_a_submodule_of_distributed_is_imported_by_one_module_only() -> None:
    found = [
        f"{path.name}: {name}"
        for path in (ROOT / "src").rglob("*.py")
        if "testing" not in path.parts and path.name != "dask_parts.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
        if name.startswith("distributed.")
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
def test_nodes_of_a_client_without_dask_get_the_newest_release_tested() -> None:
    pins = engine_pins.__wrapped__()

    assert {f"dask=={NODE_RELEASE}", f"distributed=={NODE_RELEASE}"} <= set(pins)
    assert not [pin for pin in pins if pin.startswith("tornado")]


@pytest.mark.usefixtures("without_dask")
async def test_local_nodes_without_dask_are_refused_with_the_line_that_installs_it() -> None:
    with pytest.raises(ConfigurationError, match=r"Local\(\).*pip install 'skyward-fleet\[local\]'"):
        await Local().offers(parse_request())


@pytest.mark.usefixtures("without_dask")
def test_the_dask_front_end_without_dask_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "skyward_dask"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ImportError, match=r"pip install 'skyward-fleet\[dask\]'"):
        importlib.import_module("skyward_dask")
