"""``python -m benchmarks.scale``: the costs of a client of a thousand workers, in five minutes at most.

It prints the tables, and with the usual sizes puts them into ``docs/scale.md``. Every number is measured, except those
in the table that says that they are calculated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.machine import machine
from benchmarks.report import duration, table, three_digits
from benchmarks.runner import ROOT

__all__ = ["Figures", "growth", "main", "tables"]

Figures = Mapping[str, float]

_WORKERS, _HOSTS, _MACHINES = (10, 100, 1000), 200, 1000
_PAGE = ROOT / "docs/scale.md"
_BEGIN, _END = "<!-- tables of `make bench-scale` -->", "<!-- end of the tables -->"
_TIMEOUT_S = 240
_DESCRIPTORS = 1 << 16
"""Limit of open files to which the client raises its own."""
_CALLS_A_MINUTE = 250
"""Calls that DigitalOcean allows."""


class _Row(NamedTuple):
    title: str
    figure: str
    show: Callable[[float], str] = duration
    goal: str = ""


def _kib(value: float) -> str:
    return f"{three_digits(value / 1024)} KiB"


def _mib(value: float) -> str:
    return f"{three_digits(value / (1 << 20))} MiB"


_LANES = (
    _Row("all control connections open", "controls_s"),
    _Row("all lanes open", "lanes_s"),
    _Row("processor time of both, a worker", "connected_cpu_s"),
    _Row("memory a lane", "bytes_a_lane", _kib, "≤ 200 KiB"),
    _Row("memory a node's control connection", "bytes_a_control", _kib),
    _Row("memory a worker after all of this", "bytes_a_worker_after", _kib),
    _Row("threads that they add", "threads", three_digits),
    _Row("descriptors a worker", "descriptors_a_worker", three_digits),
    _Row("no-op, 100 for each worker: processor time a call", "no_op_cpu_s"),
    _Row("of that, Python's garbage collector", "no_op_collector_s"),
    _Row("time a call", "no_op_s"),
    _Row("10 ms call, 10 for each worker: processor time a call", "nap_cpu_s"),
    _Row("of that, Python's garbage collector", "nap_collector_s"),
    _Row("time a call", "nap_s"),
    _Row("one call after the other: median", "round_trip_p50_s"),
    _Row("99th percentile", "round_trip_p99_s"),
    _Row("`@`, a call on every worker", "broadcast_s"),
    _Row("`@` with a new argument of 1 MiB", "blob_s"),
    _Row("processor time a worker", "blob_cpu_a_worker_s"),
    _Row("times that the client sent it", "blob_from_client", three_digits),
    _Row("depth of the tree of nodes", "blob_depth", three_digits),
    _Row("most that one node sent it", "blob_most_from_one", three_digits),
    _Row("all connections cut, until all are back", "redial_s", goal="< 20 s"),
    _Row("processor time a worker", "redial_cpu_a_worker_s"),
)
_SSH = (
    _Row("all logged in, a command run on each", "logins_s"),
    _Row("processor time a host", "login_cpu_a_host_s"),
    _Row("another command on all of them, a host", "command_s"),
    _Row("control connections and lanes through all sessions", "lanes_s"),
    _Row("threads a host", "threads_a_host_after", three_digits, "≤ 0.5"),
    _Row("memory a host after the login", "bytes_a_host", _kib),
    _Row("memory a host after the calls", "bytes_a_host_after", _kib),
    _Row("descriptors a host", "descriptors_a_host", three_digits),
    _Row("no-op, 100 for each worker: processor time a call", "no_op_cpu_s"),
    _Row("10 ms call, 10 for each worker: processor time a call", "nap_cpu_s"),
    _Row("one call after the other: median", "round_trip_p50_s"),
    _Row("99th percentile", "round_trip_p99_s"),
)
_RENTED = (
    _Row("launched, in the ledger and prepared", "launch_s"),
    _Row("processor time a machine", "launch_cpu_a_machine_s"),
    _Row("API calls", "launch_calls", three_digits),
    _Row("memory a machine", "bytes_a_machine", _kib),
    _Row("terminated and confirmed", "end_s"),
    _Row("processor time a machine", "end_cpu_a_machine_s"),
    _Row("API calls", "end_calls", three_digits),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=_WORKERS)
    parser.add_argument("--hosts", type=int, default=_HOSTS)
    parser.add_argument("--machines", type=int, default=_MACHINES)
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    options = parser.parse_args(arguments)
    quick = ("--quick",) * options.quick
    load, started = os.getloadavg()[0], time.monotonic()
    lanes = {count: _run("many_lanes", count, *quick) for count in options.workers}
    hosts = {options.hosts: _run("many_hosts", options.hosts, *quick)}
    machines = {options.machines: _run("many_machines", options.machines)}
    where = {
        **machine(),
        "load before": f"{load:.1f}",
        "measured": f"{time.strftime('%Y-%m-%d')}, in {time.monotonic() - started:.0f} s",
    }
    text = tables(lanes, hosts, machines, where)
    print(text)
    if (tuple(options.workers), options.hosts, options.machines, quick) == (_WORKERS, _HOSTS, _MACHINES, ()):
        before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        _PAGE.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")


def _run(module: str, count: int, *options: str) -> Figures:
    """Measure in a process of its own."""
    print(f"{module} {count} …", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", str(count), *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return {name: float(value) for name, value in json.loads(done.stdout).items()}


def tables(
    lanes: Mapping[int, Figures],
    hosts: Mapping[int, Figures],
    machines: Mapping[int, Figures],
    where: Mapping[str, str],
) -> str:
    """Return all tables, as Markdown. Pure."""
    lanes = {count: _of_lanes(figures, count) for count, figures in lanes.items()}
    hosts = {count: {**each, "login_cpu_a_host_s": each["logins_cpu_s"] / count} for count, each in hosts.items()}
    machines = {count: _of_machines(figures, count) for count, figures in machines.items()}
    parts = [
        "## Lanes",
        _figures(_LANES, lanes, "workers"),
        "## Cost of a call, most workers ÷ fewest",
        growth(lanes),
        "## SSH sessions",
        _figures(_SSH, hosts, "hosts"),
        "## Rented machines",
        _figures(_RENTED, machines, "machines"),
        "## Calculated from these, not measured",
        _calculated(lanes, hosts, machines),
        "## Where",
        table(["machine", ""], [[name, value] for name, value in where.items()]),
    ]
    return "\n\n".join(parts)


def _of_lanes(figures: Figures, workers: int) -> Figures:
    return {
        **figures,
        "connected_cpu_s": (figures["controls_cpu_s"] + figures["lanes_cpu_s"]) / workers,
        "blob_cpu_a_worker_s": figures["blob_cpu_s"] / workers,
        "redial_cpu_a_worker_s": figures["redial_cpu_s"] / workers,
    }


def _of_machines(figures: Figures, machines: int) -> Figures:
    per_machine = {f"{name}_cpu_a_machine_s": figures[f"{name}_cpu_s"] / machines for name in ("launch", "end")}
    return {**figures, **per_machine}


def _figures(rows: Sequence[_Row], results: Mapping[int, Figures], unit: str) -> str:
    return table(
        ["work", *(f"{count:,} {unit}" for count in results), "goal"],
        [[row.title, *(row.show(each[row.figure]) for each in results.values()), row.goal] for row in rows],
    )


def growth(lanes: Mapping[int, Figures]) -> str:
    """Return by how much a call costs more with the most workers than with the fewest."""
    fewest, most = lanes[min(lanes)], lanes[max(lanes)]

    def ratio(name: str, *, collector: bool) -> str:
        first, last = (
            each[f"{name}_cpu_s"] - (0.0 if collector else each[f"{name}_collector_s"]) for each in (fewest, most)
        )
        return three_digits(last / first)

    rows = (("no-op", "no_op"), ("10 ms call", "nap"))
    return table(
        ["processor time of the client a call", "reached", "goal", "without the garbage collector"],
        [[title, ratio(name, collector=True), "< 1.3", ratio(name, collector=False)] for title, name in rows],
    )


def _calculated(lanes: Mapping[int, Figures], hosts: Mapping[int, Figures], machines: Mapping[int, Figures]) -> str:
    (ssh,), (rented,) = hosts.values(), machines.values()
    most = lanes[max(lanes)]
    minutes = (rented["launch_calls"] + rented["end_calls"]) / _CALLS_A_MINUTE
    return table(
        ["", ""],
        [
            [
                f"lanes within {_DESCRIPTORS:,} descriptors, each on a node of its own",
                f"{_DESCRIPTORS / most['descriptors_a_worker']:,.0f}",
            ],
            [
                "seconds of processor in which one client opens 10,000 control connections and lanes",
                three_digits(10_000 * most["connected_cpu_s"]),
            ],
            [f"SSH hosts within {_DESCRIPTORS:,} descriptors", f"{_DESCRIPTORS / ssh['descriptors_a_host']:,.0f}"],
            [
                f"minutes for the calls of {max(machines):,} machines, at DigitalOcean's {_CALLS_A_MINUTE} a minute",
                three_digits(minutes),
            ],
        ],
    )


if __name__ == "__main__":
    main()
