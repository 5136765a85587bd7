"""The accelerators of one node, from before its workers start until after they have ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence

import platformdirs

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import ConfigurationError
from skyward.node.gpu.driver import Device, Gpu, GpuDriver, NvidiaDriver, Partition, choose_devices, choose_gpus
from skyward.node.gpu.health import GpuWatch, open_watch
from skyward.node.gpu.partitioner import GpuPartitioner
from skyward.request.accelerators import model_name
from skyward.wire.node_config import NodeConfig

__all__ = ["NodeDevices"]

log = logging.getLogger("skyward.node.gpu.devices")

_SHOWN = "CUDA_VISIBLE_DEVICES"
_LOOK_S = 1.0


class NodeDevices:
    """Finds a node's accelerators, partitions them if asked to, watches them, and leaves them as they were.

    Args:
        config: what the client asked for.
        driver: the machine's.
        environ: what says which part of the machine is this node's.
        open_watch: watches the GPUs with these UUIDs, if they can be.
        clock: the time between two looks at them.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        driver: GpuDriver | None = None,
        environ: Mapping[str, str] = os.environ,
        open_watch: Callable[[Sequence[str]], GpuWatch | None] = open_watch,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config
        self._driver = driver or NvidiaDriver()
        self._shown = environ.get(_SHOWN)
        self._open_watch = open_watch
        self._clock = clock
        self._partitioner: GpuPartitioner | None = None
        self._devices: tuple[Device, ...] = ()

    async def prepare(self) -> tuple[Device, ...]:
        """What the workers may use, in the order in which it is dealt to them.

        Raises:
            ConfigurationError: it is not what was asked for, or cannot be made so; nothing was changed.
        """
        gpus = await asyncio.to_thread(self._driver.gpus)
        if self._config.mig:
            self._devices = await self._partitioned(choose_gpus(self._config.accelerators, gpus, self._shown))
        else:
            parts = await asyncio.to_thread(self._partitions, gpus or ())
            self._devices = choose_devices(self._config.accelerators, gpus, parts, self._shown)
        return self._devices

    async def watch(self, tell: Callable[[str], None]) -> None:
        """Watch what was asked for, until cancelled; ``tell`` hears once why a GPU is of no use any more."""
        asked = self._devices if self._config.accelerators else ()
        watch = self._open_watch(sorted({device.gpu for device in asked if device.gpu}))
        if watch is None:
            return
        try:
            while not (trouble := await asyncio.to_thread(watch.trouble)):
                await self._clock.sleep(_LOOK_S)
            tell(trouble)
        finally:
            watch.close()

    async def release(self) -> None:
        """Undo what was done to GPUs of one's own. What cannot be undone is logged. Idempotent."""
        if self._partitioner is not None and self._config.own_machine:
            await self._partitioner.undo()

    async def _partitioned(self, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
        self._partitioner = GpuPartitioner(
            self._driver,
            gpus,
            self._config.mig,
            own_machine=self._config.own_machine,
            folder=platformdirs.user_state_path("skyward") / "mig",
        )
        names = {gpu.index: (model_name(gpu.name), gpu.uuid) for gpu in gpus}
        parts = await self._partitioner.set_up()
        return tuple(
            Device(name=names[part.gpu][0], shown_as=part.uuid, gpu=names[part.gpu][1], profile=part.profile)
            for part in parts
        )

    def _partitions(self, gpus: Sequence[Gpu]) -> Sequence[Partition]:
        if not any(gpu.mig for gpu in gpus):
            return ()
        try:
            return self._driver.partitions()
        except ConfigurationError as error:  # nobody may need them
            log.warning("what the GPUs in MIG mode consist of is unknown: %s", error)
            return ()
