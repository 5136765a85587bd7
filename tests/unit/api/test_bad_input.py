"""Bad input is refused at once, by a message that says what is wrong and what is right, before anything starts."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ConfigurationError, PoolStateError

PATIENCE_S = 2.0
NAN, INFINITY = float("nan"), float("inf")
NOT_COUNTS = [0, -1, 1.5, "2", True, NAN, [2]]

REFUSED: dict[str, tuple[str, list[Any]]] = {
    "nodes": ("a whole number ≥ 1", [*NOT_COUNTS, None]),
    "concurrency": ("a whole number ≥ 1", [*NOT_COUNTS, None]),
    "cpu": ("a whole number ≥ 1", NOT_COUNTS),
    "timeout": ("a number > 0", [0, -1, -0.5, True, NAN, INFINITY, 10**400, None]),
    "timeout  ": ('a length of time such as "20m"', ["60", "", "1y", "-5m"]),
    "timeout ": ("a number > 0 and finite, got", [INFINITY, 10**400]),
    "max_cost": ("a number > 0", [0, -1, -0.5, "60", True, NAN, INFINITY, 10**400]),
    "max_price_per_hour": ("a number > 0", [0, -1, -0.5, "60", True, NAN, INFINITY, 10**400]),
    "prefer": ('"price" or "order"', ["cheapest", "", None, 1, [], True]),
    "spread": ("True or False", ["yes", 1, None]),
    "wait_for_capacity": ("a length of time such as|a number > 0", ["soon", "", 0, -1, True, NAN, []]),
    "display": ("one of 'log', 'spinner', 'quiet'", ["loud", "LOG", "", 3, None, []]),
    "spot": ('"always", "if-available", "never", a share from 0 to 1', ["often", "", 1.1, -0.1, NAN, True, sky.Spot]),
    "accelerator": ("a known name, got .*; closest: ", ["A1000", "A1000:2", "best"]),
    "accelerator  ": (r'a model such as "A100" \(`skyward offers` lists', ["gpu", "GPU", "gpu:2", "cuda", "any"]),
    "accelerator   ": (".* a count of at least 1", ["A100:0", "A100:-1", "A100:many"]),
    "accelerator ": ('a name such as "A100" or an Accelerator', ["", 8, [], [["A100"]], sky.Accelerator]),
    "memory": ('a size such as "32GB"', ["", "lots", "32", "0GB", "-1GB", "32 apples", 32, ["32GB"]]),
    "provider": (r"a provider object such as sky\.Local\(\)", [sky.Local, "local", None, 3, {}]),
    "image": ("an Image", ["torch", sky.Image, {"pip": ["torch"]}, ["torch"]]),
    "env": ("a dict of strings to strings", ["A=b", [("A", "b")], 3]),
    "env ": ("a dict whose names are", [{1: "b"}, {"": "b"}, {"A B": "c"}, {"A=": "b"}]),
    "volume": ("a list of S3Volume", ["/data", 3, sky.S3Volume, sky.S3Volume(mount_path="/data", bucket="data")]),
    "pip": ("a list of strings", ["torch", 3, {"torch"}]),
    "machine": ("non-empty text", ["", " ", 3]),
    "on_event": ("a function of one event", ["print", 3, []]),
    "collect_metrics": ("True or False", ["yes", 1, None]),
}
"""Parameters of a pool, what the message says is allowed, and values that are not."""

CASES = [(name.strip(), allowed, value) for name, (allowed, values) in REFUSED.items() for value in values]

DOES_NOT_FIT: list[tuple[dict[str, Any], str]] = [
    ({"memory": "900TB"}, "does not fit on this machine"),
    ({"cpu": 100_000}, "does not fit on this machine"),
    ({"accelerator": "tpu-v4"}, "does not fit on this machine"),
    ({"machine": "p5.48xlarge"}, r"machine='p5\.48xlarge'"),
    ({"image": sky.Image(apt=["no-such-package-anywhere"])}, "apt install no-such-package-anywhere"),
]
"""What is well formed, but more than this machine has or does."""


def pool_with(**parameters: Any) -> sky.ComputePool:
    return sky.ComputePool(**{"provider": sky.Local(), "display": "quiet"} | parameters)


@sky.compute
def call() -> None: ...


def test_a_bad_parameter_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for parameter, allowed, value in CASES:
        named = pytest.raises(ConfigurationError, match=rf"^{parameter} must be {allowed}")
        with subtests.test(parameter=parameter, value=value), named:
            pool_with(**{parameter: value})


@pytest.mark.parametrize("value", ["", " ", 3, None])
def test_an_entry_of_the_wrong_type_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^pip\[1\] must be non-empty text"):
        pool_with(pip=["torch", value])
    with pytest.raises(ConfigurationError, match=r"^volume\[0\] must be an S3Volume"):
        pool_with(volume=[value])
    with pytest.raises(ConfigurationError, match=r"^env\['A'\] must be text"):
        pool_with(env={"A": ["x", value]})


@pytest.mark.parametrize(
    ("make", "unknown", "meant"),
    [
        (pool_with, "node", "nodes"),
        *((pool_with, word, "accelerator") for word in ["gpu", "gpus", "accelerators"]),
        *((pool_with, word, "concurrency") for word in ["workers", "n_workers", "processes", "n_jobs"]),
        *((pool_with, word, "nodes") for word in ["num_nodes", "n_nodes", "size"]),
        *((pool_with, word, "machine") for word in ["instance_type", "machine_type"]),
        *((pool_with, word, "pip") for word in ["requirements", "packages"]),
        (pool_with, "max_price", "max_price_per_hour"),
        (pool_with, "budget", "max_cost"),
        (pool_with, "xyz", None),
        (sky.Image, "packages", "pip"),
        (sky.Accelerator, "model", "name"),
        (sky.S3Volume, "path", "mount_path"),
        (sky.SSH, "host", "hosts"),
        (sky.AWS, "zone", "region"),
        (sky.DigitalOcean, "api_key", "token"),
        (sky.RunPod, "region", "data_centers"),
        (sky.VastAI, "region", "regions"),
        (sky.Verda, "location", "region"),
        (sky.AWS, "nodes", None),
    ],
)
def test_an_unknown_option_is_refused_with_the_meant_one_and_all(make: Any, unknown: str, meant: str | None) -> None:
    taker = sky.ComputePool if make is pool_with else make
    hint = f" (did you mean {meant}?)" if meant else ""
    known = ", ".join(sorted(inspect.signature(taker).parameters))
    with pytest.raises(TypeError) as caught:
        make(**{unknown: 1})
    assert str(caught.value) == f"{taker.__name__} has no option {unknown!r}{hint}; its options are {known}"


@pytest.mark.parametrize(
    ("unknown", "place"),
    [
        ("includes", "image=Image(includes=...)"),
        ("apt", "image=Image(apt=...)"),
        ("hosts", "provider=SSH(hosts=...)"),
        ("retries", "@compute(retries=...), or on a call with f(...).options(retries=...)"),
        ("retry", "@compute(retry=...)"),
    ],
)
def test_an_option_of_something_else_than_the_pool_is_refused_with_its_place(unknown: str, place: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"no option {unknown!r} (give it as {place}); its options are")):
        pool_with(**{unknown: 1})


@pytest.mark.parametrize("make", [sky.AWS, sky.SSH, sky.Verda, sky.Image, sky.Accelerator, sky.S3Volume])
def test_a_value_without_a_name_is_refused_with_the_names_and_not_shown(make: Any) -> None:
    known = ", ".join(sorted(inspect.signature(make).parameters))
    with pytest.raises(TypeError) as caught:
        make("dop_v1_secret")
    assert str(caught.value) == f"{make.__name__} takes its options by name; its options are {known}"


@pytest.mark.parametrize(("make", "missing"), [(sky.SSH, "hosts"), (sky.S3Volume, "mount_path and bucket")])
def test_what_an_object_needs_is_named(make: Any, missing: str) -> None:
    with pytest.raises(TypeError, match=rf"^{make.__name__} needs {missing}; its options are "):
        make()


def test_a_pool_of_a_providers_name_is_refused_with_a_provider() -> None:
    with pytest.raises(TypeError, match=r"write ComputePool\(provider=skyward\.Local\(\), \.\.\.\)$"):
        sky.ComputePool("local")  # pyright: ignore[reportCallIssue]


def test_a_provider_without_options_takes_no_values() -> None:
    with pytest.raises(TypeError, match=r"^Local was given an option; it takes none: .* belong to ComputePool$"):
        sky.Local(2)  # pyright: ignore[reportCallIssue]


def test_options_of_a_pool_are_none_of_a_provider_without_options() -> None:
    with pytest.raises(TypeError, match=r"^Local has no option 'nodes'; it takes none: .* belong to ComputePool$"):
        sky.Local(nodes=2)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "made",
    [
        sky.AWS(region="eu-central-1"),
        sky.Accelerator(name="A100", count=2),
        sky.Image(pip=["torch"], env={"A": "b"}),
        sky.S3Volume(mount_path="/data", bucket="my-bucket"),
        sky.SSH(hosts=["gpu1"]),
        sky.VastAI(regions=["US"]),
    ],
    ids=lambda made: type(made).__name__,
)
def test_objects_that_explain_their_options_stay_dataclasses(made: Any) -> None:
    if not isinstance(made, sky.Accelerator):  # its fields are not its parameters
        assert replace(made) == made
    if not hasattr(made, "offers"):  # a provider holds connections
        assert pickle.loads(pickle.dumps(made)) == made
    assert all(each.kind is each.KEYWORD_ONLY for each in inspect.signature(type(made)).parameters.values())
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(made)[0].name, "x")


def test_a_pool_without_a_provider_is_refused() -> None:
    with pytest.raises(TypeError, match="provider"):
        sky.ComputePool()  # pyright: ignore[reportCallIssue]


def test_all_of_it_is_refused_within_two_seconds_and_starts_nothing(tmp_path: Path) -> None:
    """In an interpreter of its own, importing skyward and trying every case included."""
    source = f"""
