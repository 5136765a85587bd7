"""Plan of a script's first pool: the script runs in a process of its own, which ends where that pool would open."""

from __future__ import annotations

import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from skyward.api.plan import Plan
from skyward.api.pool import ComputePool, act_instead_of_opening
from skyward.errors import ConfigurationError

_PROGRAM: Final = "from skyward.api.planned_script import run_to_first_pool; run_to_first_pool()"


class PoolPlanned(BaseException):
    """Ends a script whose pool has been planned instead of opened."""


def plan_script(script: Path, arguments: Sequence[str] = ()) -> Plan:
    """Run a script up to the opening of its first pool, and return that pool's plan. What it prints goes to stderr.

    Raises:
        ConfigurationError: there is no such file, or the script ended before it opened a pool.
    """
    if not script.is_file():
        raise ConfigurationError(f"script: there is no file {script}")
    with tempfile.TemporaryDirectory(prefix="skyward-plan-") as folder:
        place = Path(folder, "plan")
        ended = subprocess.run([sys.executable, "-c", _PROGRAM, place, script, *arguments], stdout=2, check=False)
        if place.exists():
            return pickle.loads(place.read_bytes())
    how = f"with exit code {ended.returncode}" if ended.returncode >= 0 else f"by signal {-ended.returncode}"
    raise ConfigurationError(f"script: {script} ended {how}, before it opened a pool: there is nothing to plan")


def run_to_first_pool() -> None:
    """Run the script that this process is for: its arguments are a file for the plan, the script, and the script's."""
    place, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    act_instead_of_opening(lambda pool: _write_plan(pool, place))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        if not place.exists():  # what a script does without its pool is no news
            raise


_writing: Final = threading.Lock()


def _write_plan(pool: ComputePool, place: Path) -> NoReturn:
    """Write the plan of a pool unless another one was first; end the script."""
    with _writing:
        if not place.exists():
            data = pickle.dumps(pool.plan())
            unfinished = place.with_suffix(".new")
            unfinished.write_bytes(data)
            unfinished.replace(place)
        if threading.current_thread() is not threading.main_thread():
            # An exception would reach the script late or never: pools of a MultiPool and of Dask open in threads.
            sys.stdout.flush()
            os._exit(0)
    raise PoolPlanned
