"""The check of an image before machines are requested, and the command that shows the mirror."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.client.cli import main
from skyward.client.node_packages import callers_names, name_in, with_environment
from skyward.provision.mirroring.image_mirror import mirror_environment
from skyward.provision.mirroring.missing import lack_of
from skyward.request.image import mirrored_image
from skyward.request.request import PoolRequest, parse_request

ELSEWHERE: Any = object()
"""Provider of machines that are not this one."""


def of_a_script(function: Callable[[], int]) -> Any:
    function.__module__ = "__main__"
    return sky.compute(function)


@of_a_script
def of_arrays() -> int:
    return int(np.ones(2).sum())


@of_a_script
def of_nothing() -> int:
    return 1


def checked(request: PoolRequest, *functions: Any, provider: Any = ELSEWHERE) -> list[str]:
    lines: list[str] = []
    names = {function.__name__: function for function in functions}
    assert with_environment(request, provider, chosen=True, names=[names], report=lines.append) is request
    return lines


def test_an_image_with_which_no_function_could_run_is_refused_before_a_machine_is_requested() -> None:
    with pytest.raises(sky.ConfigurationError) as raised:
        checked(parse_request(image=sky.Image()), of_arrays)

    assert str(raised.value).startswith(
        "no machine was requested: of_arrays needs packages that the image lacks: numpy (imported by of_arrays). Leave"
    )
    assert str(raised.value).endswith("pip=['numpy']")


def test_functions_that_could_not_run_beside_one_that_could_are_reported() -> None:
    (line,) = checked(parse_request(image=sky.Image()), of_arrays, of_nothing)

    assert line.startswith("of_arrays needs packages that the image lacks: numpy (imported by of_arrays)")


def test_a_call_that_found_no_package_is_named_as_it_was_written() -> None:
    lack = lack_of(of_arrays.__wrapped__, sky.Image(), missing="numpy")

    assert lack.described().startswith("numpy (imported by of_arrays). Leave")


@pytest.mark.parametrize("image", [sky.Image(pip=["numpy"]), sky.Image(pip=["pandas"])])
def test_an_image_that_has_the_packages_is_taken_as_it_is(image: sky.Image) -> None:
    assert checked(parse_request(image=image), of_arrays) == []


def test_an_image_with_packages_that_are_unknown_here_is_not_refused() -> None:
    (line,) = checked(parse_request(image=sky.Image(pip=["numpy-of-ours"])), of_arrays)

    assert "of_arrays" in line


def test_nodes_on_this_machine_have_what_it_has() -> None:
    assert checked(parse_request(image=sky.Image()), of_arrays, provider=sky.Local()) == []


def test_the_functions_are_those_of_the_code_that_makes_the_pool() -> None:
    @sky.compute
    def local() -> None: ...

    names = {name for scope in callers_names() for name, value in scope.items() if isinstance(value, type(local))}

    assert names == {"of_arrays", "of_nothing", "local"}


def test_requirements_of_ones_own_win_over_mirrored_ones(site: Any) -> None:
    site.install("sky-app", "1.0", "sky-part")
    site.install("sky-part", "2.0")
    mirror = mirror_environment(only=["sky-app"])

    image = mirrored_image(mirror, without={"sky-part"}).merged(pip=["sky_part>=3"])

    assert image.pip == ("sky-app==1.0", "sky_part>=3")


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("Sky_Part", "sky-part"),
        ("sky.part[x]>=3", "sky-part"),
        ("sky-part @ https://h/x.whl", "sky-part"),
        ("sky-part; python_version > '3'", "sky-part"),
        ("./folder", ""),
        ("https://h/x.whl", ""),
    ],
)
def test_the_name_in_a_requirement(requirement: str, name: str) -> None:
    assert name_in(requirement) == name


def test_the_command_lists_every_distribution_and_buys_nothing(site: Any) -> None:
    site.install("sky-app", "1.0", "sky-part", "msgpack")
    site.install("sky-part", "2.0")

    shown = CliRunner().invoke(main, ["env", "--only", "sky-app"])
    document = json.loads(
        CliRunner().invoke(main, ["env", "--only", "sky-app", "--exclude", "sky-part", "--json"]).stdout
    )
    refused = CliRunner().invoke(main, ["env", "--only", "sky-ap"])

    assert shown.exit_code == 0, shown.output
    assert "2 of 3 distributions; nothing was requested or bought" in shown.stdout
    assert {row["name"]: row["left_out"] for row in document["distributions"]} == {
        "msgpack": "comes with Skyward, in this version",
        "sky-app": "requires sky-part, which is left out",
        "sky-part": "excluded",
    }
    assert (refused.exit_code, "did you mean sky-app?" in refused.stderr) == (1, True)
