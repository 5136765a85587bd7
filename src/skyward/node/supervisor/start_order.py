"""Order to the client's template: which supervisor to fork, and with which environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from skyward.request.volume import GrantedVolume
from skyward.wire.node_config import NodeConfig

PROGRAM = (sys.executable, "-m", "skyward.node.supervisor")
"""Arguments of every supervisor, before the path of its configuration."""

TEMPLATE_VARIABLE = "SKYWARD_TEMPLATE"
"""Environment variable of a template. A fork shows ``SKYWARD_INSTANCE``, which is as long, in its place."""

TEMPLATE_ID = "local-000000000000"
"""Value of that variable, as long as the ids that ``Local()`` gives its instances."""

VOLUMES_REQUEST = "volumes"
"""Line in which a supervisor asks for the node's volumes."""

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
    """One supervisor to start.

    Attributes:
        config: its node; the order omits the volumes.
        env: its environment; may be secret.
        started_with: the template's :func:`start_variables`.
        limits: the template's :func:`process_limits`, as they were when it started.
    """

    config: NodeConfig = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    started_with: Mapping[str, str]
    limits: str

    def to_json(self) -> str:
        """Return the order as one line. It holds the node's private key: never in a log, an argument or a file."""
        # Every process of the node is a fork of the one that reads this. Calls must not find the volumes' keys in it.
        config = replace(self.config, volumes=())
        return json.dumps([json.loads(config.to_json()), dict(self.env), dict(self.started_with), self.limits])

    @classmethod
    def from_json(cls, text: str) -> StartOrder:
        """Read the line."""
        config, env, started_with, limits = json.loads(text)
        return cls(config=NodeConfig.from_json(json.dumps(config)), env=env, started_with=started_with, limits=limits)


def volumes_line(volumes: Iterable[GrantedVolume]) -> str:
    """Return a node's volumes as one line. It holds their keys."""
    return json.dumps([volume.to_dict() for volume in volumes])


def read_volumes(text: str) -> tuple[GrantedVolume, ...]:
    """Read that line."""
    return tuple(map(GrantedVolume.from_dict, json.loads(text)))
