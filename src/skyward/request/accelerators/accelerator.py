"""``Accelerator``, the kind and number that a pool requests, its MIG partitions, and the factories by vendor."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from skyward.errors import ConfigurationError
from skyward.request.accelerators.catalogue import Model, Variant, Vendor, find_model, find_variant, fold_name, models
from skyward.request.checks import explain_options, gibibytes, refusal, text, texts, whole_number

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


@dataclass(frozen=True, slots=True)
class AcceleratorFactory:
    """Factory of requests for one model of the catalogue: ``Accelerator.NVIDIA.L4(count=2)``.

    Attributes:
        name: the model's name.
    """

    name: str

    def __call__(self, count: int = 1, mig: str | Sequence[str] | None = None) -> Accelerator:
        """Request ``count`` of this model on each node; ``mig`` is one profile (as many as fit) or a list of them."""
        return Accelerator(name=self.name, count=count, mig=mig)


class _NVIDIA:
    """NVIDIA's GPUs. ``memory`` is text such as ``"40GB"``; ``mig`` one profile (as many as fit) or a list."""

    @staticmethod
    def H100(
        count: int = 1,
        memory: str | None = None,
        mig: str | Sequence[str] | None = None,
        form_factor: str | None = None,
    ) -> Accelerator:
        """Request NVIDIA H100, 80 GB or 94 GB.

        Args:
            count: number on each node.
            memory: memory of each, such as ``"80GB"``; None is that of the form factor.
            mig: MIG profile such as ``"3g.40gb"``, as often as it fits, or a list of profiles; None is whole GPUs.
            form_factor: ``"SXM"``, ``"PCIe"`` or ``"NVL"`` (94 GB); None is any.
        """
        return Accelerator(name="H100", count=count, memory=memory, mig=mig, form_factor=form_factor)

    @staticmethod
    def A100(count: int = 1, memory: str | None = None, mig: str | Sequence[str] | None = None) -> Accelerator:
        """Request NVIDIA A100, 80 GB or 40 GB.

        Args:
            count: number on each node.
            memory: ``"80GB"`` or ``"40GB"``; None is 80 GB.
            mig: MIG profile such as ``"3g.40gb"``, as often as it fits, or a list of profiles; None is whole GPUs.
        """
        return Accelerator(name="A100", count=count, memory=memory, mig=mig)

    @staticmethod
    def V100(count: int = 1, memory: str | None = None) -> Accelerator:
        """Request ``count`` NVIDIA V100 on each node; ``memory`` is ``"16GB"`` or ``"32GB"``."""
        return Accelerator(name="V100", count=count, memory=memory)

    H200 = AcceleratorFactory("H200")
    B100 = AcceleratorFactory("B100")
    B200 = AcceleratorFactory("B200")
    B300 = AcceleratorFactory("B300")
    GB200 = AcceleratorFactory("GB200")
    GH200 = AcceleratorFactory("GH200")
    L4 = AcceleratorFactory("L4")
    L40 = AcceleratorFactory("L40")
    L40S = AcceleratorFactory("L40S")
    T4 = AcceleratorFactory("T4")
    T4g = AcceleratorFactory("T4g")
    A10 = AcceleratorFactory("A10")
    A10G = AcceleratorFactory("A10G")
    A30 = AcceleratorFactory("A30")
    A40 = AcceleratorFactory("A40")
    RTX_A2000 = AcceleratorFactory("RTX-A2000")
    RTX_A4000 = AcceleratorFactory("RTX-A4000")
    RTX_A4500 = AcceleratorFactory("RTX-A4500")
    RTX_A5000 = AcceleratorFactory("RTX-A5000")
    RTX_A6000 = AcceleratorFactory("RTX-A6000")
    RTX_2000_Ada = AcceleratorFactory("RTX-2000-Ada")
    RTX_4000_Ada = AcceleratorFactory("RTX-4000-Ada")
    RTX_5000_Ada = AcceleratorFactory("RTX-5000-Ada")
    RTX_6000_Ada = AcceleratorFactory("RTX-6000-Ada")
    RTX_PRO_6000 = AcceleratorFactory("RTX-PRO-6000")
    RTX_3070 = AcceleratorFactory("RTX-3070")
    RTX_3080 = AcceleratorFactory("RTX-3080")
    RTX_3080_Ti = AcceleratorFactory("RTX-3080-Ti")
    RTX_3090 = AcceleratorFactory("RTX-3090")
    RTX_3090_Ti = AcceleratorFactory("RTX-3090-Ti")
    RTX_4070_Ti = AcceleratorFactory("RTX-4070-Ti")
    RTX_4080 = AcceleratorFactory("RTX-4080")
    RTX_4080_SUPER = AcceleratorFactory("RTX-4080-SUPER")
    RTX_4090 = AcceleratorFactory("RTX-4090")
    RTX_5080 = AcceleratorFactory("RTX-5080")
    RTX_5090 = AcceleratorFactory("RTX-5090")


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

    NVIDIA: ClassVar = _NVIDIA
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
"""Values that ``accelerator=`` takes; the members of :class:`NVIDIA` are strings."""


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
    if memory_gib is None:
        raise ConfigurationError(
            f"accelerator must be a known name, got {name!r}; closest: {_closest(name)}. "
            f'For another one write Accelerator(name={name!r}, memory="...GB")'
        )
    model = Model(vendor=Vendor.UNKNOWN, name=name, memory_gib=(memory_gib,), source="the user")
    return Variant(model=model, memory_gib=memory_gib, form_factor=form_factor)


def _closest(name: str) -> str:
    known = {fold_name(model.name): model.name for model in models()}
    matches = difflib.get_close_matches(fold_name(name), known, n=3, cutoff=0.3)
    return ", ".join(known[match] for match in matches) or ", ".join(known.values())


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
