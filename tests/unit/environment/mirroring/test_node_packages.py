"""The check of an image before machines are requested, and the command that shows the mirror."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.api.node_packages import callers_names, refuse_spread_gangs, with_environment
from skyward.cli import main
from skyward.distributed._gang import GANG_MARK
from skyward.environment.image_mirror import lack_of, name_in
from skyward.environment.installed import without_implied
from skyward.request.request import PoolRequest, parse_request

from .conftest import make_site, make_wheel

pytestmark = pytest.mark.timeout(300)  # a program that resolves requirements two dozen times

ELSEWHERE: Any = SimpleNamespace(this_machine=False)
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
    complete = with_environment(request, provider, names=[names], report=lines.append)
    assert complete.image.pip == request.image.pip
    return lines


@pytest.mark.parametrize(("request_", "is_refused"), [({}, True), ({"nodes": 1}, False), ({"spread": False}, False)])
def test_a_function_of_all_workers_together_is_refused_where_nodes_may_be_apart(
    request_: dict[str, Any], is_refused: bool
) -> None:
    def train() -> None:
        pass

    setattr(train, GANG_MARK, True)
    options: dict[str, Any] = {"nodes": 2, "spread": True, **request_}
    request = parse_request(**options)
    names = [{"alone": of_nothing, "train": sky.compute(train)}]
    if not is_refused:
        refuse_spread_gangs(request, names)
        return
    with pytest.raises(sky.ConfigurationError, match=r"^train is decorated with skyward\.distributed: .* spread=True"):
        refuse_spread_gangs(request, names)


def test_an_image_with_which_no_function_could_run_is_refused_before_a_machine_is_requested() -> None:
    with pytest.raises(sky.ConfigurationError) as raised:
        checked(parse_request(image=sky.Image()), of_arrays)

    assert str(raised.value).startswith(
        "no machine was requested: of_arrays needs packages that the image lacks: numpy (imported by of_arrays). Let"
    )
    assert str(raised.value).endswith("pip=['numpy']")


def test_functions_that_could_not_run_beside_one_that_could_are_reported() -> None:
    (line,) = checked(parse_request(image=sky.Image()), of_arrays, of_nothing)

    assert line.startswith("of_arrays needs packages that the image lacks: numpy (imported by of_arrays)")


def test_a_call_that_found_no_package_is_named_as_it_was_written() -> None:
    lack = lack_of(of_arrays.__wrapped__, sky.Image(), missing="numpy")

    assert lack.described().startswith("numpy (imported by of_arrays). Add them: pip=")


@pytest.mark.parametrize("image", [sky.Image(pip=["numpy"]), sky.Image(pip=["pandas"])])
def test_an_image_that_has_the_packages_is_taken_as_it_is(image: sky.Image) -> None:
    assert checked(parse_request(image=image), of_arrays) == []


def test_an_image_with_packages_that_are_unknown_here_is_not_refused() -> None:
    (line,) = checked(parse_request(image=sky.Image(pip=["numpy-of-ours"])), of_arrays)

    assert "of_arrays" in line


def test_nodes_on_this_machine_have_what_it_has() -> None:
    assert checked(parse_request(image=sky.Image()), of_arrays, provider=sky.Local()) == []


def test_an_environment_made_on_this_machine_has_what_the_program_imports_too(outcomes: dict[str, Any]) -> None:
    assert outcomes["dict(pip=['sky-new>=5']), sky.Local()"][0] == sorted([APP, LEAF, PART, "sky-new>=5"])
    assert outcomes["dict(pip=['sky-other']), sky.Local()"][0] == ["sky-other"]  # it is here, and so is all else


def test_the_functions_are_those_of_the_code_that_makes_the_pool() -> None:
    @sky.compute
    def local() -> None: ...

    names = {name for scope in callers_names() for name, value in scope.items() if isinstance(value, type(local))}

    assert names == {"of_arrays", "of_nothing", "local"}


PROGRAM = """
import json
import sys
from types import SimpleNamespace

import sky_app
import skyward as sky
from skyward.api.node_packages import with_environment
from skyward.request.request import parse_request

for case in json.loads(sys.argv[1]):
    lines = []
    try:
        options, provider = eval(case) if case.endswith("()") else (eval(case), SimpleNamespace(this_machine=False))
        request = with_environment(parse_request(**options), provider, names=[], report=lines.append)
        image = request.image
        outcome = [sorted(image.pip), image.pip_index_url, [path.rpartition("/")[2] for path in image.includes]]
    except sky.ConfigurationError as error:
        outcome = str(error)
    print(json.dumps(outcome))
