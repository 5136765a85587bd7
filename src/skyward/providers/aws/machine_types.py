"""EC2's machine types, and the types that satisfy a request (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from skyward.errors import ConfigurationError
from skyward.request.accelerators import Accelerator, Vendor, find_variant, fold_name
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.request import PoolRequest

__all__ = ["FAMILIES", "MachineType", "candidates", "closest", "fewest_accelerators", "parse_types", "size"]

X86: Final = "x86_64"
_MIB_PER_GIB: Final = 1024
_TOLERANCE: Final = 0.07
_LEAST: Final = InstanceWish(cpu=2, memory_gib=4.0)
"""Smallest machine for a request that gives no size."""
_GENERAL: Final = "cmrxz"
"""First letters of the families for general computing; others are for storage, bursts, or dedicated hardware."""

FAMILIES: Final[Mapping[str, str]] = {
    "T4": "g4dn",
    "T4g": "g5g",
    "A10G": "g5",
    "L4": "g6",
    "L40S": "g6e",
    "RTX-PRO-6000": "g7e",
    "V100-32GB": "p3dn",
    "A100-40GB": "p4d",
    "A100-80GB": "p4de",
    "H100-SXM": "p5",
    "H200": "p5e, p5en",
    "B200": "p6-b200",
    "B300": "p6-b300",
    "GB200-192GB": "p6e-gb200",
    "Trainium1": "trn1",
    "Trainium2": "trn2",
    "Inferentia1": "inf1",
    "Inferentia2": "inf2",
    "Radeon-Pro-V520": "g4ad",
}
"""Accelerators that EC2 offers in any region, and the families that have them."""

_NAMES: Final[Mapping[str, str]] = {
    "RTX PRO Server 6000": "RTX-PRO-6000",
    "Trainium": "Trainium1",
    "Inferentia": "Inferentia1",
    "H100": "H100-SXM",
}
"""EC2's names of accelerators that differ from the usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """Machine type of EC2.

    Attributes:
        spec: name, cores, memory, accelerators as sold.
        architecture: ``"x86_64"`` or ``"arm64"``.
        spot: True if it is sold on spot.
        on_demand: True if it is sold on demand.
        current: True if EC2 lists it as a current generation.
        whole: True for a virtual machine with whole accelerators and constant speed; others are chosen by name only.
        odd: True if its price includes other hardware: an FPGA, a video card.
    """

    spec: InstanceSpec
    architecture: str
    spot: bool
    on_demand: bool
    current: bool
    whole: bool
    odd: bool

    @property
    def name(self) -> str:
        """``"p5.48xlarge"``."""
        return self.spec.name

    @property
    def family(self) -> str:
        """``"p5"``."""
        return self.name.partition(".")[0]


def parse_types(rows: Iterable[Mapping[str, Any]]) -> tuple[MachineType, ...]:
    """Parse the members of ``DescribeInstanceTypes``; malformed ones are left out."""
    return tuple(parsed for row in rows if (parsed := _parse(row)) is not None)


def candidates(types: Sequence[MachineType], request: PoolRequest, *, region: str) -> tuple[MachineType, ...]:
    """Return the types that satisfy a request, the smallest first.

    Raises:
        ConfigurationError: there is none; names the nearest.
    """
    if request.machine is not None:
        return (_named(types, request.machine, region),)
    fitting = [each for each in types if not request.wish.shortfall(each.spec) and each.whole]
    if request.accelerator is None:
        general = (each for each in fitting if each.spec.accelerator is None and each.family[0] in _GENERAL)
        x86 = (each for each in general if each.architecture == X86 and not each.odd)
        fitting = [each for each in x86 if not _LEAST.shortfall(each.spec)]
        fitting = [each for each in fitting if each.current] or fitting
    elif any(each.architecture == X86 for each in fitting):
        fitting = [each for each in fitting if each.architecture == X86]
    if not fitting:
        raise _nothing(types, request, region)
    return tuple(sorted(fitting, key=size))


def fewest_accelerators(types: Sequence[MachineType]) -> tuple[MachineType, ...]:
    """Return the types with the fewest accelerators, so that a request for one does not pay for eight."""
    fewest = min((each.spec.accelerator_count for each in types), default=0)
    return tuple(each for each in types if each.spec.accelerator_count == fewest)


def size(machine: MachineType) -> tuple[float | str, ...]:
    """Return the sort key for the size of a type."""
    spec = machine.spec
    return spec.accelerator_count, spec.cpu, spec.memory_gib, spec.name


def closest(name: str, names: Iterable[str]) -> str:
    """Return up to three names similar to ``name``, for a message."""
    return ", ".join(difflib.get_close_matches(name, list(names), n=3, cutoff=0.3)) or "none"


def _parse(row: Mapping[str, Any]) -> MachineType | None:
    try:
        usage = cast("Sequence[str]", row.get("SupportedUsageClasses", ("on-demand",)))
        architectures = cast("Sequence[str]", row["ProcessorInfo"]["SupportedArchitectures"])
        name, count, memory_gib, whole = _accelerators(row)
        spec = InstanceSpec(
            name=str(row["InstanceType"]),
            cpu=int(row["VCpuInfo"]["DefaultVCpus"]),
            memory_gib=float(row["MemoryInfo"]["SizeInMiB"]) / _MIB_PER_GIB,
            accelerator=name,
            accelerator_count=count,
            accelerator_memory_gib=memory_gib,
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    steady = not row.get("BareMetal") and not row.get("BurstablePerformanceSupported")
    return MachineType(
        spec=spec,
        architecture=X86 if X86 in architectures else architectures[0] if architectures else "",
        spot="spot" in usage,
        on_demand="on-demand" in usage,
        current=bool(row.get("CurrentGeneration", True)),
        whole=whole and steady,
        odd="FpgaInfo" in row or "MediaAcceleratorInfo" in row,
    )


def _accelerators(row: Mapping[str, Any]) -> tuple[str | None, int, float | None, bool]:
    """Return the accelerators' name, number, memory of each, and True if they are whole.

    EC2 lists the devices of inf1 and inf2 in two members; the first one counts.
    """
    gpus = row.get("GpuInfo", {}).get("Gpus", ())
    neuron = row.get("NeuronInfo", {}).get("NeuronDevices", ())
    inference = row.get("InferenceAcceleratorInfo", {}).get("Accelerators", ())
    device = next((group[0] for group in (gpus, neuron, inference) if group), None)
    if device is None:
        return None, 0, None, True
    reported_gib = float(device.get("MemoryInfo", {}).get("SizeInMiB", 0)) / _MIB_PER_GIB
    name, memory_gib = _sold_as(str(device.get("Manufacturer", "")), str(device["Name"]), reported_gib)
    count = int(device.get("Count", 1))
    return name, count or int(device.get("LogicalGpuCount", 1)), memory_gib, count > 0


def _sold_as(maker: str, name: str, reported_gib: float) -> tuple[str, float]:
    """Return the catalogue's name and nominal memory; EC2 reports usable memory, which is less."""
    variant = find_variant(_NAMES.get(name, name)) or find_variant(f"{maker} {name}")
    if variant is None:
        return name, reported_gib
    model = variant.model
    if variant.form_factor is not None:
        return f"{model.name}-{variant.form_factor}", variant.memory_gib
    if len(model.memory_gib) == 1:
        near = abs(model.memory_gib[0] - reported_gib) <= _TOLERANCE * model.memory_gib[0]
        return model.name, model.memory_gib[0] if near or model.vendor is Vendor.AWS else reported_gib
    memory_gib = min(model.memory_gib, key=lambda sold: abs(sold - reported_gib))
    return f"{model.name}-{memory_gib:g}GB", memory_gib


