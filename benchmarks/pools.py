"""The pool itself: how soon it is there, what it costs while nothing happens, and what deciding costs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import psutil

from benchmarks.measured import Measured, opened
from benchmarks.observe import CELL_VARIABLE, cell_processes, pss_bytes
from benchmarks.peers import CLUSTERS, PEERS, Peer
from benchmarks.work import nothing

__all__ = ["dispatch", "idle", "many_nodes", "next_pool", "startup"]

_MANY = 16
_SIMULATED_CALLS = 100_000
_FLEETS = (2, 20, 200, 2000)
_ROLES = ("supervisor", "resource_tracker")


def startup(name: str) -> Measured:
    """From before the peer is imported to its first result."""
    started = time.perf_counter()
    with PEERS[name]() as peer:
        peer.call(nothing)
        seconds = time.perf_counter() - started
    return Measured(seconds=(seconds,))


def next_pool(name: str) -> Measured:
    """From the beginning of a second pool, after the first has closed, to its first result."""
    with PEERS[name]() as peer:
        peer.call(nothing)
    started = time.perf_counter()
    with PEERS[name]() as peer:
        peer.call(nothing)
        seconds = time.perf_counter() - started
    return Measured(seconds=(seconds,))


def _node_cpu_seconds() -> float:
    """Return the processor time of all nodes' processes so far, those of them that have ended included."""
    times = [
        process.cpu_times() for process in cell_processes(os.environ[CELL_VARIABLE], os.getpid()) if _in_node(process)
    ]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def _in_node(process: psutil.Process) -> bool:
    return "SKYWARD_INSTANCE" in process.environ()


def many_nodes(name: str) -> Measured:
    """From before the peer is imported to the first result, with 16 nodes of one worker."""
    started = time.perf_counter()
    with CLUSTERS[name](nodes=_MANY, workers=1) as peer:
        peer.call(nothing)
        seconds = time.perf_counter() - started
        figures = {"node_cpu_s": _node_cpu_seconds() / _MANY} if name == "skyward" else {}
    return Measured(seconds=(seconds,), figures=figures)


# --- idle ---------------------------------------------------------------------------------------------------------


@opened
def idle(peer: Peer) -> Measured:
    """Observe an idle pool of two workers that has worked."""
    for _ in range(100):
        peer.call(nothing)
    node = cell_processes(os.environ[CELL_VARIABLE], os.getpid())
    everyone = [psutil.Process(), *node]
    threading.Event().wait(3)
    before = [_cpu_seconds(process) for process in everyone]
    started = time.perf_counter()
    threading.Event().wait(60)
    elapsed = time.perf_counter() - started
    shares = [(_cpu_seconds(process) - used) / elapsed for process, used in zip(everyone, before, strict=True)]
    return Measured(figures={"client_cpu": shares[0], "node_cpu": sum(shares[1:]), **_memory(everyone)})


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _memory(everyone: list[psutil.Process]) -> dict[str, float]:
    """MiB by role, and the whole node's."""
    figures: dict[str, float] = {}
    for process in everyone:
        role = "client" if process.pid == os.getpid() else _role(process)
        while f"{role}: rss_mib" in figures:
            role += "'"
        figures[f"{role}: rss_mib"] = process.memory_info().rss / 2**20
        figures[f"{role}: pss_mib"] = pss_bytes(process.pid) / 2**20
    figures["node_pss_mib"] = sum(pss_bytes(process.pid) for process in everyone[1:]) / 2**20
    return figures


def _role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((role for role in _ROLES if role in command), process.name().removeprefix("sky-"))


# --- dispatch -----------------------------------------------------------------------------------------------------


def dispatch(_name: str) -> Measured:
    """Measure the cost of dispatch per call, with fleets of four sizes."""
    costs = {workers: _cost_per_call(workers) for workers in _FLEETS}
    figures = {f"us_{workers}": cost * 1e6 for workers, cost in costs.items()}
    return Measured(figures=figures | {"growth": costs[_FLEETS[-1]] / costs[_FLEETS[0]]})


def _cost_per_call(workers: int) -> float:
    """Simulate short calls, submitted at once; whoever has work finishes one call, in turns."""
    from skyward.scheduling.dispatch_and_retries import CallState, Dispatch, Send, WorkerId

    state = Dispatch()
    for index in range(workers):
        state.worker_up(WorkerId(index, 0), 0.0)
    calls = [CallState(id=number, kind="f") for number in range(1, _SIMULATED_CALLS + 1)]
    started = time.perf_counter()
    running: deque[int] = deque()
    actions = state.submit(calls, 0.0)
    while True:
        running.extend(call.id for action in actions if isinstance(action, Send) for call in action.calls)
        if not running:
            break
        actions = state.finished([(running.popleft(), 0.0001)], 0.0)
    assert state.unfinished == 0
    return (time.perf_counter() - started) / _SIMULATED_CALLS
