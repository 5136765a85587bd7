from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A worker for the tests of one module."""
    with WorkerProcess() as worker:
        yield worker
