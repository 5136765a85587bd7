"""``NVIDIA`` as a type, as the documentation says; checked by pyright, never run."""

from __future__ import annotations

import skyward as sky


def train(gpu: sky.NVIDIA) -> str:
    return gpu


def uses() -> None:
    train(sky.NVIDIA.A100)
    sky.ComputePool(provider=sky.Local(), accelerator=sky.NVIDIA.A100)
    train("A100")  # pyright: ignore[reportArgumentType]
