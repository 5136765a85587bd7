"""The rows of the table: what is measured, with whom, and the goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks import arrays, calls, forwarding, graphs, learning, pools, ssh_opening, streams, wide_area
from benchmarks.measured import Measured

__all__ = ["ONCE", "ROWS", "Goal", "Limit", "Row"]

ALL = ("skyward", "loky", "dask", "ray", "ipyparallel")
ONCE = ("parsl", "hyperqueue", "hyperqueue, programs")
"""Peers that take part in the first round only: their calls, or their starts, take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How many times as fast as ``peer`` Skyward wants to be, at least; or how many times less time of processors."""

    peer: str
    at_least: float
    by: Literal["the clock", "processor time"] = "the clock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What one of Skyward's own figures may be, at most; ``text`` says what it is."""

    figure: str
    at_most: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of work.

    Attributes:
        title: what is done.
        measure: does it with the peer of that name.
        peers: with whom; Skyward first.
        goals: what is wanted.
        rounds: how often all peers take their turn.
        timeout_s: after which a peer is ended and said to have taken too long.
    """

    title: str
    measure: Callable[[str], Measured]
    peers: tuple[str, ...] = ("skyward",)
    goals: tuple[Goal | Limit, ...] = ()
    rounds: int = 3
    timeout_s: float = 60


_ONE_COPY = Limit(figure="copies", at_most=1.05, text="copies of the array on the node at the peak")
_STALLS = (
    Limit(figure="client_stall_s", at_most=0.1, text="longest stall of the client's loop, s"),
    Limit(figure="worker_stall_s", at_most=0.1, text="longest stall of a worker's loop, s"),
)
_FLAT = (
    Limit(figure="client_growth_mb", at_most=20, text="growth of the client's memory, MB"),
    Limit(figure="node_growth_mb", at_most=20, text="growth of the node's memory, MB"),
)
_WIDE_AREA = ("skyward", wide_area.DASK)
_FORWARDING = ("skyward", "OpenSSH")
_DASK_FRONT_END = ("skyward", "dask", "dask, TLS")
_AS_DASK = (Goal(peer="dask", at_least=1 / 1.05),)


def _beside_loky(at_least: float) -> tuple[Goal, Goal]:
    return Goal(peer="loky", at_least=at_least), Goal(peer="loky", at_least=at_least, by="processor time")


def _processor_time(*, client_us: float, node_us: float) -> tuple[Limit, Limit]:
    return (
        Limit(figure="client_cpu_us", at_most=client_us, text="processor time of a call, client, µs"),
        Limit(figure="node_cpu_us", at_most=node_us, text="processor time of a call, node, µs"),
    )


ROWS: dict[str, Row] = {
    "round_trip": Row(
        title="no-op round trip, `>>`",
        measure=calls.round_trip,
        peers=(*ALL, "parsl", "hyperqueue"),
        goals=(
            *(Goal(peer="dask", at_least=25), Goal(peer="ray", at_least=3), Goal(peer="loky", at_least=1)),
            Limit(figure="least_us", at_most=120, text="the quickest hundred, µs a call"),
            *_processor_time(client_us=70, node_us=70),
        ),
    ),
    "gather": Row(
        title="`gather` of 10,000 no-ops",
        measure=calls.gather,
        peers=("skyward", "loky", "dask", "ray", "parsl", "hyperqueue", "hyperqueue, programs"),
        goals=(
            *(Goal(peer="dask", at_least=50), Goal(peer="ray", at_least=12), Goal(peer="loky", at_least=3)),
            *_processor_time(client_us=8, node_us=10),
        ),
        timeout_s=120,
    ),
    "stream_items": Row(
        title="a generator of 1,000,000 numbers, read one by one",
        measure=streams.items,
        goals=(Limit(figure="first_item_s", at_most=1, text="time to the first of them, s"), *_FLAT),
        rounds=1,
        timeout_s=120,
    ),
    "stream_calls": Row(
        title="`gather(..., stream=True)` of 1,000,000 no-ops from a generator",
        measure=streams.calls,
        goals=(Limit(figure="first_item_s", at_most=1, text="time to the first result, s"), *_FLAT),
        rounds=1,
        timeout_s=240,
    ),
    "joblib_5000": Row(
        title="joblib, 5,000 no-ops",
        measure=calls.joblib_calls(5_000, repeats=3),
        peers=ALL,
        goals=(Goal(peer="dask", at_least=8), *_beside_loky(1.2)),
    ),
    "joblib_50000": Row(
        title="joblib, 50,000 no-ops",
        measure=calls.joblib_calls(50_000, repeats=1),
        peers=ALL,
        goals=(Goal(peer="dask", at_least=8), *_beside_loky(1.2)),
    ),
    "joblib_generator": Row(
        title='joblib, 50,000 no-ops, `return_as="generator"`',
        measure=calls.joblib_calls(50_000, repeats=1, return_as="generator"),
        peers=("skyward", "loky"),
        goals=_beside_loky(1),
    ),
    "joblib_shared": Row(
        title="joblib, 40 calls sharing a 200 MB array, after the first run",
        measure=arrays.joblib_shared,
        peers=("skyward", "loky", "dask"),
        goals=(Goal(peer="loky", at_least=1), Goal(peer="dask", at_least=3), _ONE_COPY),
    ),
    "gather_shared": Row(
        title="`gather` of 40 calls sharing a 200 MB array, after the first run; Ray with `put`",
        measure=arrays.gather_shared,
        peers=("skyward", "ray"),
        goals=(Goal(peer="ray", at_least=1), _ONE_COPY),
    ),
    "big_result": Row(
        title="a result of 500 MB",
        measure=arrays.big_result,
        peers=("skyward", "ray"),
        goals=(Goal(peer="ray", at_least=1), *_STALLS),
    ),
    "big_argument": Row(
        title="an argument of 500 MB",
        measure=arrays.big_argument,
        peers=("skyward", "ray"),
        goals=(Goal(peer="ray", at_least=0.5), *_STALLS),
    ),
    "kept_model": Row(
        title="a warm call of a worker that keeps a model of 1 GB; Ray with an actor",
        measure=arrays.kept_model,
        peers=("skyward", "dask", "ray"),
        goals=(Goal(peer="ray", at_least=1),),
        timeout_s=90,
    ),
    "grid_search": Row(
        title="GridSearchCV, SVC on digits, 24 candidates, 3 folds",
        measure=learning.grid_search,
        peers=("skyward", "loky"),
        goals=_beside_loky(1),
    ),
    "cross_validation": Row(
        title="`cross_val_score`, logistic regression on digits, 10 folds",
        measure=learning.cross_validation,
        peers=("skyward", "loky"),
        goals=_beside_loky(1),
    ),
    "forest": Row(
        title="RandomForest of 500 trees, fit, `n_jobs=2`",
        measure=learning.forest,
        peers=("skyward", "loky"),
        goals=_beside_loky(1),
    ),
    "large_search": Row(
        title="GridSearchCV, GaussianNB on 200 MB, 4 candidates, 3 folds",
        measure=learning.large_search,
        peers=("skyward", "loky"),
        goals=_beside_loky(1),
    ),
    "client_map": Row(
        title="`SkywardCluster`: `client.map` of 1,500 no-ops",
        measure=graphs.client_map,
        peers=_DASK_FRONT_END,
        goals=_AS_DASK,
        rounds=5,
        timeout_s=180,
    ),
    "shuffle": Row(
        title="`SkywardCluster`: shuffle of a data frame, 1/128 of the machine's memory",
        measure=graphs.shuffle,
        peers=_DASK_FRONT_END,
        goals=_AS_DASK,
        rounds=5,
        timeout_s=120,
    ),
    "aggregation": Row(
        title="`SkywardCluster`: means of 1,000 groups of that data frame",
        measure=graphs.aggregation,
        peers=_DASK_FRONT_END,
        goals=_AS_DASK,
        rounds=5,
        timeout_s=120,
    ),
    "reduction": Row(
        title="`SkywardCluster`: reduction of an array, 1/16 of the machine's memory",
        measure=graphs.reduction,
        peers=_DASK_FRONT_END,
        goals=_AS_DASK,
        rounds=5,
        timeout_s=120,
    ),
    "dask_startup": Row(
        title="from before the import to the first result of a Dask client, 2 workers",
        measure=graphs.first_result,
        peers=_DASK_FRONT_END,
        goals=(Goal(peer="dask", at_least=1 / 1.1),),
    ),
    "beside_calls": Row(
        title="that reduction and 10,000 no-op calls at once, on one pool",
        measure=graphs.beside_calls,
        rounds=5,
        timeout_s=120,
    ),
    "startup": Row(
        title="from before the import to the first result, 2 workers",
        measure=pools.startup,
        peers=(*ALL, "parsl", "hyperqueue"),
        goals=(Goal(peer="dask", at_least=1 / 0.7),),
    ),
    "next_pool": Row(
        title="the next pool of a process, to its first result, 2 workers",
        measure=pools.next_pool,
        peers=("skyward", "dask"),
        goals=(Goal(peer="dask", at_least=1.0),),
    ),
    "many_nodes": Row(
        title="from before the import to the first result, 16 nodes of 1 worker",
        measure=pools.many_nodes,
        peers=("skyward", "dask"),
        goals=(
            Goal(peer="dask", at_least=1.0),
            Limit(figure="node_cpu_s", at_most=0.4, text="processor time of a node, s"),
        ),
    ),
    "ssh_warm": Row(
        title="from the opening of a pool on 2 SSH hosts that have the environment to the first result",
        measure=ssh_opening.opening,
        peers=_WIDE_AREA,
        goals=(Limit(figure="time_s", at_most=0.8, text="that time, s"),),
        timeout_s=240,
    ),
    "ssh_edit": Row(
        title="that pool, open: from the edit of a module to the next call's result",
        measure=ssh_opening.edit_in_pool,
        goals=(Limit(figure="time_s", at_most=0.3, text="that time, s"),),
        timeout_s=240,
    ),
    "ssh_edit_process": Row(
        title="those hosts: from the start of a new client, after the edit of a module, to the first result",
        measure=ssh_opening.edit_in_process,
        goals=(Limit(figure="beyond_opening_s", at_most=0.3, text="of that, beyond the import and the opening, s"),),
        timeout_s=240,
    ),
    "ssh_edit_kept": Row(
        title="the same on the kept fleet of the client before",
        measure=ssh_opening.edit_in_kept_fleet,
        goals=(Limit(figure="time_s", at_most=2.0, text="that time, s"),),
        timeout_s=240,
    ),
    "dispatch": Row(
        title="dispatch alone, simulated, 2 → 2,000 workers",
        measure=pools.dispatch,
        goals=(Limit(figure="growth", at_most=1.5, text="cost per call, 2,000 workers ÷ 2"),),
    ),
    "idle": Row(
        title="idle pool for a minute",
        measure=pools.idle,
        goals=(
            Limit(figure="client_cpu", at_most=0.01, text="share of a core, client"),
            Limit(figure="node_cpu", at_most=0.003, text="share of a core, node"),
            Limit(figure="node_pss_mib", at_most=80, text="memory of the node, MiB (PSS)"),
        ),
        rounds=1,
        timeout_s=120,
    ),
    "wide_round_trip": Row(
        title="50 ms, 100 Mbit/s: no-op round trip, `>>`",
        measure=wide_area.round_trip,
        peers=_WIDE_AREA,
        goals=(Limit(figure="round_trips", at_most=1.2, text="round trips of the line"),),
        timeout_s=240,
    ),
    "wide_naps": Row(
        title="50 ms, 100 Mbit/s: 1,000 calls of 10 ms on 4 workers",
        measure=wide_area.naps,
        peers=_WIDE_AREA,
        goals=(Limit(figure="times_ideal", at_most=1 / 0.9, text="time ÷ 2.5 s, the ideal"),),
        timeout_s=240,
    ),
    "wide_array": Row(
        title="50 ms, 100 Mbit/s: 100 MB to 4 nodes of 2 workers",
        measure=wide_area.array,
        peers=_WIDE_AREA,
        goals=(Limit(figure="sent", at_most=1.05, text="bytes up the line ÷ 100 MB"),),
        timeout_s=240,
    ),
    "wide_grid_search": Row(
        title="50 ms, 100 Mbit/s: GridSearchCV, SVC on digits, 24 candidates, 3 folds, 4 workers",
        measure=wide_area.grid_search,
        peers=_WIDE_AREA,
        timeout_s=240,
    ),
    "forward_latency": Row(
        title="a forwarded port: a byte there and back",
        measure=forwarding.latency,
        peers=_FORWARDING,
    ),
    "forward_throughput": Row(
        title="a forwarded port: 256 MiB up, then down",
        measure=forwarding.throughput,
        peers=_FORWARDING,
        timeout_s=120,
    ),
}
