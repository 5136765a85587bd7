"""Start of a supervisor: the order for a fork of the client's template, and the environment of its program.

A node on another machine starts with what its programs need, and nothing else of the host's login, whose variables are
somebody's settings for something else: another Python's ``PYTHONHOME``, ``LD_PRELOAD``, a hardened shell's ``TMOUT``, a
laboratory's ``DASK_…``. Users set variables for their calls with ``env=``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from skyward.wire.node_config import NodeConfig

PROGRAM = (sys.executable, "-m", "skyward.node.supervisor")
"""Arguments of every supervisor, before its node's folder."""

TEMPLATE_VARIABLE = "SKYWARD_TEMPLATE"
"""Environment variable of a template. A fork shows ``SKYWARD_INSTANCE``, which is as long, in its place."""

TEMPLATE_ID = "local-000000000000"
"""Value of that variable, as long as the ids that ``Local()`` gives its instances."""

VOLUMES_REQUEST = b'"volumes"\n'
"""Report with which a supervisor, once it shows its node's id, asks for the volumes."""

_START_PREFIXES: Final = (
    *("PYTHON", "LANG", "LC_", "LD_", "GLIBC_", "MALLOC_", "ASAN_", "COV_", "COVERAGE_", "SSL_", "OPENSSL_"),
    *("BLIS_", "GOTO_", "KMP_", "MKL_", "NPY_", "NUMEXPR_", "NUMPY_", "OMP_", "OPENBLAS_"),
    *("DASK_", "TORNADO_"),  # where a pool is opened with Dask's service
)
"""Beginnings of the names of variables that are read once, at a program's start, by the dynamic loader, the C library,
Python or a module that a template imports."""


def node_programs(service: str) -> tuple[str, ...]:
    """Return the modules of a node's processes, to be imported before they are forked; ``service`` may be empty."""
    return ("skyward.node.worker.worker", "skyward.node.supervisor.service_process", *filter(None, (service,)))


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

    def __post_init__(self) -> None:
        if self.config.volumes:
            raise ValueError("every process of the node would hold the keys of its volumes")


VISIBLE: Final = "--visible"
"""Argument of a supervisor on the client's own machine, whose variables are visible in calls."""

KNOWN: Final = {"SKYWARD_ENVIRONMENT": "known"}
"""Variable by which a node's programs know that no settings of the host's login count."""

_NAMES: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "NIX_SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
        *("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
        # A host's large disk: models would fill its home folder otherwise.
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
        *("TFDS_DATA_DIR", "NLTK_DATA"),
    }
)
# Of the machine, not of a person: its devices, their drivers and its fast networks.
_BEGINNINGS: Final = (
    *("SKYWARD_", "CUDA_", "NVIDIA_", "NCCL_", "UCX_", "FI_"),
    *("ROCM_", "ROCR_", "HIP_", "HSA_", "NEURON_", "TPU_", "XLA_", "OMPI_"),
)
_ENDINGS: Final = ("_METADATA_SERVICE_ENDPOINT", "_CA_BUNDLE")
"""Ends of the names of variables: where a machine's own service is, which announces its end; certificates."""
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
_LANGUAGE: Final = "C.UTF-8"
_UTF_8: Final = ("utf-8", "utf8")


def known_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a login's ``variables`` that a node starts with.

    The language is kept only where its text is UTF-8: Python would read and write files otherwise in the host's way.
    """
    kept = {name: value for name, value in variables.items() if _is_known(name)}
    language = {
        name: value for name, value in variables.items() if _is_of_language(name) and value.lower().endswith(_UTF_8)
    }
    return {"LANG": _LANGUAGE} | language | kept | KNOWN


def visible_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the client's ``variables`` without those of its Python, for another Python on its machine."""
    return {name: value for name, value in variables.items() if not name.startswith("PYTHON")}


def _is_known(name: str) -> bool:
    return name in _NAMES or name.startswith(_BEGINNINGS) or name.endswith(_ENDINGS) or name.lower() in _PROXIES


def _is_of_language(name: str) -> bool:
    return name == "LANG" or name.startswith("LC_")
