"""The catalogue of accelerators: ``catalogue.toml``, read at its first use."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType


class Vendor(enum.Enum):
    """Maker of an accelerator."""

    NVIDIA = "NVIDIA"
    """CUDA devices."""
    AWS = "AWS"
    """Trainium and Inferentia."""
    GOOGLE = "Google"
    """TPUs. Requests for them parse; no provider here offers them."""
    AMD = "AMD"
    """ROCm devices."""
    UNKNOWN = "unknown"
    """Not in the catalogue: given by name and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One row of the catalogue.

    Attributes:
        vendor: the maker.
        name: the name in requests and offers.
        memory_gib: memory as sold, per accelerator; the first is the default.
        form_factors: form factor to the memory it comes with.
        mig: memory in GiB to its MIG profiles; empty without MIG.
        cores_per_chip: units of a slice's size per accelerator (TPU slices).
        source: origin of the facts.
    """

    vendor: Vendor
    name: str
    memory_gib: tuple[float, ...]
    form_factors: Mapping[str, float] = field(default_factory=dict[str, float])
    mig: Mapping[float, tuple[str, ...]] = field(default_factory=dict[float, tuple[str, ...]])
    cores_per_chip: int = 1
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model in one of its memory sizes and, if named, one of its form factors.

    Attributes:
        model: the catalogue's row.
        memory_gib: memory of this variant.
        form_factor: as the catalogue spells it; None where the name leaves it open.
    """

    model: Model
    memory_gib: float
    form_factor: str | None = None


def fold_name(name: str) -> str:
    """Return ``name`` without case, dashes and blanks, for comparisons."""
    return "".join(filter(str.isalnum, name)).lower()


@cache
def models() -> tuple[Model, ...]:
    """Return every row of the catalogue, in its order."""
    import tomllib

    rows = tomllib.loads(files("skyward.request.accelerators").joinpath("catalogue.toml").read_text(encoding="utf-8"))
    return tuple(
        Model(
            vendor=Vendor(row["vendor"]),
            name=row["name"],
            memory_gib=tuple(map(float, row["memory_gib"])),
            form_factors=MappingProxyType(row.get("form_factors", {})),
            mig=MappingProxyType({float(gib): tuple(names) for gib, names in row.get("mig", {}).items()}),
            cores_per_chip=row.get("cores_per_chip", 1),
            source=rows["sources"][row["source"]],
        )
        for row in rows["models"]
    )


def find_variant(name: str) -> Variant | None:
    """Return the variant named by, e.g., ``"a100-40gb"`` or ``"H100 SXM"``; None if there is none."""
    return _variants_by_name().get(fold_name(name))


def find_model(name: str) -> Model | None:
    """Return the catalogue's row for a name, with any memory or form factor; None if there is none."""
    variant = find_variant(name)
    return None if variant is None else variant.model


def model_name(reported: str) -> str:
    """Return the catalogue's name in a driver's name such as ``"NVIDIA A100-SXM4-80GB"``; the latter if it has none."""
    words = reported.replace("-", " ").split()
    spans = [words[i:j] for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    known = (find_variant("".join(span)) for span in sorted(spans, key=len, reverse=True))
    return next((variant.model.name for variant in known if variant is not None), reported)


@cache
def _variants_by_name() -> Mapping[str, Variant]:
    return {fold_name(name): variant for model in models() for name, variant in _spellings(model)}


def _spellings(model: Model) -> Iterator[tuple[str, Variant]]:
    yield model.name, Variant(model=model, memory_gib=model.memory_gib[0])
    for memory_gib in model.memory_gib:
        yield f"{model.name}{memory_gib:g}GB", Variant(model=model, memory_gib=memory_gib)
    for form_factor, memory_gib in model.form_factors.items():
        variant = Variant(model=model, memory_gib=memory_gib, form_factor=form_factor)
        yield f"{model.name}{form_factor}", variant
        yield f"{model.name}{form_factor}{memory_gib:g}GB", variant
