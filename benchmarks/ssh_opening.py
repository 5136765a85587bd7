"""Two SSH hosts that have the environment: how soon a pool on them has its first result, and what an edit costs.

``python -m benchmarks.ssh_opening FOLDER LOGIN`` is a client: it opens a pool, calls a function of the module
``project`` in FOLDER, edits that, and calls it again. It prints its seconds as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.far_side import FarSide, far_side
from benchmarks.measured import Measured
from benchmarks.wide_area import DASK, open_dask
from benchmarks.work import nothing

__all__ = ["edit_in_kept_fleet", "edit_in_pool", "edit_in_process", "opening"]

_HOSTS = 2
_KEPT = "benchmark"
_SOURCE = "import functions\n\n\ndef answer() -> int:\n    return functions.double({number})\n"


def opening(name: str) -> Measured:
    """From the opening of a pool to its first result; imports are done before. Dask's client dials through a proxy."""
    with far_side(_HOSTS, latency_s=0.0) as far:
        if name != DASK:
            return _measured(_times_of_clients(far)[-1]["first_s"])
        importlib.import_module("distributed")
        started = time.perf_counter()
        with open_dask(far, 1) as cluster:
            cluster.call(nothing)
            return Measured(seconds=(time.perf_counter() - started,))


def edit_in_pool(_name: str) -> Measured:
    """From the edit of a module to the result of the next call on an open pool."""
    with far_side(_HOSTS, latency_s=0.0) as far:
        return _measured(_times_of_clients(far)[-1]["edit_s"])


def edit_in_process(_name: str) -> Measured:
    """From the start of a new client, after the edit of a module, to its first result."""
    with far_side(_HOSTS, latency_s=0.0) as far:
        times = _times_of_clients(far)[-1]
        beyond_s = times["first_s"] - times["opening_s"]
        return Measured(seconds=(times["whole_s"],), figures={"beyond_opening_s": beyond_s})


def edit_in_kept_fleet(_name: str) -> Measured:
    """As :func:`edit_in_process`, on the fleet that the client before has left."""
    with far_side(_HOSTS, latency_s=0.0) as far, tempfile.TemporaryDirectory(prefix="state-") as state:
        env = os.environ | {"XDG_STATE_HOME": state}
        try:
            return _measured(_times_of_clients(far, env, _KEPT)[-1]["whole_s"])
        finally:
            subprocess.run([sys.executable, "-m", "skyward", "down", _KEPT], check=True, capture_output=True, env=env)


def _measured(seconds: float) -> Measured:
    return Measured(seconds=(seconds,), figures={"time_s": seconds})


def _times_of_clients(
    far: FarSide, env: Mapping[str, str] | None = None, fleet: str = ""
) -> Sequence[Mapping[str, float]]:
    """Run a client that makes the environment, then one with an edited module."""
    login = {"hosts": [f"{host}:{port}" for host, port in far.hosts], "user": far.user}
    login |= {"key_path": far.key_path, "known_hosts": far.known_hosts}
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        Path(folder, "functions.py").write_text("def double(x: int) -> int:\n    return 2 * x\n", encoding="utf-8")
        return [_run_client(Path(folder), login, number, env, fleet) for number in (1, 3)]


def _run_client(
    folder: Path, login: Mapping[str, Any], number: int, env: Mapping[str, str] | None, fleet: str
) -> Mapping[str, float]:
    _edit(folder, number)
    command = [sys.executable, "-m", "benchmarks.ssh_opening", str(folder), json.dumps(login), fleet]
    started_at = time.time()
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    times: dict[str, float] = json.loads(printed)
    return times | {"whole_s": times.pop("first_at") - started_at}


def _edit(folder: Path, number: int) -> None:
    # Of another length each time: Python takes bytecode for current if the second of the change and the size agree.
    (folder / "project.py").write_text(_SOURCE.format(number=number) + "\n" * number, encoding="utf-8")


def _main(folder: Path, login: Mapping[str, Any], fleet: str) -> None:
    import skyward as sky

    sys.path.insert(0, str(folder))
    project: Any = importlib.import_module("project")
    number = int(project.answer()) // 2
    started = time.perf_counter()
    kept: dict[str, Any] = {"name": fleet, "keep": "5m"} if fleet else {}
    with sky.ComputePool(provider=sky.SSH(**login), nodes=_HOSTS, concurrency=1, display="quiet", **kept) as pool:
        opened = time.perf_counter()
        assert sky.compute(project.answer)() >> pool == 2 * number
        first, first_at = time.perf_counter(), time.time()
        _edit(folder, number + 1)
        importlib.invalidate_caches()
        importlib.reload(project)
        assert sky.compute(project.answer)() >> pool == 2 * (number + 1)
        edited = time.perf_counter()
    times = {"opening_s": opened - started, "first_s": first - started, "edit_s": edited - first, "first_at": first_at}
    print(json.dumps(times))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
