"""Partitions of a node's GPUs: made before its workers start; on the user's own machine undone after they ended.

Each GPU has a record, a file that is locked as long as the node lives. Its state and the change about to be made are
written there first. Where a supervisor was killed, the next one that locks the file undoes the change.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from skyward.base.platform import boot_id
from skyward.base.waiting import NotYet, wait_until
from skyward.errors import ConfigurationError, SkywardError
from skyward.node.gpu.driver import Device, Gpu, GpuInstance, NvidiaDriver
from skyward.request.accelerators import MigProfile

_IN_USE_S = 20.0
"""Seconds for which the driver may count killed processes as users of a partition."""
_PENDING = (
    "the mode changes with the GPU's next reset. Stop the processes on the GPU (nvidia-smi lists them; monitoring such "
    "as dcgm counts), then try again, or reset it or reboot: `nvidia-smi --gpu-reset -i {index}`"
)

log = logging.getLogger("skyward.node.gpu.partitioner")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Change to a GPU.

    Attributes:
        mig: True if MIG mode was on before.
        made: numbers of the instances that were made.
        making: profiles of those that are about to be made, and have no numbers yet.
    """

    mig: bool
    made: tuple[int, ...] = ()
    making: tuple[str, ...] = ()

    def accounts_for(self, there: Sequence[GpuInstance]) -> list[int]:
        """Return the numbers of the instances that come from it."""
        # Killed between the command and its record: all are its own, unless one has a profile that was not requested.
        if self.making and not Counter(each.profile for each in there) - Counter(self.making):
            return [each.id for each in there]
        return [each.id for each in there if each.id in self.made]


class _Claim:
    """Exclusive right of this process to partition a GPU, and the file that records the GPU's former state."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(folder / f"{gpu.uuid}.json", os.O_RDWR | os.O_CREAT, 0o600), "r+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigurationError(
                f"mig: {gpu} is partitioned for another node of Skyward's at the moment: close its pool first"
            ) from None

    def read(self) -> _Change | None:
        """Return the change that was not undone, if any."""
        self._file.seek(0)
        text = self._file.readline()
        if not text:
            return None
        values = json.loads(text)
        # Instances do not survive a reboot; after it, others may have their numbers.
        if values["boot"] != boot_id():
            return _Change(mig=values["mig"])
        return _Change(mig=values["mig"], made=tuple(values["made"]), making=tuple(values["making"]))

    def write(self, change: _Change | None) -> None:
        """Record a change that follows or was made; None if the GPU is in its former state."""
        # One line, flushed before the rest is cut off: killed in between, this process leaves the old or the new one.
        self._file.seek(0)
        if change is not None:
            self._file.write(json.dumps({**asdict(change), "boot": boot_id()}) + "\n")
            self._file.flush()
        self._file.truncate()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Release the GPU to other processes."""
        self._file.close()


