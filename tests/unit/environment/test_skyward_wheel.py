"""The wheel of Skyward's own code."""

from __future__ import annotations

import importlib.metadata
import io
import zipfile

import pytest

from skyward.environment.skyward_wheel import engine_pins, own_wheel


def names() -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(own_wheel().data)).namelist())


def test_it_holds_all_that_runs_here_data_included_and_nothing_compiled() -> None:
    there = names()

    assert {
        "skyward/__init__.py",
        "skyward/node/supervisor/supervisor.py",
        "skyward/environment/bootstrap.sh",
        "skyward/request/accelerators.toml",
        "skyward_dask/skyward.yaml",
        "skyward_joblib/backend.py",
    } <= there
    assert not [name for name in there if "__pycache__" in name or name.endswith(".pyc")]


def test_the_same_files_make_the_same_wheel() -> None:
    first = own_wheel()
    own_wheel.cache_clear()

    assert own_wheel() == first
    assert len(first.digest) == 16


def test_its_record_names_every_file() -> None:
    with zipfile.ZipFile(io.BytesIO(own_wheel().data)) as wheel:
        (record,) = (name for name in wheel.namelist() if name.endswith("/RECORD"))
        recorded = {line.split(",")[0] for line in wheel.read(record).decode().splitlines()}

    assert recorded == names()


def test_nodes_do_without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["uv>=0.9", "psutil>=7"])
    engine_pins.cache_clear()
    try:
        names = {pin.partition("==")[0] for pin in engine_pins()}
    finally:
        engine_pins.cache_clear()

    assert "psutil" in names
    assert "uv" not in names
