"""Picture of `skyward top`, from the answer of `skyward top --json` that a real pool gave."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

from rich.console import Console

from skyward.display.tables import PoolView
from skyward.events.snapshot import PoolSnapshot

ANSWER = Path(__file__).with_name("top.json")


def draw() -> str:
    """Return the picture, without the fonts that rich would fetch from elsewhere."""
    (pool,) = json.loads(ANSWER.read_text(encoding="utf-8"))["pools"]
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(PoolView.of(PoolSnapshot.from_dict(pool)).rich())
    picture = console.export_svg(title="skyward top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
