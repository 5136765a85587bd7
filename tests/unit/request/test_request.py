from __future__ import annotations

import pickle
import sys
from importlib.metadata import version
from typing import Any

import pytest

from skyward.environment.image import Image
from skyward.errors import ConfigurationError
from skyward.request.accelerators import Accelerator
from skyward.request.image import ImageSettings
from skyward.request.instance import InstanceWish
from skyward.request.request import NodeRange, PoolRequest, Spot, parse_request
from skyward.request.volume import S3Volume, volume_at

OTHER_PYTHON = f"3.{sys.version_info.minor + 1}"


def test_defaults_are_those_of_the_reference():
    image = ImageSettings()

    assert parse_request() == PoolRequest(image=image, spot=Spot.Always(), env=image.env)


def test_every_parameter_arrives_parsed():
    volume = S3Volume(mount_path="/data", bucket="my-bucket")

    request = parse_request(
        nodes=3,
        machine="p5.48xlarge",
        accelerator="a100-40gb",
        cpu=4,
        memory="32GB",
        volume=[volume],
        spot=0.5,
        timeout=60,
        env={"A": "pool"},
        concurrency=2,
        image=Image(pip=["a"], env={"A": "image", "B": "image"}),
        pip=["b"],
        collect_metrics=False,
    )

    pins = [f"boto3=={version('boto3')}"]
    assert request.image == Image(pip=["a", "b", *pins], env={"A": "pool", "B": "image"})
    assert request == PoolRequest(
        nodes=3,
        machine="p5.48xlarge",
        accelerators=(Accelerator.NVIDIA.A100(memory="40GB"),),
        cpu=4,
        memory_gib=32.0,
        volumes=(volume,),
        spot=Spot.Percent(0.5),
        timeout_s=60.0,
        env=request.image.env,
        concurrency=2,
        image=request.image,
        collect_metrics=False,
    )


NOT_COUNTS = [0, -1, 1.5, "2", True, None, float("nan")]
NOT_TIMES = [0, -1, "60", True, None, float("nan"), float("inf")]


def test_a_bad_value_is_refused_naming_parameter_and_what_is_allowed(subtests: pytest.Subtests):
    for parameter, value, message in [
        *(("nodes", value, "a whole number ≥ 1") for value in NOT_COUNTS),
        *(("concurrency", value, "a whole number ≥ 1") for value in NOT_COUNTS),
        *(("cpu", value, "a whole number ≥ 1") for value in NOT_COUNTS if value is not None),
        *(("timeout", value, "a length of time" if value == "60" else "a number > 0") for value in NOT_TIMES),
        *(("memory", value, "a size such as") for value in ["", "lots", "32", "0GB", "-1GB", "32PB", 32, "٣GB"]),
        *(("machine", value, "non-empty text") for value in ["", " ", 3]),
        *(("spot", value, '"always", "if-available", "never"') for value in ["sometimes", 2, None]),
        *(("volume", value, "a list of S3Volume") for value in ["/data", 3, S3Volume(mount_path="/a", bucket="abc")]),
        *(("image", value, "an Image") for value in ["torch", Image, {}]),
        *(("pip", value, "a list of strings") for value in ["torch", "", 0, {}]),
        *(("env", value, "a dict of strings to strings") for value in [[], "A=b", 3]),
        *(("accelerator", value, "a name such as") for value in [3, ""]),
        *(("collect_metrics", value, "True or False") for value in [1, "yes", None]),
    ]:
        with subtests.test(parameter=parameter, value=value, message=message):
            arguments: dict[str, Any] = {parameter: value}

            with pytest.raises(ConfigurationError, match=f"^{parameter} must be {message}.*, got "):
                parse_request(**arguments)


def test_the_message_says_it_all():
    with pytest.raises(ConfigurationError, match=r"^nodes must be a whole number ≥ 1, got 0$"):
        parse_request(nodes=0)


def test_a_range_of_nodes_is_an_elastic_pool():
    request = parse_request(nodes=(0, 8), idle="90s")
    assert (request.nodes, request.first_nodes) == (8, 0)
    assert request.elastic == NodeRange(minimum=0, maximum=8, idle_s=90.0)
    assert parse_request(nodes=(2, 8)).elastic == NodeRange(minimum=2, maximum=8, idle_s=300.0)
    assert (request.checked_size(0), request.checked_size(8), parse_request(nodes=3).checked_size(9)) == (0, 8, 9)


