"""Fakes work where pytest is not installed; only the contract suites require it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import skyward.testing

SUITES = {"transport"}


def test_every_fake_is_importable_without_pytest() -> None:
    folder = Path(skyward.testing.__file__).parent
    paths = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    modules = sorted(".".join(path.parts) for path in paths if path.name not in {*SUITES, "__init__"})
    script = (
        "import importlib, sys\n"
        "sys.modules.update({'pytest': None, '_pytest': None})\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'skyward.testing.{name}')\n"
    )

    done = subprocess.run([sys.executable, "-c", script, *modules], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert {"aws.local_ec2", "hosts", "in_process", "provider"} <= set(modules)
