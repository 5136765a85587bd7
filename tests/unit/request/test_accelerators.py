from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import ConfigurationError
from skyward.request import accelerators
from skyward.request.accelerators import (
    NVIDIA,
    Accelerator,
    Vendor,
    find_variant,
    fold_name,
    is_nvidia,
    is_trainium,
    models,
    parse_accelerator,
    parse_accelerators,
)


@pytest.mark.parametrize(
    ("name", "label", "memory_gib"),
    [
        ("A100", "A100-80GB", 80),
        ("a100-40gb", "A100-40GB", 40),
        ("A100 80GB", "A100-80GB", 80),
        ("V100", "V100-16GB", 16),
        ("h100_sxm", "H100-SXM", 80),
        ("H100-NVL", "H100-NVL", 94),
        ("l40s", "L40S", 48),
        ("rtx4090", "RTX-4090", 24),
        ("TPU-v5p", "TPU-v5p", 95),
    ],
)
def test_names_are_matched_without_regard_to_case_and_dashes(name: str, label: str, memory_gib: float):
    parsed = parse_accelerator(name)

    assert (parsed.label, parsed.memory_gib, parsed.count) == (label, memory_gib, 1)


def test_no_two_variants_share_a_spelling():
    spellings = [fold_name(model.name) for model in models()]
    spellings += [fold_name(f"{m.name}{gib:g}GB") for m in models() for gib in m.memory_gib]

    assert len(set(spellings)) == len(spellings)


def test_every_row_has_a_source_and_its_form_factors_a_listed_memory():
    for model in models():
        assert model.source
        assert set(model.form_factors.values()) | set(model.mig) <= set(model.memory_gib)


def test_an_unknown_name_is_refused_with_the_closest_and_the_way_out():
    with pytest.raises(ConfigurationError, match=r"'H1000'; closest: H100, .*Accelerator\(name='H1000', memory="):
        parse_accelerator("H1000")


@pytest.mark.parametrize("name", ["*", "Foo", "%%%"])
def test_a_name_like_no_other_is_refused_with_the_way_to_the_names(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"got '.+'; `skyward offers` lists them with prices\. For another one"
    ):
        parse_accelerator(name)


def test_names_in_one_text_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigurationError, match=r"or a list of names such as \['H100', 'A100'\], got 'H100, A100'"):
        parse_accelerator("H100, A100")


def test_an_uncatalogued_accelerator_needs_its_memory():
    assert str(Accelerator(name="Z1", memory="48GB", count=2)) == "2x Z1"
    assert Accelerator(name="Z1", memory="48GB").vendor is Vendor.UNKNOWN
    with pytest.raises(ConfigurationError, match="accelerator must be a known name"):
        Accelerator(name="Z1")


