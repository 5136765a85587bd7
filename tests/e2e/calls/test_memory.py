"""Results that the client has no memory for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource

import skyward as sky

@sky.compute
def large(mebibytes):
    return bytes(mebibytes << 20)

@sky.compute
def double(x):
    return 2 * x

with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
    double(1) >> pool
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    before, refused, after = pool.submit(double.local, 1), pool.submit(large.local, 300), pool.submit(double.local, 2)
    try:
        refused.result(120)
    except MemoryError as error:
        print(error)
    print(before.result(120), after.result(120), len(large(8) >> pool), double(3) >> pool)
"""


def test_a_result_without_memory_for_it_fails_its_call_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    said, others = ended.stdout.splitlines()
    assert "has 315 MB, and this process has no memory for it" in said
    assert others == f"2 4 {8 << 20} 6"