class GpuPartitioner:
    """Partitioner of a node's GPUs, which restores them afterwards.

    Existing partitions are used if they are exactly the requested ones. Any others are an error on the user's own
    machine; on a rented one they are replaced.

    Args:
        driver: the machine's driver.
        gpus: the GPUs to partition.
        profiles: the partitions of each GPU.
        own_machine: True if the machine existed before the node and outlives it.
        folder: folder of the records.
    """

    def __init__(
        self, driver: NvidiaDriver, gpus: Sequence[Gpu], profiles: Sequence[str], *, own_machine: bool, folder: Path
    ) -> None:
        self._driver = driver
        self._gpus = tuple(gpus)
        self._profiles = tuple(profiles)
        self._own = own_machine
        self._folder = folder
        self._claims: dict[int, _Claim] = {}
        self._closing = ExitStack()

    async def set_up(self) -> tuple[Device, ...]:
        """Make the partitions; return those of the first GPU, then those of the next, each in the requested order.

        Raises:
            ConfigurationError: they cannot be made; the message has the reason and a remedy. Nothing is left of them.
        """
        try:
            for gpu in self._gpus:
                await self._cut(gpu)
            return tuple([part for gpu in self._gpus for part in await self._checked(gpu)])
        except BaseException:
            await self.undo()
            raise

    async def undo(self) -> None:
        """Restore every GPU of the user's own machine. A failure is logged, and left to the next node. Idempotent."""
        for gpu in self._gpus:
            claim = self._claims.pop(gpu.index, None)
            change = claim.read() if claim is not None else None
            if claim is None or change is None:
                continue
            try:
                await self._restore(gpu, change)
                claim.write(None)
            except (SkywardError, OSError):  # the node's end has more to do: volumes, folders
                log.exception("%s could not be restored; the next node that partitions it tries again", gpu)
        self._closing.close()

    async def _cut(self, gpu: Gpu) -> None:
        if self._own:
            claim = _Claim(self._folder, gpu)
            self._closing.callback(claim.close)
            if (left := claim.read()) is not None:
                log.warning("a node that partitioned %s was killed; the GPU is restored first", gpu)
                await self._restore(gpu, left)
                claim.write(None)
                gpu = await self._seen(gpu)
            self._claims[gpu.index] = claim
        there = await asyncio.to_thread(self._driver.instances, gpu.index) if gpu.mig else ()
        if there and await self._has_the_requested_ones(gpu, len(there)):
            return
        if there and self._own:
            has = ", ".join(instance.profile for instance in there)
            raise ConfigurationError(
                f"mig: {gpu} is partitioned already, into {has}; asked for: {', '.join(self._profiles)}. Ask for its "
                f"partitions, or remove them first: `nvidia-smi mig -i {gpu.index} -dci`, then the same with -dgi"
            )
        self._note(gpu, _Change(mig=bool(gpu.mig), making=self._profiles))
        if not gpu.mig:
            await self._turn_on(gpu)
        create = largest_first(self._profiles, gpu.memory_gib)
        destroy = [instance.id for instance in there]
        try:
            await asyncio.to_thread(self._driver.change, gpu.index, create=create, destroy=destroy)
        finally:
            made = await asyncio.to_thread(self._driver.instances, gpu.index)
            self._note(gpu, _Change(mig=bool(gpu.mig), made=tuple(instance.id for instance in made)))

    def _note(self, gpu: Gpu, change: _Change) -> None:
        if self._own:
            self._claims[gpu.index].write(change)

    async def _turn_on(self, gpu: Gpu) -> None:
        said = await asyncio.to_thread(self._driver.set_mig, gpu.index, on=True)
        now = await self._seen(gpu)
        if not now.mig:
            why = _PENDING.format(index=gpu.index) if now.mig_pending else "it stays off"
            raise ConfigurationError(f"mig: {gpu} is not in MIG mode yet, {why}. nvidia-smi: {said}")

    async def _seen(self, gpu: Gpu) -> Gpu:
        """Return the GPU's present state."""
        now = await asyncio.to_thread(self._driver.gpus)
        return next((each for each in now or () if each.uuid == gpu.uuid), gpu)

    async def _parts(self, gpu: Gpu) -> list[Device]:
        return list(await asyncio.to_thread(self._driver.partitions, gpu))

    async def _has_the_requested_ones(self, gpu: Gpu, instances: int) -> bool:
        parts = await self._parts(gpu)
        # An instance more than partitions has no compute instance: no program could use it.
        return len(parts) == instances and Counter(part.profile for part in parts) == Counter(self._profiles)

    async def _checked(self, gpu: Gpu) -> list[Device]:
        """Return the partitions in the requested order."""
        parts = await self._parts(gpu)
        if Counter(part.profile for part in parts) != Counter(self._profiles):
            has = ", ".join(part.profile for part in parts) or "none"
            raise ConfigurationError(f"mig: {gpu} was to have {', '.join(self._profiles)}, but has {has}")
        return [parts.pop(next(i for i, part in enumerate(parts) if part.profile == name)) for name in self._profiles]

    async def _restore(self, gpu: Gpu, change: _Change) -> None:
        now = await self._seen(gpu)
        if now.mig and await self._remove(gpu, change):
            return  # MIG mode stays on: somebody else has made partitions meanwhile
        if (now.mig or now.mig_pending) and not change.mig:
            said = await asyncio.to_thread(self._driver.set_mig, gpu.index, on=False)
            if (await self._seen(gpu)).mig:
                raise ConfigurationError(f"mig: {gpu} stays in MIG mode until its next reset. nvidia-smi: {said}")

    async def _remove(self, gpu: Gpu, change: _Change) -> bool:
        """Destroy the instances that were made; return whether others are left."""

        # Retried: the driver refuses as long as it counts a program that was just killed as a user.
        async def removed() -> bool | NotYet:
            there = await asyncio.to_thread(self._driver.instances, gpu.index)
            ours = change.accounts_for(there)
            try:
                await asyncio.to_thread(self._driver.change, gpu.index, destroy=ours)
            except ConfigurationError as error:
                return NotYet(str(error))
            return len(ours) < len(there)

        return await wait_until(
            removed, deadline_s=_IN_USE_S, interval_s=0.5, what=f"the partitions of {gpu} to be removed"
        )


def largest_first(profiles: Sequence[str], memory_gib: float) -> list[str]:
    """Return the profiles in the order in which there is room for all of them.

    Args:
        profiles: the partitions of one GPU.
        memory_gib: the GPU's memory; 0 if unknown.
    """
    # The driver places each one by itself and never moves an instance to make room for a larger one.

    def size(profile: str) -> tuple[int, int]:
        known = MigProfile.of(profile, memory_gib or 1.0)
        return known.memory_slices, known.compute_slices

    return sorted(profiles, key=size, reverse=True)
