"""Logins of many machines at a time."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import UnreachableError
from skyward.machine import ssh_login
from skyward.machine.ssh_config import SSHTarget

SILENT = 3
DEADLINE_S = 20.0


async def test_login_that_waited_for_its_turn_has_its_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent machines hold all turns for as long as their patience, which is also that of the one that waits."""
    monkeypatch.setattr(ssh_login, "_LOGINS", SILENT)
    times_s: list[float] = []
    logged_in = ssh_login._log_in

    def log_in(*arguments: Any, deadline: float, **options: Any) -> object:
        times_s.append(deadline - time.monotonic())
        return logged_in(*arguments, deadline=deadline, **options)

    monkeypatch.setattr(ssh_login, "_log_in", log_in)
    (tmp_path / "known").write_text(
        "* ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDmfn3ulsvHk/0adUMp2ZAIrtaLdFLa6PT0Bb6ULjUOG\n"
    )
    (tmp_path / "config").write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known\n")
    with ExitStack() as listeners:
        ports = [
            listeners.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(SILENT + 1)
        ]

        async def attempt(port: int) -> None:
            target = SSHTarget(host="127.0.0.1", port=port, patience_s=1.0, config_path=str(tmp_path / "config"))
            with pytest.raises(UnreachableError):
                await ssh_login.connect(target, None, lambda _: None, threading.Lock())

        await asyncio.wait_for(asyncio.gather(*map(attempt, ports)), DEADLINE_S)
    assert len(times_s) == SILENT + 1
    assert min(times_s) > 0.5  # none was left with the rest of the others' time
