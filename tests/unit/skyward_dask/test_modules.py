"""Sources of the user's modules on their way to a scheduler and its workers."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from types import ModuleType

import pytest

from skyward.shipping.project_modules import SentSources
from skyward.wire.messages import ModuleSource
from skyward_dask.modules import KeptModules, missing_modules, named_in


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's that imports another one in a function."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sky_graphed.py").write_text("def f():\n    import sky_graphed_too\n")
    (tmp_path / "sky_graphed_too.py").write_text("FACTOR = 1\n")
    return importlib.import_module("sky_graphed")


def names(message: bytes | None) -> list[str]:
    return [] if message is None else [source.name for source in pickle.loads(message)]


def test_a_module_whose_function_is_pickled_by_name_is_found(module: ModuleType) -> None:
    assert named_in([pickle.dumps([1, module.f])]) == {"sky_graphed"}
    assert named_in([pickle.dumps([1, len, Path])]) == set()


def test_sources_go_once_and_again_when_they_have_changed(module: ModuleType, tmp_path: Path) -> None:
    sent, graph = SentSources(), [pickle.dumps(module.f)]

    first, again = names(missing_modules(sent, graph)), names(missing_modules(sent, graph))
    (tmp_path / "sky_graphed_too.py").write_text("FACTOR = 2\n")

    assert (first, again) == (["sky_graphed", "sky_graphed_too"], [])
    assert names(missing_modules(sent, graph)) == ["sky_graphed_too"]


@pytest.mark.parametrize("order", [((2, "new"), (1, "old")), ((1, "old"), (2, "new"))])
def test_a_worker_that_comes_later_gets_the_newest_edition_of_everything(order: tuple[tuple[int, str], ...]) -> None:
    kept = KeptModules()
    assert kept.all() is None

    for edition, text in order:
        source = ModuleSource(name="sky_kept", text=text, is_package=False, origin="here", edition_ns=edition)
        kept.take(pickle.dumps([source]))

    assert [source.text for source in pickle.loads(kept.all() or b"")] == ["new"]
