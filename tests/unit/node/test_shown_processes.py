"""In programs of their own: what a process shows cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

PROGRAM = """
import os, sys
from pathlib import Path
from skyward.node.processes import fits_arguments, show_arguments, show_variable

def shown(name):
    return Path("/proc/self", name).read_bytes().split(b"\\0")

os.environ.clear()
"""


def run(body: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM + body],
        env=os.environ | {"PLACEHOLDER": "local-1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr


def test_arguments_are_shown_with_a_path_that_fills_the_rest() -> None:
    run("""
assert fits_arguments(["python", "-m", "some.module"])
size = len(Path("/proc/self/cmdline").read_bytes())
show_arguments(["python", "-m", "some.module"], "/a/path")
*arguments, path, end = shown("cmdline")
assert arguments == [b"python", b"-m", b"some.module"] and end == b""
assert os.path.normpath(path).lstrip(b"/") == b"a/path", path
assert len(Path("/proc/self/cmdline").read_bytes()) == size
""")


def test_a_path_that_is_too_long_loses_its_beginning() -> None:
    run("""
path = "/" + "x" * 10000 + "/end"
show_arguments(["python"], path)
_, shown_path, _ = shown("cmdline")
assert shown_path.endswith(b"x/end") and path.endswith(shown_path.decode())
""")


def test_arguments_that_are_too_long_are_refused() -> None:
    run("""
assert not fits_arguments(["x" * 10000])
try:
    show_arguments(["x" * 10000], "/")
except ValueError:
    sys.exit(0)
sys.exit("accepted")
""")


def test_a_variable_takes_the_place_of_another_one() -> None:
    run("""
show_variable("PLACEHOLDER", "PLACEHOLDED", "local-2")
assert b"PLACEHOLDED=local-2" in shown("environ")
assert not [each for each in shown("environ") if each.startswith(b"PLACEHOLDER")]
for name, value in (("PLACEHOLDED", "longer-than-it"), ("OTHER", "x")):
    try:
        show_variable("PLACEHOLDED", name, value)
    except ValueError:
        continue
    sys.exit("accepted")
""")
