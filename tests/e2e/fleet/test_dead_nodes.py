"""Nodes whose programs end before a worker runs: the pool does not open, and its error has the end of their log."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest

import skyward as sky
from skyward.errors import BootstrapError, UnreachableError
from skyward_dask import SkywardCluster

NO_YAML = "distributed: [\n"
NO_MODULE = "distributed:\n  worker:\n    preload: [my_lab_setup]\n"
NO_MODULE_OF_SCHEDULER = "distributed:\n  scheduler:\n    preload: [my_lab_setup]\n"


def error_of(env: dict[str, str]) -> BootstrapError:
    pool = sky.ComputePool(provider=sky.Local(), env=env, display="quiet")
    with pytest.raises(BootstrapError) as caught, pool:
        pass
    return caught.value


def settings_in(folder: Path, settings: str) -> dict[str, str]:
    (folder / "lab.yaml").write_text(settings)  # https://github.com/dask/dask-jobqueue/issues/679
    return {"DASK_CONFIG": str(folder)}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (NO_YAML, BootstrapError, "is malformed"),
        (NO_MODULE_OF_SCHEDULER, UnreachableError, "No module named 'my_lab_setup'"),
    ],
    ids=["no YAML", "no module of the scheduler"],
)
def test_settings_with_which_dask_does_not_start_are_in_the_error(
    tmp_path: Path, settings: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        SkywardCluster(provider=sky.Local(), env=settings_in(tmp_path, settings), display="quiet")


def test_settings_with_which_a_worker_does_not_join_are_in_an_event(tmp_path: Path) -> None:
    heard = SimpleQueue[str]()

    def hear(event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.Error):
            heard.put(event.message)

    with SkywardCluster(provider=sky.Local(), env=settings_in(tmp_path, NO_MODULE), on_event=hear, display="quiet"):
        assert "node0-worker0 cannot join dask: ModuleNotFoundError: No module named 'my_lab_setup'" in heard.get(
            timeout=60
        )


def test_a_python_that_does_not_start_is_in_the_error(tmp_path: Path) -> None:
    assert "No module named 'encodings'" in str(error_of({"PYTHONHOME": str(tmp_path)}))