def _named(types: Sequence[MachineType], name: str, region: str) -> MachineType:
    found = next((each for each in types if each.name == name), None)
    if found is None:
        near = closest(name, (each.name for each in types))
        raise ConfigurationError(f"machine={name!r}: EC2 has no such machine type in {region}; closest: {near}")
    return found


def _nothing(types: Sequence[MachineType], request: PoolRequest, region: str) -> ConfigurationError:
    if request.accelerator is None:
        plain = [each for each in types if each.spec.accelerator is None and each.whole and not each.odd]
        nearest = sorted(plain, key=lambda each: (request.wish.shortfall(each.spec), -each.spec.cpu, each.name))[:3]
        return ConfigurationError(
            f"EC2 has no machine type with {request.wish} in {region}; nearest: "
            f"{'; '.join(str(each.spec) for each in nearest) or 'none'}"
        )
    wanted = request.accelerator
    alone = InstanceWish(accelerator=wanted)
    if largest := [each for each in types if not alone.shortfall(each.spec) and each.whole]:
        most = max(largest, key=size)
        return ConfigurationError(
            f"EC2's machines with {wanted} in {region} have less than {request.wish}; the largest is {most.spec}"
        )
    same = [each for each in types if each.whole and _is_model(each.spec.accelerator, wanted)]
    if same:
        return _other_variant(same, wanted, region)
    return _other_model(wanted, region)


