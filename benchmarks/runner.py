"""Runs every cell in a process of its own, peers in turns, and leaves nothing of it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.measured import Measured
from benchmarks.observe import CELL_VARIABLE, cell_processes
from benchmarks.results import Result
from benchmarks.rows import ONCE, Row

__all__ = ["ONE_THREAD", "ROOT", "run_rows"]

ROOT = Path(__file__).parents[1]

ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")}
_GRACE_S = 10


def run_rows(rows: Mapping[str, Row], *, quick: bool) -> Iterator[Result]:
    """Measure; a peer that failed is left out of the row's later rounds."""
    for key, row in rows.items():
        failed: set[str] = set()
        for number in range(1 if quick else row.rounds):
            for peer in row.peers:
                if peer not in failed and (number == 0 or peer not in ONCE):
                    result = _run_cell(key, row, peer, number)
                    failed |= {peer} if result.error else set()
                    yield result


def _run_cell(key: str, row: Row, peer: str, number: int) -> Result:
    name = uuid.uuid4().hex[:8]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            client = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cell", key, peer, f"{folder}/result.json"],
                cwd=ROOT,
                env=_environment(name, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            client.wait(row.timeout_s)
            late = ""
        except subprocess.TimeoutExpired:
            late = f"took over {row.timeout_s:g} s"
        finally:
            _end(client, name)
        measured, error = _read(Path(folder, "result.json"))
        if late or error:
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-2000:])
        return Result(row=key, peer=peer, round=number, measured=None if late else measured, error=late or error)


def _environment(name: str, folder: str) -> dict[str, str]:
    own = {
        CELL_VARIABLE: name,
        "TMPDIR": folder,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # as an activated environment has it
        "IPYTHONDIR": f"{folder}/ipython",
        "XDG_STATE_HOME": f"{folder}/state",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    return os.environ | ONE_THREAD | own


def _end(client: subprocess.Popen[bytes], name: str) -> None:
    """Ask the client to end if it has not, then kill whatever is left of the cell."""
    started = cell_processes(name, client.pid)
    if client.poll() is None:
        client.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            client.wait(_GRACE_S)
    left = [*started, *cell_processes(name, client.pid)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    client.kill()
    client.wait()
    psutil.wait_procs(left, timeout=_GRACE_S)


def _read(path: Path) -> tuple[Measured | None, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "died"
    if "error" in found:
        return None, found["error"]
    return Measured(seconds=tuple(found["seconds"]), figures=found["figures"]), ""
