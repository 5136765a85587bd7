"""Versions of the client and of the nodes."""

from __future__ import annotations

import copy

import pytest
from distributed.versions import get_versions

from skyward.errors import ConfigurationError
from skyward_dask import check_versions


@pytest.fixture
def versions():
    return copy.deepcopy(
        {"client": get_versions(), "scheduler": get_versions(), "workers": {"tls://w": get_versions()}}
    )


def test_the_same_are_accepted(versions):
    check_versions(versions)


def test_another_patch_release_of_python_is_accepted(versions):
    versions["scheduler"]["packages"]["python"] = ".".join(
        [*versions["client"]["packages"]["python"].split(".")[:2], "99", "final", "0"]
    )
    check_versions(versions)


def test_another_python_is_named_on_both_sides_with_what_to_do(versions):
    versions["client"]["packages"]["python"] = "3.12.1.final.0"
    versions["scheduler"]["packages"]["python"] = versions["workers"]["tls://w"]["packages"]["python"] = (
        "3.11.9.final.0"
    )
    with pytest.raises(ConfigurationError, match=r"this process has python 3\.12, but the scheduler has python 3\.11"):
        check_versions(versions)
    with pytest.raises(ConfigurationError, match=r"Image\(python='3\.12'\)"):
        check_versions(versions)


@pytest.mark.parametrize("package", ["dask", "distributed", "cloudpickle"])
def test_a_worker_with_another_package_is_named(versions, package):
    versions["workers"]["tls://w"]["packages"][package] = "0.1"
    here = versions["client"]["packages"][package]
    with pytest.raises(ConfigurationError) as caught:
        check_versions(versions)
    assert f"this process has {package} {here}, but tls://w has {package} 0.1" in str(caught.value)
    assert f'pip=["{package}=={here}"]' in str(caught.value)


def test_a_missing_package_is_a_difference(versions):
    versions["scheduler"]["packages"]["cloudpickle"] = None
    with pytest.raises(ConfigurationError, match="the scheduler has cloudpickle missing"):
        check_versions(versions)


def test_what_is_not_exchanged_may_differ(versions):
    versions["scheduler"]["packages"]["numpy"] = "0.1"
    check_versions(versions)
