from __future__ import annotations

import importlib
import sys
from importlib.metadata import version

import pytest
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend

from skyward.environment.image import Image
from skyward.testing.provider import FakeProvider
from skyward_joblib import JoblibPool, ScikitLearnPool, SkywardBackend, joblib_backend, sklearn_backend


def installs(pool):
    return set(pool._pool._request.image.pip)


@pytest.mark.parametrize("backend", [joblib_backend, sklearn_backend])
def test_open_pool_is_joblibs_backend_inside_the_block_only(fleet, backend):
    with backend(fleet):
        assert isinstance(get_active_backend()[0], SkywardBackend)
        assert Parallel()(delayed(abs)(-n) for n in range(5)) == [0, 1, 2, 3, 4]
    assert not isinstance(get_active_backend()[0], SkywardBackend)


def test_innermost_pool_is_used_and_the_outer_one_comes_back_after_an_error(fleet_of):
    outer, inner = fleet_of(1), fleet_of(1)
    with joblib_backend(outer):
        with pytest.raises(TypeError), joblib_backend(inner):
            Parallel()([delayed(abs)("no number")])
        assert (len(outer.labels), len(inner.labels)) == (0, 1)
        Parallel()([delayed(abs)(1)])
    assert (len(outer.labels), len(inner.labels)) == (1, 1)


def test_missing_joblib_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "skyward_joblib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(ImportError, match=r"pip install 'skyward-fleet\[joblib\]'"):
        importlib.import_module("skyward_joblib")


@pytest.mark.parametrize("use", [ScikitLearnPool, sklearn_backend(None).__enter__])
def test_missing_sklearn_names_the_extra(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'skyward-fleet\[sklearn\]'"):
        use()


@pytest.mark.parametrize(
    ("make", "unknown", "meant"),
    [(JoblibPool, "nodez", "nodes"), (ScikitLearnPool, "sklearn_versoin", "sklearn_version")],
)
def test_wrong_pool_parameter_is_refused_before_anything_is_started(make, unknown, meant):
    with pytest.raises(TypeError, match=rf"^{make.__name__} has no option '{unknown}' \(did you mean {meant}\?\); its"):
        make(provider=FakeProvider(), **{unknown: 2})


def test_nodes_get_the_versions_of_this_process_and_what_was_asked_for():
    image, pip = Image(pip=["rich"]), ["xgboost"]
    joblib_pool = JoblibPool(provider=FakeProvider(), image=image, pip=pip)
    sklearn_pool = ScikitLearnPool(provider=FakeProvider())
    ours = {f"{name}=={version(name)}" for name in ("joblib", "numpy", "threadpoolctl")}
    assert installs(joblib_pool) == {"rich", "xgboost", *ours}
    assert installs(sklearn_pool) == {f"{name}=={version(name)}" for name in ("scikit-learn", "scipy")} | ours


@pytest.mark.parametrize(
    ("pool_type", "parameter", "package"),
    [(JoblibPool, "joblib_version", "joblib"), (ScikitLearnPool, "sklearn_version", "scikit-learn")],
)
def test_other_version_is_installed_as_asked_with_a_warning(pool_type, parameter, package):
    with pytest.warns(UserWarning, match=f"the nodes get {package} 0.9") as warned:
        pool = pool_type(provider=FakeProvider(), **{parameter: "0.9"})
    assert f"{package}==0.9" in installs(pool)
    assert warned[0].filename == __file__


def test_asking_for_the_version_of_this_process_warns_of_nothing():
    JoblibPool(provider=FakeProvider(), joblib_version=version("joblib"))


def test_leaving_a_pool_that_was_never_opened_does_nothing():
    JoblibPool(provider=FakeProvider()).__exit__(None, None, None)
