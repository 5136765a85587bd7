"""The ``skyward`` command against a cloud: what it lists, checks and ends there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from skyward.cli import main
from skyward.ledger import termination
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Owner
from skyward.providers._common.cached_answers import AnswerFile
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE
from skyward.providers.aws.provider import AWS
from skyward.providers.base import Instance, LaunchOrder
from skyward.providers.registry import provider_settings
from skyward.request.request import parse_request
from skyward.testing.aws import AwsFault, LocalEC2, Looks, use_ec2

ALIVE = Owner.this_process()
DEAD = replace(ALIVE, started="long ago")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEC2]:
    with LocalEC2(looks=Looks(pending=0, ending=0), block=74) as ec2:
        use_ec2(ec2, monkeypatch, {"listing_s": 0.0, "patience_s": 2.0})
        monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
        yield ec2


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state" / "skyward" / "ledger.db", now=lambda: time.time() - 3600.0)


@pytest.fixture
def launch(ec2: LocalEC2, ledger: Ledger) -> Callable[..., Sequence[Instance]]:
    """Makes machines, written down or not."""

    def launch(*keys: str, pool: str = "sky-1", owner: Owner = DEAD, known: bool = True) -> Sequence[Instance]:
        provider = AWS(endpoint_url=ec2.endpoint_url)
        if known:
            settings = provider_settings(provider)
            purchase = Purchase(
                pool_id=pool, provider="aws", settings=settings, region="us-east-1", machine="?", spot=True
            )
            ledger.reserve({key: node for node, key in enumerate(keys)}, purchase, owner=owner)
        instances = asyncio.run(_launch(provider, keys, pool))
        if known:
            ledger.record(instances)
        return instances

    return launch


async def _launch(provider: AWS, keys: Sequence[str], pool: str) -> Sequence[Instance]:
    try:
        offers = await provider.offers(parse_request(machine="t3.medium"))
        spot = [each for each in offers if each.spot]
        return await provider.launch(spot, LaunchOrder(pool_id=pool, keys=tuple(keys), timeout_s=3600.0))
    finally:
        await provider.close()


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def answer(*arguments: str, exit_code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def at(ec2: LocalEC2) -> tuple[str, str]:
    return "--set", f"endpoint_url={ec2.endpoint_url}"


def living(ec2: LocalEC2) -> set[str]:
    return {each["InstanceId"] for each in ec2.instances() if each["State"]["Name"] != "terminated"}


# --- offers -------------------------------------------------------------------------------------------------------


def test_offers_are_listed_cheapest_first_with_prices_and_zones(ec2: LocalEC2) -> None:
    listed = answer("offers", "--provider", "aws", "--accelerator", "T4", *at(ec2))["offers"]

    assert listed
    assert {each["accelerator"] for each in listed} == {"T4"}
    cheapest = [min(each["spot_per_hour"] or 1e9, each["on_demand_per_hour"] or 1e9) for each in listed]
    assert cheapest == sorted(cheapest)
    assert listed[0]["type"] == "g4dn.xlarge"
    assert listed[0]["zones"]
    assert all(zone.startswith("us-east-1") for zone in listed[0]["zones"])


def test_the_table_says_the_same(ec2: LocalEC2) -> None:
    listed = answer("offers", "--provider", "aws", "--machine", "p4de.24xlarge", *at(ec2))["offers"][0]
    table = run("offers", "--provider", "aws", "--machine", "p4de.24xlarge", *at(ec2)).stdout

    assert "p4de.24xlarge" in table
    assert f"8x {listed['accelerator']}" in table
    assert " 96 " in table
    assert f" {listed['on_demand_per_hour']:.2f} " in table
    assert " live" in table


def test_the_age_of_cached_prices_is_shown(ec2: LocalEC2) -> None:
    asked = ("offers", "--provider", "aws", "--machine", "p4de.24xlarge", *at(ec2))
    assert answer(*asked)["offers"][0]["price_age_s"] < 60

    kept = AnswerFile(
        vendor="aws", name="on-demand", place="us-east-1", endpoint_url=ec2.endpoint_url, longest_s=24 * 3600.0
    )
    entries = json.loads(kept.path.read_text())
    entries["p4de.24xlarge"]["at"] -= 2 * 3600
    kept.path.write_text(json.dumps(entries))

    assert 7200 <= answer(*asked)["offers"][0]["price_age_s"] < 7500
    assert "live 2h" in run(*asked).stdout


def test_why_a_price_is_unknown_is_said_once(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(code="AccessDeniedException"), action="GetProducts", times=100)

    table = run("offers", "--provider", "aws", "--cpu", "2", *at(ec2)).stdout

    assert table.count("prices on demand are unknown: the account may not query them (pricing:GetProducts)") == 1
    assert "prices on spot" not in table


def test_another_region_and_only_spot(ec2: LocalEC2) -> None:
    listed = answer(
        "offers", "--provider", "aws", "--machine", "t3.medium", "--region", "eu-west-1", "--spot", *at(ec2)
    )["offers"]

    assert {(each["region"], each["type"]) for each in listed} == {("eu-west-1", "t3.medium")}


def test_what_cannot_be_had_is_an_error(ec2: LocalEC2) -> None:
    said = answer("offers", "--provider", "aws", "--accelerator", "tpu-v4", *at(ec2), exit_code=1)

    assert said["offers"] == []
    assert "aws" in said["errors"]
    assert run("offers", "--provider", "aws", "--accelerator", "no-such-thing", *at(ec2)).exit_code == 1


def test_settings_are_the_providers_own_to_refuse(ec2: LocalEC2) -> None:
    assert run("offers", "--set", "endpoint").exit_code == 2
    assert run("offers", "--provider", "no-such-provider").exit_code == 2
    assert "nothing" in answer("offers", "--set", "nothing=1", exit_code=1)["errors"]["aws"]
    assert "closest" in answer("offers", "--region", "mars-north-1", *at(ec2), exit_code=1)["errors"]["aws"]


# --- doctor -------------------------------------------------------------------------------------------------------


def findings(*arguments: str, exit_code: int) -> dict[str, tuple[str, str, str]]:
    found = answer("doctor", *arguments, exit_code=exit_code)["findings"]
    return {each["what"]: (each["state"], each["found"], each["fix"]) for each in found}


def test_doctor_says_who_one_is_what_one_may_and_how_much(ec2: LocalEC2) -> None:
    found = findings("--provider", "aws", *at(ec2), exit_code=0)

    assert found["aws credentials"][0] == "ok"
    assert "123456789012" in found["aws credentials"][1]
    assert found["aws region"][1] == "us-east-1"
    assert found["aws network"][0] == "ok"
    assert "us-east-1a" in found["aws network"][1]
    assert found["aws may ec2:RunInstances"] == ("ok", "yes", "")
    assert found["aws may ec2:CreateFleet"] == ("ok", "yes", "")
    assert "cores" in found["aws quotas"][1]
    assert "session-manager-plugin" not in found


def test_doctor_creates_nothing(ec2: LocalEC2) -> None:
    client = ec2.client("ec2")
    groups = len(client.describe_security_groups()["SecurityGroups"])

    findings("--provider", "aws", *at(ec2), exit_code=0)

    assert living(ec2) == set()
    assert client.describe_launch_templates()["LaunchTemplates"] == []
    assert len(client.describe_security_groups()["SecurityGroups"]) == groups


def test_doctor_names_a_permission_that_is_missing(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="RunInstances", times=99)

    state, found, fix = findings("--provider", "aws", *at(ec2), exit_code=1)["aws may ec2:RunInstances"]

    assert state == "fail"
    assert '"ec2:RunInstances"' in f"{found} {fix}"


def test_doctor_says_how_to_give_credentials(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    found = findings("--provider", "aws", *at(ec2), exit_code=1)

    assert found["aws credentials"][0] == "fail"
    assert "aws configure" in " ".join(found["aws credentials"])
    assert "aws network" not in found


def test_doctor_looks_for_the_plugin_only_where_it_is_used(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    settings = ("--set", "use_ssm=true", "--set", "instance_profile=role")

    found = findings("--provider", "aws", *settings, *at(ec2), exit_code=1)

    assert found["session-manager-plugin"][0] == "fail"
    assert "dpkg -i" in " ".join(found["session-manager-plugin"])


def test_doctor_asks_no_cloud_by_itself(ec2: LocalEC2) -> None:
    found = findings(exit_code=0)

    assert found["provider aws"][0] == "ok"
    assert ec2.calls == ()


# --- ls, down, sweep ----------------------------------------------------------------------------------------------


def test_ls_lists_machines_of_a_cloud_with_region_and_price(ec2: LocalEC2, launch: Callable[..., Any]) -> None:
    (instance,) = launch("sky-1-0", owner=ALIVE)

    (machine,) = answer("ls")["machines"]

    assert (machine["provider"], machine["region"], machine["instance"]) == ("aws", "us-east-1", instance.id)
    assert (machine["type"], machine["spot"], machine["owner"]["alive"]) == ("t3.medium", True, True)
    assert machine["cost"] == pytest.approx(machine["price_per_hour"], rel=0.1)


def test_down_ends_a_pool_and_nothing_of_it_is_left(ec2: LocalEC2, launch: Callable[..., Any]) -> None:
    gone = launch("sky-1-0", "sky-1-1", owner=ALIVE)
    (other,) = launch("sky-2-0", pool="sky-2", owner=ALIVE)

    ended = answer("down", "sky-1")["ended"]

    assert {each["instance"] for each in ended} == {each.id for each in gone}
    assert living(ec2) == {other.id}
    groups = ec2.client("ec2").describe_security_groups()["SecurityGroups"]
    assert not any("sky-1" in group["GroupName"] for group in groups)
    assert [each["pool"] for each in answer("ls")["machines"]] == ["sky-2"]
    answer("down", "sky-2")


def test_sweep_looks_in_the_region_that_is_named(ec2: LocalEC2, launch: Callable[..., Any]) -> None:
    (stranger,) = launch("sky-9-0", pool="sky-9", known=False)

    said = answer("sweep", "--unknown", "--provider", "aws", "--region", "eu-west-1", *at(ec2))

    assert said["unknown"] == []
    assert living(ec2) == {stranger.id}


def test_sweep_keeps_what_a_cloud_does_not_confirm(
    ec2: LocalEC2, launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination, "_ATTEMPTS", 1)
    (dead,) = launch("sky-1-0")
    ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="TerminateInstances", times=99)

    (left,) = answer("sweep", exit_code=1)["left"]

    assert left["instance"] == dead.id
    assert "ec2:TerminateInstances" in left["reason"]
    ec2.heal()
    assert len(answer("sweep")["ended"]) == 1


def test_sweep_removes_what_a_launch_made_before_it_was_killed(ec2: LocalEC2, ledger: Ledger) -> None:
    """The group and the template are there, a machine is not; the ledger knows no id."""
    provider = AWS(endpoint_url=ec2.endpoint_url)
    purchase = Purchase(
        pool_id="sky-1",
        provider="aws",
        settings=provider_settings(provider),
        region="us-east-1",
        machine="?",
        spot=True,
    )
    ledger.reserve({"sky-1-0-a": 0}, purchase, owner=DEAD)
    tags = [{"Key": "skyward:pool", "Value": "sky-1"}]
    client = ec2.client("ec2")
    client.create_security_group(
        GroupName="skyward-sky-1",
        Description="made before the client was killed",
        TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
    )
    client.create_launch_template(
        LaunchTemplateName="skyward-sky-1-0",
        LaunchTemplateData={"InstanceType": "m7i.large"},
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
    )
    assert ec2.left()
    assert CliRunner().invoke(main, ["sweep"]).exit_code == 0
    assert ec2.left() == {}
