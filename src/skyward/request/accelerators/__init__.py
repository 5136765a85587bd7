"""Accelerators: the catalogue, requests for them, and MIG partitions."""

from __future__ import annotations

from skyward.request.accelerators.accelerator import (
    Accelerator,
    AcceleratorFactory,
    AcceleratorLike,
    MigProfile,
    is_nvidia,
    is_trainium,
    parse_accelerator,
)
from skyward.request.accelerators.catalogue import (
    Model,
    Variant,
    Vendor,
    find_model,
    find_variant,
    fold_name,
    model_name,
    models,
)
from skyward.request.accelerators.names import NVIDIA

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
