"""A field that a vendor renames is an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from skyward.errors import UnreachableError
from skyward.providers import digitalocean, runpod, vastai, verda
from skyward.providers._common.rest_client import VendorPayload, decode, decode_list, decode_rows, decode_state
from skyward.providers.base import InstanceState
from support.clouds.digital_ocean_api import SIZES
from support.clouds.runpod_api import CPUS
from support.clouds.verda_api import TYPES


class Thing(VendorPayload):
    name: str
    price: float
    note: str | None = None


def test_numbers_may_be_text_and_other_fields_are_ignored() -> None:
    thing = decode(Thing, {"name": "a", "price": "0.5", "new": 1}, "Cloud: GET /things")

    assert (thing.name, thing.price, thing.note) == ("a", 0.5, None)


def test_malformed_rows_are_left_out_unless_all_are() -> None:
    rows = [{"name": "a"}, {"name": "b", "price": 1}]

    assert [thing.name for thing in decode_rows(Thing, rows, "Cloud")] == ["b"]
    assert decode_rows(Thing, [], "Cloud") == []
    with pytest.raises(UnreachableError, match=r"^Cloud was answered .* required field `price`.* newer version"):
        decode_rows(Thing, rows[:1], "Cloud")


def test_an_unknown_state_is_pending_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    states = {"up": InstanceState.RUNNING}

    assert [decode_state(states, word, "Cloud: GET /things") for word in ("up", "dreaming", "dreaming")] == [
        InstanceState.RUNNING,
        *[InstanceState.PENDING] * 2,
    ]
    assert caplog.text.count("Cloud: GET /things: this version of Skyward does not know the state 'dreaming'") == 1


def test_a_list_may_be_empty_and_not_missing() -> None:
    for listed in ([], None):
        assert decode_list({"things": listed}, "things", "Cloud") == []
    with pytest.raises(UnreachableError, match=r"^Cloud was answered .* required field `things`"):
        decode_list({"items": [1]}, "things", "Cloud")


VAST = {
    **dict.fromkeys(("num_gpus", "cpu_cores", "cpu_cores_effective", "cpu_ram", "gpu_ram", "dph_total"), 1),
    **dict.fromkeys(("actual_status", "cur_state", "next_state", "intended_status"), "running"),
    "id": 1,
    "machine_id": 2,
    "gpu_name": "L4",
    "geolocation": "Hesse, DE",
    "is_bid": False,
    "label": "skyward.pool.key",
}
POD = {
    "id": "p",
    "name": "skyward.pool.key",
    "status": "RUNNING",
    "cost": 1.0,
    "dataCenterId": "EU-RO-1",
    "gpu": {"id": "NVIDIA L4", "count": 1},
    "ssh": {"direct": None},
}
MACHINE = {
    "id": "i",
    "description": "skyward.pool.key",
    "status": "running",
    "location": "FIN-01",
    "instance_type": "CPU.4V.16G",
    "is_spot": False,
}
DROPLET = {
    "id": 1,
    "name": "skyward-key",
    "tags": ["skyward:pool:pool"],
    "status": "active",
    "size_slug": "c-4",
    "vcpus": 4,
    "memory": 8192,
    "region": {"slug": "nyc1"},
    "networks": {"v4": []},
    "size": {"price_hourly": 0.1},
}
RECORDS: list[tuple[Callable[[Any], object], Mapping[str, Any], tuple[str, ...]]] = [
    (vastai.parse_record, VAST, ()),
    (runpod._parse_pod, POD, ()),
    (verda.parse_record, MACHINE, ("description",)),
    (digitalocean.parse_droplet, DROPLET, ()),
]
"""Reader, record, and fields without which the machine is somebody else's."""


@pytest.mark.parametrize(("read", "row", "optional"), RECORDS, ids=["vastai", "runpod", "verda", "digitalocean"])
def test_a_renamed_field_of_a_machine_is_an_error(
    read: Callable[[Any], object], row: Mapping[str, Any], optional: tuple[str, ...]
) -> None:
    assert read(row) is not None
    for name in row.keys() - {*optional}:
        with pytest.raises(UnreachableError, match=f"`{name}`"):
            read({**{other: value for other, value in row.items() if other != name}, "renamed": row[name]})


def test_a_renamed_price_in_a_catalogue_is_an_error() -> None:
    sizes = [{"usd": 1.0, **{k: v for k, v in size.record().items() if k != "price_hourly"}} for size in SIZES]
    for read, rows in (
        (digitalocean.parse_sizes, sizes),
        (runpod.parse_cpus, [{**row, "price": {"perVcpu": 0.03}} for row in CPUS]),
        (verda.parse_types, [{name: row[name] for name in row if name != "spot_price"} for row in TYPES]),
    ):
        with pytest.raises(UnreachableError, match=r"price|secure"):
            read(rows)
