"""Images of containers, checked without a registry."""

from __future__ import annotations

import pytest

from skyward.errors import ConfigurationError
from skyward.providers._common.machine_boot import CPU_IMAGE, GPU_IMAGE, checked_image, cuda_of


@pytest.mark.parametrize(
    "image",
    [
        CPU_IMAGE,
        GPU_IMAGE,
        "own",
        "ghcr.io:443/me/tool:1.0",
        "own/base:@automatic-tag",
        f"own@sha256:{'0' * 64}",
    ],
)
def test_names_of_images_are_taken(image: str) -> None:
    assert checked_image(image, disk="disk_gb", disk_gb=10) == image


@pytest.mark.parametrize("image", [5, "", "no image", "-it", "own:", "own@sha256:0", "own;ls"])
def test_other_texts_are_refused(image: object) -> None:
    with pytest.raises(ConfigurationError, match="image"):
        checked_image(image, disk="disk_gb", disk_gb=10)


@pytest.mark.parametrize("image", ["123456789012.dkr.ecr.eu-west-1.amazonaws.com/own:1", "team.azurecr.io/own"])
def test_private_registries_need_credentials(image: str) -> None:
    with pytest.raises(ConfigurationError, match="private registry: log in"):
        checked_image(image, disk="disk_gb", disk_gb=10, remedy="log in")
    assert checked_image(image, disk="disk_gb", disk_gb=10, login="-u me -p secret") == image


def test_well_known_images_need_their_disk() -> None:
    with pytest.raises(ConfigurationError, match="disk_gb must be at least 20 for the image pytorch/pytorch"):
        checked_image("pytorch/pytorch:2.9.0", disk="disk_gb", disk_gb=19)
    assert checked_image("pytorch/pytorch:2.9.0", disk="disk_gb", disk_gb=20)


@pytest.mark.parametrize(
    ("image", "version"), [(GPU_IMAGE, 12.4), ("pytorch/pytorch:2.9.0-cuda12.8-cudnn9", 12.8), (CPU_IMAGE, None)]
)
def test_the_version_of_cuda_is_that_of_the_name(image: str, version: float | None) -> None:
    assert cuda_of(image) == version
