from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from skyward.environment.image import Image
from skyward.environment.skyward_wheel import ENGINE_PACKAGES, engine_pins
from skyward.errors import ConfigurationError
from skyward.request.image import EnvVars

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_lists_are_kept_as_tuples():
    pip = ["torch", "numpy"]
    image = Image(pip=pip, apt=["ffmpeg"], find_links=["/wheels"], includes=["./lib"])
    pip.append("later")

    assert image.pip == ("torch", "numpy")
    assert (image.apt, image.find_links, image.includes) == (("ffmpeg",), ("/wheels",), ("./lib",))


def test_no_python_means_that_of_the_client():
    assert Image().python_version == HERE
    assert Image(python="3.13").python_version == "3.13"


def test_values_of_the_environment_show_nowhere_but_in_it():
    image = Image(env={"TOKEN": "s3cret"})

    assert "TOKEN" in repr(image)
    assert "s3cret" not in repr(image) + str(image.env) + image.bootstrap(60)
    assert image.env["TOKEN"] == "s3cret"


def test_bad_fields_name_themselves(subtests: pytest.Subtests):
    for arguments, message in [
        ({"python": 3.11}, 'python must be a version such as "3.11", got 3.11'),
        ({"python": "2.7"}, "python must be"),
        ({"python": "3.11; reboot"}, "python must be"),
        ({"pip": "torch"}, r"pip must be a list of strings, as in pip=\[\.\.\.\], got 'torch'"),
        ({"pip": "x@https://me:pw@host/x.whl"}, r"got 'x@https://\*\*\*@host/x.whl'$"),
        ({"pip": ["torch", 3]}, r"pip\[1\] must be non-empty text, got 3"),
        ({"pip": {"torch"}}, "pip must be a list of strings"),
        ({"pip": ["--index-url=http://x"]}, r"pip\[0\] must be a value, not an option"),
        ({"apt": ["-o", "x"]}, r"apt\[0\] must be a value, not an option"),
        ({"apt": [""]}, r"apt\[0\] must be non-empty text"),
        ({"apt": ["a\0b"]}, r"apt\[0\] must be non-empty text"),
        ({"includes": None}, "includes must be a list of strings"),
        ({"env": ["A=b"]}, "env must be a dict of strings to strings, got list"),
        ({"env": {"A B": "c"}}, "env must be a dict whose names are letters, digits and underscores, got 'A B'"),
        ({"env": {"1A": "c"}}, "env must be a dict whose names"),
        ({"env": {1: "c"}}, "env must be a dict whose names"),
        ({"env": {"A": 1}}, r"env\['A'\] must be text without NUL, got int"),
        ({"env": {"A": "s3c\0ret"}}, r"env\['A'\] must be text without NUL, got text with a NUL$"),
        ({"pip_index_url": "ftp://x/"}, "pip_index_url must be an http, https or file URL"),
        ({"pip_extra_index_url": 3}, "pip_extra_index_url must be non-empty text"),
    ]:
        with subtests.test(arguments=arguments), pytest.raises(ConfigurationError, match=message):
            Image(**arguments)


@pytest.mark.parametrize("parameter", ["pip_index_url", "pip_extra_index_url"])
def test_an_index_url_with_credentials_is_refused_without_showing_them(parameter: str):
    arguments: dict[str, Any] = {parameter: "https://me:s3cret@example.org/simple"}

    with pytest.raises(ConfigurationError, match=f"{parameter} must not carry credentials") as caught:
        Image(**arguments)

    assert "s3cret" not in str(caught.value)


def test_the_hash_is_12_characters_and_stable():
    image = Image(python="3.11", pip=["torch"], apt=["ffmpeg"])

    assert image.content_hash(pins=["distributed==2026.8.0"]) == "396f32dd4603"
    assert len(Image().content_hash()) == 12


def test_the_hash_ignores_order_where_order_does_not_matter():
    one = Image(pip=["a", "b"], apt=["x", "y"], env={"A": "1"}, includes=["lib"])
    other = Image(pip=["b", "a"], apt=["y", "x"], env={"A": "2"})

    assert one.content_hash() == other.content_hash()
    assert one.content_hash(pins=["p==1", "q==1"]) == one.content_hash(pins=["q==1", "p==1"])