@pytest.mark.parametrize(
    ("nodes", "idle", "message"),
    [
        ((8, 2), None, r"^nodes must be \(minimum, maximum\), such as \(2, 8\), got \(8, 2\)$"),
        ((0, 0), None, "^the maximum of nodes must be a whole number ≥ 1, got 0$"),
        ((-1, 2), None, "^the minimum of nodes must be a whole number ≥ 0, got -1$"),
        ((1, 2, 3), None, "^nodes must be a number, or a minimum and a maximum"),
        (2, "5m", "^idle='5m' needs a range such as"),
        ((0, 2), "soon", "^idle must be a length of time"),
        ((0, 2), 0, "^idle must be a number > 0"),
    ],
)
def test_a_range_that_is_none_is_refused(nodes: Any, idle: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        parse_request(nodes=nodes, idle=idle)


def test_an_elastic_pool_is_not_scaled_beyond_its_range():
    request = parse_request(nodes=(1, 8))
    with pytest.raises(ConfigurationError, match=r"^nodes must be a whole number ≥ 1, got 0$"):
        request.checked_size(0)
    with pytest.raises(ConfigurationError, match=r"^nodes must be at most 8, as the pool has nodes=\(1, 8\), got 9$"):
        request.checked_size(9)


def test_secrets_of_a_bad_environment_are_not_shown():
    with pytest.raises(ConfigurationError, match=r"env\['A'\] must be text") as caught:
        parse_request(env={"A": b"s3cret"})  # pyright: ignore[reportArgumentType]

    assert "s3cret" not in str(caught.value)


def test_a_list_of_volumes_holds_volumes_at_different_places():
    volume = S3Volume(mount_path="/data", bucket="my-bucket")

    with pytest.raises(ConfigurationError, match=r"volume\[1\] must be an S3Volume, got '/data'"):
        parse_request(volume=[volume, "/data"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="different mount paths"):
        parse_request(volume=[volume, volume])
    with pytest.raises(ConfigurationError, match="none within another"):
        parse_request(volume=[volume, S3Volume(mount_path="/data/deep/er", bucket="my-bucket")])
    with pytest.raises(ConfigurationError, match="different mount paths"):
        parse_request(volume=[volume, S3Volume(mount_path="/data/", bucket="other-bucket")])


def test_another_python_than_the_clients_is_refused_before_anything_starts():
    with pytest.raises(ConfigurationError, match=rf"image\.python must be 3\.\d+, .* got '{OTHER_PYTHON}'"):
        parse_request(image=Image(python=OTHER_PYTHON))


def test_a_patch_version_of_the_clients_python_is_accepted():
    version = f"3.{sys.version_info.minor}.1"

    assert parse_request(image=Image(python=version)).image.python_version == version


@pytest.mark.parametrize(
    ("text", "gib"), [("32GB", 32), ("32gib", 32), (" 1.5 TB ", 1536), ("512MB", 0.5), ("512 MiB", 0.5)]
)
def test_memory_is_read_as_machines_are_sold(text: str, gib: float):
    assert parse_request(memory=text).memory_gib == gib


def test_workers_are_concurrency_times_partitions():
    assert parse_request(concurrency=3).workers_per_node == 3
    assert parse_request(concurrency=2, accelerator=Accelerator.NVIDIA.A100(mig="3g.40gb")).workers_per_node == 4
    assert parse_request(concurrency=2, accelerator=Accelerator.NVIDIA.A100(count=8)).workers_per_node == 2


def test_cores_and_memory_are_asked_for_each_worker():
    request = parse_request(cpu=2, memory="4GB", concurrency=3)

    assert request.wish == InstanceWish(cpu=6, memory_gib=12.0)
    assert parse_request().wish == InstanceWish()


def test_a_request_is_a_value_that_hides_secrets():
    request = parse_request(env={"TOKEN": "s3cret"})

    assert pickle.loads(pickle.dumps(request)) == request
    assert "s3cret" not in repr(request)


@pytest.mark.parametrize("parameter", ["lease", "away"])
@pytest.mark.parametrize("value", [0, -1, "120", True, float("inf"), None])
def test_times_a_node_lives_on_are_positive(parameter: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{parameter} must be a (number > 0|length of time such as)"):
        parse_request(**{parameter: value})


def test_times_a_node_lives_on_have_the_documented_defaults() -> None:
    assert (parse_request().lease_s, parse_request().away_s) == (120.0, 1800.0)
    assert (parse_request(lease=5).lease_s, parse_request(away=0.5).away_s) == (5.0, 0.5)


def test_every_time_of_a_pool_may_be_said_with_its_unit() -> None:
    request = parse_request(lease="5m", away="1h 30m", timeout="2d")

    assert (request.lease_s, request.away_s, request.timeout_s) == (300.0, 5400.0, 172_800.0)


@pytest.mark.parametrize(
    ("keep", "seconds"),
    [
        ("20m", 1200),
        ("1h", 3600),
        ("90s", 90),
        ("1h 30m", 5400),
        ("1h30m", 5400),
        ("0.5H", 1800),
        ("1d", 86400),
        (45, 45),
    ],
)
def test_time_that_a_fleet_is_kept_is_read_as_it_is_said(keep: str | float, seconds: float) -> None:
    assert parse_request(name="llm", keep=keep).keep_s == seconds


@pytest.mark.parametrize("keep", ["", "20", "m", "-1h", "1y", "1h,", "0s", 0, -1, True, float("inf"), b"1h"])
def test_other_times_are_refused_with_an_example(keep: Any) -> None:
    with pytest.raises(ConfigurationError, match="keep must be"):
        parse_request(name="llm", keep=keep)


@pytest.mark.parametrize("name", ["", "a b", "../x", ".hidden", "-x", "a/b", "ü", "x" * 65, "a.", 3, "a\n"])
def test_name_of_a_fleet_is_that_of_a_folder_anywhere(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="name must be 1 to 64 letters"):
        parse_request(name=name, keep="1h")


_DATA = S3Volume(mount_path="/mnt/data", bucket="bucket", prefix="data")
_OUT = S3Volume(mount_path="/mnt/out", bucket="bucket", prefix="out/", read_only=False)
_ALL = S3Volume(mount_path="/mnt/all", bucket="other", read_only=False)


@pytest.mark.parametrize(
    ("results", "place"),
    [
        ("/mnt/out", "s3://bucket/out/"),
        ("/mnt/out/results/", "s3://bucket/out/results/"),
        ("/mnt/all/a/b", "s3://other/a/b/"),
        (None, ""),
    ],
)
def test_results_are_kept_in_a_writable_volume(results: str | None, place: str) -> None:
    request = parse_request(name="llm", keep="1h", volume=[_DATA, _OUT, _ALL], results=results)

    assert request.results_location == place
    assert place in ("", volume_at(place or "s3://bucket/").location)


@pytest.mark.parametrize(
    ("results", "given", "why"),
    [
        ("/mnt/data/results", {"volume": [_DATA, _OUT]}, r"its volumes: /mnt/data \(read-only\), /mnt/out, got"),
        ("/mnt/outside", {"volume": [_OUT]}, "its volumes: /mnt/out, got '/mnt/outside'"),
        ("/mnt/out/../data", {"volume": [_OUT]}, "its volumes: /mnt/out"),
        ("results", {"volume": [_OUT]}, "its volumes: /mnt/out"),
        ("/mnt/out", {}, "its volumes: none"),
        (3, {"volume": [_OUT]}, "results must be"),
        ("", {"volume": [_OUT]}, "results must be"),
        ("/mnt/out", {"volume": [_OUT], "name": None, "keep": None}, "for the jobs of a kept pool: add name="),
    ],
)
def test_results_elsewhere_are_refused_with_the_volumes_there_are(
    results: Any, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_request(**({"name": "llm", "keep": "1h", "results": results} | given))


@pytest.mark.parametrize(
    ("given", "advice"), [({"keep": "1h"}, "needs a name"), ({"name": "llm"}, 'add keep="20m"')], ids=("keep", "name")
)
def test_name_and_time_of_a_kept_fleet_come_together(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        parse_request(**given)
