"""Start of a supervisor as a process of its own: from its program, or as a fork of the client's template."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NoReturn, TextIO

from skyward.base.descriptors import raise_descriptor_limit
from skyward.base.platform import adopt_orphans, process_limits
from skyward.errors import SkywardError
from skyward.node.plan import node_cpu_count, process_env
from skyward.node.processes import SUPERVISOR_LOG, end_of_log, name_process, show_arguments, show_variable
from skyward.node.supervisor.forking import fork_zygote
from skyward.node.supervisor.start_order import (
    PROGRAM,
    TEMPLATE_VARIABLE,
    VISIBLE,
    VOLUMES_REQUEST,
    StartOrder,
    known_environment,
    start_variables,
    visible_environment,
)
from skyward.node.supervisor.supervisor import Supervisor
from skyward.wire.node_config import NodeConfig, NodeReady

log = logging.getLogger("skyward.node.supervisor.start")


def run_program() -> None:
    """Read the node's configuration from standard input; print :class:`NodeReady` and return.

    The node lives on in a detached process. When it does not come up: exit status 1, and the reason on standard error.
    """
    config = NodeConfig.from_json(sys.stdin.read())
    if sys.flags.isolated:
        start_with = visible_environment if VISIBLE in sys.argv else known_environment
        variables = start_with(os.environ)
        os.environ.clear()
        os.environ.update(variables)
    here, there = os.pipe()
    if os.fork() == 0:
        os.close(here)
        stream = open(there, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
        _run_detached(lambda: _supervise(config, stream, None), config.workdir)
    os.close(there)
    with open(here) as answer:
        ready = answer.read()
    if not ready:
        log_file = Path(config.workdir, SUPERVISOR_LOG)
        raise SystemExit(f"the node did not come up:\n{end_of_log(config.workdir)}\nwhole log: {log_file}")
    sys.stdout.write(ready)


def main(client: BinaryIO, answer: TextIO) -> None:
    """In a fork of the template: start a supervisor as ordered by the client's first command.

    Return in the template's child. The supervisor is a child of that one, as it is of :func:`run_program`, so that its
    life has nothing to do with the template's.
    """
    order: StartOrder = pickle.load(client)
    if process_limits() != order.limits:
        raise RuntimeError("the limits of the process that nodes are forked from were changed, and its forks have them")
    if os.fork() == 0:
        _run_detached(lambda: _supervise_forked(order, client, answer), order.config.workdir)


def _supervise_forked(order: StartOrder, client: BinaryIO, answer: TextIO) -> None:
    name_process("supervisor")
    # All variables have other places from here on: those that the program started with can be overwritten.
    os.environ.clear()
    os.environ.update(order.env)
    time.tzset()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    config = order.config
    show_arguments(PROGRAM, config.workdir)
    show_variable(TEMPLATE_VARIABLE, "SKYWARD_INSTANCE", config.instance_id)
    env = os.environ | process_env(config, node_cpu_count(config))
    zygote = fork_zygote(env) if start_variables(env) == order.started_with else None
    # Only now: the zygote, and with it every worker, is a copy of all that this process has read so far.
    answer.write(VOLUMES_REQUEST.decode())
    with client:
        volumes = pickle.load(client)
    _supervise(replace(config, volumes=volumes), answer, zygote)


def _supervise(config: NodeConfig, answer: TextIO, zygote: tuple[int, socket.socket] | None) -> None:
    def announce(ready: NodeReady) -> None:
        with answer:  # fails when the starting side has given up meanwhile: then the node ends
            answer.write(f"{ready.to_json()}\n")

    async def supervise() -> None:
        supervisor = Supervisor(config, zygote=zygote)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.end, "it was told to (SIGTERM)")
        await supervisor.run(announce)

    asyncio.run(supervise())


def _run_detached(supervise: Callable[[], None], workdir: str) -> NoReturn:
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
