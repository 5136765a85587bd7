"""Start of a supervisor, once its modules are imported: in its program, or in a fork of the client's template."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import pickle
import signal
import socket
import tempfile
import time
from dataclasses import replace
from typing import BinaryIO, TextIO

from skyward.base.platform import process_limits
from skyward.node.plan import node_cpu_count, process_env
from skyward.node.processes import name_process, show_arguments, show_variable
from skyward.node.supervisor.forking import fork_zygote
from skyward.node.supervisor.program import run_detached
from skyward.node.supervisor.start_order import (
    PROGRAM,
    TEMPLATE_VARIABLE,
    VOLUMES_REQUEST,
    StartOrder,
    start_variables,
)
from skyward.node.supervisor.supervisor import Supervisor
from skyward.wire.node_config import NodeConfig, NodeReady

log = logging.getLogger("skyward.node.supervisor.start")


def main(client: BinaryIO, answer: TextIO) -> None:
    """In a fork of the template: start a supervisor as ordered by the client's first command.

    Return in the template's child. The supervisor is a child of that one, as it is of the program, so that its
    life has nothing to do with the template's.
    """
    order: StartOrder = pickle.load(client)
    if process_limits() != order.limits:
        raise RuntimeError("the limits of the process that nodes are forked from were changed, and its forks have them")
    if os.fork() == 0:
        run_detached(lambda: _supervise_forked(order, client, answer), order.config.workdir)


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
    _run_supervisor(replace(config, volumes=volumes), answer, zygote)


def supervise(configuration: str, answer: TextIO, zygote: tuple[int, socket.socket] | None) -> None:
    """Run a supervisor to its end.

    Args:
        configuration: its node's, as text.
        answer: receives :class:`NodeReady`.
        zygote: see :class:`Supervisor`.
    """
    _run_supervisor(NodeConfig.from_json(configuration), answer, zygote)


def _run_supervisor(config: NodeConfig, answer: TextIO, zygote: tuple[int, socket.socket] | None) -> None:
    def announce(ready: NodeReady) -> None:
        with answer:  # fails when the starting side has given up meanwhile: then the node ends
            answer.write(f"{ready.to_json()}\n")

    async def supervise() -> None:
        supervisor = Supervisor(config, zygote=zygote)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.end, "it was told to (SIGTERM)")
        await supervisor.run(announce)

    asyncio.run(supervise())
