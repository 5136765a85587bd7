"""Dask's own cluster and what users of ``distributed`` expect of one: the control of :mod:`test_clusters`.

``make conformance`` runs it; a commit here changes nothing of it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import pytest
from distributed import LocalCluster, Nanny

from support.dask_clusters import ClusterConformance


@pytest.fixture(autouse=True, scope="module")
def scratch() -> Iterator[None]:
    """Dask's own workers make this folder and leave it; their processes leave a resource tracker."""
    folder = Path(tempfile.gettempdir(), "dask-scratch-space")
    folder.mkdir()
    yield
    shutil.rmtree(folder)
    resource_tracker._resource_tracker._stop()


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's own scheduler and workers put their folders on this process's ``sys.path``, and leave them there."""
    monkeypatch.setattr(sys, "path", [*sys.path])


class BrokenNanny(Nanny):
    async def start_unsafe(self) -> NoReturn:
        raise RuntimeError("broken, for a test")


class TestLocalCluster(ClusterConformance):
    threads_per_worker = 2

    def make_cluster(self, *, workers: int, **options: Any) -> LocalCluster:
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=self.threads_per_worker,
            memory_limit="1GiB",
            dashboard_address="127.0.0.1:0",
            **options,
        )

    def make_broken_cluster(self) -> LocalCluster:
        return LocalCluster(n_workers=1, worker_class=BrokenNanny, dashboard_address="127.0.0.1:0")
