"""Tests on this machine's NVIDIA GPU: ``PYTHONPATH=src python tests/gpu``, or ``make test-gpu``.

They run with the packages that are installed and with the standard library's unittest: a machine with torch rarely has
a pytest. The last lines list the tests that could not run, with the reason.

Exit codes: 0 if every test that ran passed, 1 if one failed, 2 if none could run. No file here is named ``test_…``, so
pytest collects none of them.
"""

from __future__ import annotations

import sys
import unittest
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 11)


def main() -> int:
    if reasons := obstacles():
        print("No GPU test could run on this machine:")
        print(*(f"  - {reason}" for reason in reasons), sep="\n")
        return 2
    import checks

    print(*(f"note: {note}" for note in other_versions()), *checks.machine(), sep="\n", flush=True)
    suite = unittest.defaultTestLoader.loadTestsFromModule(checks)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    left_out = [(test.id().rpartition(".")[2], reason) for test, reason in result.skipped]
    left_out += checks.NEVER_RUN
    print(f"{len(left_out)} could not run:")
    print(*(f"  - {test}: {reason}" for test, reason in left_out), sep="\n")
    if len(result.skipped) == result.testsRun:
        return 2
    return 0 if result.wasSuccessful() else 1


def obstacles() -> list[str]:
    """Return every reason why nothing can run here, with the next step."""
    if sys.version_info < OLDEST_PYTHON:
        running = ".".join(map(str, sys.version_info[:3]))
        return [f"Python is {running}, Skyward needs 3.11 or newer: make test-gpu PYTHON=python3.12"]
    found: list[str] = []
    missing = [requirement for requirement in requirements() if not installed(requirement)]
    if missing:
        quoted = " ".join(f"'{requirement}'" for requirement in missing)
        found.append(f"packages are missing: {sys.executable} -m pip install {quoted}")
    try:
        import skyward  # noqa: F401
    except ImportError as error:
        if not missing:
            found.append(f"skyward cannot be imported ({error}): set PYTHONPATH={ROOT / 'src'}")
    if reason := no_gpu():
        found.append(reason)
    return found


def no_gpu() -> str | None:
    """Return the reason why torch has no NVIDIA GPU here; None if it has one."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}): install a build for CUDA"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build for CUDA"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU: compare with nvidia-smi, and with CUDA_VISIBLE_DEVICES"
    return None


def requirements() -> list[str]:
    """Return the library's own requirements and those of Dask, as pyproject.toml lists them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dask"]]


def name_of(requirement: str) -> str:
    return requirement.partition(">")[0].partition("=")[0].partition("[")[0]


def installed(requirement: str) -> bool:
    try:
        metadata.version(name_of(requirement))
    except metadata.PackageNotFoundError:
        return False
    return True


def other_versions() -> list[str]:
    """Return the packages whose installed version is not one that pyproject.toml admits."""
    from packaging.requirements import Requirement

    notes: list[str] = []
    for requirement in map(Requirement, requirements()):
        version = metadata.version(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            notes.append(f"{requirement.name} is {version}, Skyward requires {requirement.specifier}")
    return notes


if __name__ == "__main__":
    raise SystemExit(main())
