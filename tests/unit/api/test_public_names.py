"""What ``import skyward`` offers, and what it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyward

SPECIFIED = [
    "compute",
    "PendingCompute",
    "PendingBatch",
    "ComputeFunction",
    "gather",
    "ComputePool",
    "MultiPool",
    "Image",
    "Local",
    "Accelerator",
    "NVIDIA",
    "accelerators",
    "is_nvidia",
    "is_trainium",
    "current_accelerator",
    "shard",
    "DistributedSampler",
    "instance_info",
    "InstanceInfo",
    "select_instance",
    "InstanceSpec",
    "InfraCreating",
    "InfraCreated",
    "InstanceLaunching",
    "InstanceProvisioned",
    "BootstrapStarting",
    "BootstrapProgress",
    "BootstrapCompleted",
    "PoolStarted",
    "Metrics",
    "LogLine",
    "InstanceStopping",
    "PoolStopping",
    "CostUpdate",
    "CostFinal",
    "Error",
    "SkywardEvent",
    "Callback",
    "ProviderName",
    "compose",
    "emit",
    "use_callback",
    "S3Volume",
    "Spot",
    "SpotLike",
    "errors",
    "integrations",
]
HEAVY = ["boto3", "cryptography", "dask", "distributed", "joblib", "numpy", "paramiko", "rich"]


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def homes() -> dict[str, str]:
    """Return the names that type checkers see, each with its module."""
    stub = Path(inspect.getfile(skyward)).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": node.module or "" for node in imports for alias in node.names}


def test_specified_names_are_public(subtests: pytest.Subtests) -> None:
    for name in SPECIFIED:
        with subtests.test(name=name):
            assert name in skyward.__all__


def test_public_names_can_be_had(subtests: pytest.Subtests) -> None:
    for name in skyward.__all__:
        with subtests.test(name=name):
            assert getattr(skyward, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    assert sorted(homes()) == skyward.__all__


def test_public_names_are_public_where_they_live(subtests: pytest.Subtests) -> None:
    for name, home in homes().items():
        with subtests.test(name=name):
            assert home == "skyward" or hasattr(importlib.import_module(home), name)


def test_every_error_and_event_is_public() -> None:
    internal = {"current_callbacks", "deliver", "flatten", "forward_emitted"}
    events = set(importlib.import_module("skyward.events").__all__) - internal
    assert events | set(importlib.import_module("skyward.errors").__all__) <= set(skyward.__all__)


def test_no_submodule_bears_the_name_of_a_public_object() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(skyward.__path__)}
    assert submodules & set(skyward.__all__) == {name for name, home in homes().items() if home == "skyward"}


def test_dir_lists_the_public_names() -> None:
    assert dir(skyward) == sorted(skyward.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(skyward, "computer")
    with pytest.raises(AttributeError, match="module 'skyward' has no attribute 'computer'"):
        _ = skyward.computer
    with pytest.raises(ImportError, match="computer"):
        from skyward import computer  # noqa: F401


def test_integrations_come_from_skyward_joblib() -> None:
    pytest.importorskip("joblib")
    import skyward_joblib
    from skyward import integrations

    for name in integrations.__all__:
        assert getattr(integrations, name) is getattr(skyward_joblib, name)
    assert dir(integrations) == integrations.__all__
    with pytest.raises(AttributeError, match=re.escape("module 'skyward.integrations' has no attribute 'DaskPool'")):
        _ = integrations.DaskPool


def test_importing_skyward_loads_nothing_heavy() -> None:
    code = f"import sys, skyward; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_compute_and_values_load_nothing_heavy() -> None:
    names = "compute, gather, Image, Spot, S3Volume, Accelerator, NVIDIA, shard, instance_info, LogLine, errors"
    code = f"import sys; from skyward import {names}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_importing_skyward_takes_no_time() -> None:
    code = "import time; start = time.process_time(); import skyward; print(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.06


def test_names_are_the_same_whatever_was_imported_before() -> None:
    code = "import skyward.api.calls; from skyward import compute; print(type(compute).__name__)"
    assert run(code) == "function"
