"""Driver of this machine's NVIDIA GPUs: read through NVML, partitioned with ``nvidia-smi``.

Facts about ``nvidia-smi`` are from NVIDIA's MIG user guide ("Getting Started with MIG", "MIG Device Names") and the
manual page nvidia-smi(1), those about NVML from its reference. ``tests/support/gpus.py`` has a fake of both.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from skyward.errors import ConfigurationError
from skyward.node.gpu import nvml as nvml_program
from skyward.node.gpu.nvml import (
    GpuInstance,
    ask,
    import_nvml,
    instance_profiles,
    list_instances,
    mig_devices,
    mig_mode,
    open_nvml,
)
from skyward.request.accelerators import model_name

__all__ = ["Device", "Gpu", "GpuInstance", "NvidiaDriver", "run_command"]

log = logging.getLogger("skyward.node.gpu.driver")

_GIB = 1 << 30
_COMMAND_S = 45.0
_NO_SUCH_PROGRAM, _TIMED_OUT, _NOT_FOUND = 127, 124, 6
_NO_PERMISSION = "insufficient permissions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as its driver describes it.

    Attributes:
        index: the driver's number of it, in the order of the PCI bus.
        uuid: the driver's name of it, e.g. ``GPU-…``; the same after a restart.
        name: its model, in the driver's words.
        memory_gib: its memory; 0 if unknown.
        mig: True if MIG mode is on; None where there is no such mode.
        mig_pending: True if it will be on after the GPU's next reset.
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
class Device:
    """Accelerator, or a part of one that programs can use (a compute instance in a GPU instance).

    Attributes:
        name: the catalogue's name of the model.
        shown_as: its name in ``CUDA_VISIBLE_DEVICES``, e.g. ``GPU-…`` or ``MIG-…``.
        gpu: UUID of the GPU that it is, or is a part of; empty where the driver was not asked.
        profile: the partition's size, e.g. ``"3g.40gb"``; empty for a whole GPU.
    """

    name: str
    shown_as: str
    gpu: str = ""
    profile: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.profile})" if self.profile else self.name


def run_command(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command of the driver's; return its exit status and both outputs.

    One that is missing, or does not end in time, counts as failed.
    """
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
        return _NO_SUCH_PROGRAM, f"{argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return _TIMED_OUT, f"no answer within {_COMMAND_S:g} s"
    return done.returncode, done.stdout.strip()


