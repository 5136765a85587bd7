"""Order to the client's template: which supervisor to fork, and with which environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from skyward.wire.node_config import NodeConfig

PROGRAM = (sys.executable, "-m", "skyward.node.supervisor")
"""Arguments of every supervisor, before the path of its configuration."""

TEMPLATE_VARIABLE = "SKYWARD_TEMPLATE"
"""Environment variable of a template. A fork shows ``SKYWARD_INSTANCE``, which is as long, in its place."""

TEMPLATE_ID = "local-000000000000"
"""Value of that variable, as long as the ids that ``Local()`` gives its instances."""

VOLUMES_REQUEST = b'"volumes"\n'
"""Report with which a supervisor, once it shows its node's id, asks for the volumes."""

_START_PREFIXES = (
    "ASAN_",
    "BLIS_",
    "COV_",
    "COVERAGE_",
    "DASK_",
    "GLIBC_",
    "GOTO_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NPY_",
    "NUMEXPR_",
    "NUMPY_",
    "OMP_",
    "OPENBLAS_",
    "OPENSSL_",
    "PYTHON",
    "SSL_",
    "TORNADO_",
)
"""Beginnings of the names of variables that are read once, at a program's start, by the dynamic loader, the C library,
Python or a module that a template imports."""


def node_programs(config: NodeConfig) -> tuple[str, ...]:
    """Return the modules of a node's processes, to be imported before they are forked."""
    service = (config.service,) if config.service else ()
    return ("skyward.node.worker.worker", "skyward.node.supervisor.service_process", *service)


def start_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``env`` that count only when a program starts, and so cannot be set in a fork."""
    return {name: value for name, value in env.items() if name.startswith(_START_PREFIXES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """One supervisor to start. It holds the node's private key: never in a log, an argument or a file.

    Attributes:
        config: its node, without volumes: every process of the node is a fork of the one that gets the order, and calls
            must not find the volumes' keys in their memory.
        env: its environment; may be secret.
        started_with: the template's :func:`start_variables`.
        limits: the template's :func:`process_limits`, as they were when it started.
    """

    config: NodeConfig = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    started_with: Mapping[str, str]
    limits: str
