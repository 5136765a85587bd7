"""NVIDIA GPUs that do not exist: ``nvidia-smi`` and NVML over one file, so that several processes see the same GPUs.

They follow NVIDIA's MIG user guide ("Getting Started with MIG", "Supported MIG Profiles"), nvidia-smi(1), NVML's
reference, and outputs of drivers R525 and R570.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.gpu_parts._gpu_cards import COMPUTE_SLICES, PROFILES, Profile, place_for

__all__ = [
    "FakeGpu",
    "FakeGpus",
    "FakeInstance",
    "Machine",
    "cut",
    "main",
    "make_instance",
]


@dataclass(slots=True, kw_only=True)
class FakeInstance:
    """A GPU instance.

    Attributes:
        id: the driver's number of it.
        profile: its size.
        start: the memory slice that it starts at.
        uuid: of the compute instance in it; empty if there is none.
        used_by: how many programs use it.
    """

    id: int
    profile: str
    start: int
    uuid: str = ""
    used_by: int = 0


@dataclass(slots=True, kw_only=True)
class FakeGpu:
    """A GPU.

    Attributes:
        card: its model, one of :data:`support.gpu_parts._gpu_cards.CARDS`.
        uuid: the driver's name of it.
        mig: whether MIG mode is on.
        pending: whether it will be after a reset.
        used_by: how many programs use the GPU as a whole, monitoring included.
        resettable: whether a reset from within this machine is possible.
        lost: whether it has fallen off the bus.
        xids: errors that were not asked for yet.
        instances: what is set aside on it.
    """

    card: str = "H100-80"
    uuid: str = field(default_factory=lambda: f"GPU-{uuid.uuid4()}")
    mig: bool = False
    pending: bool = False
    used_by: int = 0
    resettable: bool = True
    lost: bool = False
    xids: list[int] = field(default_factory=list[int])
    instances: list[FakeInstance] = field(default_factory=list[FakeInstance])

    @property
    def bus(self) -> str:
        """Its place on the PCI bus."""
        return f"00000000:{int(self.uuid[4:6], 16):02X}:00.0"


@dataclass(slots=True, kw_only=True)
class Machine:
    """What the file says.

    Attributes:
        gpus: by index.
        root: whether commands are run by root.
        sudo: whether others may become root without a password.
        breaks_after: how many instances can be created before the driver fails; None for any number.
        commands: every command so far, in order.
    """

    gpus: list[FakeGpu]
    root: bool = True
    sudo: bool = True
    breaks_after: int | None = None
    commands: list[str] = field(default_factory=list[str])


class FakeGpus:
    """GPUs in a file.

    Args:
        path: the file; it is made with ``machine`` in it, if that is given.
        machine: what there is at first.
    """

    def __init__(self, path: Path, machine: Machine | None = None) -> None:
        self._path = path
        if machine is not None:
            path.write_text(json.dumps(asdict(machine)), encoding="utf-8")

    @contextmanager
    def change(self) -> Generator[Machine]:
        """What there is, to be changed; nobody else sees or changes it meanwhile."""
        with self._path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            machine = _parse(json.load(file))
            try:
                yield machine
            finally:
                file.seek(0)
                file.truncate()
                json.dump(asdict(machine), file)

    @property
    def machine(self) -> Machine:
        """What there is now."""
        with self._path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return _parse(json.load(file))

    @property
    def changes(self) -> list[str]:
        """The commands so far that do more than look."""
        return [each for each in self.machine.commands if "nvml.py" not in each and "--query" not in each]

    def run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Run a command: its exit status, and what it prints."""
        from support.gpu_parts._gpu_smi import Smi

        with self.change() as machine:
            machine.commands.append(" ".join(argv))
            root = machine.root
            if argv[0] == "sudo":
                if not machine.sudo:
                    return 1, "sudo: a password is required"
                argv, root = argv[2:], True
            if argv[0] == "nvidia-smi":
                return Smi(machine, root=root).run(list(argv[1:]))
        from skyward.node.gpu.nvml import instances_as_json

        return 0, instances_as_json(self.nvml(root=root), argv[-1])  # python nvml.py UUID

    def nvml(self, *, root: bool | None = None) -> Any:
        """What ``import pynvml`` gives to root, or to another user; by default to the machine's."""
        from support.gpu_parts._gpu_nvml import FakeNvml

        return FakeNvml(self, root=root)

    def install(self, folder: Path) -> Mapping[str, str]:
        """Make programs of them in a folder; returns the environment in which other processes find those first."""
        folder.mkdir(parents=True, exist_ok=True)
        own = Path(__file__).parents[1]
        start = f"import sys; sys.path.append({str(own)!r}); from support import gpus\n"
        for name in ("nvidia-smi", "sudo"):
            program = folder / name
            be = f"gpus.main({str(self._path)!r}, {name!r})"
            program.write_text(f"#!{sys.executable}\n{start}{be}\n", encoding="utf-8")
            program.chmod(0o755)
        (folder / "pynvml.py").write_text(
            f"{start}nvml = gpus.FakeGpus(gpus.Path({str(self._path)!r})).nvml()\n"
            "globals().update({name: getattr(nvml, name) for name in dir(nvml) if not name.startswith('_')})\n",
            encoding="utf-8",
        )
        return {
            name: os.pathsep.join(filter(None, (str(folder), os.environ.get(name)))) for name in ("PATH", "PYTHONPATH")
        }


def cut(gpu: FakeGpu, profiles: Sequence[str]) -> None:
    """Have MIG mode on, and these instances there already, each with a compute instance."""
    gpu.mig = gpu.pending = True
    for name in profiles:
        profile = next(each for each in PROFILES[gpu.card] if each.name == name)
        instance = make_instance(gpu, profile)
        instance.uuid = f"MIG-{uuid.uuid4()}"


def make_instance(gpu: FakeGpu, profile: Profile) -> FakeInstance:
    """Set a part of a GPU aside where the driver would; raises ``LookupError`` where there is no place for it."""
    there = [(each.start, _profile(gpu, each)) for each in gpu.instances]
    if sum(each.compute for _, each in there) + profile.compute > COMPUTE_SLICES:
        raise LookupError(profile.name)
    start = place_for(profile, [(at, each.size) for at, each in there])
    instance = FakeInstance(id=8 // profile.size - 1 + start // profile.size, profile=profile.name, start=start)
    gpu.instances.append(instance)
    return instance


def _profile(gpu: FakeGpu, instance: FakeInstance) -> Profile:
    return next(each for each in PROFILES[gpu.card] if each.name == instance.profile)


def _parse(values: Mapping[str, Any]) -> Machine:
    machine = Machine(**values)
    machine.gpus = [FakeGpu(**gpu) for gpu in values["gpus"]]
    for gpu, read in zip(machine.gpus, values["gpus"], strict=True):
        gpu.instances = [FakeInstance(**each) for each in read["instances"]]
    return machine


def main(path: str, program: str) -> None:
    """Be one of the programs that :meth:`FakeGpus.install` makes."""
    exit_code, text = FakeGpus(Path(path)).run([program, *sys.argv[1:]])
    sys.stdout.write(f"{text}\n")
    raise SystemExit(exit_code)
