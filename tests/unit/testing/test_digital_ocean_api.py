"""The fake DigitalOcean keeps to the vendor's description, and has the oddities that a client must cope with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from skyward.testing.aws import Looks
from support.clouds.digital_ocean_api import SIZES, TOKEN, DigitalOceanApi
from support.clouds.rest_service import call_api

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGRoaXMgaXMgbm90IGEga2V5IGJ1dCBsb25nIGVub3U= user"
DROPLET = {"name": "one", "region": "nyc1", "size": "s-1vcpu-1gb", "image": "ubuntu-24-04-x64", "tags": ["sky:a"]}
GPU = {**DROPLET, "name": "two", "region": "tor1", "size": "gpu-l40sx1-48gb", "image": "gpu-h100x1-base"}


@pytest.fixture
def cloud() -> Iterator[DigitalOceanApi]:
    with DigitalOceanApi(looks=Looks(pending=1, ending=1)) as cloud:
        yield cloud


def ask(cloud: DigitalOceanApi, call: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any, Mapping[str, str]]:
    return call_api(cloud.endpoint_url, call, body, {"Authorization": f"Bearer {token}"})


def test_every_route_keeps_to_the_description(cloud: DigitalOceanApi) -> None:
    """Leaving the service fails if one of these exchanges does not."""
    _, made, _ = ask(cloud, "POST /v2/account/keys", {"name": "mine", "public_key": PUBLIC})
    mark = made["ssh_key"]["fingerprint"]
    rules = {"inbound_rules": [{"protocol": "tcp", "ports": "22", "sources": {"addresses": ["203.0.113.7/32"]}}]}
    ask(cloud, "POST /v2/tags", {"name": "sky:a"})
    _, wall, _ = ask(cloud, "POST /v2/firewalls", {"name": "sky-a", "tags": ["sky:a"], **rules})
    wall_id = wall["firewall"]["id"]
    _, droplet, _ = ask(cloud, "POST /v2/droplets", {**DROPLET, "ssh_keys": [mark]})
    one = droplet["droplet"]["id"]
    answers = [
        ask(cloud, call, body)[0]
        for call, body in (
            ("GET /v2/account", None),
            ("GET /v2/account/keys", None),
            (f"GET /v2/account/keys/{mark}", None),
            ("GET /v2/sizes?per_page=200", None),
            ("GET /v2/regions", None),
            ("GET /v2/vpcs", None),
            ("GET /v2/firewalls", None),
            (f"PUT /v2/firewalls/{wall_id}", {"name": "sky-a", "tags": ["sky:a"], **rules}),
            (f"POST /v2/firewalls/{wall_id}/rules", rules),
            (f"DELETE /v2/firewalls/{wall_id}/rules", rules),
            (f"GET /v2/firewalls/{wall_id}", None),
            ("GET /v2/tags", None),
            ("GET /v2/tags/sky:a", None),
            ("POST /v2/droplets", GPU),
            ("GET /v2/droplets?tag_name=sky:a", None),
            (f"GET /v2/droplets/{one}", None),
            (f"DELETE /v2/droplets/{one}", None),
            ("DELETE /v2/droplets?tag_name=sky:a", None),
            (f"DELETE /v2/firewalls/{wall_id}", None),
            ("DELETE /v2/tags/sky:a", None),
            (f"DELETE /v2/account/keys/{mark}", None),
        )
    ]
    assert [each for each in answers if each >= 300] == []
    assert {call.route for call in cloud.service.calls} == {route for route, *_ in cloud._routes()}
    assert cloud.left() == {}


def test_gpu_droplets_are_listed_only_on_demand_and_never_by_tag(cloud: DigitalOceanApi) -> None:
    for body in (DROPLET, GPU):
        ask(cloud, "POST /v2/droplets", body)

    def named(query: str) -> list[str]:
        return [each["name"] for each in ask(cloud, f"GET /v2/droplets{query}")[1]["droplets"]]

    assert (named(""), named("?tag_name=sky:a"), named("?name=two")) == (["one"], ["one"], [])
    assert (named("?type=gpus"), named("?name=TWO&type=gpus")) == (["two"], ["two"])
    assert ask(cloud, "GET /v2/droplets?tag_name=sky:a&type=gpus")[0] == 400


def test_states_take_their_time_and_a_droplet_that_is_off_is_billed(cloud: DigitalOceanApi) -> None:
    one = ask(cloud, "POST /v2/droplets", DROPLET)[1]["droplet"]["id"]
    seen = [ask(cloud, f"GET /v2/droplets/{one}")[1]["droplet"] for _ in range(2)]
    assert [(each["status"], len(each["networks"]["v4"])) for each in seen] == [("new", 0), ("active", 2)]
    cloud.machines[str(one)].status = "off"
    assert ask(cloud, f"GET /v2/droplets/{one}")[1]["droplet"]["status"] == "off"
    assert cloud.service.bill.open == [str(one)]
    assert [ask(cloud, f"DELETE /v2/droplets/{one}")[0] for _ in range(2)] == [204, 404]
    assert [ask(cloud, f"GET /v2/droplets/{one}")[0] for _ in range(2)] == [200, 404]
    assert cloud.service.bill.seconds() == {str(one): 60}


def test_long_lists_come_in_pages(cloud: DigitalOceanApi) -> None:
    path, slugs = "/v2/sizes?per_page=4", list[str]()
    while path:
        _, page, _ = ask(cloud, f"GET {path}")
        slugs += [each["slug"] for each in page["sizes"]]
        path = page["links"]["pages"].get("next", "").removeprefix(cloud.endpoint_url)
    assert slugs == [size.slug for size in SIZES]


def test_accounts_and_tokens_have_their_limits(cloud: DigitalOceanApi) -> None:
    cloud.tokens["reader"] = frozenset({"account:read"})
    assert ask(cloud, "GET /v2/account", token="reader")[0] == 200
    status, answer, _ = ask(cloud, "POST /v2/droplets", DROPLET, token="reader")
    assert (status, "droplet:create" in answer["message"]) == (403, True)
    assert ask(cloud, "GET /v2/account", token="nobody")[0] == 401
    statuses = [ask(cloud, "GET /v2/account/keys") for _ in range(11)]
    assert [status for status, *_ in statuses] == [200] * 10 + [429]
    assert "ratelimit-reset" in statuses[-1][2]
    assert "Retry-After" not in statuses[-1][2]
