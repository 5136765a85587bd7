"""The fake RunPod keeps to the vendor's description, and has the oddities that a client must cope with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from skyward.testing.aws import Looks
from support.clouds.rest_service import call_api
from support.clouds.runpod_api import API_KEY, RunPodApi

POD = {"name": "one", "image": "ubuntu:24.04", "cpu": {"id": "cpu3c", "vcpuCount": 2}, "ports": ["22/tcp"]}
GPU = {"name": "two", "image": "ubuntu:24.04", "gpu": {"id": "NVIDIA L4", "count": 2}, "ports": ["22/tcp"]}


@pytest.fixture
def cloud() -> Iterator[RunPodApi]:
    with RunPodApi(looks=Looks(pending=1, ending=1)) as cloud:
        yield cloud


def ask(cloud: RunPodApi, call: str, body: Any = None, key: str = API_KEY) -> tuple[int, Any, Mapping[str, str]]:
    return call_api(cloud.endpoint_url, call, body, {"Authorization": f"Bearer {key}"})


def made(cloud: RunPodApi, order: Mapping[str, Any] = POD) -> str:
    status, pod, _ = ask(cloud, "POST /v2/pods", order)
    assert status == 201
    return str(pod["id"])


def test_every_route_keeps_to_the_description(cloud: RunPodApi) -> None:
    """Leaving the service fails if one of these exchanges does not."""
    one, two = made(cloud), made(cloud, GPU)
    stock = "include=AVAILABILITY&product=POD"
    answers = [
        ask(cloud, call, body)[0]
        for call, body in (
            (f"GET /v2/catalog/gpus?{stock}&count=2&cloud=SECURE", None),
            (f"GET /v2/catalog/cpus?{stock}", None),
            ("GET /v2/catalog/datacenters", None),
            ("GET /v2/network-volumes", None),
            ("GET /v2/network-volumes/agv6w2qcg7", None),
            ("GET /v2/network-volumes/nothing", None),
            ("GET /v2/pods?includeClusterPods=true", None),
            (f"GET /v2/pods/{one}", None),
            (f"GET /v2/pods/{two}", None),
            (f"POST /v2/pods/{two}/action", {"action": "stop"}),
            (f"POST /v2/pods/{two}/action", {"action": "restart"}),
            (f"POST /v2/pods/{two}/action", {"action": "terminate"}),
            (f"DELETE /v2/pods/{one}", None),
            (f"DELETE /v2/pods/{one}", None),
        )
    ]
    assert answers == [200, 200, 200, 200, 200, 404, 200, 200, 200, 200, 409, 204, 204, 404]
    assert cloud.left() == {}
    assert cloud.service.bill.open == []


def test_a_pods_own_key_reaches_that_pod_only_and_may_be_refused(cloud: RunPodApi) -> None:
    one, two = made(cloud), made(cloud)
    key = cloud.pods[one].key

    assert ask(cloud, f"GET /v2/pods/{one}", key=key)[0] == 200
    assert ask(cloud, f"DELETE /v2/pods/{two}", key=key)[0] == 403
    assert ask(cloud, "GET /v2/pods", key=key)[0] == 403
    cloud.containers_may_end = False
    assert ask(cloud, f"DELETE /v2/pods/{one}", key=key)[0] == 403
    cloud.containers_may_end = True
    assert ask(cloud, f"DELETE /v2/pods/{one}", key=key)[0] == 204
    assert cloud.alive == [two]


def test_pods_of_clusters_are_hidden_and_cannot_be_deleted(cloud: RunPodApi) -> None:
    member = cloud.deploy(GPU, cluster="cluster_1")

    assert ask(cloud, "GET /v2/pods")[1]["pods"] == []
    (seen,) = ask(cloud, "GET /v2/pods?includeClusterPods=true")[1]["pods"]
    assert seen["cluster"]["id"] == "cluster_1"
    assert ask(cloud, f"DELETE /v2/pods/{member}")[0] == 409


def test_the_sixty_first_call_of_a_minute_is_refused_with_a_time(cloud: RunPodApi) -> None:
    answers = [ask(cloud, "GET /v2/pods") for _ in range(61)]

    assert [status for status, _, _ in answers].count(429) == 1
    assert 0 < int(answers[-1][2]["Retry-After"]) <= 61
