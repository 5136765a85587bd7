"""Partitions of a node's GPUs: made before its workers start, and on a machine of one's own undone after they ended.

What was found, and what is about to be changed, is written down first, in a file for each GPU that is locked as long
as the node lives. Where a supervisor was killed, the next one that locks the file undoes what it says.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from skyward._concurrency.waiting import NotYet, wait_until
from skyward.errors import ConfigurationError, SkywardError
from skyward.node.gpu.driver import Gpu, GpuDriver, GpuInstance, Partition
from skyward.request.accelerators import MigProfile

__all__ = ["MIG_START_S", "MIG_UNDO_S", "GpuPartitioner", "largest_first"]

T = TypeVar("T")

MIG_START_S = 240.0
"""How much longer a node may take to start: eight GPUs are reset and cut one after the other."""
MIG_UNDO_S = 120.0
"""How much longer it may take to end."""

_IN_USE_S = 20.0
"""For so long the driver may hold on to processes that have ended."""
_PENDING = (
    "the mode changes with the GPU's next reset. Stop what uses the GPU (nvidia-smi lists it; monitoring such as dcgm "
    "counts), then try again, or reset it or reboot: `nvidia-smi --gpu-reset -i {index}`"
)

log = logging.getLogger("skyward.node.gpu.partitioner")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What was done to a GPU.

    Attributes:
        mig: whether MIG mode was on before.
        made: numbers of the instances that were made.
        making: profiles of those that are about to be made, and have no numbers yet.
    """

    mig: bool
    made: tuple[int, ...] = ()
    making: tuple[str, ...] = ()

    def accounts_for(self, there: Sequence[GpuInstance]) -> list[int]:
        """Numbers of those instances that come from it."""
        if self.making and not Counter(each.profile for each in there) - Counter(self.making):
            return [each.id for each in there]
        return [each.id for each in there if each.id in self.made]


class _Claim:
    """A GPU that is this process's to partition, and the file that says how it was."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(folder / f"{gpu.uuid}.json", os.O_RDWR | os.O_CREAT, 0o600), "r+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigurationError(
                f"mig: {gpu} is partitioned for another node of Skyward's at the moment; close its pool first"
            ) from None

    def read(self) -> _Change | None:
        """What was not undone. Instances do not outlive the system's start: their numbers may be others' after it."""
        self._file.seek(0)
        text = self._file.readline()
        if not text:
            return None
        values = json.loads(text)
        if values["boot"] != _boot():
            return _Change(mig=values["mig"])
        return _Change(mig=values["mig"], made=tuple(values["made"]), making=tuple(values["making"]))

    def write(self, change: _Change | None) -> None:
        """A change follows, or was made; or all is as it was.

        Where this process is killed meanwhile, the first line is what it was before, or what it is to be.
        """
        self._file.seek(0)
        if change is not None:
            self._file.write(json.dumps({**asdict(change), "boot": _boot()}) + "\n")
            self._file.flush()
        self._file.truncate()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others have it."""
        self._file.close()


