"""docs/integrations/index.md names tests that exist, and every library of the specification."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[4]
LIBRARIES = [
    "scikit-learn",
    "joblib",
    "Dask",
    "dask-ml",
    "concurrent.futures",
    "asyncio",
    "PyTorch",
    "Keras",
    "JAX",
    "TensorFlow",
    "Transformers",
    "Optuna",
    "skorch",
    "Notebooks",
    "OpenTelemetry",
]


def test_each_library_has_a_row_with_tests_that_exist(
    tables: Callable[[str], dict[str, list[dict[str, str]]]],
) -> None:
    ways, rows = tables("integrations/index.md").values()

    for table in (ways, rows):
        assert {name for name in LIBRARIES if not any(name in row["Library"] for row in table)} == set()
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", row["Tests"])
        assert files, row
        assert [file for file in files if not (ROOT / file).is_file()] == []
