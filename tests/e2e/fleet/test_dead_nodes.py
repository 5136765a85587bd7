"""Nodes whose programs end before a worker runs: the pool does not open, and its error has the end of their log."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import BootstrapError

NO_YAML = "distributed: [\n"
NO_MODULE = "distributed:\n  worker:\n    preload: [my_lab_setup]\n"
NO_MODULE_OF_SCHEDULER = "distributed:\n  scheduler:\n    preload: [my_lab_setup]\n"


def error_of(env: dict[str, str]) -> BootstrapError:
    pool = sky.ComputePool(provider=sky.Local(), env=env, display="quiet")
    with pytest.raises(BootstrapError) as caught, pool:
        pass
    return caught.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (NO_YAML, "is malformed"),
        (NO_MODULE, "No module named 'my_lab_setup'"),
        (NO_MODULE_OF_SCHEDULER, "No module named 'my_lab_setup'"),
    ],
    ids=["no YAML", "no module of workers", "no module of the scheduler"],
)
def test_settings_with_which_dask_does_not_start_are_in_the_error(tmp_path: Path, settings: str, words: str) -> None:
    (tmp_path / "lab.yaml").write_text(settings)  # https://github.com/dask/dask-jobqueue/issues/679
    assert words in str(error_of({"DASK_CONFIG": str(tmp_path)}))


def test_a_python_that_does_not_start_is_in_the_error(tmp_path: Path) -> None:
    assert "No module named 'encodings'" in str(error_of({"PYTHONHOME": str(tmp_path)}))
