"""Tables as text and HTML; of a pool, the load of its nodes and, in ``skyward top`` and notebooks, its workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

from skyward import events as ev
from skyward.display.words import bill, duration, money, plural, price, progress_words
from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot
from skyward.wire.terminal import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

_DRAWN_NODES: Final = 8
_SHOWN_WORKERS: Final = 40
_MIB_PER_GIB: Final = 1024


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
                ranks = [rank for rank, node in self._nodes.items() if node.instance_id == event.instance_id]
                for rank in ranks:
                    del self._nodes[rank]
            case _:
                pass

    def words(self, now_s: float) -> str:
        """Return load, as ranges over the nodes, and cost in one line; empty while both are unknown."""
        return ", ".join([*_ranges(list(self._nodes.values())), *self._cost_words(now_s)])

    def rows(self) -> list[Sequence[str]]:
        """Return the cells of a table with a row for each of the first nodes."""
        return [_row(node) for node in self._sorted()[:_DRAWN_NODES]]

    def footer(self, now_s: float) -> list[str]:
        """Return the lines below the table: the other nodes together, and the cost."""
        rest = self._sorted()[_DRAWN_NODES:]
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


def _figures(load: ev.Metrics | None, mark: str) -> dict[str, str]:
    """Return the figures that a node reports, by name; ``mark`` stands between used and present memory."""
    if load is None:
        return {}
    figures = {"cpu": f"{load.cpu_percent:.0f} %", "memory": _gib(load.memory_used_mb, mark, load.memory_total_mb)}
    if load.gpu_utilization is not None:
        figures["gpu"] = f"{load.gpu_utilization:.0f} %"
    if load.gpu_memory_used_mb is not None and load.gpu_memory_total_mb is not None:
        figures["gpu memory"] = _gib(load.gpu_memory_used_mb, mark, load.gpu_memory_total_mb)
    return figures


def _row(node: ev.Metrics) -> Sequence[str]:
    temperature = [] if node.gpu_temperature is None else [f"{node.gpu_temperature:.0f} °C"]
    return [f"node {node.node}", *(f"{name} {text}" for name, text in _figures(node, " of ").items()), *temperature]


def _gib(used_mib: float, mark: str, total_mib: float) -> str:
    return f"{used_mib / _MIB_PER_GIB:.1f}{mark}{total_mib / _MIB_PER_GIB:.1f} GiB"


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
    return [text for text in ranges if text]


def _range(what: str, values: Iterable[float | None]) -> str:
    known = [round(value) for value in values if value is not None]
    if not known:
        return ""
    least, most = min(known), max(known)
    return f"{what} {least} %" if least == most else f"{what} {least}-{most} %"


_COLUMNS: Final = ("node", "worker", "call", "for", "behind", "cpu", "memory", "gpu", "gpu memory", "$/h")
_ALWAYS: Final = ("node", "worker", "call")
_TITLE, _ROW = "margin:0 0 .3em", "text-align:left;padding:.1em 1em .1em 0;white-space:nowrap"


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a header as text."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, style: str = "") -> str:
    """Return a table with a header as HTML: escaped, each cell with this style."""
    styled = f' style="{style}"' if style else ""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{styled}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """Texts of a view, without control characters.

    Attributes:
        title: the pool, its provider, its age and its size.
        lines: counts of calls, progress, the latest failure, the cost.
        columns: headers of the table; a column that would be empty is left out.
        rows: its cells, a row for each worker, and one for each node that has none yet.
    """

    title: str
    lines: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, pool: PoolSnapshot, *, closed: bool = False, dated: bool = False) -> PoolView:
        """Return the view of a snapshot.

        Args:
            pool: the snapshot.
            closed: whether the pool has been closed since.
            dated: whether to give the time of the opening in place of the age, which changes all the time.
        """
        workers = sum(len(node.workers) for node in pool.nodes)
        size = f"{plural(len(pool.nodes), 'node')}, {plural(workers, 'worker')}"
        title = f"{pool.pool_id} · {pool.provider} · {_state(pool, closed=closed, dated=dated)} · {size}"
        rows = [row for node in pool.nodes for row in _node_rows(node)]
        columns = tuple(name for name in _COLUMNS if name in _ALWAYS or any(row.get(name) for row in rows))
        lines = [_calls(pool), *map(progress_words, pool.works)]
        lines += [f"last failure: {pool.last_failure}"] if pool.last_failure else []
        cost = bill(pool.cost, pool.cost_by_provider)
        lines += [f"{cost} so far · {price(pool.hourly_rate)}"] if pool.cost or pool.hourly_rate else []
        lines += [f"{len(rows) - _SHOWN_WORKERS} more workers are not shown"] if len(rows) > _SHOWN_WORKERS else []
        return cls(
            title=harmless(title),
            lines=tuple(map(harmless, lines)),
            columns=columns,
            rows=tuple(tuple(harmless(row.get(name, "")) for name in columns) for row in rows[:_SHOWN_WORKERS]),
        )

    def rich(self) -> RenderableType:
        """Return the view for a terminal."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in self.columns:
            table.add_column(Text(name), no_wrap=True, overflow="ellipsis", ratio=1 if name == "call" else None)
        for row in self.rows:
            table.add_row(*map(Text, row))
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in self.lines]
        return Group(Text(self.title, style="bold", no_wrap=True, overflow="ellipsis"), *lines, table)

    def html(self) -> str:
        """Return the view for a notebook: escaped, without scripts and outside resources."""
        lines = "<br>".join(map(escape, self.lines))
        table = html_table(self.columns, self.rows, style=_ROW)
        return f'<div><p style="{_TITLE}"><b>{escape(self.title)}</b><br>{lines}</p>{table}</div>'

    def text(self) -> str:
        """Return the lines above the table."""
        return "\n".join([self.title, *self.lines])


def _state(pool: PoolSnapshot, *, closed: bool, dated: bool) -> str:
    if closed:
        return f"closed after {duration(pool.open_s)}"
    if dated:
        return f"open since {time.strftime('%H:%M:%S', time.localtime(round(pool.taken_at - pool.open_s)))}"
    return f"open for {duration(pool.open_s)}"


def _calls(pool: PoolSnapshot) -> str:
    counts = {"running": pool.running, "queued": pool.queued, "done": pool.done}
    counts |= {name: count for name, count in {"failed": pool.failed, "cancelled": pool.cancelled}.items() if count}
    return "calls: " + " · ".join(f"{count:,} {name}" for name, count in counts.items())


def _node_rows(node: NodeSnapshot) -> list[dict[str, str]]:
    """Return a row for each worker, by column; the first one has the node's own cells too."""
    own = {"node": f"{node.node}" if node.state == "ready" else f"{node.node} ({node.state})"}
    own |= _figures(node.metrics, "/") | ({"$/h": f"{node.price_per_hour:.3f}"} if node.price_per_hour else {})
    first, *others = map(_worker_cells, node.workers) if node.workers else ({},)
    return [own | first, *others]


def _worker_cells(worker: WorkerSnapshot) -> dict[str, str]:
    return {
        "worker": f"{worker.worker}",
        "call": worker.call or worker.state,
        "for": "" if worker.seconds is None else duration(worker.seconds),
        "behind": f"{worker.waiting}" if worker.waiting else "",
    }
