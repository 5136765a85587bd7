"""Accelerators: the catalogue, requests for them, and MIG partitions."""

from __future__ import annotations

from skyward.spec.accelerators.accelerator import (
    Accelerator,
    AcceleratorFactory,
    AcceleratorLike,
    is_nvidia,
    is_trainium,
    parse_accelerator,
)
from skyward.spec.accelerators.catalogue import (
    Model,
    Variant,
    Vendor,
    find_model,
    find_variant,
    fold_name,
    model_name,
    models,
)
from skyward.spec.accelerators.mig import MigProfile
from skyward.spec.accelerators.names import NVIDIA

__all__ = [
    "NVIDIA",
    "Accelerator",
    "AcceleratorFactory",
    "AcceleratorLike",
    "MigProfile",
    "Model",
    "Variant",
    "Vendor",
    "find_model",
    "find_variant",
    "fold_name",
    "is_nvidia",
    "is_trainium",
    "model_name",
    "models",
    "parse_accelerator",
]