"""

WHEELS = [
    ("sky_part", "3.0", ""),
    ("sky_other", "3.0", ""),
    ("sky_new", "5.0", "sky-part<2"),
    ("sky_new", "6.0", ""),
    ("sky_new", "7.0", "sky-other<4"),
]
APP, PART, LEAF = "sky-app==1.0", "sky-part==2.0", "sky-leaf==1.0"
CASES = {
    "{}": [APP, PART, LEAF],
    "dict(image=sky.Image())": [APP, PART, LEAF],
    "dict(image=sky.Image(env={'A': '1'}, outputs=['*.bin'], apt=['git']))": [APP, PART, LEAF],
    "dict(image=sky.Image(includes=['data']))": [APP, PART, LEAF],
    "dict(env={'A': '1'})": [APP, PART, LEAF],
    "dict(pip=[])": [APP, PART, LEAF],
    "dict(pip=['sky-other'])": [APP, PART, LEAF, "sky-other==4.0"],
    "dict(pip=['sky-new>=5'])": [APP, PART, LEAF, "sky-new>=5"],
    "dict(image=sky.Image(pip=['sky-part']), pip=['sky-new'])": [APP, PART, LEAF, "sky-new"],
    "dict(pip=['Sky_Part[fast]<3'])": [APP, PART, LEAF, "Sky_Part[fast]<3"],
    # Another version: what only the replaced one requires is its own affair.
    "dict(pip=['sky_part>=3'])": [APP, "sky_part>=3"],
    "dict(pip=['sky-part @ https://h/sky_part-9-py3-none-any.whl'])": [
        APP,
        "sky-part @ https://h/sky_part-9-py3-none-any.whl",
    ],
    # Of what is named itself, an installer takes the versions that agree.
    "dict(pip=['sky-other', 'sky-new==7.0'])": [APP, PART, LEAF, "sky-new==7.0", "sky-other"],
    "dict(pip=['sky-lost'])": [APP, PART, LEAF, "sky-lost"],
    "dict(image=sky.Image(mirror=False))": [],
    "dict(image=sky.Image(mirror=False, pip=['sky-new']), pip=['sky-other'])": ["sky-new", "sky-other"],
    "dict(image=sky.Image.mirror(only=['sky-other']), env={'A': '1'})": ["sky-other==4.0"],
    "dict(image=sky.Image.mirror(only=['sky-app'], exclude=['sky-leaf']))": [],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The outcome of each case, in one program that imports sky_app."""
    folder = tmp_path_factory.mktemp("program")
    with pytest.MonkeyPatch.context() as patch:
        site = make_site(folder, patch)
        site.install("sky-app", "1.0", "sky-part")
        site.install("sky-part", "2.0", "sky-leaf")
        site.install("sky-leaf", "1.0")
        site.install("sky-other", "4.0")
        site.install("sky-lost", "1.0.post7", in_index=False)
        (site.installed / "sky_lost-1.0.post7.dist-info/RECORD").write_text("sky_lost.so,,\n")
        for name, version, needed in WHEELS:
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            make_wheel(site.wheels, name, version, text + (needed and f"Requires-Dist: {needed}\n"))
        (folder / "main.py").write_text(PROGRAM)
        (folder / "data").mkdir()
        patch.delenv("SKYWARD_MIRROR", raising=False)
        patch.setenv("PYTHONPATH", str(site.installed))
        here = [f"dict(pip=[{name!r}]), sky.Local()" for name in ("sky-new>=5", "sky-other")]
        cases = [*CASES, *CONFLICTS, *here]
        ran = subprocess.run(
            [sys.executable, "main.py", json.dumps(cases)], cwd=folder, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        yield dict(zip(cases, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_options_add_to_what_the_program_imports(case: str, outcomes: dict[str, Any]) -> None:
    packages, index, includes = outcomes[case]

    assert packages == sorted(CASES[case])
    assert index is None
    assert includes == (["data"] if "includes" in case else [])


CONFLICTS = {
    "dict(pip=['sky-new==5.0'])": "sky-part<2",
    "dict(image=sky.Image(pip=['sky-other<4', 'sky-other>4']))": "sky-other",
    "dict(pip=['msgpack<0.1'])": "msgpack",
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_requirements_that_exclude_the_mirrored_versions_are_refused_before_a_machine_is_requested(
    case: str, outcomes: dict[str, Any]
) -> None:
    text = outcomes[case]

    assert text.startswith("no machine was requested: pip=[")
    assert CONFLICTS[case] in text
    assert "Image(mirror=False, pip=[…])" in text


@pytest.mark.parametrize(
    ("requirement", "pin", "says_more"),
    [
        ("Sky_Part", "sky-part==2.0", False),
        ("sky-part>=1,<3", "sky-part==2.0", False),
        ("sky-part; python_version > '3'", "sky-part==2.0", False),
        ("sky-part", "sky-part @ https://h/x.whl", False),
        ("sky-part>=1", "sky-part @ https://h/x.whl", True),
        ("sky-part>=3", "sky-part==2.0", True),
        ("sky-part==2.0+cpu", "sky-part==2.0", True),
        ("sky-part[fast]", "sky-part==2.0", True),
        ("sky-part @ https://h/x.whl", "sky-part==2.0", True),
        ("sky-parts", "sky-part==2.0", True),
        ("./folder", "sky-part==2.0", True),
    ],
)
def test_a_requirement_that_a_pin_satisfies_is_left_out_beside_it(requirement: str, pin: str, says_more: bool) -> None:
    assert without_implied([requirement], [pin]) == ([requirement] if says_more else [])


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("Sky_Part", "sky-part"),
        ("sky.part[x]>=3", "sky-part"),
        ("sky-part @ https://h/x.whl", "sky-part"),
        ("sky-part; python_version > '3'", "sky-part"),
        ("sky-part (>=3)", "sky-part"),
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
