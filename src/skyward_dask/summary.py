"""What a notebook shows of a fleet, as rows of Dask's own table."""

from __future__ import annotations

from collections import Counter
from html import escape

from skyward.submission import FleetStatus
from skyward_dask.scaling import staying

__all__ = ["fleet_rows", "scaling_table"]

_CELL = '<td style="text-align: left;"><strong>{}:</strong> {}</td>'


def fleet_rows(status: FleetStatus) -> str:
    """Nodes, accelerators, how they were bought and what they have cost, as two rows of HTML."""
    nodes = staying(status)
    ready = sum(node.state == "ready" for node in nodes)
    spot = sum(node.spot for node in nodes)
    devices = Counter(name for node in nodes for name in node.accelerators)
    per_hour = sum(node.price_per_hour or 0.0 for node in nodes)
    return _row(
        ("Nodes", f"{ready}" if ready == status.wanted else f"{ready} of {status.wanted}"),
        ("Accelerators", ", ".join(f"{name} x {count}" for name, count in devices.items()) or "none"),
    ) + _row(
        ("Bought", f"{spot} spot, {len(nodes) - spot} on demand"),
        ("Cost so far", f"{status.cost:.2f} USD, {per_hour:.2f} USD per hour"),
    )


def scaling_table(*, mode: str, observed: int, wanted: int, status: FleetStatus | None) -> str:
    """How many workers and nodes there are and should be, as a table of HTML."""
    workers = f"{observed}" if observed == wanted else f"{observed} / {wanted}"
    lines = [("Scaling mode", mode), ("Workers", workers)]
    if status is not None:
        lines.append(("Nodes", f"{status.wanted}, of {status.workers_per_node} workers each"))
    return "<table>" + "".join(map(_row, lines)) + "</table>"


def _row(*cells: tuple[str, str]) -> str:
    return "<tr>" + "".join(_CELL.format(escape(name), escape(value)) for name, value in cells) + "</tr>"
