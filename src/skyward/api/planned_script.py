"""Plan of a script's first pool: the script runs in a process of its own, which ends where that pool would open."""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import currentframe
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

from skyward.api.node_packages import PLAN_FILE
from skyward.api.plan import Plan
from skyward.errors import ConfigurationError
from skyward.hidden_frames import keeps_frames

_PROGRAM: Final = "from skyward.api.planned_script import run_to_first_pool; run_to_first_pool()"
_LOOK_S: Final = 0.05
_CLEANING_S: Final = 10.0
"""Time for the script's clean-up after one of its children has planned its pool."""


class PoolPlanned(SystemExit):
    """Ends a process whose pool has been planned instead of opened: without a traceback, and as one that failed."""

    def __init__(self) -> None:
        super().__init__(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScript:
    """Plan of the first pool that a script opens.

    Attributes:
        plan: the plan.
        line: number of the script's line that opens the pool; 0 where another file does.
        process: id of the process in which it would be opened: the script's, or one that the script started.
    """

    plan: Plan
    line: int
    process: int


def plan_script(script: Path, arguments: Sequence[str] = ()) -> PlannedScript:
    """Run a script up to the opening of its first pool, and return that pool's plan. What it prints goes to stderr.

    Raises:
        ConfigurationError: there is no such file, or the script ended before it opened a pool.
    """
    if not script.is_file():
        raise ConfigurationError(f"script: there is no file {script}")
    with tempfile.TemporaryDirectory(prefix="skyward-plan-") as folder:
        place = Path(folder, "plan")
        command = [sys.executable, "-c", _PROGRAM, script, *arguments]
        with subprocess.Popen(command, stdout=2, env=os.environ | {PLAN_FILE: str(place)}) as process:
            try:
                _wait_for_plan(process, place)
            except KeyboardInterrupt:  # which the script has got, too
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_CLEANING_S)
                raise
            finally:
                process.kill()  # unless it has ended
        if place.exists():
            return _read(place)
    code = process.returncode
    if not code:
        raise ConfigurationError(f"script: {script} opens no pool: there is nothing to plan")
    how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
    raise ConfigurationError(f"script: {script} ended {how}, before it opened a pool: there is nothing to plan")


def _wait_for_plan(process: subprocess.Popen[bytes], place: Path) -> None:
    """Wait until the script has ended; end it if it goes on, or waits, after one of its children would open a pool."""
    while not place.exists():
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
            return
    if _read(place).process == process.pid:
        process.wait()
        return
    if os.name == "posix":
        process.send_signal(signal.SIGINT)  # its `finally` blocks run
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLEANING_S)


def _read(place: Path) -> PlannedScript:
    return pickle.loads(place.read_bytes())


# --- in the script's process, and in those that it starts -------------------------------------------------------------


def run_to_first_pool() -> None:
    """Run the script that this process is for: its arguments are the script, and the script's."""
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        if Path(os.environ[PLAN_FILE]).exists():  # errors after the plan are those of a script without its pool
            return
        if isinstance(error, SystemExit) or keeps_frames():
            raise
        error.__traceback__ = _from_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _from_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that run the script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        traceback = traceback.tb_next
    return traceback


_writing: Final = threading.Lock()


def end_with_plan(make_plan: Callable[[], Plan]) -> NoReturn:
    """Write the plan of a pool, unless another one was first; end this process."""
    place = Path(os.environ[PLAN_FILE])
    with _writing:
        if place.parent.exists() and not place.exists():
            planned = PlannedScript(plan=make_plan(), line=_opening_line(), process=os.getpid())
            unfinished = place.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(planned))
            unfinished.replace(place)
        if threading.current_thread() is not threading.main_thread():
            # An exception would reach the script late or never: pools of a MultiPool and of Dask open in threads.
            sys.stdout.flush()
            os._exit(1)
    raise PoolPlanned


def _opening_line() -> int:
    """Return the number of the program's line that this thread is in; 0 if it is in none."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    frame = currentframe()
    while frame is not None and frame.f_code.co_filename != program:
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno
