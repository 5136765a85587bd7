"""A supervisor's part in its node's volumes: has changes written back now and then, and everything at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Literal

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.node.storage.volume_program import VolumeOrder
from skyward.wire.limits import RELEASE_S
from skyward.wire.node_config import NodeConfig

__all__ = ["WRITE_BACK_S", "VolumeKeeper"]

log = logging.getLogger("skyward.node.storage.write_back")

WRITE_BACK_S = 60.0
"""How often changes are written back while the node lives."""
_PAUSE_S = 1.0


class VolumeKeeper:
    """Keeps the volumes of one node.

    Args:
        config: the node's.
        on_trouble: told when changes cannot be written back, and why.

    Attributes:
        writable: whether there may be anything to write back.
    """

    def __init__(self, config: NodeConfig, on_trouble: Callable[[str], None]) -> None:
        self._config = config
        self._on_trouble = on_trouble
        self.writable = any(not granted.volume.read_only for granted in config.volumes)
        self._process: asyncio.subprocess.Process | None = None
        self._told = ""
        self._hurry = asyncio.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of what it runs at the moment."""
        return () if self._process is None else (self._process.pid,)

    async def keep(self) -> None:
        """Write back every minute what was changed; all the time once there is a hurry."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_BACK_S):
                    await self._hurry.wait()
            await SYSTEM_CLOCK.sleep(_PAUSE_S)
            self._tell(await self._run("push"))

    def hurry(self) -> None:
        """The machine will be gone soon. Idempotent."""
        self._hurry.set()

    async def release(self) -> None:
        """Write back everything, and leave nothing of the volumes on the machine. To be called once nothing runs."""
        if not self._config.volumes:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                self._tell(await self._run("release"))
        except TimeoutError:
            self._tell(f"it took longer than {RELEASE_S:g} s")

    def _tell(self, trouble: str) -> None:
        if trouble and trouble != self._told:
            log.error("%s", trouble)
            self._on_trouble(trouble)
        self._told = trouble

    async def _run(self, verb: Literal["push", "release"]) -> str:
        """Why it failed, if it did. What is left of it when this is cancelled is killed."""
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
                await asyncio.shield(process.wait())
            self._process = None
        lines = said.decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"exit status {process.returncode}") if process.returncode else ""