class GpuPartitioner:
    """Cuts GPUs as asked for, and joins them again.

    Partitions that are there already and are exactly those asked for are used. On a machine of one's own any others are
    left alone, which means an error; on a rented one they are replaced.

    Args:
        driver: the machine's.
        gpus: what to cut.
        profiles: into which parts, each of them.
        own_machine: whether the machine was there before the node and outlives it.
        folder: where it is written down how GPUs were.
    """

    def __init__(
        self, driver: GpuDriver, gpus: Sequence[Gpu], profiles: Sequence[str], *, own_machine: bool, folder: Path
    ) -> None:
        self._driver = driver
        self._gpus = tuple(gpus)
        self._profiles = tuple(profiles)
        self._own = own_machine
        self._folder = folder
        self._claims: dict[int, _Claim] = {}
        self._closing = ExitStack()

    async def set_up(self) -> tuple[Partition, ...]:
        """Make the partitions; returns those of the first GPU, then those of the next, each as they were asked for.

        Raises:
            ConfigurationError: that cannot be done; says why, and what to do. Nothing is left of it.
        """
        try:
            for gpu in self._gpus:
                await self._cut(gpu)
            return tuple([part for gpu in self._gpus for part in await self._checked(gpu)])
        except BaseException:
            await self.undo()
            raise

    async def undo(self) -> None:
        """Make every GPU of one's own what it was. What does not work is logged, and left to the next. Idempotent."""
        for gpu in self._gpus:
            claim = self._claims.pop(gpu.index, None)
            change = claim.read() if claim is not None else None
            if claim is None or change is None:
                continue
            try:
                await self._restore(gpu, change)
                claim.write(None)
            except (SkywardError, OSError):  # the node's end has more to do: volumes, folders
                log.exception("%s could not be made what it was; the next node that partitions it tries again", gpu)
        self._closing.close()

    async def _cut(self, gpu: Gpu) -> None:
        if self._own:
            claim = _Claim(self._folder, gpu)
            self._closing.callback(claim.close)
            if (left := claim.read()) is not None:
                log.warning("a node that partitioned %s was killed; it is made what it was first", gpu)
                await self._restore(gpu, left)
                claim.write(None)
                gpu = await self._seen(gpu)
            self._claims[gpu.index] = claim
        there = await _in_thread(lambda: self._driver.instances(gpu.index)) if gpu.mig else ()
        if there and await self._has_what_is_asked_for(gpu, len(there)):
            return
        if there and self._own:
            has = ", ".join(instance.profile for instance in there)
            raise ConfigurationError(
                f"mig: {gpu} is partitioned already, into {has}; asked for: {', '.join(self._profiles)}. Ask for what "
                f"it has, or remove it first: `nvidia-smi mig -i {gpu.index} -dci`, then the same with -dgi"
            )
        self._note(gpu, _Change(mig=bool(gpu.mig), making=self._profiles))
        if not gpu.mig:
            await self._turn_on(gpu)
        create = largest_first(self._profiles, gpu.memory_gib)
        destroy = [instance.id for instance in there]
        try:
            await _in_thread(lambda: self._driver.change(gpu.index, create=create, destroy=destroy))
        finally:
            made = await _in_thread(lambda: self._driver.instances(gpu.index))
            self._note(gpu, _Change(mig=bool(gpu.mig), made=tuple(instance.id for instance in made)))

    def _note(self, gpu: Gpu, change: _Change) -> None:
        if self._own:
            self._claims[gpu.index].write(change)

    async def _turn_on(self, gpu: Gpu) -> None:
        said = await _in_thread(lambda: self._driver.set_mig(gpu.index, on=True))
        now = await self._seen(gpu)
        if not now.mig:
            why = _PENDING.format(index=gpu.index) if now.mig_pending else "it stays off"
            raise ConfigurationError(f"mig: {gpu} is not in MIG mode yet, {why}. The driver said: {said}")

    async def _seen(self, gpu: Gpu) -> Gpu:
        """The GPU as it is now."""
        now = await _in_thread(self._driver.gpus)
        return next((each for each in now or () if each.uuid == gpu.uuid), gpu)

    async def _parts(self, gpu: Gpu) -> list[Partition]:
        return [part for part in await _in_thread(self._driver.partitions) if part.gpu == gpu.index]

    async def _has_what_is_asked_for(self, gpu: Gpu, instances: int) -> bool:
        """Also nothing besides, such as an instance that nobody could use."""
        parts = await self._parts(gpu)
        return len(parts) == instances and Counter(part.profile for part in parts) == Counter(self._profiles)

    async def _checked(self, gpu: Gpu) -> list[Partition]:
        """The partitions, in the order asked for."""
        parts = await self._parts(gpu)
        if Counter(part.profile for part in parts) != Counter(self._profiles):
            has = ", ".join(part.profile for part in parts) or "none"
            raise ConfigurationError(f"mig: {gpu} was to have {', '.join(self._profiles)}, and has {has}")
        return [parts.pop(next(i for i, part in enumerate(parts) if part.profile == name)) for name in self._profiles]

    async def _restore(self, gpu: Gpu, change: _Change) -> None:
        now = await self._seen(gpu)
        if now.mig and await self._remove(gpu, change):
            return  # somebody else has partitions on it by now
        if (now.mig or now.mig_pending) and not change.mig:
            said = await _in_thread(lambda: self._driver.set_mig(gpu.index, on=False))
            if (await self._seen(gpu)).mig:
                raise ConfigurationError(f"mig: {gpu} stays in MIG mode until its next reset. The driver said: {said}")

    async def _remove(self, gpu: Gpu, change: _Change) -> bool:
        """Destroy what was made, which programs that were just killed may hold for a moment; whether any is left."""

        async def removed() -> bool | NotYet:
            there = await _in_thread(lambda: self._driver.instances(gpu.index))
            ours = change.accounts_for(there)
            try:
                await _in_thread(lambda: self._driver.change(gpu.index, destroy=ours))
            except ConfigurationError as error:
                return NotYet(str(error))
            return len(ours) < len(there)

        return await wait_until(
            removed, deadline_s=_IN_USE_S, interval_s=0.5, what=f"the partitions of {gpu} to be removed"
        )


def _boot() -> str:
    """Tells one start of the system from another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


def largest_first(profiles: Sequence[str], memory_gib: float) -> list[str]:
    """The order in which all find their place: the driver does not move what is there to make room.

    Args:
        profiles: what is to be made of a GPU.
        memory_gib: the GPU's memory; 0 if it is not known.
    """

    def size(profile: str) -> tuple[int, int]:
        known = MigProfile.of(profile, memory_gib or 1.0)
        return known.memory_slices, known.compute_slices

    return sorted(profiles, key=size, reverse=True)
