"""Supervisor's part in its node's volumes: changes written back every minute, and all of them at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Literal

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.node.storage.volume_program import VolumeOrder
from skyward.wire.limits import RELEASE_S
from skyward.wire.node_config import NodeConfig

log = logging.getLogger("skyward.node.storage.write_back")

WRITE_BACK_S = 60.0
"""Seconds between two times that changes are written back while the node lives."""
_PAUSE_S = 1.0
"""Seconds between two times once the machine is about to be lost."""


class VolumeKeeper:
    """Keeper of the volumes of one node.

    Args:
        config: the node's configuration.
        on_trouble: called with the reason when changes cannot be written back.

    Attributes:
        writable: True if there may be anything to write back.
    """

    def __init__(self, config: NodeConfig, on_trouble: Callable[[str], None]) -> None:
        self._config = config
        self._on_trouble = on_trouble
        self.writable = any(not granted.volume.read_only for granted in config.volumes)
        self._process: asyncio.subprocess.Process | None = None
        self._reported = ""
        self._hurry = asyncio.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the programs that run at the moment."""
        return () if self._process is None else (self._process.pid,)

    async def keep(self) -> None:
        """Write changes back every minute; without a pause after :meth:`hurry`."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_BACK_S):
                    await self._hurry.wait()
            await SYSTEM_CLOCK.sleep(_PAUSE_S)
            self._report(await self._run("push"))

    def hurry(self) -> None:
        """Write back without a pause from now on: the machine will be gone soon. Idempotent."""
        self._hurry.set()

    async def release(self) -> None:
        """Write back everything, and remove the volumes from the machine. Call once no user code runs."""
        if not self._config.volumes:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                self._report(await self._run("release"))
        except TimeoutError:
            self._report(f"it took longer than {RELEASE_S:g} s")

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self._reported:  # every minute the same: once is enough
            log.error("%s", trouble)
            self._on_trouble(trouble)
        self._reported = trouble

    async def _run(self, verb: Literal["push", "release"]) -> str:
        """Run the program for all volumes; return the reason of a failure, if any. Cancelled, kill the program."""
        # The order goes to standard input: it holds keys, and other users can read a command line.
        config = self._config
        order = VolumeOrder(verb=verb, instance_id=config.instance_id, workdir=config.workdir, volumes=config.volumes)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "skyward.node.storage.volume_program"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return str(error)
        try:
            _, said = await process.communicate(order.to_json().encode())
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                # Shielded: a second cancellation must not leave a zombie.
                await asyncio.shield(process.wait())
            self._process = None
        lines = said.decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"exit status {process.returncode}") if process.returncode else ""