class NvidiaDriver:
    """Driver of this machine's NVIDIA GPUs. Every method blocks for up to a minute; no layer below retries.

    Args:
        run: runs a command.
        load: returns the :mod:`pynvml` module, not yet initialised.
    """

    def __init__(
        self, run: Callable[[Sequence[str]], tuple[int, str]] = run_command, load: Callable[[], Any] = import_nvml
    ) -> None:
        self._run = run
        self._load = load

    def gpus(self) -> Sequence[Gpu] | None:
        """Return the GPUs that answer, in the order of their indices; None where there is no driver. Raises nothing."""
        nvml = open_nvml(self._load)
        if nvml is None:
            return None
        try:
            found = [_describe(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
            return [gpu for gpu in found if gpu is not None]
        except nvml.NVMLError as error:
            log.warning("the NVIDIA driver does not list its GPUs: %s", error)
            return []
        finally:
            nvml.nvmlShutdown()

    def partitions(self, gpu: Gpu) -> Sequence[Device]:
        """Return a GPU's partitions, in the driver's order. Raises :class:`ConfigurationError`."""
        with self._reading(gpu.index) as nvml:
            parts = list(mig_devices(nvml, nvml.nvmlDeviceGetHandleByIndex(gpu.index)))
        name = model_name(gpu.name)
        return [Device(name=name, shown_as=uuid, gpu=gpu.uuid, profile=profile) for profile, uuid in parts]

    def instances(self, gpu: int) -> Sequence[GpuInstance]:
        """Return a GPU's instances, in use or not. Raises :class:`ConfigurationError`."""
        with self._reading(gpu) as nvml:
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
            try:
                return list_instances(nvml, handle)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NO_PERMISSION:
                    raise
            uuid = nvml.nvmlDeviceGetUUID(handle)
        return self._instances_as_root(gpu, uuid)

    def set_mig(self, gpu: int, *, on: bool) -> str:
        """Turn MIG mode on or off; return the driver's words. The new mode is in :meth:`gpus`. Idempotent.

        Raises :class:`ConfigurationError` when the driver refuses.
        """
        return self._ask("-i", str(gpu), "-mig", str(int(on)))

    def change(self, gpu: int, *, create: Sequence[str] = (), destroy: Sequence[int] = ()) -> None:
        """Destroy the instances with these numbers, then create some of these profiles, with a compute instance each.

        Raises :class:`ConfigurationError` with the driver's words; a part may be done then.
        """
        if destroy:
            others = {instance.id for instance in self.instances(gpu)} - set(destroy)
            for which in [("-gi", str(each)) for each in destroy] if others else [()]:
                self._ask("mig", "-i", str(gpu), "-dci", *which, none_is_fine=True)
                self._ask("mig", "-i", str(gpu), "-dgi", *which, none_is_fine=True)
        if create:
            self._check_profiles(gpu, create)
            self._ask("mig", "-i", str(gpu), "-cgi", ",".join(create), "-C")

    def _check_profiles(self, gpu: int, wanted: Sequence[str]) -> None:
        with self._reading(gpu) as nvml:
            supported = [each.name for each in instance_profiles(nvml, nvml.nvmlDeviceGetHandleByIndex(gpu))]
        if lacking := [profile for profile in wanted if profile not in supported]:
            raise ConfigurationError(
                f"mig: GPU {gpu} has no profile {lacking[0]}; its driver lists {', '.join(supported) or 'none'}"
            )

    @contextmanager
    def _reading(self, gpu: int) -> Generator[Any]:
        # Open for one look only: MIG mode cannot be changed while any process uses the GPU, monitoring included.
        nvml = open_nvml(self._load)
        if nvml is None:
            raise ConfigurationError(f"mig: GPU {gpu} cannot be read: this machine has no NVIDIA driver")
        try:
            yield nvml
        except nvml.NVMLError as error:
            raise ConfigurationError(f"mig: GPU {gpu} cannot be read: {error}") from error
        finally:
            nvml.nvmlShutdown()

    def _instances_as_root(self, gpu: int, uuid: str) -> Sequence[GpuInstance]:
        # -B: a cache file of root's would keep the user from removing the environment. -I: of the user's settings and
        # folders none counts for root.
        exit_code, text = self._run(("sudo", "-n", sys.executable, "-I", "-B", nvml_program.__file__, uuid))
        if exit_code:
            raise ConfigurationError(
                f"mig: Insufficient Permissions: only root may list the instances of GPU {gpu}, and sudo did not help: "
                f"{text or f'exit code {exit_code}'}. Run as root, or allow sudo without a password"
            )
        return [GpuInstance(**each) for each in json.loads(text.splitlines()[-1])]

    def _ask(self, *arguments: str, none_is_fine: bool = False) -> str:
        """Run nvidia-smi, as root where that is needed, and return its words."""
        command = ("nvidia-smi", *arguments)
        exit_code, text = self._run(command)
        if _NO_PERMISSION in text.lower():
            root_code, root_text = self._run(("sudo", "-n", *command))
            if root_code in (0, _NOT_FOUND):
                exit_code, text = root_code, root_text
            else:
                text = f"{text}; only root may do that, and sudo did not help: {root_text}"
        # Status 6 is NVML's "not found": nothing is left to destroy where an earlier attempt got half way.
        if exit_code == 0 or (none_is_fine and exit_code == _NOT_FOUND):
            return text
        raise ConfigurationError(f"mig: `{' '.join(command)}` failed with exit code {exit_code}: {text or 'no output'}")


def _describe(nvml: Any, index: int) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mig, pending = mig_mode(nvml, handle)
        memory = ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)  # in MIG mode only root may read the sum
        return Gpu(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            memory_gib=round(memory.total / _GIB, 1) if memory else 0.0,
            mig=mig,
            mig_pending=pending,
        )
    except nvml.NVMLError as error:  # a lost GPU keeps its index and answers nothing; the others work
        log.warning("GPU %d does not answer, and is left out: %s", index, error)
        return None
