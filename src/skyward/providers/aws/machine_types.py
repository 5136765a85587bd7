"""EC2's machine types, and the types that satisfy a request (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from skyward.providers._common.machine_catalogue import X86, Catalogue, MachineType, sold_as
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

__all__ = ["FAMILIES", "FIELDS", "candidates", "parse_types"]

_MIB_PER_GIB: Final = 1024
_GENERAL: Final = "cmrxz"
"""First letters of the families for general computing; others are for storage, bursts, or dedicated hardware."""

FIELDS: Final = """InstanceType VCpuInfo MemoryInfo ProcessorInfo SupportedUsageClasses CurrentGeneration BareMetal
    BurstablePerformanceSupported GpuInfo FpgaInfo NeuronInfo InferenceAcceleratorInfo MediaAcceleratorInfo"""
"""Members of a type that are read here: a fifth of the three megabytes."""

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


def parse_types(rows: Iterable[Mapping[str, Any]]) -> tuple[MachineType, ...]:
    """Parse the members of ``DescribeInstanceTypes``; malformed ones are left out."""
    return tuple(parsed for row in rows if (parsed := _parse(row)) is not None)


def candidates(types: Sequence[MachineType], request: PoolRequest, *, region: str) -> tuple[MachineType, ...]:
    """Return the types that satisfy a request, the smallest first.

    Raises:
        ConfigurationError: there is none; names the nearest.
    """
    return Catalogue(vendor="EC2", types=types, place=region, accelerators=FAMILIES).candidates(request)


def _parse(row: Mapping[str, Any]) -> MachineType | None:
    try:
        usage = cast("Sequence[str]", row.get("SupportedUsageClasses", ("on-demand",)))
        architectures = cast("Sequence[str]", row["ProcessorInfo"]["SupportedArchitectures"])
        spec = InstanceSpec(
            name=str(row["InstanceType"]),
            cpu=int(row["VCpuInfo"]["DefaultVCpus"]),
            memory_gib=float(row["MemoryInfo"]["SizeInMiB"]) / _MIB_PER_GIB,
        )
        spec, whole = _with_accelerators(spec, row)
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    steady = not row.get("BareMetal") and not row.get("BurstablePerformanceSupported")
    priced_in = "FpgaInfo" in row or "MediaAcceleratorInfo" in row
    return MachineType(
        spec=spec,
        architecture=X86 if X86 in architectures else architectures[0] if architectures else "",
        spot="spot" in usage,
        on_demand="on-demand" in usage,
        current=bool(row.get("CurrentGeneration", True)),
        whole=whole and steady,
        general=spec.name[0] in _GENERAL and not priced_in,
    )


def _with_accelerators(spec: InstanceSpec, row: Mapping[str, Any]) -> tuple[InstanceSpec, bool]:
    """Return the type with its accelerators as sold, and True if they are whole.

    EC2 lists the devices of inf1 and inf2 in two members; the first one counts. The memory that it states for those is
    not the nominal one.
    """
    gpus = row.get("GpuInfo", {}).get("Gpus", ())
    neuron = row.get("NeuronInfo", {}).get("NeuronDevices", ())
    inference = row.get("InferenceAcceleratorInfo", {}).get("Accelerators", ())
    device = next((group[0] for group in (gpus, neuron, inference) if group), None)
    if device is None:
        return spec, True
    reported_gib = float(device.get("MemoryInfo", {}).get("SizeInMiB", 0)) / _MIB_PER_GIB if gpus else 0.0
    name = str(device["Name"])
    sold = sold_as(_NAMES.get(name, name), f"{device.get('Manufacturer', '')} {name}", reported_gib=reported_gib)
    count = int(device.get("Count", 1))
    number = count or int(device.get("LogicalGpuCount", 1))
    sized = replace(spec, accelerator=sold.name, accelerator_count=number, accelerator_memory_gib=sold.memory_gib)
    return sized, count > 0
