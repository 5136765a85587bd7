"""Test hosts that are real islands, each in a network namespace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from skyward.errors import UnreachableError
from skyward.testing.hosts import SshHost

__all__ = ["GUARD", "IslandHost", "require_namespaces"]

GUARD: Final = Path(__file__).with_name("island_guard.py")
_CLONE_NEWNET = 0x40000000
_PORT = 22


def require_namespaces() -> None:
    """Skip the test, or the file of tests, where this user may not make network namespaces."""
    command = f"import ctypes; raise SystemExit(ctypes.CDLL(None).unshare({_CLONE_NEWNET}))"
    if subprocess.run([sys.executable, "-I", "-c", command], check=False).returncode:
        import pytest

        pytest.skip("a host on an island needs the right to make network namespaces: root", allow_module_level=True)


class IslandHost(SshHost):
    """Host with a network of its own, a namespace, which takes root.

    Nothing there reaches anything outside, no package index either, and from outside only ``address`` and ``port`` lead
    to its sshd. It needs a prepared cache (:func:`skyward.testing.hosts.share_cache`).

    Args:
        folder: folder of the host.
        island: its own address inside, where its sshd has port 22.
        neighbour: the island whose network it shares; None for a network of its own.
        **settings: those of every host.
    """

    def __init__(self, folder: Path, *, island: str, neighbour: SshHost | None = None, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self._island = island
        self._neighbour = neighbour

    def _guard_command(self) -> Sequence[str | Path]:
        shared = f"@{self._neighbour.pid}" if self._neighbour is not None else ""
        place = f"{self.address}:{self.port}={self._island}:{_PORT}{shared}"
        return (sys.executable, "-I", GUARD, place)

    def _enter_network(self) -> None:
        if not (port := self._answer()):
            raise UnreachableError(f"no network for the island at {self.address}:{self.port}: see standard error")
        self.port = port

    def _listen_address(self) -> str:
        return f"{self._island}:{_PORT}"