def _is_model(name: str | None, wanted: Accelerator) -> bool:
    variant = find_variant(name or "")
    return variant is not None and fold_name(variant.model.name) == fold_name(wanted.name)


def _other_variant(same: Sequence[MachineType], wanted: Accelerator, region: str) -> ConfigurationError:
    """Return the error where EC2 has the model, but fewer of it, or another form or memory."""
    fitting = [each for each in same if _is_variant(each.spec, wanted)]
    if fitting:
        most = max(fitting, key=size)
        return ConfigurationError(
            f"EC2 has at most {most.spec.accelerator_count} {wanted.label} on a machine in {region} ({most.name}), "
            f"not {wanted.count}: request more nodes instead"
        )
    kinds = ", ".join(dict.fromkeys(f"{each.spec.accelerator} ({each.name})" for each in same))
    if any(_is_model(name, wanted) and _is_sold_as(name, wanted) for name in FAMILIES):
        return ConfigurationError(
            f"EC2 has no {_described(wanted)} in {region}, but {kinds}: request that, or another region"
        )
    return ConfigurationError(f"EC2 has no {_described(wanted)} in any region; {region} has {kinds}: request that")


def _is_variant(spec: InstanceSpec, wanted: Accelerator) -> bool:
    return not InstanceWish(accelerator=wanted).shortfall(replace(spec, accelerator_count=wanted.count))


def _other_model(wanted: Accelerator, region: str) -> ConfigurationError:
    elsewhere = [(name, family) for name, family in FAMILIES.items() if _is_model(name, wanted)]
    if fitting := [pair for pair in elsewhere if _is_sold_as(pair[0], wanted)]:
        name, family = fitting[0]
        return ConfigurationError(
            f"accelerator {wanted.label}: EC2 has {name} ({family}) in other regions, but not in {region}: "
            "try AWS(region=...)"
        )
    if elsewhere:
        kinds = ", ".join(f"{name} ({family})" for name, family in elsewhere)
        return ConfigurationError(f"EC2 has no {_described(wanted)} in any region, but {kinds}: request that")
    return ConfigurationError(
        f"accelerator {wanted.label}: EC2 has none of these ({wanted.vendor.value}, {wanted.memory_gib:g} GiB) in any "
        f"region; nearest: {_nearest(wanted)}. Or use another provider"
    )


def _is_sold_as(name: str, wanted: Accelerator) -> bool:
    variant = find_variant(name)
    assert variant is not None
    same_form = wanted.form_factor is None or wanted.form_factor == variant.form_factor
    return same_form and wanted.memory_gib == variant.memory_gib


def _described(wanted: Accelerator) -> str:
    form = f"-{wanted.form_factor}" if wanted.form_factor else ""
    return f"{wanted.name}{form} with {wanted.memory_gib:g} GiB"


def _nearest(wanted: Accelerator) -> str:
    """Return the three accelerators nearest by name, then by memory."""
    named = difflib.get_close_matches(fold_name(wanted.name), [fold_name(name) for name in FAMILIES], n=1, cutoff=0.7)

    def distance(name: str) -> tuple[bool, float]:
        variant = find_variant(name)
        assert variant is not None
        return fold_name(name) not in named, abs(variant.memory_gib - wanted.memory_gib)

    return ", ".join(f"{name} ({FAMILIES[name]})" for name in sorted(FAMILIES, key=distance)[:3])
