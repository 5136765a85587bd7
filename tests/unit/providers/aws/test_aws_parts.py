"""Keys, files of answers, prices, addresses: the parts that need no EC2."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import AuthenticationError, ConfigurationError
from skyward.providers.aws.account import AnswerFile, forget
from skyward.providers.aws.boot import LARGEST_BYTES, KeyPair, make_key_pair, user_data, user_key
from skyward.providers.aws.network import CLIENT_CIDR_VARIABLE, client_cidr
from skyward.providers.aws.offering import parse_product, parse_spot_prices
from skyward.providers.aws.payloads import parse_record
from skyward.providers.aws.quotas import quota_of
from skyward.providers.base import InstanceState


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_the_users_key_is_made_once_by_however_many_and_is_private(data_home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = {pair.public for _, pair in threads.map(lambda _: user_key(), range(16))}

    path, pair = user_key()
    assert keys == {pair.public}
    assert path.is_relative_to(data_home)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["id_ed25519"]


def test_a_users_key_that_others_could_read_is_made_private_again(data_home: Path) -> None:
    path, _ = user_key()
    path.chmod(0o644)
    user_key()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_users_key_is_an_error_that_names_the_file(data_home: Path) -> None:
    path, _ = user_key()
    path.write_text("no key")
    with pytest.raises(AuthenticationError, match=str(path)):
        user_key()


def test_private_keys_are_not_shown() -> None:
    pair = make_key_pair()
    assert pair.private not in repr(pair)
    assert pair.public.startswith("ssh-ed25519 AAAA")


def test_orders_that_are_too_long_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"{LARGEST_BYTES} bytes"):
        user_data(host_key=KeyPair(public="", private="x" * LARGEST_BYTES), user_key="", time_to_live_s=60)


# --- answers on disk ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnswerFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return AnswerFile(name="spot", region="us-east-1", endpoint_url=None, longest_s=60)


def test_what_was_kept_is_there_until_it_is_too_old(kept: AnswerFile) -> None:
    kept.add({"a": 1.0})
    kept.add({"b": {"zone": 2.0}})
    assert kept.read() == {"a": 1.0, "b": {"zone": 2.0}}

    entries = json.loads(kept.path.read_text())
    entries["a"]["at"] = time.time() - 61
    kept.path.write_text(json.dumps(entries))
    assert kept.read() == {"b": {"zone": 2.0}}


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", '{"a": 3}', '{"a": {"at": "x", "value": 1}}', '{"a": {"value": 1}}']
)
def test_a_damaged_file_is_as_good_as_none(kept: AnswerFile, damaged: str) -> None:
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text(damaged)
    assert kept.read() == {}
    kept.add({"b": 1})
    assert kept.read() == {"b": 1}


def test_a_file_that_cannot_be_written_is_no_error(kept: AnswerFile) -> None:
    kept.path.parent.parent.mkdir(parents=True)
    kept.path.parent.write_text("in the way")
    kept.add({"a": 1})
    assert kept.read() == {}


def test_another_endpoints_answers_are_its_own(kept: AnswerFile) -> None:
    other = AnswerFile(name="spot", region="us-east-1", endpoint_url="http://127.71.0.2:1", longest_s=60)
    kept.add({"a": 1})
    assert other.read() == {}


def test_what_is_forgotten_is_that_endpoints_only(kept: AnswerFile) -> None:
    other = AnswerFile(name="spot", region="us-east-1", endpoint_url="http://127.71.0.2:1", longest_s=60)
    for each in (kept, other):
        each.add({"a": 1})
    forget(other.endpoint_url)
    forget(other.endpoint_url)
    assert (kept.read(), other.read()) == ({"a": 1}, {})


# --- prices -------------------------------------------------------------------------------------------------------


def product(**dimension: Any) -> str:
    return json.dumps({"terms": {"OnDemand": {"1": {"priceDimensions": {"2": dimension}}}}})


@pytest.mark.parametrize(
    ("text", "price"),
    [
        (product(unit="Hrs", pricePerUnit={"USD": "0.5260000000"}), 0.526),
        (product(unit="Hrs", pricePerUnit={"USD": "0.0000000000"}), None),
        (product(unit="Quantity", pricePerUnit={"USD": "3"}), None),
        (product(unit="Hrs", pricePerUnit={"CNY": "3"}), None),
        (product(unit="Hrs", pricePerUnit={"USD": "free"}), None),
        ('{"terms": {"Reserved": {}}}', None),
        ('"a bare string"', None),
        ("<html>", None),
        ("null", None),
    ],
)
def test_a_product_has_a_price_or_none(text: str, price: float | None) -> None:
    assert parse_product(text) == price


def test_the_latest_spot_price_of_each_zone_counts() -> None:
    def row(zone: str, price: str, at: int, **more: Any) -> dict[str, Any]:
        return {"InstanceType": "g", "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": at} | more

    rows = [row("a", "0.3", 2), row("a", "0.1", 1), row("b", "0.2", 1), row("c", "much", 1), {}]
    assert parse_spot_prices(rows) == {"g": {"a": 0.3, "b": 0.2}}


# --- quotas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spot", "code"),
    [
        ("g4dn.xlarge", False, "L-DB2E81BA"),
        ("gr6.4xlarge", True, "L-3819A6DF"),
        ("p5.48xlarge", False, "L-417A185B"),
        ("p6-b200.48xlarge", True, "L-7212CCBC"),
        ("inf2.xlarge", False, "L-1945791B"),
        ("inf2.xlarge", True, "L-B5D1601B"),
        ("trn2.48xlarge", False, "L-2C3B7624"),
        ("trn1.2xlarge", True, "L-6B0D517C"),
        ("dl1.24xlarge", False, "L-6E869C2A"),
        ("c7a.large", False, "L-1216C47A"),
        ("im4gn.large", True, "L-34B43A08"),
        ("mac2.metal", False, None),
        ("x2iedn.xlarge", False, None),
    ],
)
def test_a_type_counts_against_the_quota_of_its_family(name: str, spot: bool, code: str | None) -> None:
    quota = quota_of(name, spot=spot)
    assert (quota.code if quota else None) == code


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "cidr"),
    [
        ("203.0.113.7", "203.0.113.7/32"),
        ("203.0.113.7/24\n", "203.0.113.0/24"),
        ("2001:db8::7", "2001:db8::7/128"),
    ],
)
def test_the_client_may_say_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, told: str, cidr: str) -> None:
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, told)
    assert asyncio.run(client_cidr("http://127.71.0.9:9")) == cidr


def test_an_address_that_is_no_web_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLIENT_CIDR_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match="is not an HTTP URL"):
        asyncio.run(client_cidr("file:///etc/passwd"))


# --- records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("pending", InstanceState.PENDING),
        ("running", InstanceState.RUNNING),
        ("shutting-down", InstanceState.STOPPING),
        ("stopping", InstanceState.STOPPING),
        ("stopped", InstanceState.FAILED),
        ("terminated", InstanceState.GONE),
        ("something-new", InstanceState.PENDING),
    ],
)
def test_every_state_has_its_meaning(word: str, state: InstanceState) -> None:
    record = parse_record({"InstanceId": "i-1", "State": {"Name": word}}, "us-east-1")
    assert record.instance(None, lambda _: None).state is state


def test_why_a_machine_ended_is_told() -> None:
    reason = {"Code": "Server.SpotInstanceTermination", "Message": "taken back"}
    record = parse_record({"InstanceId": "i-1", "StateReason": reason}, "us-east-1")
    assert record.instance(None, lambda _: None).reason == "Server.SpotInstanceTermination: taken back"
