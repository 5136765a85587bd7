"""Images of containers: defaults, and the checks that need no registry (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from skyward.errors import ConfigurationError
from skyward.request.checks import refusal, text

__all__ = ["CPU_IMAGE", "GPU_IMAGE", "checked_image", "cuda_of"]

GPU_IMAGE: Final = "nvidia/cuda:12.4.1-base-ubuntu22.04"
"""Small official image with CUDA, which newer drivers run as well."""
CPU_IMAGE: Final = "ubuntu:24.04"
"""Small official image without CUDA."""

_NAME: Final = re.compile(
    r"\w[\w.-]*(:\d+)?(/[\w.-]+)*(:\w[\w.-]*|:@[\w-]+)?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_PRIVATE: Final = re.compile(r"\d{12}\.dkr\.ecr\.|[\w-]+\.azurecr\.io/", re.ASCII)
"""Registries that admit nobody without credentials."""
_NEEDS_GB: Final[Mapping[str, int]] = {
    r"\w/pytorch\b": 20,
    r"nvcr\.io/nvidia/|vllm/vllm-openai": 30,
    r"tensorflow/tensorflow|^nvidia/cuda.*-devel": 15,
}
"""Disk for well-known images, with room for an environment."""


def checked_image(
    image: object,
    *,
    disk: str,
    disk_gb: int,
    login: str | None = None,
    remedy: str = "pass image_login with its credentials",
) -> str:
    """Return ``image`` if it may be a container image that fits on its disk and can be read.

    Args:
        image: the image's name.
        disk: name of the parameter for the disk's size.
        disk_gb: size of the disk.
        login: credentials for the registry; None for none.
        remedy: next step for an image that needs some.

    Raises:
        ConfigurationError: it is none, does not fit, or is in a registry that needs credentials.
    """
    name = text("image", image)
    if not _NAME.fullmatch(name):
        raise refusal("image", "the name of a container image such as 'ubuntu:24.04'", name)
    if _PRIVATE.match(name) and login is None:
        raise ConfigurationError(f"image={name!r} is in a private registry: {remedy}")
    for pattern, needs_gb in _NEEDS_GB.items():
        if re.search(pattern, name) and disk_gb < needs_gb:
            raise refusal(disk, f"at least {needs_gb} for the image {name}", disk_gb)
    return name


def cuda_of(image: str) -> float | None:
    """Return the version of CUDA that an image's name states: ``12.4``; None if it states none."""
    found = re.search(r"cuda:?(\d+\.\d+)", image)
    return None if found is None else float(found[1])
