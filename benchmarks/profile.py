"""``python -m benchmarks.profile [ROW]``: where a row's processor time goes; without one, a page of the docs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from benchmarks import arrays, graphs, measured, peers
from benchmarks.observe import CELL_VARIABLE, profile_threads, profiled_seconds
from benchmarks.report import duration, table
from benchmarks.rows import ROWS
from benchmarks.runner import ONE_THREAD, ROOT

Parts = Counter[tuple[str, str]]

_MODULES = 6
_OPENINGS = ("startup", "next_pool", "many_nodes", "dask_startup")
_LEFT_OUT = ("dispatch", "idle", "forward", "wide", "ssh", "warm")

_PAGE = """\
# Where the time goes

Processor time of the client and of the workers in the rows of [benchmarks](benchmarks.md), by module: cProfile in every
thread, by the thread's own clock, so that what waits costs nothing. Functions in C count with the module that calls
them. Profiling slows small functions most, so the *share* is what to look at. *Time* is that share of the processor
time of a call, or of a run of the work, measured without a profile just before; the node's has its other processes in
it. Rows without a time are profiled from the opened pool on, imports of the workers included. Where the row is about
opening a pool, only the client is profiled, from the beginning. The rows over SSH are not here.

`python -m benchmarks.profile ROW` prints the table of one row, `python -m benchmarks.profile` writes this page. It
needs Python 3.11: later ones profile one thread at a time.
"""


def main(arguments: Sequence[str]) -> None:
    if arguments:
        print(profile(arguments[0]))
        return
    parts = [_PAGE]
    for key, row in ROWS.items():
        if not key.startswith(_LEFT_OUT):
            command = [sys.executable, "-m", "benchmarks.profile", key]
            output = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
            print(key, "done" if output.returncode == 0 else output.stderr[-500:], flush=True)
            parts += [
                f"## {row.title}",
                f"`python -m benchmarks.profile {key}`",
                output.stdout or "It could not be profiled.",
            ]
            text = "\n\n".join(part.strip() for part in parts)
            (ROOT / "docs/where-the-time-goes.md").write_text(text + "\n", encoding="utf-8")


def profile(key: str) -> str:
    """Measure a row, profile it, and return its table."""
    os.environ.update(ONE_THREAD | {CELL_VARIABLE: f"profile-{os.getpid()}"})
    figures = ROWS[key].measure("skyward").figures if key not in _OPENINGS else {}
    arrays.peak_memory = lambda _: nullcontext(SimpleNamespace(extra_bytes=0))
    seconds: dict[str, Parts] = {}
    profile_threads()
    if key not in _OPENINGS:
        peers.PEERS["skyward"] = peers.CLUSTERS["skyward"] = _profiled(peers.skyward, seconds, _of_peer)
        graphs.CLUSTERS["skyward"] = _profiled(graphs.CLUSTERS["skyward"], seconds, _of_cluster)
    ROWS[key].measure("skyward")
    lines = [line for each in (seconds or {"client": profiled_seconds()}).items() for line in _lines(*each, figures)]
    return table(["process", "module", "share", "time", "most of it"], lines)


def _lines(process: str, parts: Parts, figures: Mapping[str, float]) -> Iterator[list[str]]:
    measured_s = figures.get(f"{process}_cpu_s", figures.get(f"{process}_cpu_us", 0) / 1e6)
    modules: Counter[str] = Counter()
    for (module, _), seconds in parts.items():
        modules[module] += seconds
    for module, seconds in modules.most_common(_MODULES):
        share = seconds / modules.total()
        functions = Counter({function: spent for (at, function), spent in parts.items() if at == module})
        most = ", ".join(f"`{name}` {spent / modules.total():.0%}" for name, spent in functions.most_common(3))
        yield [process, f"`{module}`", f"{share:.0%}", duration(share * measured_s) if measured_s else "", most]


def _profiled(opener: Callable[..., Any], seconds: dict[str, Parts], broadcast: Callable[[Any], Any]) -> Any:
    """Open as ``opener`` does, and profile the client and the workers: what is measured, or else all."""

    @contextmanager
    def opened(**options: Any) -> Iterator[Any]:
        with opener(**options) as peer:
            on_workers = broadcast(peer)
            on_workers(profile_threads)
            measured.processor_time = lambda: _block(on_workers, seconds)
            with _block(on_workers, seconds):
                yield peer

    return opened


@contextmanager
def _block(on_workers: Callable[[Any], Any], seconds: dict[str, Parts]) -> Iterator[dict[str, float]]:
    node, client = sum(on_workers(profiled_seconds), Counter()), profiled_seconds()
    yield {}
    client, node = profiled_seconds() - client, sum(on_workers(profiled_seconds), Counter()) - node
    seconds.update({} if seconds else {"client": client, "node": node})


def _of_peer(peer: peers.Peer) -> Any:
    return peer.broadcast


def _of_cluster(cluster: Any) -> Any:
    import skyward as sky

    return lambda fn: sky.compute(fn)() @ cluster.pool


if __name__ == "__main__":
    main(sys.argv[1:])
