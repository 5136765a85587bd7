"""The page about the results. Pure: text in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.results import Result, Verdict, errors, figures, samples, verdicts
from benchmarks.rows import Goal, Limit, Row

__all__ = ["Circumstances", "duration", "page", "table", "tables", "three_digits"]

_HOW = """\
`make bench` measures the costs of Skyward on one machine, next to other libraries that run Python calls in processes:
loky (joblib's own executor), Dask's `LocalCluster`, Ray, ipyparallel, Parsl's `HighThroughputExecutor` and HyperQueue's
`LocalCluster`. Each has two workers and is used as in its documentation. HyperQueue runs programs: a function is an
interpreter that calls it and returns nothing, and its client asks once a second whether a job is done. It therefore
makes a hundredth of the calls, or a twentieth of `/bin/true` as *hyperqueue, programs*, and a `gather` counts as many
times. It and Parsl take part in one round only. TaPS, the Task Performance Suite, is not among the rows: the package
index has another project of that name.
[Where the time goes](where-the-time-goes.md) shows the rows under a profiler.
This page is the output of the last whole run. In the rows of `SkywardCluster` all peers do Dask's work: *skyward* is a
`SkywardCluster` on one node, *dask* a `LocalCluster` as it comes, *dask, TLS* one that encrypts as a pool always does.

The rows of *50 ms, 100 Mbit/s* have four hosts: SSH servers of this machine, behind a proxy that makes of the loopback
one line of 50 ms there and back and 100 Mbit/s each way, which all four share. Hosts reach each other without it. There
*skyward* is a pool on `SSH(hosts=[…])`, and *dask, SSH* an `SSHCluster` whose client reaches the scheduler, over plain
TCP, through the same line. In the rows of *a forwarded port* there is no line: a port that Skyward forwards over SSH,
beside `ssh -L`.

Every measurement runs in a process of its own, native libraries are held to one thread, and the peers take turns, round
by round, so that the noise of the machine meets them alike. A ratio is the median over the rounds of the peer's median
time divided by Skyward's in the same round. Nothing is repeated because it looked bad.
"""

_NOTES = """\
- *copies*: the memory of the node's processes at the peak, less their memory before the array came, in units of the
  array: their private memory, and every mapped file once. Measured in runs that are not timed.
- *stall*: by how much a 5 ms ticker on the event loop was late at most while the data travelled.
- The time to make a 500 MB result is taken off. Both ends read a byte of every page.
- *shuffle* and *reduction* start from data in the workers' memory. The work differs a little each time, so that no
  result can be one of the time before.
- *at once ÷ alone*: a reduction and 10,000 calls on the same two workers start together; each is compared with itself
  alone just before. They share two cores, so that each may well take longer: *both, at once ÷ in turn* says what it
  costs to do both at once.
- *round_trips*: a call's time in round trips of the line, which are measured with a byte and its echo on the same line.
  TCP's slow start is not imitated.
- *sent*: what went up the line while the array did, SSH's own share included. On `SSHCluster` it is scattered first.
- *least_us*: the quickest block of a hundred calls. *client_cpu* and *node_cpu*: processor time, of a call in µs or of
  one run in s; the node's is that of all processes but the client. Goals by processor time add both.
- *dispatch* is a simulation of 100,000 short calls in one process, without workers.
"""

_AGAIN = """\
```console
$ make bench                           # everything; writes this page
$ make bench ROWS="round_trip gather"  # these rows, only printed
$ make bench QUICK=1                   # one round, only printed
```
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Where and when: name and value of whatever is worth knowing, and the versions of what took part."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]


def page(results: Sequence[Result], rows: Mapping[str, Row], where: Circumstances, notes: str) -> str:
    """Return the whole page, as Markdown; ``notes`` has the causes of missed goals, by row."""
    machine = table(["machine", ""], [[name, value] for name, value in where.machine.items()])
    versions = table(["package", "version"], [[name, value] for name, value in where.versions.items()])
    _, *sections = re.split(r"^# (.+)$", "\n" + notes, flags=re.MULTILINE)
    notes_by_row = dict(zip(sections[::2], sections[1::2], strict=True))
    parts = [
        "# Benchmarks",
        _HOW.strip(),
        "![How many times as fast as its peers Skyward is, and the goals](benchmarks.svg)",
        tables(results, rows),
        _NOTES.strip(),
        "## Missed targets, with causes",
        _missed(results, rows, notes_by_row),
        "## Where",
        machine,
        versions,
        "## Again",
        _AGAIN.strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tables(results: Sequence[Result], rows: Mapping[str, Row]) -> str:
    """Return the goals, the times and the other figures."""
    parts = ["## Goals", _goals(results, rows), "## Times", _times(results, rows)]
    if other := _figures(results, rows):
        parts += ["## Other figures", other]
    return "\n\n".join(parts)


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def _goals(results: Sequence[Result], rows: Mapping[str, Row]) -> str:
    lines = [
        [row.title, *_goal(verdict), verdict.outcome]
        for key, row in rows.items()
        for verdict in verdicts(results, key, row)
    ]
    return table(["work", "measure", "reached", "goal", ""], _without_repeats(lines))


def _missed(results: Sequence[Result], rows: Mapping[str, Row], notes: Mapping[str, str]) -> str:
    """Return a list of the rows that miss a goal: by how much, and what is known about it."""
    lines: list[str] = []
    for key, row in rows.items():
        missed = [(*_goal(verdict), verdict.outcome) for verdict in verdicts(results, key, row) if not verdict.met]
        goals = [
            f"{measure}: {reached or 'none'} ({wanted}, {outcome})" for measure, reached, wanted, outcome in missed
        ]
        note = " ".join(notes.get(key, "Not looked into yet.").split())
        lines += [f"- *{row.title}*: {'; '.join(goals)}. {note}"] if missed else []
    return "\n".join(lines) or "None."


def _goal(verdict: Verdict) -> tuple[str, str, str]:
    """Return the table of goals: measure, result, target."""
    match verdict.goal:
        case Goal(peer=peer, at_least=bound, by=by):
            measure = f"times as fast as {peer}" if by == "the clock" else f"processor time of {peer} ÷ ours"
            wanted = f"≥ {three_digits(bound)}"
        case Limit(text=measure, at_most=bound):
            wanted = f"≤ {three_digits(bound)}"
    return measure, "" if verdict.value is None else three_digits(verdict.value), wanted


def _times(results: Sequence[Result], rows: Mapping[str, Row]) -> str:
    peers = list(dict.fromkeys(peer for row in rows.values() for peer in row.peers))
    lines = [
        [row.title, *(_time(results, key, peer) if peer in row.peers else "" for peer in peers)]
        for key, row in rows.items()
        if any(samples(results, key, peer) or errors(results, key, peer) for peer in row.peers)
    ]
    return "Medians, with the least and the most that was seen.\n\n" + table(["work", *peers], lines)


def _time(results: Sequence[Result], row: str, peer: str) -> str:
    values, failed = samples(results, row, peer), errors(results, row, peer)
    if not values:
        return failed
    text = f"**{duration(median(values))}** ({duration(min(values))} to {duration(max(values))})"
    return f"{text}; then {failed}" if failed else text


def _figures(results: Sequence[Result], rows: Mapping[str, Row]) -> str:
    found = {(key, peer): figures(results, key, peer) for key, row in rows.items() for peer in row.peers}
    peers = list(dict.fromkeys(peer for (_, peer), values in found.items() if values))
    lines = [
        [row.title, name, *(_figure(found.get((key, peer), {}), name) for peer in peers)]
        for key, row in rows.items()
        for name in dict.fromkeys(name for peer in row.peers for name in found[key, peer])
    ]
    return table(["work", "figure", *peers], _without_repeats(lines)) if lines else ""


def _figure(values: Mapping[str, float], name: str) -> str:
    return three_digits(values[name]) if name in values else ""


def three_digits(value: float) -> str:
    """Three digits, and all of those before the decimal point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _without_repeats(lines: Iterable[list[str]]) -> list[list[str]]:
    """Leave a line's first cell empty where it says what the one above said."""
    said = ""
    shorter: list[list[str]] = []
    for first, *rest in lines:
        shorter.append(["" if first == said else first, *rest])
        said = first
    return shorter


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table, as Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
