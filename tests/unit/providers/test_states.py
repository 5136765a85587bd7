"""What the vendors' words for the state of a machine mean: it decides what bills, and their doubles use few of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import pytest

from skyward.providers import digitalocean, runpod, vastai, verda
from skyward.providers.base import InstanceState
from support.clouds.rest_service import SPECS, load_json

PENDING, RUNNING, STOPPING, FAILED, GONE = (
    InstanceState.PENDING,
    InstanceState.RUNNING,
    InstanceState.STOPPING,
    InstanceState.FAILED,
    InstanceState.GONE,
)


@pytest.mark.parametrize(
    ("states", "meant"),
    [
        (digitalocean.STATES, {PENDING: {"new"}, RUNNING: {"active"}, FAILED: {"off", "archive"}}),
        (
            runpod.STATES,
            {
                PENDING: {"PROVISIONING", "STARTING"},
                RUNNING: {"RUNNING"},
                FAILED: {"EXITED", "ERROR"},
                GONE: {"TERMINATED"},
            },
        ),
        (
            verda.STATES,
            {
                PENDING: {"new", "ordered", "provisioning", "validating", "pending", "unknown"},
                RUNNING: {"running"},
                STOPPING: {"deleting"},
                FAILED: {"offline", "error", "installation_failed", "no_capacity"},
                GONE: {"discontinued", "notfound"},
            },
        ),
        (
            vastai.STATES,
            {
                PENDING: {None, "created", "loading", "rebooting"},
                RUNNING: {"running"},
                FAILED: {"stopped", "exited", "frozen", "offline", "unknown"},
            },
        ),
    ],
    ids=["digitalocean", "runpod", "verda", "vastai"],
)
def test_a_machine_that_bills_without_running_has_failed_and_others_are_as_their_vendor_says(
    states: Mapping[Any, InstanceState], meant: Mapping[InstanceState, set[str | None]]
) -> None:
    assert {state: {word for word in states if states[word] is state} for state in {*states.values()}} == meant


@pytest.mark.skipif(not SPECS.exists(), reason="the vendors' descriptions are not in the project")
@pytest.mark.parametrize(
    ("states", "description", "place"),
    [
        (digitalocean.STATES, "digitalocean-compute-openapi.json", "droplets_models_droplet.properties.status"),
        (runpod.STATES, "runpod-rest-v2-openapi.json", "PodStatus"),
        (verda.STATES, "verda-unofficial-patched.json", "Instance.properties.status"),
    ],
    ids=["digitalocean", "runpod", "verda"],
)
def test_every_word_of_a_vendors_description_is_known(
    states: Mapping[Any, InstanceState], description: str, place: str
) -> None:
    schemas = load_json(description)["components"]["schemas"]
    words = reduce(dict.__getitem__, place.split("."), schemas)["enum"]
    assert {word or "off" for word in words} == {*states}  # without quotes, "off" is false in YAML
