"""Accelerators of one node: chosen before its workers start, watched, and released after they have ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import platformdirs

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import ConfigurationError
from skyward.node.gpu.driver import Device, Gpu, NvidiaDriver
from skyward.node.gpu.health import GpuWatch, open_watch
from skyward.node.gpu.partitioner import GpuPartitioner
from skyward.request.accelerators import Vendor, find_model, fold_name, model_name
from skyward.wire.node_config import NodeConfig

log = logging.getLogger("skyward.node.gpu.devices")

_SHOWN = "CUDA_VISIBLE_DEVICES"
_LOOK_S = 1.0


class NodeDevices:
    """Accelerators of a node; partitioned on request, watched, and left as they were found.

    Args:
        config: the client's request.
        driver: the machine's driver.
        environ: environment, whose ``CUDA_VISIBLE_DEVICES`` limits the node to a part of the machine.
        open_watch: returns a watch over the GPUs with these UUIDs, or None.
        clock: paces the watch.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        driver: NvidiaDriver | None = None,
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
        """Return the workers' devices, in the order in which they are dealt.

        Raises:
            ConfigurationError: the machine lacks the requested devices and cannot make them; nothing was changed.
        """
        gpus = await asyncio.to_thread(self._driver.gpus)
        if self._config.mig:
            self._devices = await self._partitioned(choose_gpus(self._config.accelerators, gpus, self._shown))
        else:
            parts = await asyncio.to_thread(self._partitions, gpus or ())
            self._devices = choose_devices(self._config.accelerators, gpus, parts, self._shown)
        return self._devices

    async def watch(self, report: Callable[[str], None]) -> None:
        """Watch the requested devices until cancelled; pass ``report`` the failure that makes a GPU unusable, once."""
        asked = self._devices if self._config.accelerators else ()
        watch = self._open_watch(sorted({device.gpu for device in asked if device.gpu}))
        if watch is None:
            return
        try:
            while not (trouble := await asyncio.to_thread(watch.trouble)):
                await self._clock.sleep(_LOOK_S)
            report(trouble)
        finally:
            watch.close()

    async def release(self) -> None:
        """Undo the changes to GPUs of the user's own machine; log any that cannot be undone. Idempotent."""
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
        return await self._partitioner.set_up()

    def _partitions(self, gpus: Sequence[Gpu]) -> Sequence[Device]:
        found: list[Device] = []
        for gpu in gpus:
            try:
                found += self._driver.partitions(gpu) if gpu.mig else ()
            except ConfigurationError as error:  # the request may be for another GPU
                log.warning("the partitions of %s are unknown: %s", gpu, error)
        return found


def choose_devices(
    asked: Sequence[str], gpus: Sequence[Gpu] | None, partitions: Sequence[Device], shown: str | None
) -> tuple[Device, ...]:
    """Return the devices of a node that partitions nothing: the requested ones, or else all of the machine's.

    Args:
        asked: names of the accelerators, one for each.
        gpus: the machine's GPUs; None if there is no driver to list them.
        partitions: the partitions of those in MIG mode.
        shown: this process's ``CUDA_VISIBLE_DEVICES``, if set: it may show the node a part of the machine.

    Raises:
        ConfigurationError: there are fewer than requested.
    """
    if gpus is None or (asked and _vendor(asked[0]) not in (Vendor.NVIDIA, Vendor.UNKNOWN)):
        return _unseen(asked, shown)
    there = _shown_devices(gpus, partitions, shown)
    if not asked:
        return there
    fitting = [device for device in there if not device.profile and _is_called(device.name, asked[0])]
    return tuple(_enough(asked, fitting, there))


def choose_gpus(asked: Sequence[str], gpus: Sequence[Gpu] | None, shown: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a node partitions.

    Raises:
        ConfigurationError: there are fewer than requested, or one of them cannot be partitioned.
    """
    if gpus is None:
        raise ConfigurationError("mig: this machine has no NVIDIA driver, so no GPU can be partitioned")
    there = [found for found in (_shown_gpu(gpus, name) for name in _names(gpus, shown)) if found is not None]
    chosen = tuple(_enough(asked, [gpu for gpu in there if _is_called(model_name(gpu.name), asked[0])], there))
    for gpu in chosen:
        if gpu.mig is None:
            raise ConfigurationError(f"mig must be None: {gpu} cannot be partitioned")
    return chosen


def _enough(asked: Sequence[str], fitting: Sequence[Any], there: Sequence[Any]) -> Sequence[Any]:
    if len(fitting) >= len(asked):
        return fitting[: len(asked)]
    has = ", ".join(map(str, there)) or "none"
    raise ConfigurationError(
        f"accelerator: {len(asked)}x {asked[0]} asked for, and the driver of this machine has {len(fitting)}; "
        f"its devices: {has}"
    )


def _unseen(asked: Sequence[str], shown: str | None) -> tuple[Device, ...]:
    names = [name.strip() for name in (shown or "").split(",") if name.strip()]
    names += [str(index) for index in range(len(names), len(asked))]
    return tuple(Device(name=name, shown_as=names[index]) for index, name in enumerate(asked))


def _vendor(name: str) -> Vendor:
    model = find_model(name)
    return Vendor.UNKNOWN if model is None else model.vendor


def _is_called(name: str, asked: str) -> bool:
    if find_model(asked) is None:  # not in the catalogue: the user's own word, looked for in the driver's name
        return fold_name(asked) in fold_name(name)
    return fold_name(asked) == fold_name(name)


def _names(gpus: Sequence[Gpu], shown: str | None) -> Sequence[str]:
    """Return CUDA's names of the devices of this process."""
    if shown is None:
        return [str(gpu.index) for gpu in gpus]
    return [name.strip() for name in shown.split(",")]


def _shown_gpu(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    """Return the GPU of that index, or with a UUID that begins so."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None


def _shown_devices(gpus: Sequence[Gpu], partitions: Sequence[Device], shown: str | None) -> tuple[Device, ...]:
    devices: list[Device] = []
    for name in _names(gpus, shown):
        gpu = _shown_gpu(gpus, name)
        parts = [part for part in partitions if part.shown_as == name or (gpu and gpu.mig and part.gpu == gpu.uuid)]
        if gpu is not None and not gpu.mig:
            devices.append(Device(name=model_name(gpu.name), shown_as=name, gpu=gpu.uuid))
        elif parts:
            devices += parts
        elif gpu is None:
            break  # CUDA ignores every name after the first one that is invalid
    return tuple(devices)
