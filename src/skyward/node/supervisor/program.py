"""Program of a supervisor, up to its imports: its zygote starts first, and imports its modules at the same time.

Imports little itself, since everything waits for it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from skyward.base.descriptors import raise_descriptor_limit
from skyward.base.platform import adopt_orphans
from skyward.errors import SkywardError
from skyward.node.conventions import HASH_SEED, SUPERVISOR_LOG
from skyward.node.supervisor.start_order import (
    VISIBLE,
    known_environment,
    node_programs,
    visible_environment,
)

log = logging.getLogger("skyward.node.supervisor.program")


Supervise = Callable[[str, TextIO, tuple[int, socket.socket] | None], None]
"""Supervisor of a node: :func:`skyward.node.supervisor.start.supervise`."""


def run_program(supervise: Supervise) -> None:
    """Read the node's configuration from standard input; print :class:`NodeReady` and return.

    The node lives on in a detached process. When it does not come up: exit status 1, and the reason on standard error.

    Args:
        supervise: runs the supervisor to its end; may import first what that takes.
    """
    configuration = sys.stdin.read()
    settings = json.loads(configuration)
    if sys.flags.isolated:
        start_with = visible_environment if VISIBLE in sys.argv else known_environment
        variables = start_with(os.environ)
        os.environ.clear()
        os.environ.update(variables)
    here, there = os.pipe()
    if os.fork() == 0:
        os.close(here)
        stream = open(there, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
        run_detached(lambda: supervise(configuration, stream, _early_zygote(settings)), settings["workdir"])
    os.close(there)
    with open(here) as answer:
        ready = answer.read()
    if not ready:
        from skyward.node.processes import end_of_log

        workdir = settings["workdir"]
        raise SystemExit(
            f"the node did not come up:\n{end_of_log(workdir)}\nwhole log: {Path(workdir, SUPERVISOR_LOG)}"
        )
    sys.stdout.write(ready)


def _early_zygote(settings: Mapping[str, Any]) -> tuple[int, socket.socket] | None:
    """Start the zygote if it needs no variable that is not known yet."""
    # A service's modules may load numerical libraries, which read caps on threads. Those count the cores, by means that
    # have to be imported first.
    if settings["service"]:
        return None
    variables = HASH_SEED | settings["env"] | {"SKYWARD_INSTANCE": settings["instance_id"]}
    return start_zygote(node_programs(""), variables)


def start_zygote(modules: Sequence[str], variables: Mapping[str, str]) -> tuple[int, socket.socket]:
    """Start a node's zygote as a program.

    Args:
        modules: modules to import; these may be forked.
        variables: its environment variables, besides those of this process.

    Returns:
        Its process id, for which the caller waits, and the connection for its orders, which closes when it ends.
    """
    # Not "-m": multiprocessing would import the module again, as __mp_main__, in processes that calls start.
    start = "import gc; gc.disable(); from skyward.node.supervisor.forking import run_zygote as run"
    argv = (sys.executable, "-c", f"{start}; run(*{tuple(modules)!r})")
    orders, its_orders = socket.socketpair()
    with its_orders:
        process = subprocess.Popen(argv, stdin=its_orders.fileno(), env=os.environ | dict(variables))
    process.returncode = 0  # the caller waits for it
    return process.pid, orders


def run_detached(supervise: Callable[[], None], workdir: str) -> NoReturn:
    """Run the rest of the process's life in a session of its own, with its log as standard output and error."""
    status = 1
    try:
        os.setsid()
        Path(workdir).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chdir(workdir)
        log_file = os.open(SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log_file, 1), (log_file, 2)):
            os.dup2(source, target)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        # A program that daemonises leaves its session, but stays below this process then (docs/decisions/003).
        adopt_orphans()
        raise_descriptor_limit()
        supervise()
        status = 0
    except SkywardError as error:
        log.error("%s", error)
    except BaseException:  # past the fork nobody else would report it
        log.exception("the supervisor failed")
    finally:
        os._exit(status)
