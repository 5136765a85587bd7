from __future__ import annotations

import pytest

from skyward.errors import ConfigurationError
from skyward.request.accelerators import NVIDIA, Accelerator
from skyward.request.instance import InstanceSpec, InstanceWish, select_instance

SMALL = InstanceSpec(name="small", cpu=2, memory_gib=8, price_on_demand=0.1)
LARGE = InstanceSpec(name="large", cpu=32, memory_gib=128, price_on_demand=1.0)
A10G = InstanceSpec(
    name="g5", cpu=8, memory_gib=32, accelerator="A10G", accelerator_count=1, accelerator_memory_gib=22.35
)
A100_40 = InstanceSpec(name="p4d", cpu=96, memory_gib=1152, accelerator="A100-40GB", accelerator_count=8)
A100_80 = InstanceSpec(
    name="p4de", cpu=96, memory_gib=1152, accelerator="A100", accelerator_count=8, accelerator_memory_gib=80
)
H100_1 = InstanceSpec(name="p5.4xl", cpu=16, memory_gib=256, accelerator="H100-SXM", accelerator_count=1)
H100_8 = InstanceSpec(name="p5.48xl", cpu=192, memory_gib=2048, accelerator="H100", accelerator_count=8)
NVL = InstanceSpec(name="nvl", cpu=16, memory_gib=256, accelerator="H100-NVL", accelerator_count=1)
ALL = [H100_8, A100_80, A100_40, LARGE, NVL, H100_1, A10G, SMALL]


@pytest.mark.parametrize(
    ("accelerator", "cpu", "memory", "name"),
    [
        (None, None, None, "small"),
        (None, 3, None, "large"),
        (None, None, "8GB", "small"),
        (None, None, "8.1 GiB", "large"),
        ("a10g", None, None, "g5"),
        ("A100", None, None, "p4de"),
        ("A100-40GB", None, None, "p4d"),
        (NVIDIA.H100, None, None, "p5.4xl"),
        ("H100", 32, "0.5TB", "p5.48xl"),
        (Accelerator.NVIDIA.H100(count=2), None, None, "p5.48xl"),
        ("H100-NVL", None, None, "nvl"),
        ("H100-SXM", None, None, "p5.4xl"),
    ],
)
def test_the_smallest_that_has_everything_is_chosen(
    accelerator: str | Accelerator | None, cpu: int | None, memory: str | None, name: str
):
    assert select_instance(ALL, accelerator=accelerator, cpu=cpu, memory=memory).name == name


def test_among_equals_the_cheaper_one_is_chosen():
    dear = InstanceSpec(name="dear", cpu=2, memory_gib=8, price_on_demand=0.2)
    unknown = InstanceSpec(name="a", cpu=2, memory_gib=8)

    assert select_instance([unknown, dear, SMALL]) == SMALL


def test_an_accelerator_outside_the_catalogue_is_matched_by_name():
    odd = InstanceSpec(name="odd", cpu=2, memory_gib=8, accelerator="Z-1", accelerator_count=1)

    assert select_instance([SMALL, odd], accelerator=Accelerator(name="z1", memory="48GB")) == odd


def test_when_nothing_matches_the_nearest_are_named_first():
    with pytest.raises(
        ConfigurationError, match=r"no instance type has 16x A100-80GB, 4 cores; nearest: p4de \(8x A100, 96 cores, "
    ):
        select_instance(ALL, accelerator=Accelerator.NVIDIA.A100(count=16), cpu=4)


def test_a_form_factor_is_never_guessed():
    with pytest.raises(ConfigurationError, match=r"no instance type has 1x H100-PCIe; nearest: p5\.4xl"):
        select_instance(ALL, accelerator="H100-PCIe")


def test_nothing_to_choose_from_is_said():
    with pytest.raises(ConfigurationError, match="no instance types to choose from"):
        select_instance([], memory="1GB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cpu": 0}, "cpu must be a whole number ≥ 1, got 0"),
        ({"memory": "lots"}, "memory must be a size"),
        ({"memory": 32}, "memory must be a size"),
        ({"accelerator": "X9"}, "accelerator must be a known name"),
    ],
)
def test_bad_arguments_name_themselves(arguments: dict[str, object], message: str):
    with pytest.raises(ConfigurationError, match=message):
        select_instance(ALL, **arguments)  # pyright: ignore[reportArgumentType]


def test_a_shortfall_grows_with_what_is_missing():
    wish = InstanceWish(accelerator=Accelerator.NVIDIA.H100(count=2), cpu=64, memory_gib=64)

    assert [wish.shortfall(spec) for spec in (H100_8, H100_1, NVL, SMALL)] == [0, 2, 3, 6]
    assert str(wish) == "2x H100-80GB, 64 cores, 64 GiB"
    assert str(InstanceWish()) == "anything"
