"""The NVIDIA GPUs of this machine: the driver behind one seam, and what of them a node's workers may use.

What is said here of ``nvidia-smi`` is in NVIDIA's MIG user guide ("Getting Started with MIG", "MIG Device Names") and
in the manual page nvidia-smi(1); of NVML in its reference. ``support.gpus`` has a driver that answers likewise.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyward.errors import ConfigurationError
from skyward.node.gpu.nvml import import_nvml, open_nvml
from skyward.request.accelerators import Vendor, find_model, fold_name, model_name

__all__ = [
    "Device",
    "Gpu",
    "GpuDriver",
    "GpuInstance",
    "NvidiaDriver",
    "Partition",
    "SmiAnswer",
    "choose_devices",
    "choose_gpus",
    "run_command",
]

log = logging.getLogger("skyward.node.gpu.driver")

_GIB = 1 << 30
_COMMAND_S = 45.0
_NO_SUCH_PROGRAM, _TIMED_OUT, _NOT_FOUND = 127, 124, 6
_NO_PERMISSION = "insufficient permissions"
# "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-…)", and below it "  MIG 3g.20gb     Device  0: (UUID: MIG-…)": single blanks
# before R510; before R470 the name was MIG-GPU-<the GPU's>/<GPU instance>/<compute instance>.
_GPU_LINE = re.compile(r"GPU (\d+): .*\(UUID: GPU-[^)]+\)")
_PARTITION_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
# "|   0  MIG 3g.20gb       9        1          4:4     |": GPU, name, profile, instance, start:size. Columns grow wider
# with the driver's version.
_INSTANCE_ROW = re.compile(r"\|\s+\d+\s+MIG (\S+)\s+\d+\s+(\d+)\s+\d+:\d+\s+\|")
# "|   0  MIG 3g.20gb        9     2/2        19.50      No     42     2     0   |"
_PROFILE_ROW = re.compile(r"\|\s+\d+\s+MIG (\S+)\s+\d+\s+\d+/\d+\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as its driver describes it.

    Attributes:
        index: the driver's number of it, in the order of the PCI bus.
        uuid: the driver's name of it, e.g. ``GPU-…``; the same after a restart.
        name: its model, in the driver's words.
        memory_gib: its memory.
        mig: whether MIG mode is on; None where there is no such mode.
        mig_pending: whether it is to be on after the GPU's next reset.
    """

    index: int
    uuid: str
    name: str
    memory_gib: float
    mig: bool | None = None
    mig_pending: bool = False

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """A part of a GPU that was set aside; one with a compute instance in it is a :class:`Partition` as well.

    Attributes:
        id: the driver's number of it on its GPU.
        profile: its size, e.g. ``"3g.40gb"``.
    """

    id: int
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A part of a GPU that programs can use.

    Attributes:
        gpu: the GPU's index.
        profile: its size, e.g. ``"3g.40gb"``.
        uuid: what CUDA knows it by, e.g. ``MIG-…``.
    """

    gpu: int
    profile: str
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one worker, or several of them, may use.

    Attributes:
        name: the catalogue's name of the model.
        shown_as: what ``CUDA_VISIBLE_DEVICES`` calls it.
        gpu: UUID of the GPU that it is, or is a part of; empty where the driver was not asked.
        profile: the partition's size; empty for a whole GPU.
    """

    name: str
    shown_as: str
    gpu: str = ""
    profile: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.profile})" if self.profile else self.name


class GpuDriver(Protocol):
    """The driver of this machine's NVIDIA GPUs. Every verb blocks for up to a minute; nobody below tries again."""

    def gpus(self) -> Sequence[Gpu] | None:
        """The GPUs that answer, in the order of their indices; None where there is no driver. Raises nothing."""
        ...

    def partitions(self) -> Sequence[Partition]:
        """What GPUs in MIG mode consist of, in the driver's order. Raises :class:`ConfigurationError`."""
        ...

    def instances(self, gpu: int) -> Sequence[GpuInstance]:
        """What is set aside on a GPU, in use or not. Raises :class:`ConfigurationError`."""
        ...

    def set_mig(self, gpu: int, *, on: bool) -> str:
        """Turn MIG mode on or off; returns what the driver said. Whether it did is in :meth:`gpus`. Idempotent.

        Raises :class:`ConfigurationError` when the driver refuses.
        """
        ...

    def change(self, gpu: int, *, create: Sequence[str] = (), destroy: Sequence[int] = ()) -> None:
        """Destroy the instances with these numbers, then create some of these profiles, with a compute instance each.

        Raises :class:`ConfigurationError` with what the driver said; a part may be done then.
        """
        ...


