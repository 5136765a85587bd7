"""A distribution's metadata says what is installed, in whatever layout; the rest is the user's."""

from __future__ import annotations

import importlib
import json
import sys
import xml.dom.minidom
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import skyward
from skyward.shipping.project_modules import added_package_folders, is_installed_at, is_the_users
from support.users import as_other_user

INIT = "own/__init__.py"


def wheel(*files: str, name: str = "own") -> dict[str, str]:
    """Return files with the metadata of a wheel that lists them."""
    record = "".join(f"{file},sha256=x,1\n" for file in files)
    info = f"{name}-1.dist-info"
    return {**dict.fromkeys(files, ""), f"{info}/METADATA": f"Name: {name}\nVersion: 1\n", f"{info}/RECORD": record}


def egg_info(texts: dict[str, str]) -> dict[str, str]:
    """Return a package with metadata of setuptools'."""
    listed = {f"own.egg-info/{name}": text for name, text in texts.items()}
    return {INIT: "", "own.egg-info/PKG-INFO": "Name: own\nVersion: 1\n", **listed}


LAYOUTS = {
    "target": (wheel(INIT, "own/deep/part.py"), "", True),
    "a distribution of another name": (wheel(INIT, name="whole"), "", True),
    "a module": (wheel("own.py"), "", True),
    "a compiled module": (wheel("own.cpython-311-x86_64-linux-gnu.so"), "", True),
    "a compiled package": (wheel("own/__init__.cpython-311-x86_64-linux-gnu.so"), "", True),
    "listed by installed-files.txt": (egg_info({"installed-files.txt": "../own/__init__.py\n"}), "", True),
    "no list, but its packages": (
        {INIT: "", "whole-1.dist-info/METADATA": "Name: whole\n", "whole-1.dist-info/top_level.txt": "own\n"},
        "",
        True,
    ),
    "no list at all": ({INIT: "", "own-1.dist-info/METADATA": "Name: own\n"}, "", True),
    "site-packages without metadata": ({"site-packages/" + INIT: ""}, "site-packages", True),
    "dist-packages without metadata": ({"dist-packages/" + INIT: ""}, "dist-packages", True),
    "an egg": ({"own-1.egg/" + INIT: "", "own-1.egg/EGG-INFO/PKG-INFO": "Name: own\n"}, "own-1.egg", True),
    "a wheel on the path": ({"own-1-py3-none-any.whl/" + INIT: ""}, "own-1-py3-none-any.whl", True),
    "sources alone": ({INIT: ""}, "", False),
    "beside a package in one folder": ({INIT: "", **wheel("other/__init__.py", name="other")}, "", False),
    "the same name as a distribution": ({INIT: "", **wheel("other/__init__.py", name="own")}, "", False),
    "by-product of an editable installation": (
        egg_info({"SOURCES.txt": "own/__init__.py\n", "top_level.txt": "own\n"}),
        "",
        False,
    ),
}


@pytest.mark.parametrize(("files", "entry", "installed"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_owner_of_a_module_follows_from_metadata(
    files: dict[str, str], entry: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / entry)
    (place,) = [each for kind in ("own/__init__.*", "own.py", "own.*.so") for each in (tmp_path / entry).glob(kind)]

    assert is_installed_at("own", str(place)) == installed


@pytest.mark.parametrize(
    "damage",
    [
        {"METADATA": b"Name: J\xf6rg\n"},
        {"METADATA": b""},
        {"METADATA": b"", "RECORD": b"\xff\xfe"},
        {"METADATA": b"", "top_level.txt": b"\xff\xfe"},
        {},
    ],
)
def test_damaged_metadata_beside_a_module_changes_nothing(
    damage: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {**wheel(INIT), "mine/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for info in ("torn-1.dist-info", "~wn-1.dist-info"):
        (tmp_path / info).mkdir()
        for name, content in damage.items():
            (tmp_path / info / name).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)

    assert is_installed_at("own", str(tmp_path / INIT))
    assert not is_installed_at("mine", str(tmp_path / "mine/__init__.py"))


def test_an_archive_is_looked_into(tmp_path: Path) -> None:
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in {**wheel(INIT), "mine/__init__.py": ""}.items():
            file.writestr(name, text)

    assert is_installed_at("own", f"{archive}/own/__init__.py")
    assert not is_installed_at("mine", f"{archive}/mine/__init__.py")


def test_each_part_of_a_namespace_has_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, files in {"target": wheel("space/theirs.py"), "project": {"space/mine.py": ""}}.items():
        for name, text in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path / folder)

    assert is_installed_at("space.theirs", str(tmp_path / "target/space/theirs.py"))
    assert not is_installed_at("space.mine", str(tmp_path / "project/space/mine.py"))


def test_a_link_to_the_users_folder_among_packages_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "project/own").mkdir(parents=True)
    (tmp_path / "project/own/__init__.py").touch()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/own").symlink_to(tmp_path / "project/own")

    assert not is_installed_at("own", str(tmp_path / "site-packages/own/__init__.py"))


@pytest.mark.parametrize(
    "module",
    [sys, json, importlib, np, np.linalg, skyward, pytest, xml.dom.minidom],
    ids=lambda module: module.__name__,
)
def test_python_and_packages_are_not_the_users(module: ModuleType) -> None:
    assert not is_the_users(module)


def test_a_module_of_the_users_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: Callable[[str], ModuleType]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sched", "nntplib", "yaml"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)

        assert is_the_users(imported(name))


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module for a test."""

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return load


def test_folders_that_may_not_be_read_have_no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``sudo -u``, which keeps another user's home folder."""
    (tmp_path / "closed").mkdir(mode=0o000)
    with as_other_user(tmp_path):
        monkeypatch.setenv("PYTHONPATH", "closed")
        monkeypatch.setattr(sys, "path", [*sys.path, "closed"])
        folders = added_package_folders()
    assert [folder for folder in folders if folder.endswith("closed")] == []
