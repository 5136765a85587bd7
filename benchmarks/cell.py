"""``python -m benchmarks.cell ROW PEER FILE``: one measurement, in a process of its own, written to FILE as JSON."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.rows import ROWS


def measure(row: str, peer: str) -> dict[str, Any]:
    """Return the measurement, or the reason for its absence."""
    try:
        return asdict(ROWS[row].measure(peer))
    except ModuleNotFoundError as error:
        return {"error": f"absent: {error}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], sys.argv[2])), encoding="utf-8")