@dataclass(frozen=True, slots=True)
class SmiAnswer:
    """What a command said, on both of its outputs, and how it ended."""

    exit_code: int
    text: str


def run_command(argv: Sequence[str]) -> SmiAnswer:
    """Run a command of the driver's; one that is not there, or does not end in time, has failed."""
    try:
        done = subprocess.run(
            argv,
            check=False,
            timeout=_COMMAND_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except FileNotFoundError:
        return SmiAnswer(exit_code=_NO_SUCH_PROGRAM, text=f"{argv[0]} is not installed")
    except subprocess.TimeoutExpired:
        return SmiAnswer(exit_code=_TIMED_OUT, text=f"no answer within {_COMMAND_S:g} s")
    return SmiAnswer(exit_code=done.returncode, text=done.stdout.strip())


class NvidiaDriver:
    """Implements :class:`GpuDriver`: GPUs are looked at with NVML, and partitioned with ``nvidia-smi``.

    NVML is held open for the time of a look only: MIG mode cannot be changed while anybody uses the GPU.

    Args:
        run: runs a command.
        load: returns the :mod:`pynvml` module, not yet initialised.
    """

    def __init__(
        self, run: Callable[[Sequence[str]], SmiAnswer] = run_command, load: Callable[[], Any] = import_nvml
    ) -> None:
        self._run = run
        self._load = load

    def gpus(self) -> Sequence[Gpu] | None:
        """See :meth:`GpuDriver.gpus`."""
        nvml = open_nvml(self._load)
        if nvml is None:
            return None
        try:
            found = [_look(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
            return [gpu for gpu in found if gpu is not None]
        except nvml.NVMLError as error:
            log.warning("the NVIDIA driver does not say what it has: %s", error)
            return []
        finally:
            nvml.nvmlShutdown()

    def partitions(self) -> Sequence[Partition]:
        """See :meth:`GpuDriver.partitions`."""
        found: list[Partition] = []
        gpu = -1
        for line in self._ask("-L").text.splitlines():
            if match := _GPU_LINE.match(line):
                gpu = int(match[1])
            elif match := _PARTITION_LINE.match(line):
                found.append(Partition(gpu=gpu, profile=match[1], uuid=match[2]))
        return found

    def instances(self, gpu: int) -> Sequence[GpuInstance]:
        """See :meth:`GpuDriver.instances`."""
        rows = self._ask("mig", "-i", str(gpu), "-lgi", none_is_fine=True).text.splitlines()
        return [GpuInstance(id=int(row[2]), profile=row[1]) for row in map(_INSTANCE_ROW.match, rows) if row]

    def set_mig(self, gpu: int, *, on: bool) -> str:
        """See :meth:`GpuDriver.set_mig`."""
        return self._ask("-i", str(gpu), "-mig", str(int(on))).text

    def change(self, gpu: int, *, create: Sequence[str] = (), destroy: Sequence[int] = ()) -> None:
        """See :meth:`GpuDriver.change`."""
        if destroy:
            others = {instance.id for instance in self.instances(gpu)} - set(destroy)
            for which in [("-gi", str(each)) for each in destroy] if others else [()]:
                self._ask("mig", "-i", str(gpu), "-dci", *which, none_is_fine=True)
                self._ask("mig", "-i", str(gpu), "-dgi", *which, none_is_fine=True)
        if create:
            self._check_profiles(gpu, create)
            self._ask("mig", "-i", str(gpu), "-cgi", ",".join(create), "-C")

    def _check_profiles(self, gpu: int, wanted: Sequence[str]) -> None:
        rows = self._ask("mig", "-i", str(gpu), "-lgip").text.splitlines()
        known = [row[1] for row in map(_PROFILE_ROW.match, rows) if row]
        if strange := [profile for profile in wanted if profile not in known]:
            raise ConfigurationError(
                f"mig: GPU {gpu} has no profile {strange[0]}; its driver lists {', '.join(known) or 'none'}"
            )

    def _ask(self, *arguments: str, none_is_fine: bool = False) -> SmiAnswer:
        command = ("nvidia-smi", *arguments)
        answer = self._run(command)
        if _NO_PERMISSION in answer.text.lower():
            answer = self._as_root(command, answer)
        if answer.exit_code == 0 or (none_is_fine and answer.exit_code == _NOT_FOUND):
            return answer
        raise ConfigurationError(
            f"mig: `{' '.join(command)}` failed with exit code {answer.exit_code}: {answer.text or 'it said nothing'}"
        )

    def _as_root(self, command: Sequence[str], refused: SmiAnswer) -> SmiAnswer:
        answer = self._run(("sudo", "-n", *command))
        if answer.exit_code in (0, _NOT_FOUND):
            return answer
        return SmiAnswer(
            exit_code=refused.exit_code,
            text=f"{refused.text}; only root may do that, and sudo did not help: {answer.text}",
        )


def _look(nvml: Any, index: int) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mig, pending = _mig_mode(nvml, handle)
        return Gpu(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            memory_gib=round(_memory_bytes(nvml, handle) / _GIB, 1),
            mig=mig,
            mig_pending=pending,
        )
    except nvml.NVMLError as error:
        log.warning("GPU %d does not answer, and is left out: %s", index, error)
        return None


def _mig_mode(nvml: Any, handle: Any) -> tuple[bool | None, bool]:
    try:
        current, pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU, or a driver, older than MIG
        return None, False
    return bool(current), bool(pending)


def _memory_bytes(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # in MIG mode only root is told the sum
        return 0


def choose_devices(
    asked: Sequence[str], gpus: Sequence[Gpu] | None, partitions: Sequence[Partition], shown: str | None
) -> tuple[Device, ...]:
    """What a node that does not partition anything may use: what was asked for, or else all that there is.

    Args:
        asked: names of the accelerators, one for each.
        gpus: what there is; None if nobody can tell.
        partitions: what those in MIG mode consist of.
        shown: this process's ``CUDA_VISIBLE_DEVICES``, if it has one: the node may be shown a part.

    Raises:
        ConfigurationError: there are fewer than asked for.
    """
    if gpus is None or (asked and _vendor(asked[0]) not in (Vendor.NVIDIA, Vendor.UNKNOWN)):
        return _unseen(asked, shown)
    there = _shown_devices(gpus, partitions, shown)
    if not asked:
        return there
    fitting = [device for device in there if not device.profile and _is_called(device.name, asked[0])]
    return tuple(_enough(asked, fitting, there))


def choose_gpus(asked: Sequence[str], gpus: Sequence[Gpu] | None, shown: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a node partitions.

    Raises:
        ConfigurationError: there are fewer than asked for, or one of them cannot be partitioned.
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
        f"what it has: {has}"
    )


def _unseen(asked: Sequence[str], shown: str | None) -> tuple[Device, ...]:
    names = [name.strip() for name in (shown or "").split(",") if name.strip()]
    names += [str(index) for index in range(len(names), len(asked))]
    return tuple(Device(name=name, shown_as=names[index]) for index, name in enumerate(asked))


def _vendor(name: str) -> Vendor:
    model = find_model(name)
    return Vendor.UNKNOWN if model is None else model.vendor


def _is_called(name: str, asked: str) -> bool:
    if find_model(asked) is None:  # the user's own word for it
        return fold_name(asked) in fold_name(name)
    return fold_name(asked) == fold_name(name)


def _names(gpus: Sequence[Gpu], shown: str | None) -> Sequence[str]:
    """What CUDA would call the devices of this process."""
    if shown is None:
        return [str(gpu.index) for gpu in gpus]
    return [name.strip() for name in shown.split(",")]


def _shown_gpu(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    """The GPU of that index, or with a UUID that begins so."""
    for gpu in gpus:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    return None


def _shown_devices(gpus: Sequence[Gpu], partitions: Sequence[Partition], shown: str | None) -> tuple[Device, ...]:
    devices: list[Device] = []
    for name in _names(gpus, shown):
        gpu = _shown_gpu(gpus, name)
        parts = [part for part in partitions if part.uuid == name or (gpu and gpu.mig and part.gpu == gpu.index)]
        if gpu is not None and not gpu.mig:
            devices.append(Device(name=model_name(gpu.name), shown_as=name, gpu=gpu.uuid))
        elif parts:
            devices += [_part_device(gpus, part) for part in parts]
        elif gpu is None:
            break  # CUDA shows nothing of what comes after a name that means nothing
    return tuple(devices)


def _part_device(gpus: Sequence[Gpu], part: Partition) -> Device:
    gpu = next(gpu for gpu in gpus if gpu.index == part.gpu)
    return Device(name=model_name(gpu.name), shown_as=part.uuid, gpu=gpu.uuid, profile=part.profile)
