"""The provider against EC2 on this machine: what is launched, how it is described, what is left."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest

from skyward.base.waiting import wait_until
from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    TerminationError,
    UnreachableError,
)
from skyward.machine.ssh import SSHAccess
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE, host_key, user_key
from skyward.providers.aws.account import SPOT_WATCH
from skyward.providers.aws.provider import AWS
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.request.request import parse_request
from skyward.testing.aws import AwsFault, Capacity, LocalEC2, Looks, use_ec2
from skyward.testing.provider import NotedOrder

T = TypeVar("T")
G4DN = {"accelerator": "T4"}
ORDER = LaunchOrder(pool_id="pool", keys=("k0", "k1", "k2"), timeout_s=3600.0)


def use(ec2: LocalEC2, work: Callable[[AWS], Awaitable[T]], **settings: Any) -> T:
    async def closing() -> T:
        provider = AWS(endpoint_url=ec2.endpoint_url, **settings)
        try:
            return await work(provider)
        finally:
            await provider.close()

    return asyncio.run(closing())


async def offers_of(provider: AWS, **asked: Any) -> Sequence[Offer]:
    return await provider.offers(parse_request(**asked))


async def launch(provider: AWS, order: LaunchOrder = ORDER, **asked: Any) -> Sequence[Instance]:
    spot = asked.get("spot", "always") != "never"
    offers = [offer for offer in await offers_of(provider, **(asked or G4DN)) if offer.spot == spot]
    return await provider.launch(sorted(offers, key=lambda offer: offer.price_per_hour or 0.0), order)


def got(instances: Sequence[Instance]) -> set[tuple[str, str, bool, float | None]]:
    return {(each.offer.spec.name, each.offer.zone, each.offer.spot, each.offer.price_per_hour) for each in instances}


def groups_of(row: Any) -> list[str]:
    return [group["GroupName"] for interface in row["NetworkInterfaces"] for group in interface["Groups"]]


def described(ec2: LocalEC2) -> list[Any]:
    return [each for each in ec2.instances() if each["State"]["Name"] != "terminated"]


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"region": "us-esat-1"}, "no such region; closest: .*us-east-1"),
        ({"region": "frankfurt"}, "region='frankfurt': AWS has no such region"),
        ({"region": 3}, "region must be"),
        ({"subnet": "vpc-123"}, "subnet must be a subnet's id"),
        ({"use_ssm": "yes"}, "use_ssm must be True or False"),
        ({"use_ssm": True}, "use_ssm=True needs instance_profile="),
        ({"profile": ""}, "profile must be"),
        ({"endpoint_url": "localhost:5000"}, "endpoint_url must be a URL"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_right(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AWS(**settings)


# --- offers -------------------------------------------------------------------------------------------------------


def test_offers_have_the_prices_of_the_list_and_of_the_market(ec2: LocalEC2) -> None:
    ec2.market.spot_prices["g4dn.xlarge"] = {"us-east-1a": 0.3, "us-east-1b": 0.2}

    found = use(ec2, lambda provider: offers_of(provider, **G4DN))

    assert [(offer.spec.name, offer.spot, offer.price_per_hour) for offer in found] == [
        ("g4dn.xlarge", True, 0.2),
        ("g4dn.xlarge", False, 0.526),
    ]
    assert {offer.on_demand_price_per_hour for offer in found} == {0.526}


def test_prices_that_may_not_be_asked_for_are_unknown_and_asked_for_once(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(code="AccessDeniedException", status=400), action="GetProducts", times=100)

    found = use(ec2, lambda provider: offers_of(provider, cpu=2))

    assert {offer.price_per_hour for offer in found if not offer.spot} == {None}
    assert len(found) > 2
    assert ec2.actions.count("GetProducts") == 1


def test_that_no_price_is_known_is_said(ec2: LocalEC2) -> None:
    refused = AwsFault(code="UnauthorizedOperation", status=403)
    ec2.fail(refused, action="GetProducts", times=100)
    ec2.fail(refused, action="DescribeSpotPriceHistory", times=100)

    for offer in use(ec2, lambda provider: offers_of(provider, **G4DN)):
        market, action = ("spot", "ec2:DescribeSpotPriceHistory") if offer.spot else ("demand", "pricing:GetProducts")
        assert offer.price_per_hour is None
        assert f"prices on {market} are unknown" in offer.note
        assert action in offer.note


def test_that_prices_of_one_market_are_unknown_is_said_of_that_one(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="GetProducts", times=100)

    on_spot, on_demand = use(ec2, lambda provider: offers_of(provider, **G4DN))

    assert (on_spot.price_per_hour, on_spot.note) == (0.1841, "")
    assert "pricing:GetProducts" in on_demand.note


def test_types_and_prices_are_asked_for_once_by_all_processes(ec2: LocalEC2) -> None:
    first = use(ec2, lambda provider: offers_of(provider, **G4DN))
    before = len(ec2.actions)

    assert use(ec2, lambda provider: offers_of(provider, **G4DN)) == first
    assert not {"DescribeInstanceTypes", "GetProducts", "DescribeSpotPriceHistory"} & set(ec2.actions[before:])


@pytest.mark.parametrize("spot", ["always", 0.5])
def test_a_spot_quota_that_is_too_small_is_named_and_no_on_demand_machine_is_offered(ec2: LocalEC2, spot: Any) -> None:
    ec2.market.quotas["L-3819A6DF"] = 0

    with pytest.raises(
        QuotaError, match=r"0 cores of 'All G and VT Spot.*L-3819A6DF.*g4dn.xlarge.*console.aws"
    ) as told:
        use(ec2, lambda provider: offers_of(provider, spot=spot, **G4DN))
    assert "request-service-quota-increase" in str(told.value)


def test_without_a_spot_quota_the_other_market_serves_if_it_may(ec2: LocalEC2) -> None:
    ec2.market.quotas["L-3819A6DF"] = 3

    found = use(ec2, lambda provider: offers_of(provider, spot="if-available", **G4DN))

    assert [offer.spot for offer in found] == [False]
    assert "L-3819A6DF" in found[0].note


def test_a_quota_that_may_not_be_asked_for_is_no_zero(ec2: LocalEC2) -> None:
    ec2.market.quotas["L-3819A6DF"] = 0
    ec2.fail(AwsFault(code="AccessDeniedException", status=400), action="GetServiceQuota", times=100)

    assert [offer.spot for offer in use(ec2, lambda provider: offers_of(provider, **G4DN))] == [True, False]


def test_a_quota_that_is_not_found_once_is_asked_for_again(ec2: LocalEC2) -> None:
    ec2.market.quotas["L-3819A6DF"] = 0
    ec2.fail(AwsFault(code="NoSuchResourceException", status=400), action="GetServiceQuota", times=1)

    async def twice(provider: AWS) -> None:
        await offers_of(provider, **G4DN)
        with pytest.raises(QuotaError):
            await offers_of(provider, **G4DN)

    use(ec2, twice)


def test_no_default_network_is_said_before_anything_is_made(ec2: LocalEC2) -> None:
    api = ec2.client("ec2")
    (vpc,) = api.describe_vpcs()["Vpcs"]
    for subnet in api.describe_subnets()["Subnets"]:
        api.delete_subnet(SubnetId=subnet["SubnetId"])
    api.delete_vpc(VpcId=vpc["VpcId"])

    with pytest.raises(ConfigurationError, match=r"no default VPC in us-east-1.*aws ec2 create-default-vpc"):
        use(ec2, lambda provider: offers_of(provider, **G4DN))


def test_a_subnet_that_does_not_exist_is_said_before_anything_is_made(ec2: LocalEC2) -> None:
    with pytest.raises(ConfigurationError, match="subnet='subnet-0123' does not exist in us-east-1"):
        use(ec2, lambda provider: offers_of(provider, **G4DN), subnet="subnet-0123")


def test_a_zone_without_the_type_is_said_with_those_that_have_it(ec2: LocalEC2) -> None:
    subnets = {row["AvailabilityZone"]: row["SubnetId"] for row in ec2.client("ec2").describe_subnets()["Subnets"]}
    asked = {"machine": "p4de.24xlarge"}
    offered = ec2.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["p4de.24xlarge"]}]
    )
    without = sorted(set(subnets) - {row["Location"] for row in offered["InstanceTypeOfferings"]})

    with pytest.raises(ConfigurationError, match=rf"p4de.24xlarge: EC2 offers this in .*subnets are in {without[0]}"):
        use(ec2, lambda provider: offers_of(provider, **asked), subnet=subnets[without[0]])


def test_no_credentials_is_an_error_that_says_how_to_give_them(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AuthenticationError, match=r"NoCredentialsError.*aws configure.*AWS_ACCESS_KEY_ID"):
        use(ec2, lambda provider: offers_of(provider, **G4DN))


def test_a_profile_that_does_not_exist_is_said(ec2: LocalEC2) -> None:
    with pytest.raises(ConfigurationError, match=r"ProfileNotFound.*\(nobody\).*list-profiles"):
        use(ec2, lambda provider: offers_of(provider, **G4DN), profile="nobody")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("UnauthorizedOperation", 'must allow the action "ec2:DescribeVpcs"'),
        ("ExpiredToken", "aws sso login"),
        ("RequestExpired", "this machine's clock is wrong"),
        ("OptInRequired", "aws account enable-region --region-name us-east-1"),
        ("AuthFailure", "The key is wrong or disabled"),
    ],
)
def test_what_is_wrong_with_the_account_is_said_with_what_to_do(ec2: LocalEC2, code: str, message: str) -> None:
    ec2.fail(AwsFault(code=code, status=403), action="DescribeVpcs")

    with pytest.raises(AuthenticationError, match=f"aws us-east-1: ec2 DescribeVpcs was refused: {code}") as told:
        use(ec2, lambda provider: offers_of(provider, **G4DN))
    assert message in str(told.value)


def test_what_was_throttled_is_asked_again(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AWS, "patience_s", 30.0)  # three answers take more than the fixture's 2 s on a busy machine
    ec2.fail(AwsFault(code="RequestLimitExceeded", status=503), action="DescribeVpcs", times=2)

    assert use(ec2, lambda provider: offers_of(provider, **G4DN))
    assert ec2.actions.count("DescribeVpcs") == 3


# --- launch -------------------------------------------------------------------------------------------------------


def test_one_type_is_run_and_each_machine_is_its_own(ec2: LocalEC2) -> None:
    launched = use(ec2, launch)

    assert [each.key for each in launched] == ["k0", "k1", "k2"]
    assert got(launched) == {("g4dn.xlarge", launched[0].offer.zone, True, 0.1841)}
    assert all(each.watch == SPOT_WATCH for each in launched)
    assert "CreateFleet" not in ec2.actions
    tags = [{tag["Key"]: tag["Value"] for tag in each["Tags"]} for each in described(ec2)]
    assert sorted(each["skyward:key"] for each in tags) == ["k0", "k1", "k2"]
    assert {(each["skyward:pool"], each["Name"]) for each in tags} == {("pool", "skyward-pool")}


def test_what_a_machine_is_told_makes_it_safe(ec2: LocalEC2) -> None:
    (instance,) = use(ec2, lambda provider: launch(provider, LaunchOrder(pool_id="p", keys=("k",), timeout_s=90.5)))

    (row,) = described(ec2)
    attribute = ec2.client("ec2").describe_instance_attribute
    told = base64.b64decode(attribute(InstanceId=instance.id, Attribute="userData")["UserData"]["Value"]).decode()
    behaviour = attribute(InstanceId=instance.id, Attribute="instanceInitiatedShutdownBehavior")
    config = json.loads(told.removeprefix("#cloud-config\n"))
    tags = {tag["Key"]: tag["Value"] for tag in row["Tags"]}
    (disk,) = ec2.client("ec2").describe_volumes()["Volumes"]

    assert behaviour["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    assert instance.ends_itself
    assert next(iter(config)) == "bootcmd"
    assert config["bootcmd"][0][:2] == ["sh", "-c"]
    assert config["bootcmd"][0][2].startswith("life=211\n")
    assert config["ssh_keys"]["ed25519_public"] == host_key("k").public
    assert set(tags) == {"skyward:pool", "skyward:key", "Name"}
    assert config["ssh_authorized_keys"] == [user_key()[1].public]
    assert user_key()[1].private not in told
    assert row["MetadataOptions"]["HttpTokens"] == "required"
    assert row["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert (disk["VolumeType"], disk["Size"]) == ("gp3", 100)
    assert row["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"]


def test_the_group_of_a_pool_lets_in_the_client_and_the_pool_only(ec2: LocalEC2) -> None:
    use(ec2, launch)

    (group,) = [
        each
        for each in ec2.client("ec2").describe_security_groups()["SecurityGroups"]
        if each["GroupName"] == "skyward-pool"
    ]
    rules = {rule["IpProtocol"]: rule for rule in group["IpPermissions"]}
    assert [pair["GroupId"] for pair in rules["-1"]["UserIdGroupPairs"]] == [group["GroupId"]]
    assert (rules["tcp"]["FromPort"], rules["tcp"]["ToPort"]) == (22, 22)
    assert [each["CidrIp"] for each in rules["tcp"]["IpRanges"]] == ["203.0.113.7/32"]
    assert {name for each in described(ec2) for name in groups_of(each)} == {"skyward-pool"}


def admitted(ec2: LocalEC2) -> list[str]:
    (group,) = [
        each
        for each in ec2.client("ec2").describe_security_groups()["SecurityGroups"]
        if each["GroupName"] == "skyward-pool"
    ]
    (ssh,) = [rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "tcp"]
    return sorted(
        [each["CidrIp"] for each in ssh["IpRanges"]] + [each["CidrIpv6"] for each in ssh.get("Ipv6Ranges", ())]
    )


@pytest.mark.parametrize("moved_to", ["198.51.100.9/32", "2001:db8::9/128"])
def test_a_client_whose_address_has_changed_is_let_in_from_there_and_from_nowhere_else(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, moved_to: str
) -> None:
    use(ec2, launch)
    (group,) = ec2.client("ec2").describe_security_groups(GroupNames=["skyward-pool"])["SecurityGroups"]
    own = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]}
    ec2.client("ec2").authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[own])
    assert admitted(ec2) == ["192.0.2.0/24", "203.0.113.7/32"]
    assert use(ec2, lambda provider: provider.admit("pool")) == ""

    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, moved_to)

    assert use(ec2, lambda provider: provider.admit("pool")) == moved_to
    assert admitted(ec2) == sorted(["192.0.2.0/24", moved_to])  # what somebody has added is left alone
    assert use(ec2, lambda provider: provider.admit("pool")) == ""


def test_a_new_address_is_let_in_where_the_old_one_may_not_be_removed(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(ec2, launch)
    ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="RevokeSecurityGroupIngress")
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "198.51.100.9")

    assert use(ec2, lambda provider: provider.admit("pool")) == "198.51.100.9/32"
    assert admitted(ec2) == ["198.51.100.9/32", "203.0.113.7/32"]


def test_no_address_is_asked_for_where_no_port_is_open(ec2: LocalEC2) -> None:
    asked = len(ec2.actions)

    assert use(ec2, lambda provider: provider.admit("pool"), use_ssm=True, instance_profile="role") == ""
    assert len(ec2.actions) == asked


@pytest.mark.parametrize("value", ["0.0.0.0/0", "::/0", "somewhere"])
def test_the_whole_internet_is_never_let_in(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, value)
    with pytest.raises(ConfigurationError, match=CLIENT_CIDR_VARIABLE):
        use(ec2, launch)
    assert not ec2.left()


def test_a_client_that_does_not_know_its_address_is_told_how_to_say_it(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLIENT_CIDR_VARIABLE)
    monkeypatch.setattr(AWS, "address_url", "http://127.71.0.9:9/")
    with pytest.raises(ConfigurationError, match=f"set {CLIENT_CIDR_VARIABLE}"):
        use(ec2, launch)
    assert not ec2.left()


def test_of_several_types_a_fleet_chooses_and_its_template_goes(ec2: LocalEC2) -> None:
    ec2.market.limits.append(Capacity(type="c5.large"))

    launched = use(ec2, lambda provider: launch(provider, cpu=2, memory="4GB"))

    assert {"CreateLaunchTemplate", "CreateFleet", "DeleteLaunchTemplate"} <= set(ec2.actions)
    assert "c5.large" not in {each.offer.spec.name for each in launched}
    assert len({(each.offer.spec.name, each.offer.zone) for each in launched}) == 1
    assert "templates" not in ec2.left()
    assert sorted(key for each in described(ec2) for key in tags_of(each, "skyward:key")) == ["k0", "k1", "k2"]


def tags_of(row: Any, name: str) -> list[str]:
    return [tag["Value"] for tag in row["Tags"] if tag["Key"] == name]


def test_a_spot_machine_that_costs_far_more_is_taken_only_when_the_cheap_ones_are_not_to_be_had(ec2: LocalEC2) -> None:
    ec2.market.prices |= {"g4dn.2xlarge": 0.752, "g4dn.4xlarge": 1.204}
    ec2.market.limits.append(Capacity(type="g4dn.xlarge"))
    ec2.market.limits.append(Capacity(type="g4dn.2xlarge"))

    launched = use(ec2, launch)

    assert {each.offer.spec.name for each in launched} == {"g4dn.4xlarge"}
    first_fleet = next(call for call in ec2.calls if call.action == "CreateFleet")
    assert "g4dn.4xlarge" not in json.dumps(dict(first_fleet.parameters))


def test_all_machines_are_of_one_type_in_one_zone_or_there_are_none(ec2: LocalEC2) -> None:
    ec2.market.spot_prices["g4dn.xlarge"] = {"us-east-1a": 0.1, "us-east-1b": 0.2, "us-east-1c": 0.3}
    ec2.market.limits.append(Capacity(count=2, type="g4dn.xlarge", zone="us-east-1a"))

    launched = use(ec2, launch)

    assert got(launched) == {("g4dn.xlarge", "us-east-1b", True, 0.2)}
    assert len(described(ec2)) == 3


def test_later_machines_of_a_pool_stay_in_its_zone(ec2: LocalEC2) -> None:
    ec2.market.spot_prices["g4dn.xlarge"] = {"us-east-1a": 0.1, "us-east-1b": 0.2}

    async def scenario(provider: AWS) -> None:
        await launch(provider)
        ec2.market.limits.append(Capacity(zone="us-east-1a"))
        with pytest.raises(CapacityError, match="in zone us-east-1a, where the pool's other machines are"):
            await launch(provider, LaunchOrder(pool_id="pool", keys=("k3",), timeout_s=60))
        other = await launch(provider, LaunchOrder(pool_id="other", keys=("k4",), timeout_s=60))
        assert other[0].offer.zone == "us-east-1b"

    use(ec2, scenario)
    assert len(described(ec2)) == 4


def test_the_next_kind_is_taken_for_want_of_capacity_only(ec2: LocalEC2) -> None:
    async def both(provider: AWS) -> Sequence[Instance]:
        return await provider.launch(await offers_of(provider, spot="if-available", **G4DN), ORDER)

    ec2.market.limits.append(Capacity(spot=True))
    launched = use(ec2, both)
    assert {(each.offer.spot, each.watch) for each in launched} == {(False, None)}
    assert {each.offer.price_per_hour for each in launched} == {0.526}


def test_machines_of_an_order_that_cannot_be_filled_are_reported_as_ended(ec2: LocalEC2) -> None:
    order = NotedOrder(pool_id=ORDER.pool_id, keys=ORDER.keys, timeout_s=ORDER.timeout_s)
    ec2.market.limits.append(Capacity(count=2))
    with pytest.raises(CapacityError):
        use(ec2, lambda provider: launch(provider, order))

    assert {each.id for each in order.undone} == {each["InstanceId"] for each in ec2.instances()} != set()
    assert {each.state for each in order.undone} == {InstanceState.GONE}
    assert not ec2.left()


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "InvalidParameterCombination"])
def test_a_refusal_of_another_kind_is_not_answered_with_a_dearer_machine(ec2: LocalEC2, code: str) -> None:
    async def both(provider: AWS) -> Sequence[Instance]:
        return await provider.launch(await offers_of(provider, spot="if-available", **G4DN), ORDER)

    ec2.fail(AwsFault(code=code, status=403), action="RunInstances")
    with pytest.raises((AuthenticationError, ConfigurationError), match=code):
        use(ec2, both)
    assert ec2.actions.count("RunInstances") == 1
    assert not ec2.left()


def test_what_is_not_to_be_had_is_said_with_every_place_that_was_tried(ec2: LocalEC2) -> None:
    ec2.market.limits.append(Capacity())

    with pytest.raises(CapacityError, match=r"launch 3 machines .*in us-east-1: g4dn.xlarge \(spot, (us-east-1\w, )+"):
        use(ec2, launch)
    assert not ec2.left()


def test_of_many_types_that_are_not_to_be_had_the_first_are_named(ec2: LocalEC2) -> None:
    ec2.market.prices = dict.fromkeys([f"{family}.large" for family in ("c6i", "c7a", "c7i", "m7a", "m7i")], 0.1)
    ec2.market.limits.append(Capacity())

    with pytest.raises(
        CapacityError, match=r"launch 1 machine of .*: (\w+\.large \(spot, [^)]*\), ){3}and 2 more; last"
    ):
        use(ec2, lambda provider: launch(provider, LaunchOrder(pool_id="p", keys=("k",), timeout_s=60), cpu=2))


def test_a_quota_that_shows_at_the_launch_is_named(ec2: LocalEC2) -> None:
    ec2.market.limits.append(Capacity(code="VcpuLimitExceeded"))

    with pytest.raises(QuotaError, match=r"'Running On-Demand G and VT instances' \(quota L-DB2E81BA\)"):
        use(ec2, lambda provider: launch(provider, spot="never", **G4DN))
    assert not ec2.left()


def test_a_machine_of_an_order_that_nobody_heard_of_is_found_and_ended(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(dropped="after"), action="RunInstances", times=100)

    with pytest.raises(UnreachableError):
        use(ec2, launch)
    assert not ec2.left()
    assert ec2.instances()


def test_a_cancelled_launch_leaves_nothing(ec2: LocalEC2) -> None:
    async def started() -> bool | None:
        return "RunInstances" in ec2.actions or None

    async def scenario(provider: AWS) -> None:
        offers = await offers_of(provider, **G4DN)
        launching = asyncio.ensure_future(provider.launch(offers, ORDER))
        await wait_until(started, deadline_s=30, interval_s=0.001, what="a machine to be asked for")
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching

    use(ec2, scenario)
    assert not ec2.left()


def test_a_role_that_is_not_known_yet_is_waited_for(ec2: LocalEC2) -> None:
    ec2.client("iam").create_instance_profile(InstanceProfileName="reader")
    refused = AwsFault(code="InvalidParameterValue", status=400, message="Invalid IAM Instance Profile name: reader")
    ec2.fail(refused, action="RunInstances", times=2)

    launched = use(ec2, launch, instance_profile="reader")

    assert len(launched) == 3


@pytest.mark.parametrize("code", ["InvalidGroup.NotFound", "InvalidLaunchTemplateId.NotFound"])
def test_what_a_fleet_does_not_know_yet_is_waited_for(
    ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr("skyward.providers.aws.api._LOOK_S", 0.01)
    ec2.market.limits.append(Capacity(code=code))

    async def asked_twice() -> bool | None:
        return ec2.actions.count("CreateFleet") >= 2 or None

    async def scenario(provider: AWS) -> Sequence[Instance]:
        launching = asyncio.ensure_future(launch(provider, cpu=2, memory="4GB"))
        await wait_until(asked_twice, deadline_s=30, interval_s=0.001, what="a fleet to be asked for again")
        ec2.market.limits.clear()
        return await launching

    assert [each.key for each in use(ec2, scenario)] == ["k0", "k1", "k2"]


@pytest.mark.full
def test_what_a_fleet_never_knows_is_said(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.providers.aws.api._VISIBLE_S", 0.0)
    monkeypatch.setattr("skyward.providers.aws.api._LOOK_S", 30.0)  # for the one answer, on a slow machine
    ec2.market.limits.append(Capacity(code="InvalidGroup.NotFound"))

    with pytest.raises(UnreachableError, match=r"CreateFleet was refused: InvalidGroup\.NotFound"):
        use(ec2, lambda provider: launch(provider, cpu=2, memory="4GB"))
    assert not ec2.left()


# --- describe -----------------------------------------------------------------------------------------------------


def test_a_running_machine_is_reached_by_its_own_key(ec2: LocalEC2) -> None:
    async def scenario(provider: AWS) -> tuple[Sequence[Instance], Sequence[Instance]]:
        launched = await launch(provider)
        return launched, await provider.describe([each.id for each in launched])

    launched, seen = use(ec2, scenario)

    rows = {row["InstanceId"]: row for row in described(ec2)}
    for before, now in zip(launched, seen, strict=True):
        access = now.access
        assert isinstance(access, SSHAccess)
        assert access.target.host_keys == (host_key(now.key).public,)
        assert (access.target.user, access.target.port) == ("ubuntu", 22)
        assert access.target.key_path == str(user_key()[0])
        assert access.address == rows[now.id]["PrivateIpAddress"]
        assert access.workdir == f"/home/ubuntu/.cache/skyward/nodes/{now.id}"
        assert (now.state, now.offer, now.key) == (InstanceState.RUNNING, before.offer, before.key)
        assert before.ends_itself
        assert now.ends_itself


def test_another_process_can_describe_and_reach_a_machine(ec2: LocalEC2) -> None:
    launched = use(ec2, launch)

    (seen,) = use(ec2, lambda provider: provider.describe([launched[0].id]))

    assert (seen.key, seen.state, seen.offer.spot) == ("k0", InstanceState.RUNNING, True)
    assert (seen.offer.spec.name, seen.offer.zone) == ("g4dn.xlarge", launched[0].offer.zone)
    assert isinstance(seen.access, SSHAccess)
    assert seen.access.target.host_keys


def test_a_new_machine_that_is_not_listed_yet_is_pending_and_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
    with LocalEC2(looks=Looks(unseen=2, pending=1, ending=1), block=71) as slow:
        use_ec2(slow, monkeypatch, {})

        async def scenario(provider: AWS) -> list[InstanceState]:
            (instance,) = await launch(provider, LaunchOrder(pool_id="p", keys=("k",), timeout_s=60))
            states = [(await provider.describe([instance.id]))[0].state for _ in range(4)]
            await provider.terminate([instance.id])
            return [*states, (await provider.describe([instance.id]))[0].state]

        pending, running, gone = InstanceState.PENDING, InstanceState.RUNNING, InstanceState.GONE
        states = use(slow, scenario)
        assert states[:2] == [pending, pending]
        assert set(states[2:4]) <= {pending, running}
        assert states[-1] is gone


def test_what_was_taken_back_says_why(ec2: LocalEC2) -> None:
    async def scenario(provider: AWS) -> Instance:
        instance = (await launch(provider))[0]
        ec2.preempt(instance.id, in_s=0.0)

        async def gone() -> Instance | None:
            (seen,) = await provider.describe([instance.id])
            return seen if seen.state is InstanceState.GONE else None

        return await wait_until(gone, deadline_s=30, interval_s=0.01, what="it to be gone")

    assert "Server.SpotInstanceTermination" in use(ec2, scenario).reason


# --- terminate ----------------------------------------------------------------------------------------------------


def test_the_group_stays_until_the_pools_last_machine_ends(ec2: LocalEC2) -> None:
    async def scenario(provider: AWS) -> None:
        first, *others = [each.id for each in await launch(provider)]
        await provider.terminate([first])
        assert ec2.left()["groups"] == ["skyward-pool"]
        await provider.terminate(others)

    use(ec2, scenario)
    assert not ec2.left()


def test_machines_that_may_not_be_ended_are_named(ec2: LocalEC2) -> None:
    async def scenario(provider: AWS) -> None:
        ids = [each.id for each in await launch(provider)]
        ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="TerminateInstances", times=1000)
        with pytest.raises(TerminationError, match='must allow the action "ec2:TerminateInstances"') as told:
            await provider.terminate(ids)
        assert sorted(told.value.instance_ids) == sorted(ids)
        ec2.heal()
        await provider.terminate(ids)

    use(ec2, scenario)
    assert not ec2.left()


def test_a_pools_group_goes_when_it_is_tidied_and_no_others(ec2: LocalEC2) -> None:
    (instance,) = use(ec2, lambda provider: launch(provider, LaunchOrder(pool_id="old", keys=("k",), timeout_s=60)))
    living = use(ec2, lambda provider: launch(provider, LaunchOrder(pool_id="alive", keys=("k",), timeout_s=60)))
    ec2.client("ec2").terminate_instances(InstanceIds=[instance.id])

    use(ec2, lambda provider: provider.terminate(["i-00000000000000000"]))
    assert sorted(ec2.left()["groups"]) == ["skyward-alive", "skyward-old"]
    use(ec2, lambda provider: asyncio.gather(provider.tidy("old"), provider.tidy("alive")))
    assert ec2.left()["groups"] == ["skyward-alive"]
    assert ec2.left()["instances"] == [living[0].id]


def test_a_machine_of_somebody_elses_is_not_listed(ec2: LocalEC2) -> None:
    image = "ami-0ca0000000000024a"
    ec2.client("ec2").run_instances(ImageId=image, InstanceType="m5.large", MinCount=1, MaxCount=1)

    assert use(ec2, lambda provider: provider.tagged()) == []


def test_a_replacement_that_is_launched_while_the_last_machine_ends_keeps_the_group(ec2: LocalEC2) -> None:
    async def scenario(provider: AWS) -> None:
        (old,) = await launch(provider, LaunchOrder(pool_id="pool", keys=("old",), timeout_s=60))
        order = LaunchOrder(pool_id="pool", keys=("new",), timeout_s=60)
        await asyncio.gather(provider.terminate([old.id]), launch(provider, order))
        (row,) = described(ec2)
        assert groups_of(row) == ["skyward-pool"]

    use(ec2, scenario)
    assert ec2.left()["groups"] == ["skyward-pool"]
