"""Dask's settings ``skyward.*``."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from importlib.resources import files

import dask.config
import pytest
import yaml

from skyward.errors import ConfigurationError
from skyward_dask.settings import load_defaults, seconds, setting

READ = "import skyward_dask, dask.config; print(dask.config.get('skyward.adaptive.wait-count'))"


def read(tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-c", READ],
        env=os.environ | {"DASK_CONFIG": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def test_defaults_are_there_once_the_package_is_imported(tmp_path):
    assert read(tmp_path) == "12"


def test_a_file_and_the_environment_win_over_them(tmp_path):
    (tmp_path / "skyward.yaml").write_text("skyward: {adaptive: {wait-count: 7}}")
    assert read(tmp_path) == "7"
    assert read(tmp_path, DASK_SKYWARD__ADAPTIVE__WAIT_COUNT="9") == "9"


def test_importing_the_package_does_not_load_distributed():
    script = "import sys, skyward_dask; print('distributed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_loading_them_twice_changes_nothing():
    before = len(dask.config.defaults)
    load_defaults()
    assert len(dask.config.defaults) == before


@pytest.fixture
def cleared():
    load_defaults()
    before = dict(dask.config.config)
    dask.config.config.clear()
    yield
    dask.config.config.clear()
    dask.config.config.update(before)


def test_defaults_hold_although_dasks_configuration_was_cleared(cleared):
    assert setting("adaptive.wait-count") == 12
    assert setting("name") is None
    with dask.config.set({"skyward.adaptive.wait-count": 7}):
        assert (setting("adaptive.wait-count"), setting("adaptive.interval")) == (7, "10s")


def test_every_default_is_explained():
    text = files("skyward_dask").joinpath("skyward.yaml").read_text()
    defaults = yaml.safe_load(text)["skyward"]
    assert set(defaults) == {"name", "dashboard-timeout", "adaptive"}
    assert set(defaults["adaptive"]) == {"interval", "wait-count", "target-duration", "minimum", "maximum"}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.strip() and not line.strip().startswith("#") and line != "skyward:":
            assert lines[number - 1].strip().startswith("#"), line


def test_they_can_be_set_for_a_while():
    with dask.config.set({"skyward.adaptive.interval": "1s"}):
        assert setting("adaptive.interval") == "1s"
    assert setting("adaptive.interval") == "10s"


@pytest.mark.parametrize(("value", "found"), [("2m", 120), ("500ms", 0.5), (3, 3), (timedelta(seconds=4), 4)])
def test_durations(value, found):
    assert seconds("interval", value) == found


@pytest.mark.parametrize("value", ["soon", 0, -1, None, True, [], "-2s", float("nan")])
def test_wrong_durations_are_named(value):
    with pytest.raises(ConfigurationError, match="interval must be a duration above zero"):
        seconds("interval", value)
