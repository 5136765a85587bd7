from __future__ import annotations

import pytest

from skyward import Image
from skyward.errors import ConfigurationError
from skyward.request.distribution_names import distribution_of_module
from skyward.shipping.remote_exceptions import pack_error, unpack_error


@pytest.mark.parametrize(
    ("requirement", "package"),
    [("cv2", "opencv-python"), ("PIL>=10", "pillow"), ("sklearn==1.7", "scikit-learn"), ("skimage", "scikit-image")],
)
def test_a_module_in_place_of_its_package_is_answered_with_the_package(requirement: str, package: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"pip\[1\] must name a package, .* write '{package}'"):
        Image(pip=["numpy", requirement])
    assert Image(pip=[requirement], pip_index_url="https://index.example/simple").pip == (requirement,)


@pytest.mark.parametrize("requirement", ["opencv-python", "scikit-learn", "pillow", "cv2-tools", "yaml-rs"])
def test_packages_stay_as_they_are(requirement: str) -> None:
    assert Image(pip=[requirement]).pip == (requirement,)


@pytest.mark.parametrize(
    ("module", "package"),
    [("cv2", "opencv-python"), ("sklearn.svm", "scikit-learn"), ("yaml", "pyyaml"), ("torch", "torch")],
)
def test_a_missing_module_is_noted_with_its_package(module: str, package: str) -> None:
    error = unpack_error(pack_error(ModuleNotFoundError(f"No module named {module!r}", name=module)), where="node 0")
    assert f"Image(pip=['{package}'])" in error.__notes__[-1]
    assert distribution_of_module(module) == package