import json, runpy, sys, threading, time
cases = runpy.run_path({__file__!r})
refused = 0
for name, _, value in cases["CASES"]:
    try:
        cases["pool_with"](**{{name: value}})
    except ValueError:
        refused += 1
import psutil
print(json.dumps({{
    "refused": refused,
    "seconds": time.process_time(),  # of this process: others may be busy beside it
    "threads": [thread.name for thread in threading.enumerate()],
    "children": len(psutil.Process().children()),
    "heavy": sorted({{"distributed", "dask", "cryptography", "rich", "numpy"}} & set(sys.modules)),
}}))
"""
    home = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env=os.environ | home
    )
    seen = json.loads(done.stdout)
    assert seen.pop("seconds") < PATIENCE_S
    assert seen == {"refused": len(CASES), "threads": ["MainThread"], "children": 0, "heavy": []}
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("parameters", "message"), DOES_NOT_FIT)
def test_what_this_machine_does_not_have_is_refused_on_entering_within_two_seconds(
    parameters: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pool = pool_with(**parameters)
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match=message), pool:
        pytest.fail("the pool opened")
    assert time.monotonic() - started < PATIENCE_S
    assert not pool.is_active
    assert not (tmp_path / "skyward" / "local").exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda pool: call() >> pool,
        lambda pool: call() @ pool,
        lambda pool: (call() & call()) >> pool,
        lambda pool: sky.gather(call()) >> pool,
        lambda pool: pool.run(call()),
        lambda pool: pool.run_batch(sky.gather(call())),
        lambda pool: pool.broadcast(call()),
        lambda pool: pool.submit(call),
        lambda pool: pool.map(abs, [1]),
        lambda pool: pool.executor().submit(abs, 1),
        lambda pool: pool.submit_calls([call().invocation()]),
        lambda pool: pool.cancel_calls([]),
    ],
)
def test_a_pool_that_is_not_open_names_the_with_block(use: Any) -> None:
    with pytest.raises(PoolStateError, match=r"not open; use it inside `with ComputePool"):
        use(pool_with())


def test_a_pool_that_is_not_open_may_be_closed() -> None:
    pool = pool_with()
    pool.close()
    pool.close()
    assert not pool.is_active


@pytest.mark.parametrize("other", [3, None, sky.ComputePool, "pool"])
def test_a_multipool_refuses_what_is_no_pool_before_it_opens_any(other: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"MultiPool takes pools, got .* as argument 2"):
        sky.MultiPool(pool_with(), other)
