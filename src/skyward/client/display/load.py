"""Load of a pool's nodes and its running cost, from the latest events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyward import events as ev
from skyward.client.display.words import money, price

__all__ = ["FleetLoad"]

_ROWS = 8
_MIB_PER_GIB = 1024


class FleetLoad:
    """Latest metrics of each node, and the cost so far. Times are seconds of one clock, which includes sleep."""

    def __init__(self) -> None:
        self._nodes: dict[int, ev.Metrics] = {}
        self._cost: ev.CostUpdate | None = None
        self._cost_at_s = 0.0

    def note(self, event: ev.SkywardEvent, now_s: float) -> None:
        """Record an event about load or cost; ignore others."""
        match event:
            case ev.Metrics():
                self._nodes[event.node] = event
            case ev.CostUpdate():
                self._cost, self._cost_at_s = event, now_s
            case ev.NodeUnreachable() | ev.InstanceStopping():
                gone = [rank for rank, node in self._nodes.items() if node.instance_id == event.instance_id]
                for rank in gone:
                    del self._nodes[rank]
            case _:
                pass

    def words(self, now_s: float) -> str:
        """Return load, as ranges over the nodes, and cost in one line; empty while both are unknown."""
        return ", ".join([*_ranges(list(self._nodes.values())), *self._cost_words(now_s)])

    def rows(self) -> list[Sequence[str]]:
        """Return the cells of a table with a row for each of the first nodes."""
        return [_row(node) for node in self._sorted()[:_ROWS]]

    def footer(self, now_s: float) -> list[str]:
        """Return the lines below the table: the other nodes together, and the cost."""
        rest = self._sorted()[_ROWS:]
        others = [f"{len(rest)} more: {', '.join(_ranges(rest))}"] if rest else []
        cost = ", ".join(self._cost_words(now_s))
        return [*others, cost] if cost else others

    def _sorted(self) -> list[ev.Metrics]:
        # A copy: any thread that prints may draw while an event removes a node from the mapping.
        return [node for _, node in sorted(self._nodes.items())]

    def _cost_words(self, now_s: float) -> list[str]:
        if self._cost is None or not (self._cost.accumulated_cost or self._cost.hourly_rate):
            return []
        since = self._cost.hourly_rate * (now_s - self._cost_at_s) / 3600
        return [f"{money(self._cost.accumulated_cost + since)} so far", price(self._cost.hourly_rate)]


def _row(node: ev.Metrics) -> Sequence[str]:
    cells = [
        f"node {node.node}",
        f"cpu {node.cpu_percent:.0f} %",
        f"memory {_of(node.memory_used_mb, node.memory_total_mb)}",
    ]
    if node.gpu_utilization is not None:
        cells.append(f"gpu {node.gpu_utilization:.0f} %")
    if node.gpu_memory_used_mb is not None and node.gpu_memory_total_mb is not None:
        cells.append(f"gpu memory {_of(node.gpu_memory_used_mb, node.gpu_memory_total_mb)}")
    if node.gpu_temperature is not None:
        cells.append(f"{node.gpu_temperature:.0f} °C")
    return cells


def _of(used_mib: float, total_mib: float) -> str:
    return f"{used_mib / _MIB_PER_GIB:.1f} of {total_mib / _MIB_PER_GIB:.1f} GiB"


def _ranges(nodes: Sequence[ev.Metrics]) -> list[str]:
    """Return each figure's range over the nodes that report it."""
    gpu_memory = [
        100 * node.gpu_memory_used_mb / node.gpu_memory_total_mb
        for node in nodes
        if node.gpu_memory_used_mb is not None and node.gpu_memory_total_mb
    ]
    ranges = [
        _range("cpu", (node.cpu_percent for node in nodes)),
        _range("memory", (node.memory_percent for node in nodes)),
        _range("gpu", (node.gpu_utilization for node in nodes)),
        _range("gpu memory", gpu_memory),
    ]
    return [each for each in ranges if each]


def _range(what: str, values: Iterable[float | None]) -> str:
    known = [round(value) for value in values if value is not None]
    if not known:
        return ""
    least, most = min(known), max(known)
    return f"{what} {least} %" if least == most else f"{what} {least}-{most} %"
