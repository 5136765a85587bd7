"""Accelerators: the catalogue (``accelerators.toml``, read at its first use), requests for them, and MIG partitions."""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from skyward.errors import ConfigurationError
from skyward.request.checks import explain_options, gibibytes, refusal, text, texts, whole_number


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

    rows = tomllib.loads(files("skyward.request").joinpath("accelerators.toml").read_text(encoding="utf-8"))
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


# --- requests ---------------------------------------------------------------------------------------------------------

_COMPUTE_SLICES = 7
_MEMORY_SLICES = 8
_PROFILE = re.compile(r"([1-7])g\.(\d+)gb", re.ASCII)
_NO_MODEL = {"accelerator", "amd", "any", "cuda", "gpu", "gpus", "nvidia"}
_ALLOWED = 'a name such as "A100" or an Accelerator'


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """One kind of partition of one GPU.

    Attributes:
        name: the profile's name in nvidia-smi, e.g. ``"3g.40gb"``.
        compute_slices: number taken of the GPU's 7.
        memory_slices: number taken of the GPU's 8.
    """

    name: str
    compute_slices: int
    memory_slices: int

    @classmethod
    def of(cls, name: str, gpu_memory_gib: float) -> MigProfile:
        """Read a profile's name: an eighth of the GPU's memory is a slice (names round it)."""
        match = _PROFILE.fullmatch(name)
        if match is None:
            raise refusal("mig", 'a profile such as "3g.40gb"', name)
        return cls(
            name=name,
            compute_slices=int(match[1]),
            memory_slices=max(1, round(int(match[2]) * _MEMORY_SLICES / gpu_memory_gib)),
        )

    @property
    def most(self) -> int:
        """The number of such partitions that fit on one GPU."""
        return min(_COMPUTE_SLICES // self.compute_slices, _MEMORY_SLICES // self.memory_slices)


class NVIDIA(enum.StrEnum):
    """NVIDIA's GPUs: names that are text, for annotations such as ``def train(gpu: NVIDIA)``, and functions.

    ``accelerator=NVIDIA.A100`` requests one; ``NVIDIA.A100(count=4, memory="40GB")`` says more.
    """

    H100_80GB = "H100-80GB"
    """H100, 80 GB."""
    H100 = H100_80GB
    """H100 with 80 GB."""
    H100_SXM = "H100-SXM"
    """H100, SXM, 80 GB."""
    H100_PCIe = "H100-PCIe"
    """H100, PCIe, 80 GB."""
    H100_NVL = "H100-NVL"
    """H100, NVL, 94 GB."""
    H200 = "H200"
    """H200, 141 GB."""
    A100_80GB = "A100-80GB"
    """A100, 80 GB."""
    A100_40GB = "A100-40GB"
    """A100, 40 GB."""
    A100 = A100_80GB
    """A100 with 80 GB."""
    B100 = "B100"
    """B100, 192 GB."""
    B200 = "B200"
    """B200, 192 GB."""
    B300 = "B300"
    """B300, 288 GB."""
    GB200 = "GB200"
    """GB200, 384 GB."""
    GH200 = "GH200"
    """GH200, 96 GB."""
    L4 = "L4"
    """L4, 24 GB."""
    L40 = "L40"
    """L40, 48 GB."""
    L40S = "L40S"
    """L40S, 48 GB."""
    T4 = "T4"
    """T4, 16 GB."""
    T4g = "T4g"
    """T4g, 16 GB."""
    A10 = "A10"
    """A10, 24 GB."""
    A10G = "A10G"
    """A10G, 24 GB."""
    V100_16GB = "V100-16GB"
    """V100, 16 GB."""
    V100_32GB = "V100-32GB"
    """V100, 32 GB."""
    V100 = V100_16GB
    """V100 with 16 GB."""
    A30 = "A30"
    """A30, 24 GB."""
    A40 = "A40"
    """A40, 48 GB."""
    RTX_A2000 = "RTX-A2000"
    """RTX-A2000, 6 GB."""
    RTX_A4000 = "RTX-A4000"
    """RTX-A4000, 16 GB."""
    RTX_A4500 = "RTX-A4500"
    """RTX-A4500, 20 GB."""
    RTX_A5000 = "RTX-A5000"
    """RTX-A5000, 24 GB."""
    RTX_A6000 = "RTX-A6000"
    """RTX-A6000, 48 GB."""
    RTX_2000_Ada = "RTX-2000-Ada"
    """RTX-2000-Ada, 16 GB."""
    RTX_4000_Ada = "RTX-4000-Ada"
    """RTX-4000-Ada, 20 GB."""
    RTX_5000_Ada = "RTX-5000-Ada"
    """RTX-5000-Ada, 32 GB."""
    RTX_6000_Ada = "RTX-6000-Ada"
    """RTX-6000-Ada, 48 GB."""
    RTX_PRO_6000 = "RTX-PRO-6000"
    """RTX-PRO-6000, 96 GB."""
    RTX_3070 = "RTX-3070"
    """RTX-3070, 8 GB."""
    RTX_3080 = "RTX-3080"
    """RTX-3080, 10 GB."""
    RTX_3080_Ti = "RTX-3080-Ti"
    """RTX-3080-Ti, 12 GB."""
    RTX_3090 = "RTX-3090"
    """RTX-3090, 24 GB."""
    RTX_3090_Ti = "RTX-3090-Ti"
    """RTX-3090-Ti, 24 GB."""
    RTX_4070_Ti = "RTX-4070-Ti"
    """RTX-4070-Ti, 12 GB."""
    RTX_4080 = "RTX-4080"
    """RTX-4080, 16 GB."""
    RTX_4080_SUPER = "RTX-4080-SUPER"
    """RTX-4080-SUPER, 16 GB."""
    RTX_4090 = "RTX-4090"
    """RTX-4090, 24 GB."""
    RTX_5080 = "RTX-5080"
    """RTX-5080, 16 GB."""
    RTX_5090 = "RTX-5090"
    """RTX-5090, 32 GB."""

    def __call__(
        self,
        count: int = 1,
        memory: str | None = None,
        mig: str | Sequence[str] | None = None,
        form_factor: str | None = None,
    ) -> Accelerator:
        """Request GPUs of this model on each node.

        Args:
            count: number on each node.
            memory: memory of each, such as ``"80GB"``; None is that of the name, or of the form factor.
            mig: MIG profile such as ``"3g.40gb"``, as often as it fits, or a list of profiles; None is whole GPUs.
            form_factor: H100's ``"SXM"``, ``"PCIe"`` or ``"NVL"`` (94 GB); None is any.
        """
        return Accelerator(name=self.value, count=count, memory=memory, mig=mig, form_factor=form_factor)


class _AWS:
    """AWS's own accelerators."""

    @staticmethod
    def Trainium(version: int = 2, count: int = 1) -> Accelerator:
        """Request ``count`` chips of a Trainium on each node; ``version`` is 1, 2 or 3."""
        return Accelerator(name=f"Trainium{version}", count=count)

    @staticmethod
    def Inferentia(version: int = 2, count: int = 1) -> Accelerator:
        """Request ``count`` chips of an Inferentia on each node; ``version`` is 1 or 2."""
        return Accelerator(name=f"Inferentia{version}", count=count)


class _Google:
    """Google's TPUs. Requests for them parse; no provider offers them yet."""

    @staticmethod
    def TPU(version: str = "v5p", count: int = 1) -> Accelerator:
        """Request ``count`` chips of a TPU version: ``"v2"``, ``"v3"``, ``"v4"``, ``"v5e"``, ``"v5p"`` or ``"v6e"``."""
        return Accelerator(name=f"TPU-{version}", count=count)

    @staticmethod
    def TPUSlice(name: str) -> Accelerator:
        """Request the chips of the slice ``name``, such as ``"v5p-8"``.

        The size of a slice counts cores, two a chip; for v5e and v6e it counts chips.
        """
        version, _, size = text("name", name).partition("-")
        model = find_model(f"TPU-{version}")
        units = int(size) if size.isascii() and size.isdigit() else 0
        if model is None or not units or units % model.cores_per_chip:
            raise refusal("name", 'a TPU slice such as "v5p-8"', name)
        return Accelerator(name=model.name, count=units // model.cores_per_chip)


class _AMD:
    """AMD's GPUs."""

    @staticmethod
    def MI(model: str, count: int = 1) -> Accelerator:
        """Request ``count`` AMD Instinct on each node; ``model`` is such as ``"300X"``."""
        return Accelerator(name=f"MI{model}", count=count)

    @staticmethod
    def RadeonPro(model: str, count: int = 1) -> Accelerator:
        """Request ``count`` AMD Radeon Pro on each node; ``model`` is such as ``"V710"``."""
        return Accelerator(name=f"Radeon-Pro-{model}", count=count)


@explain_options
@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Accelerator:
    """A kind of accelerator and how many of it each node must have.

    Names of the catalogue are matched without regard to case and dashes and may carry a memory size or a form factor
    (``"a100-40gb"``, ``"H100-SXM"``). Any other name needs its memory: ``Accelerator(name="Z1", memory="48GB")``.

    Attributes:
        name: the model's name, without memory and form factor.
        memory_gib: memory of each accelerator, as sold.
        count: accelerators a node.
        mig: MIG profiles to create on each of them; empty is the whole accelerator.
        form_factor: None is any.
        vendor: the maker.

    Raises:
        ConfigurationError: an unknown name (with the closest ones), memory, form factor or MIG profile, a count < 1.
    """

    NVIDIA: ClassVar = NVIDIA
    AWS: ClassVar = _AWS
    Google: ClassVar = _Google
    AMD: ClassVar = _AMD

    name: str
    memory_gib: float
    count: int
    mig: tuple[str, ...]
    form_factor: str | None
    vendor: Vendor

    def __init__(
        self,
        *,
        name: str,
        memory: str | None = None,
        count: int = 1,
        mig: str | Sequence[str] | None = None,
        form_factor: str | None = None,
    ) -> None:
        variant = _resolve(text("accelerator", name, allowed=_ALLOWED), memory, form_factor)
        values = {
            "name": variant.model.name,
            "memory_gib": variant.memory_gib,
            "count": whole_number("count", count),
            "mig": _plan_partitions(variant, mig),
            "form_factor": variant.form_factor,
            "vendor": variant.model.vendor,
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @staticmethod
    def any(*, memory: str | None = None, vendor: str | None = None, count: int = 1) -> tuple[Accelerator, ...]:
        """Return every accelerator of the catalogue that will do, for ``accelerator=``: the cheapest offer wins.

        Args:
            memory: least memory of each, such as ``">=40GB"``; None is any.
            vendor: the only maker, such as ``"nvidia"`` or ``"amd"``; None is any.
            count: number on each node.

        Raises:
            ConfigurationError: a value is wrong, or none of the catalogue has that much memory.
        """
        made_by = None if vendor is None else _vendor_named(vendor)
        least = 0.0 if memory is None else _least_gib(memory)
        same = [model for model in models() if made_by in (None, model.vendor)]
        found = [(model.name, gib) for model in same for gib in model.memory_gib if gib >= least]
        if not found:
            gib, name = max((max(model.memory_gib), model.name) for model in same)
            raise ConfigurationError(f"memory={memory!r}: the most that one has is {gib:g} GB ({name})")
        return tuple(Accelerator(name=name, memory=f"{gib:g}GB", count=count) for name, gib in found)

    @property
    def partitions(self) -> int:
        """MIG partitions of a node, on all its accelerators together; 1 without MIG."""
        return len(self.mig) * self.count or 1

    @property
    def label(self) -> str:
        """The full name without the count: ``"H100-SXM"``, ``"A100-40GB"``, ``"T4"``."""
        if self.form_factor:
            return f"{self.name}-{self.form_factor}"
        model = find_model(self.name)
        sizes = model.memory_gib if model else ()
        return f"{self.name}-{self.memory_gib:g}GB" if len(sizes) > 1 else self.name

    def __str__(self) -> str:
        return f"{self.count}x {self.label}"


def any_accelerator() -> Accelerator:
    """Return one of any kind, of which no size is known, to list machines with; no pool requests it."""
    made = object.__new__(Accelerator)
    values = {"name": "GPU", "memory_gib": 0.0, "count": 1, "mig": (), "form_factor": None, "vendor": Vendor.UNKNOWN}
    for attribute, value in values.items():
        object.__setattr__(made, attribute, value)
    return made


AcceleratorLike: TypeAlias = Accelerator | str
"""One accelerator; the members of :class:`NVIDIA` are strings."""

Accelerators: TypeAlias = AcceleratorLike | Sequence[AcceleratorLike]
"""Values that ``accelerator=`` takes: one, or several of which any will do."""


def parse_accelerators(value: Accelerators) -> tuple[Accelerator, ...]:
    """Return the accelerators that ``value`` names, without those named twice.

    Raises:
        ConfigurationError: it is empty, one of them is wrong, or they differ in MIG partitions and so in workers.
    """
    if isinstance(value, Accelerator | str) or not isinstance(value, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        return (parse_accelerator(value),)
    found = tuple(dict.fromkeys(map(parse_accelerator, value)))
    if not found:
        raise refusal("accelerator", f"{_ALLOWED}, or a list of at least one", value)
    if len({one.partitions for one in found}) > 1:
        counts = ", ".join(f"{one} has {one.partitions}" for one in found)
        raise ConfigurationError(f"accelerator: each must have as many MIG partitions as the others, but {counts}")
    return found


def parse_accelerator(value: AcceleratorLike) -> Accelerator:
    """Return the accelerator that ``value`` names: one for a name, four for ``"A100:4"``.

    Raises:
        ConfigurationError: not a name or an Accelerator, or a name the catalogue does not have.
    """
    if isinstance(value, Accelerator):
        return value
    name, colon, count = str(value).partition(":")
    if not colon:
        return Accelerator(name=value)
    if not (count.isascii() and count.isdecimal() and int(count)):
        raise refusal("accelerator", 'a name, or a name and a count of at least 1, such as "A100:4"', value)
    return Accelerator(name=name, count=int(count))


def is_nvidia(accelerator: AcceleratorLike) -> bool:
    """Return True if ``accelerator`` is of NVIDIA; an unknown name must begin with it (``"NVIDIA Z1"``)."""
    return _vendor(accelerator) is Vendor.NVIDIA


def is_trainium(accelerator: AcceleratorLike) -> bool:
    """Return True if ``accelerator``, a name or an :class:`Accelerator`, is a Trainium of any version."""
    name = accelerator.name if isinstance(accelerator, Accelerator) else accelerator
    return fold_name(name).startswith("trainium")


def _vendor(accelerator: AcceleratorLike) -> Vendor:
    if isinstance(accelerator, Accelerator):
        return accelerator.vendor
    if model := find_model(accelerator):
        return model.vendor
    return Vendor.NVIDIA if fold_name(accelerator).startswith("nvidia") else Vendor.UNKNOWN


def _resolve(name: str, memory: str | None, form_factor: str | None) -> Variant:
    variant = find_variant(name)
    memory_gib = None if memory is None else gibibytes("memory", memory)
    if variant is not None:
        return _choose_variant(variant, memory_gib, form_factor)
    if memory_gib is None and fold_name(name) in _NO_MODEL:
        raise refusal("accelerator", 'a model such as "A100" (`skyward offers` lists them with prices)', name)
    if memory_gib is None and "," in name:
        names = [part.strip() for part in name.split(",")]
        raise refusal("accelerator", f"one name, or a list of names such as {names}", name)
    if memory_gib is None:
        raise ConfigurationError(
            f"accelerator must be a known name, got {name!r}; {_closest(name)}. "
            f'For another one write Accelerator(name={name!r}, memory="...GB")'
        )
    model = Model(vendor=Vendor.UNKNOWN, name=name, memory_gib=(memory_gib,), source="the user")
    return Variant(model=model, memory_gib=memory_gib, form_factor=form_factor)


def _least_gib(memory: object) -> float:
    try:
        return gibibytes("memory", memory.removeprefix(">=") if isinstance(memory, str) else memory)
    except ConfigurationError:
        raise refusal("memory", 'a least size such as ">=40GB"', memory) from None


def _vendor_named(name: str) -> Vendor:
    known = {fold_name(vendor.value): vendor for vendor in Vendor if vendor is not Vendor.UNKNOWN}
    vendor = known.get(fold_name(text("vendor", name)))
    if vendor is None:
        raise refusal("vendor", " or ".join(f'"{each.value}"' for each in known.values()), name)
    return vendor


def _closest(name: str) -> str:
    known = {fold_name(model.name): model.name for model in models()}
    matches = difflib.get_close_matches(fold_name(name), known, n=3, cutoff=0.3)
    if not matches:
        return "`skyward offers` lists them with prices"
    return f"closest: {', '.join(known[match] for match in matches)}"


def _choose_variant(named: Variant, memory_gib: float | None, form_factor: str | None) -> Variant:
    """Return the named variant with the memory and form factor requested besides; refuse one that does not exist."""
    model = named.model
    if form_factor is not None:
        found = find_variant(f"{model.name}{text('form_factor', form_factor)}")
        if found is None or found.form_factor is None or named.form_factor not in (None, found.form_factor):
            raise refusal(
                "form_factor", f"one of {', '.join(model.form_factors) or 'none'} for {model.name}", form_factor
            )
        named = found
    if memory_gib is None:
        return named
    sizes = model.memory_gib if named.form_factor is None else (named.memory_gib,)
    if memory_gib not in sizes:
        allowed = " or ".join(f'"{size:g}GB"' for size in sizes)
        raise ConfigurationError(f"memory must be {allowed} for {model.name}, got {memory_gib:g} GiB")
    return Variant(model=model, memory_gib=memory_gib, form_factor=named.form_factor)


def _plan_partitions(variant: Variant, mig: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the profiles to create on each GPU: as many as fit of a single one, or exactly those of a list.

    Raises:
        ConfigurationError: the GPU has no MIG, lacks a profile, or the list takes more slices than there are.
    """
    if mig is None:
        return ()
    profiles = [_profile(variant, name) for name in ((mig,) if isinstance(mig, str) else texts("mig", mig))]
    if isinstance(mig, str):
        return (profiles[0].name,) * profiles[0].most
    if not profiles:
        raise refusal("mig", "a profile or a list of at least one", mig)
    compute, memory = sum(p.compute_slices for p in profiles), sum(p.memory_slices for p in profiles)
    if compute > _COMPUTE_SLICES or memory > _MEMORY_SLICES:
        raise ConfigurationError(
            f"mig must fit {_COMPUTE_SLICES} compute and {_MEMORY_SLICES} memory slices; "
            f"{', '.join(p.name for p in profiles)} take {compute} and {memory}"
        )
    return tuple(p.name for p in profiles)


def _profile(variant: Variant, name: str) -> MigProfile:
    gpu = f"{variant.model.name}-{variant.memory_gib:g}GB"
    known = variant.model.mig.get(variant.memory_gib, ())
    if not known:
        raise ConfigurationError(f"mig must be None for {gpu}: it cannot be partitioned")
    if name.lower() not in known:
        raise refusal("mig", f"one of {', '.join(known)} for {gpu}", name)
    return MigProfile.of(name.lower(), variant.memory_gib)
