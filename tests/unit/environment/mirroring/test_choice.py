"""Distributions that nodes get, from made-up environments."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from skyward.environment.image_mirror import choose, is_accelerators_build, public_version
from skyward.environment.installed import Distribution
from skyward.errors import ConfigurationError


def environment(**versions: str) -> dict[str, Distribution]:
    """Each as ``name="1.0: a requirement; another"``; ``;`` within a requirement is ``|``, ``-`` in a name ``_``."""
    found: dict[str, Distribution] = {}
    for key, text in versions.items():
        name = key.replace("_", "-")
        version, _, requires = text.partition(":")
        lines = [line.strip().replace("|", ";") for line in requires.split(";") if line.strip()]
        found[name] = Distribution(name=name, version=version, requires=tuple(map(Requirement, lines)))
    return found


HERE = environment(
    app="1.0: frame>=2; colour",
    frame="2.1: array; arrow | extra == 'fast'; appnope | sys_platform == 'darwin'",
    array="3.0",
    arrow="4.0",
    appnope="0.1",
    colour="1.0",
    pip="26.0",
    msgpack="1.1",
    skyward_fleet="0.1: msgpack; pip",
    torch="2.13.0+cpu: nvidia-cudnn-cu13 | platform_system == 'Linux'; array",
    nvidia_cudnn_cu13="9.0",
    trainer="1.0: torch>=2",
)


def test_everything_is_taken_but_what_nodes_have_or_have_no_use_for() -> None:
    chosen = {each.name: each.left_out for each in choose(HERE, roots=None, engine={"msgpack"})}

    assert chosen == {
        "app": "",
        "appnope": "for another operating system",
        "array": "",
        "arrow": "",
        "colour": "",
        "frame": "",
        "msgpack": "comes with Skyward, in this version",
        "nvidia-cudnn-cu13": "comes with the build for the node's processors or GPUs",
        "pip": "a tool for this machine; only=[…] takes it",
        "skyward-fleet": "nodes get the Skyward that runs here",
        "torch": "",
        "trainer": "",
    }


def test_only_takes_what_is_named_and_its_requirements_with_their_dependents() -> None:
    chosen = choose(HERE, roots={"app"})

    assert [(each.name, each.needed_by) for each in chosen] == [
        ("app", ()),
        ("array", ("frame",)),
        ("colour", ("app",)),
        ("frame", ("app",)),
    ]


def test_an_optional_requirement_is_taken_if_the_program_has_imported_it() -> None:
    assert "arrow" in [each.name for each in choose(HERE, roots={"frame"}, loaded={"arrow"})]


def test_a_requirement_of_an_extra_is_taken_if_a_requirement_names_the_extra() -> None:
    here = {**HERE, **environment(fan="1.0: frame[fast]")}

    assert "arrow" in [each.name for each in choose(here, roots={"fan"})]


def test_a_root_that_is_a_part_of_an_accelerators_build_is_taken() -> None:
    (chosen,) = choose(HERE, roots={"nvidia-cudnn-cu13"})

    assert chosen.left_out == ""


def test_an_excluded_one_takes_its_dependents_along_or_an_installer_would_bring_it_back() -> None:
    chosen = {each.name: each.left_out for each in choose(HERE, roots={"trainer", "app"}, exclude={"torch"})}

    assert chosen["torch"] == "excluded"
    assert chosen["trainer"] == "requires torch, which is left out"
    assert chosen["app"] == ""


def test_two_that_contradict_each_other_are_named_both() -> None:
    here = environment(a="1.0: b<2", b="2.1")

    with pytest.raises(ConfigurationError, match=r"a 1\.0 requires b<2, and 2\.1 is installed.*exclude="):
        choose(here, roots=None)
    assert choose(here, roots={"b"})


def test_what_skyward_needs_cannot_be_excluded() -> None:
    with pytest.raises(ConfigurationError, match="exclude names msgpack, which Skyward itself needs"):
        choose(HERE, roots=None, exclude={"msgpack"}, engine={"msgpack"})


@pytest.mark.parametrize(
    ("version", "public"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.13.0+cu130", "2.13.0"),
        ("0.10.1+cuda12.cudnn89", "0.10.1"),
        ("2.5.1+rocm6.2", "2.5.1"),
        ("1.0+ours.1", "1.0+ours.1"),
        ("1.0", "1.0"),
    ],
)
def test_labels_of_accelerators_builds_are_dropped(version: str, public: str) -> None:
    assert public_version(version) == public
    assert is_accelerators_build(version) == (version != public)


def test_a_tool_that_another_one_requires_is_taken() -> None:
    here = environment(checker="1.0: pytest>=8", pytest="9.0", ruff="1.0")

    assert {each.name: bool(each.left_out) for each in choose(here, roots=None)} == {
        "checker": False,
        "pytest": False,
        "ruff": True,
    }