@pytest.mark.parametrize("given", [3, None, b"A100", "", Accelerator.AMD.MI, ["A100"]])
def test_what_is_no_name_is_refused(given: object):
    with pytest.raises(ConfigurationError, match='accelerator must be a name such as "A100" or an Accelerator'):
        parse_accelerator(given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2"])
def test_a_count_is_a_whole_number(count: int):
    with pytest.raises(ConfigurationError, match="count must be a whole number ≥ 1"):
        Accelerator.NVIDIA.T4(count)


def test_the_reference_examples_mean_what_they_say():
    nvidia = Accelerator.NVIDIA
    assert nvidia.H100(count=4) == Accelerator(name="H100", memory="80GB", count=4)
    assert nvidia.A100(memory="40GB").label == "A100-40GB"
    assert nvidia.V100(memory="32GB").memory_gib == 32
    assert [nvidia.H100(form_factor=f).memory_gib for f in ("SXM", "PCIe", "nvl")] == [80, 80, 94]
    assert nvidia.H100(memory="40GB").memory_gib == 40
    assert Accelerator.AWS.Trainium(version=2).name == "Trainium2"
    assert Accelerator.AWS.Inferentia(version=1).memory_gib == 8
    assert str(Accelerator.Google.TPU(version="v5p")) == "1x TPU-v5p"
    assert Accelerator.AMD.MI("250X").memory_gib == 128
    assert Accelerator.AMD.RadeonPro("V710").vendor is Vendor.AMD


@pytest.mark.parametrize(
    ("method", "memory_gib"),
    [
        ("H100", 80),
        ("H200", 141),
        ("A100", 80),
        ("B100", 192),
        ("B200", 192),
        ("GB200", 384),
        ("GH200", 96),
        ("L4", 24),
        ("L40", 48),
        ("L40S", 48),
        ("T4", 16),
        ("A10", 24),
        ("A10G", 24),
        ("V100", 16),
    ],
)
def test_factories_have_the_memory_of_the_reference(method: str, memory_gib: float):
    assert getattr(Accelerator.NVIDIA, method)(count=2).memory_gib == memory_gib


@pytest.mark.parametrize(("name", "chips"), [("v5p-8", 4), ("v5e-8", 8), ("v4-32", 16), ("v6e-1", 1)])
def test_a_tpu_slice_counts_cores_or_chips_as_its_version_does(name: str, chips: int):
    assert Accelerator.Google.TPUSlice(name).count == chips


@pytest.mark.parametrize("name", ["v5p", "v5p-", "v5p-3", "v5p-0", "v9-8", "v5p-x", "v5p-²"])
def test_a_malformed_tpu_slice_is_refused(name: str):
    with pytest.raises(ConfigurationError, match="a TPU slice"):
        Accelerator.Google.TPUSlice(name)


def test_a_memory_size_that_does_not_exist_names_those_that_do():
    with pytest.raises(ConfigurationError, match='memory must be "80GB" or "40GB" for A100, got 60 GiB'):
        Accelerator.NVIDIA.A100(memory="60GB")
    with pytest.raises(ConfigurationError, match='memory must be "94GB" for H100'):
        Accelerator.NVIDIA.H100(memory="80GB", form_factor="NVL")


@pytest.mark.parametrize("form_factor", ["OAM", "80GB", "", 3])
def test_a_form_factor_that_does_not_exist_is_refused(form_factor: str):
    with pytest.raises(ConfigurationError, match="form_factor must be"):
        Accelerator.NVIDIA.H100(form_factor=form_factor)


def test_a_name_and_a_form_factor_must_not_disagree():
    with pytest.raises(ConfigurationError, match="form_factor must be"):
        Accelerator(name="H100-SXM", form_factor="PCIe")


@pytest.mark.parametrize(
    ("memory", "profile", "workers"),
    [
        ("80GB", "1g.10gb", 7),
        ("80GB", "1g.20gb", 4),
        ("80GB", "2g.20gb", 3),
        ("80GB", "3g.40gb", 2),
        ("80GB", "4g.40gb", 1),
        ("80GB", "7g.80gb", 1),
        ("40GB", "1g.5gb", 7),
        ("40GB", "2g.10gb", 3),
        ("40GB", "3g.20gb", 2),
        ("40GB", "4g.20gb", 1),
    ],
)
def test_one_profile_is_created_as_often_as_it_fits(memory: str, profile: str, workers: int):
    assert Accelerator.NVIDIA.A100(memory=memory, mig=profile).partitions == workers


def test_partitions_count_every_gpu_of_a_node():
    assert Accelerator.NVIDIA.H100(count=4, mig="3g.40gb").partitions == 8
    assert Accelerator.NVIDIA.H100(count=4).partitions == 1


def test_a_list_of_profiles_is_created_exactly():
    mixed = Accelerator.NVIDIA.A100(mig=["4g.40gb", "2G.20GB", "1g.10gb"])

    assert mixed.mig == ("4g.40gb", "2g.20gb", "1g.10gb")
    assert mixed.partitions == 3


@pytest.mark.parametrize(
    ("profiles", "taken"),
    [
        (["4g.40gb", "4g.40gb"], "8 and 8"),  # too much compute
        (["3g.40gb", "3g.40gb", "1g.10gb"], "7 and 9"),  # compute fits, memory does not
        (["1g.20gb"] * 5, "5 and 10"),
        (["7g.80gb", "1g.10gb"], "8 and 9"),
    ],
)
def test_both_slice_budgets_are_checked(profiles: list[str], taken: str):
    with pytest.raises(ConfigurationError, match=f"7 compute and 8 memory slices; .* take {taken}"):
        Accelerator.NVIDIA.H100(mig=profiles)


def test_a_profile_must_match_the_memory_of_its_gpu():
    with pytest.raises(ConfigurationError, match=r"mig must be one of 1g\.5gb, .* for A100-40GB, got '3g.40gb'"):
        Accelerator.NVIDIA.A100(memory="40GB", mig="3g.40gb")


@pytest.mark.parametrize("mig", ["", "big", [], [3], 3])
def test_a_malformed_mig_is_refused(mig: str):
    with pytest.raises(ConfigurationError, match="mig"):
        Accelerator.NVIDIA.A100(mig=mig)


def test_a_gpu_without_mig_says_so():
    with pytest.raises(ConfigurationError, match="mig must be None for T4-16GB"):
        Accelerator(name="T4", mig="1g.10gb")


def test_every_profile_of_the_catalogue_fits_its_gpu():
    for model in models():
        for memory_gib, profiles in model.mig.items():
            for profile in profiles:
                whole = Accelerator(name=model.name, memory=f"{memory_gib:g}GB", mig=profile)
                Accelerator(name=model.name, memory=f"{memory_gib:g}GB", mig=list(whole.mig))


def test_an_accelerator_is_a_value():
    given = Accelerator.NVIDIA.H100(mig="3g.40gb", form_factor="SXM")

    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given
    assert len({given, copy.copy(given)}) == 1
    with pytest.raises(AttributeError):
        given.count = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_is_nvidia_and_is_trainium_know_names_and_accelerators():
    assert is_nvidia("H100")
    assert is_nvidia("NVIDIA Z1")
    assert is_nvidia(NVIDIA.L40S)
    assert is_nvidia(Accelerator.NVIDIA.A100())
    assert not is_nvidia("MI300X")
    assert not is_nvidia("Z1")
    assert is_trainium("Trainium2")
    assert is_trainium(Accelerator.AWS.Trainium(version=1))
    assert not is_trainium("H100")


def test_nvidia_names_are_text_and_every_one_parses():
    assert NVIDIA.A100 == "A100-80GB"
    assert parse_accelerator(NVIDIA.H100_NVL).memory_gib == 94
    assert {name for name in NVIDIA if parse_accelerator(name).label != name} == {NVIDIA.GB200}


def test_nvidia_names_the_whole_catalogue():
    named = {variant.model.name for name in NVIDIA if (variant := find_variant(name))}

    assert named == {model.name for model in models() if model.vendor is Vendor.NVIDIA}


def test_the_catalogue_is_data_beside_the_code():
    assert (Path(accelerators.__file__).parent / "accelerators.toml").is_file()


def test_a_name_may_say_how_many() -> None:
    assert parse_accelerator("A100-40GB:8").count == 8


@pytest.mark.parametrize("text", ["L4:0", "A10:", "H100:two", "H100:-1"])
def test_how_many_must_be_a_number(text: str) -> None:
    with pytest.raises(ConfigurationError, match='such as "A100:4"'):
        parse_accelerator(text)


def test_several_may_do_and_one_named_twice_counts_once() -> None:
    assert list(map(str, parse_accelerators(["H100", "a100-40gb:2", "h100 80gb"]))) == ["1x H100-80GB", "2x A100-40GB"]
    assert parse_accelerators("T4") == (parse_accelerator("T4"),)


@pytest.mark.parametrize(
    ("several", "message"),
    [
        ([], "a list of at least one"),
        (["H100", "H10"], "closest: H100"),
        (["H100", 3], "accelerator must be a name"),
        ([Accelerator.NVIDIA.H100(mig="3g.40gb"), "A100"], "1x H100-80GB has 2, 1x A100-80GB has 1"),
    ],
)
def test_several_that_cannot_stand_for_each_other_are_refused(several: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_accelerators(several)


def test_any_is_every_accelerator_with_so_much_memory_of_a_maker() -> None:
    found = Accelerator.any(memory=">=140GB", vendor="nvidia", count=2)

    names = ["H200", "B100", "B200", "B300", "GB200-384GB", "GB200-192GB"]
    assert [str(one) for one in found] == [f"2x {name}" for name in names]
    assert len(Accelerator.any()) > len(Accelerator.any(vendor="NVIDIA")) > len(Accelerator.any(memory="80GB"))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"memory": "<40GB"}, "least size such as"),
        ({"memory": 40}, "least size such as"),
        ({"memory": ">=1TB", "vendor": "nvidia"}, "the most that one has is 384 GB \\(GB200\\)"),
        ({"vendor": "intel"}, 'vendor must be "NVIDIA" or "AWS"'),
        ({"count": 0}, "count must be"),
    ],
)
def test_a_wish_that_nothing_satisfies_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator.any(**wish)
