"""`make test-gpu` on a machine without a GPU: it gives the reasons and fails, and installs nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_gpu_tests(python_path: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(python_path), str(ROOT / "src")]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, ROOT / "tests/gpu"], capture_output=True, text=True, timeout=100, check=False, env=env
    )


def fake_torch(folder: Path, text: str) -> Path:
    (folder / "torch.py").write_text(text, encoding="utf-8")
    return folder


def test_without_torch_the_reason_is_given(tmp_path: Path) -> None:
    done = run_gpu_tests(fake_torch(tmp_path, "raise ImportError('hidden')\n"))

    assert done.returncode == 2, done.stderr
    assert "torch cannot be imported (hidden): install a build for CUDA" in done.stdout


def test_without_a_gpu_the_reason_is_given(tmp_path: Path) -> None:
    text = "class version: cuda = '13.0'\nclass cuda: is_available = lambda: False\n"
    done = run_gpu_tests(fake_torch(tmp_path, text))

    assert done.returncode == 2, done.stderr
    assert done.stdout.splitlines() == [
        "No GPU test could run on this machine:",
        "  - torch sees no NVIDIA GPU: compare with nvidia-smi, and with CUDA_VISIBLE_DEVICES",
    ]


def test_missing_packages_are_listed_with_the_command(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "tests/gpu"], capture_output=True, text=True, timeout=100, check=False, env=env
    )

    assert done.returncode == 2, done.stderr
    assert f"packages are missing: {sys.executable} -m pip install " in done.stdout
    assert "'distributed>=" in done.stdout


def test_each_check_names_the_behaviours_of_a_gpu() -> None:
    """They cannot run here; this notes one that was dropped."""
    tree = ast.parse((ROOT / "tests/gpu/checks.py").read_text(encoding="utf-8"))
    names = " ".join(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))

    for subject in ("metrics", "current_accelerator", "gpus_of_its_own", "nccl", "gloo", "memory", "killed"):
        assert subject in names
