"""The commands of ``nvidia-smi`` that change MIG mode and instances, over GPUs that do not exist."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from support.gpu_parts._gpu_cards import CARDS, PROFILES
from support.gpus import FakeGpu, FakeInstance, Machine, make_instance

__all__ = ["Smi"]

_INVALID, _PERMISSIONS, _NOT_FOUND, _LOST, _IN_USE, _RESOURCES, _OTHER = 2, 4, 6, 15, 19, 23, 255
_SAID = {
    _INVALID: "Invalid Argument",
    _PERMISSIONS: "Insufficient Permissions",
    _NOT_FOUND: "Not Found",
    _IN_USE: "In use by another client",
    _RESOURCES: "Insufficient Resources",
    _OTHER: "Unknown Error",
}


class _RefusedError(Exception):
    def __init__(self, exit_code: int, lines: Sequence[str]) -> None:
        super().__init__(*lines)
        self.exit_code = exit_code
        self.lines = lines


@dataclass(slots=True)
class Smi:
    """One run of it, on a machine, by root or by somebody else."""

    machine: Machine
    root: bool

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """Its exit status, and what it prints."""
        try:
            return 0, "\n".join(self._act(arguments))
        except _RefusedError as refused:
            return refused.exit_code, "\n".join(refused.lines)

    def _act(self, arguments: list[str]) -> list[str]:
        if arguments and arguments[0].startswith("--query-gpu=name,memory.total"):
            return [f"{self._name(gpu)}, {CARDS[gpu.card].memory_mib}" for gpu in self.machine.gpus]
        match arguments:
            case ["-i", index, "-mig", mode]:
                return self._set_mode(self._gpu(index), on=mode == "1")
            case ["mig", "-i", index, "-cgi", names, "-C"]:
                return self._create(int(index), self._gpu(index), names.split(","))
            case ["mig", "-i", index, verb, *which] if verb in self._verbs():
                return self._verbs()[verb](int(index), self._gpu(index), which)
            case _:
                raise _RefusedError(_INVALID, ["Invalid combination of input arguments. Please run 'nvidia-smi -h'."])

    def _verbs(self) -> dict[str, Callable[[int, FakeGpu, list[str]], list[str]]]:
        return {
            "-dci": self._destroy_compute,
            "-dgi": self._destroy,
        }

    def _gpu(self, index: str) -> FakeGpu:
        if not index.isdigit() or int(index) >= len(self.machine.gpus):
            raise _RefusedError(_NOT_FOUND, ["No devices were found"])
        gpu = self.machine.gpus[int(index)]
        if gpu.lost:
            where = f"Unable to determine the device handle for GPU{index}: {gpu.bus}"
            raise _RefusedError(_LOST, [f"{where}: GPU is lost.  Reboot the system to recover this GPU"])
        return gpu

    def _name(self, gpu: FakeGpu) -> str:
        return CARDS[gpu.card].name

    # --- MIG mode ---------------------------------------------------------------------------------------------------

    def _set_mode(self, gpu: FakeGpu, *, on: bool) -> list[str]:
        word, done = ("enable", "Enabled") if on else ("disable", "Disabled")
        unable = f"Unable to {word} MIG Mode for GPU {gpu.bus}"
        if not PROFILES[gpu.card]:
            return [f"{unable}: Not Supported", "Treating as warning and moving on.", "All done."]
        if not self.root:
            self._refuse(_PERMISSIONS, unable, "Terminating early due to previous errors.")
        if not on and gpu.instances:
            self._refuse(_IN_USE, unable, "Terminating early due to previous errors.")
        gpu.pending = on
        if gpu.mig == on or not (gpu.used_by or not gpu.resettable):
            gpu.mig = on
            return [f"{done} MIG Mode for GPU {gpu.bus}", "All done."]
        warning = f"Warning: MIG mode is in pending {word} state for GPU {gpu.bus}"
        if not gpu.resettable:
            reset = f"Reboot the system or try nvidia-smi --gpu-reset to make MIG mode effective on GPU {gpu.bus}"
            return [f"{warning}:Not Supported", reset, "All done."]
        using = (
            f"{gpu.bus} is currently being used by one or more other processes (e.g. CUDA application or a monitoring "
            "application such as another instance of nvidia-smi). Please first kill all processes using the device and "
            "retry the command or reboot the system to make MIG mode effective."
        )
        return [f"{warning}:In use by another client", using, "All done."]

    # --- instances --------------------------------------------------------------------------------------------------

    def _create(self, index: int, gpu: FakeGpu, names: list[str]) -> list[str]:
        self._needs_mig(gpu)
        lines: list[str] = []
        known = {key: each for each in PROFILES[gpu.card] for key in (each.name, str(each.id), f"MIG {each.name}")}
        for name in names:
            unable = f"Unable to create a GPU instance on GPU {index:>2} using profile {name}"
            failed = "Failed to create GPU instances"
            if not self.root:
                self._refuse(_PERMISSIONS, unable, failed, lines)
            if name not in known:
                self._refuse(_INVALID, unable, failed, lines)
            if self.machine.breaks_after is not None and len(gpu.instances) >= self.machine.breaks_after:
                self._refuse(_OTHER, unable, failed, lines)
            profile = known[name]
            try:
                made = make_instance(gpu, profile)
            except LookupError:
                self._refuse(_RESOURCES, unable, failed, lines)
            made.uuid = f"MIG-{uuid.uuid4()}"
            own = f"GPU instance ID {made.id:>2}"
            using = f"using profile MIG {profile.name} (ID"
            lines += [
                f"Successfully created {own} on GPU {index:>2} {using} {profile.id:>2})",
                f"Successfully created compute instance ID  0 on GPU {index:>2} {own} {using} {profile.compute_id:>2})",
            ]
        return lines

    def _destroy_compute(self, index: int, gpu: FakeGpu, which: list[str]) -> list[str]:
        meant = [each for each in self._meant(gpu, which) if each.uuid]
        lines: list[str] = []
        if not meant:
            raise _RefusedError(_NOT_FOUND, ["No compute instances found: Not Found"])
        for instance in meant:
            where = f"compute instance ID  0 from GPU {index:>2} GPU instance ID {instance.id:>2}"
            self._may_destroy(where, "Failed to destroy compute instances", lines, in_use=bool(instance.used_by))
            instance.uuid = ""
            lines.append(f"Successfully destroyed {where}")
        return lines

    def _destroy(self, index: int, gpu: FakeGpu, which: list[str]) -> list[str]:
        meant = self._meant(gpu, which)
        lines: list[str] = []
        if not meant:
            raise _RefusedError(_NOT_FOUND, ["No GPU instances found: Not Found"])
        for instance in meant:
            where = f"GPU instance ID {instance.id:>2} from GPU {index:>2}"
            self._may_destroy(where, "Failed to destroy GPU instances", lines, in_use=bool(instance.uuid))
            gpu.instances.remove(instance)
            lines.append(f"Successfully destroyed {where}")
        return lines

    def _may_destroy(self, where: str, failed: str, lines: list[str], *, in_use: bool) -> None:
        if not self.root:
            self._refuse(_PERMISSIONS, f"Unable to destroy {where}", failed, lines)
        if in_use:
            self._refuse(_IN_USE, f"Unable to destroy {where}", failed, lines)

    def _meant(self, gpu: FakeGpu, which: list[str]) -> list[FakeInstance]:
        self._needs_mig(gpu)
        match which:
            case []:
                return list(gpu.instances)
            case ["-gi", number]:
                return [each for each in gpu.instances if str(each.id) == number]
            case _:
                raise _RefusedError(_INVALID, ["Invalid combination of input arguments."])

    def _needs_mig(self, gpu: FakeGpu) -> None:
        if not gpu.mig:
            raise _RefusedError(_NOT_FOUND, ["No MIG-enabled devices found."])

    @staticmethod
    def _refuse(exit_code: int, unable: str, failed: str = "", lines: Sequence[str] = ()) -> NoReturn:
        why = _SAID[exit_code]
        last = [f"{failed}: {why}" if failed.startswith("Failed") else failed] if failed else []
        raise _RefusedError(exit_code, [*lines, f"{unable}: {why}", *last])
