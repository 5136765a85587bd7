"""View of a pool's snapshot: a table of its workers, the same for terminals (rich) and for notebooks (HTML)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

from skyward.client.display.escapes import harmless
from skyward.client.display.words import duration, money, plural, price, progress_words
from skyward.events import Metrics
from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PoolView"]

_ROWS: Final = 40
_MIB_PER_GIB: Final = 1024
_COLUMNS: Final = ("node", "worker", "call", "for", "behind", "cpu", "memory", "gpu", "gpu memory", "$/h")
_ALWAYS: Final = ("node", "worker", "call")
_TITLE, _ROW = "margin:0 0 .3em", "text-align:left;padding:.1em 1em .1em 0;white-space:nowrap"


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
    def of(cls, pool: PoolSnapshot, *, closed: bool = False, dated: bool = False, rows: int = _ROWS) -> PoolView:
        """Return the view of a snapshot.

        Args:
            pool: the snapshot.
            closed: whether the pool has been closed since.
            dated: whether to give the time of the opening in place of the age, which changes all the time.
            rows: maximum number of rows; the others are counted.
        """
        workers = sum(len(node.workers) for node in pool.nodes)
        size = f"{plural(len(pool.nodes), 'node')}, {plural(workers, 'worker')}"
        title = f"{pool.pool_id} · {pool.provider} · {_state(pool, closed=closed, dated=dated)} · {size}"
        cells = [row for node in pool.nodes for row in _node_rows(node)]
        shown = [index for index, name in enumerate(_COLUMNS) if name in _ALWAYS or any(row[index] for row in cells)]
        lines = [_calls(pool), *map(progress_words, pool.works)]
        lines += [f"last failure: {pool.last_failure}"] if pool.last_failure else []
        lines += [f"{money(pool.cost)} so far · {price(pool.hourly_rate)}"] if pool.cost or pool.hourly_rate else []
        lines += [f"{len(cells) - rows} more workers are not shown"] if len(cells) > rows else []
        return cls(
            title=harmless(title),
            lines=tuple(map(harmless, lines)),
            columns=tuple(_COLUMNS[index] for index in shown),
            rows=tuple(tuple(harmless(row[index]) for index in shown) for row in cells[:rows]),
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
        head = "".join(f'<th style="{_ROW}">{escape(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        return (
            f'<div><p style="{_TITLE}"><b>{escape(self.title)}</b><br>{lines}</p>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def text(self) -> str:
        """Return the lines above the table."""
        return "\n".join([self.title, *self.lines])


def _state(pool: PoolSnapshot, *, closed: bool, dated: bool) -> str:
    if closed:
        return f"closed after {duration(pool.open_s)}"
    if dated:
        return f"open since {time.strftime('%H:%M:%S', time.localtime(round(pool.taken_at - pool.open_s)))}"
    return f"open for {duration(pool.open_s)}"


def _cell(text: str) -> str:
    return f'<td style="{_ROW}">{escape(text)}</td>'


def _calls(pool: PoolSnapshot) -> str:
    counts = {"running": pool.running, "queued": pool.queued, "done": pool.done}
    counts |= {name: count for name, count in {"failed": pool.failed, "cancelled": pool.cancelled}.items() if count}
    return "calls: " + " · ".join(f"{count:,} {name}" for name, count in counts.items())


def _node_rows(node: NodeSnapshot) -> list[Sequence[str]]:
    name = f"{node.node}" if node.state == "ready" else f"{node.node} ({node.state})"
    workers = [_worker_cells(worker) for worker in node.workers] or [("", "", "", "")]
    costs = "" if not node.price_per_hour else f"{node.price_per_hour:.3f}"
    own: tuple[str, ...] = (*_load_cells(node.metrics), costs)
    return [
        (name if first else "", *cells, *(own if first else ("",) * len(own)))
        for first, cells in ((index == 0, cells) for index, cells in enumerate(workers))
    ]


def _worker_cells(worker: WorkerSnapshot) -> Sequence[str]:
    taken = "" if worker.seconds is None else duration(worker.seconds)
    return f"{worker.worker}", worker.call or worker.state, taken, f"{worker.waiting}" if worker.waiting else ""


def _load_cells(load: Metrics | None) -> Sequence[str]:
    if load is None:
        return ("",) * 4
    gpu = "" if load.gpu_utilization is None else f"{load.gpu_utilization:.0f} %"
    gpu_memory = ""
    if load.gpu_memory_used_mb is not None and load.gpu_memory_total_mb is not None:
        gpu_memory = _of(load.gpu_memory_used_mb, load.gpu_memory_total_mb)
    return f"{load.cpu_percent:.0f} %", _of(load.memory_used_mb, load.memory_total_mb), gpu, gpu_memory


def _of(used_mib: float, total_mib: float) -> str:
    return f"{used_mib / _MIB_PER_GIB:.1f}/{total_mib / _MIB_PER_GIB:.1f} GiB"
