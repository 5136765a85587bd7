"""The demos of ``make demo`` and ``make demo-ssh``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gallery

ON_HOSTS = """
import sys
from pathlib import Path

import demo_ssh
from skyward.testing.hosts import SshHost, share_cache

class Host(SshHost):
    def __enter__(self):
        host = super().__enter__()
        share_cache(host.home, Path(sys.argv[1]))
        return host

demo_ssh.SshHost = Host
demo_ssh.main()
"""

pytestmark = [pytest.mark.full, pytest.mark.example, pytest.mark.timeout(180)]


def run(example: str, *arguments: str | Path, folder: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(gallery.EXAMPLES)},
    )

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr
    gallery.compare(example, completed.stdout, exactly=False)


def test_the_demo_prints_what_the_gallery_shows(tmp_path: Path) -> None:
    run("demo.py", gallery.EXAMPLES / "demo.py", folder=tmp_path)


def test_the_demo_on_hosts_prints_what_the_gallery_shows(tmp_path: Path, ssh_cache: Path) -> None:
    """With the environments of all test hosts: to make and compile one on each took 20 s of processor time."""
    run("demo_ssh.py", "-c", ON_HOSTS, ssh_cache, folder=tmp_path)