def test_the_hash_follows_everything_that_is_installed():
    images = [
        Image(),
        Image(python="3.9"),
        Image(pip=["a"]),
        Image(pip=["b"]),
        Image(apt=["a"]),
        Image(pip_index_url="https://example.org/"),
        Image(pip_extra_index_url="https://example.org/"),
        Image(find_links=["x", "y"]),
        Image(find_links=["y", "x"]),
    ]

    assert len({image.content_hash() for image in images}) == len(images)


def test_the_hash_follows_the_engine_pins():
    assert Image().content_hash(pins=["distributed==1"]) != Image().content_hash(pins=["distributed==2"])


def test_merging_adds_requirements_once_and_overrides_the_environment():
    image = Image(pip=["a", "b"], apt=["x"], env={"A": "1", "B": "1"}, pip_index_url="https://example.org/")

    merged = image.merged(pip=["b", "c"], env={"B": "2"})

    assert merged.pip == ("a", "b", "c")
    assert merged.env == {"A": "1", "B": "2"}
    assert (merged.apt, merged.pip_index_url) == (image.apt, image.pip_index_url)
    assert image.merged() == image
    assert image.merged(outputs=["*.bin"]).merged(outputs=["m/"]).outputs == ("*.bin", "m/")


def test_images_are_values():
    image = Image(pip=["a"], env={"A": "1"})

    assert pickle.loads(pickle.dumps(image)) == image
    assert hash(Image(pip=["a"], env={"A": "1"})) == hash(image)
    assert Image(env={"A": "2"}) != Image(env={"A": "1"})


def test_environment_variables_combine_without_changing():
    values = EnvVars({"A": "1"})

    assert values | {"B": "2"} == {"A": "1", "B": "2"}
    assert dict(values) == {"A": "1"}
    assert repr(values) == "{'A': '***'}"


def test_the_engine_is_pinned_to_what_runs_here():
    names = [pin.partition("==")[0] for pin in engine_pins()]

    assert set(ENGINE_PACKAGES) <= set(names)
    assert names == sorted(set(names))


@pytest.mark.parametrize("ttl", [-1, 1.5, True, "60"])
def test_a_time_to_live_is_whole_seconds(ttl: int):
    with pytest.raises(ConfigurationError, match="ttl must be a whole number ≥ 0"):
        Image().bootstrap(ttl)


@pytest.mark.parametrize("requirement", ["numpy==1..2", "numpy=1.2", "torch>>2", "two words", "x[", "y; python_versio"])
def test_a_requirement_that_no_installer_can_read_is_refused(requirement: str) -> None:
    with pytest.raises(ConfigurationError, match=r"pip\[1\] must be a requirement such as"):
        Image(pip=["numpy", requirement])


@pytest.mark.parametrize(
    "requirement",
    [
        "torch>=2.4,<3",
        "x[y]",
        "./local.whl",
        "git+https://host/x.git@main",
        "p @ https://host/p.whl",
        "a; python_version>'3'",
    ],
)
def test_whatever_pip_may_understand_is_taken(requirement: str) -> None:
    assert Image(pip=[requirement]).pip == (requirement,)


@pytest.mark.parametrize("package", ["a b", "rm -rf /", "Upper", "x;y", "$(id)"])
def test_what_is_no_debian_package_is_refused(package: str) -> None:
    with pytest.raises(ConfigurationError, match=r"apt\[0\] must be the name of a Debian package"):
        Image(apt=[package])


@pytest.mark.parametrize("user", ["user:hunter2222", "hunter2222", "user:hunter2222@hunter2222"])
def test_the_repr_and_errors_show_no_credentials_of_urls(user: str) -> None:
    secret = f"https://{user}@host/x.whl"
    image = Image(pip=[f"x @ {secret}", "y @ https://host/y.whl?access_token=hunter2222&egg=y"], find_links=[secret])
    assert "hunter2222" not in repr(image)
    assert "x @ https://***@host/x.whl" in repr(image)
    assert "https://host/y.whl?access_token=***&egg=y" in repr(image)
    assert image.pip[0] == f"x @ {secret}"
    with pytest.raises(ConfigurationError) as caught:
        Image(pip=[f"skyward-fleet @ {secret}"])
    assert "hunter2222" not in str(caught.value)
