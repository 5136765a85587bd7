from __future__ import annotations

import asyncio
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from skyward.errors import ConfigurationError
from skyward.fleet import machine_size
from skyward.machine.ssh import SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.providers.aws.provider import AWS
from skyward.testing.aws import AwsFault, Capacity, LocalEC2, Looks, Market, local_ec2
from skyward.testing.hosts import require_sshd

IMAGE = "ami-0ca0000000000024a"
DEADLINE_S = 30.0
TOKEN_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"
ACTION = "meta-data/spot/instance-action"


@pytest.fixture
def ec2() -> Iterator[LocalEC2]:
    with LocalEC2(looks=Looks(pending=0, ending=0)) as ec2:
        yield ec2


def client(ec2: LocalEC2, service: str = "ec2") -> Any:
    """As the product has one, but that nothing is tried again."""
    session = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test")
    config = Config(retries={"max_attempts": 0})
    return session.client(service, region_name="us-east-1", endpoint_url=ec2.endpoint_url, config=config)


def run(api: Any, **more: Any) -> str:
    asked = {"ImageId": IMAGE, "InstanceType": "m7i.large", "MinCount": 1, "MaxCount": 1} | more
    (instance,) = api.run_instances(**asked)["Instances"]
    return instance["InstanceId"]


def eventually(condition: Callable[[], Any]) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.01)
    return found


def described(api: Any, instance_id: str) -> dict[str, Any]:
    return api.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]


def code_of(call: Callable[..., Any], **arguments: Any) -> tuple[str, int]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return caught.value.response["Error"]["Code"], caught.value.response["ResponseMetadata"]["HTTPStatusCode"]


def key_pair() -> tuple[str, str]:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def cloud_config(host_key: str, user_key: str, minutes: int) -> str:
    indented = "".join(f"    {line}\n" for line in host_key.splitlines())
    return (
        f"#cloud-config\nbootcmd:\n  - [shutdown, -h, '+{minutes}']\nssh_deletekeys: true\n"
        f"ssh_keys:\n  ed25519_private: |\n{indented}ssh_authorized_keys:\n  - {user_key}\n"
    )


def test_the_nth_call_fails_as_it_was_told_to_and_then_no_more(ec2: LocalEC2) -> None:
    api = client(ec2)
    ec2.fail(AwsFault(code="RequestLimitExceeded", status=503), nth=2)
    ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="DescribeSubnets", times=2)

    api.describe_vpcs()
    assert code_of(api.describe_vpcs) == ("RequestLimitExceeded", 503)
    assert [code_of(api.describe_subnets) for _ in range(2)] == [("UnauthorizedOperation", 403)] * 2
    assert api.describe_subnets()["Subnets"]
    assert ec2.actions == ["DescribeVpcs"] * 2 + ["DescribeSubnets"] * 3


@pytest.mark.parametrize(("dropped", "there"), [("before", 0), ("after", 1)])
def test_a_dropped_call_has_its_effect_or_not_and_its_token_makes_it_happen_once(
    ec2: LocalEC2, dropped: Any, there: int
) -> None:
    api = client(ec2)
    ec2.fail(AwsFault(dropped=dropped), action="RunInstances")
    with pytest.raises(ConnectionClosedError):
        run(api, ClientToken="token")
    assert len(ec2.instances()) == there
    assert run(api, ClientToken="token") == run(api, ClientToken="token")
    assert len(ec2.instances()) == 1
    assert code_of(run, api=api, ClientToken="token", InstanceType="c7i.large") == ("IdempotentParameterMismatch", 400)


def test_a_new_instance_is_not_found_then_pending_then_running() -> None:
    with LocalEC2(looks=Looks(unseen=1, pending=1, ending=1)) as slow:
        api = client(slow)
        instance_id = run(api)
        assert code_of(api.describe_instances, InstanceIds=[instance_id]) == ("InvalidInstanceID.NotFound", 400)
        assert described(api, instance_id)["State"]["Name"] == "running"
        assert described(api, instance_id)["PublicIpAddress"]
        hidden = run(api)
        seen = [each["Instances"][0]["InstanceId"] for each in api.describe_instances()["Reservations"]]
        assert hidden not in seen
        assert instance_id in seen
        api.terminate_instances(InstanceIds=[instance_id])
        states = [described(api, instance_id)["State"]["Name"] for _ in range(2)]
    assert states == ["shutting-down", "terminated"]


def test_capacity_runs_out_and_a_fleet_says_of_what(ec2: LocalEC2) -> None:
    api = client(ec2)
    ec2.market.limits += [Capacity(type="m7i.large", spot=True), Capacity(type="c7i.large", count=1)]
    ec2.market.spot_prices["c7i.large"] = 0.01
    spot = {"MarketType": "spot"}
    assert code_of(run, api=api, InstanceMarketOptions=spot) == ("InsufficientInstanceCapacity", 500)
    template = {"ImageId": IMAGE, "InstanceInitiatedShutdownBehavior": "terminate"}
    made = api.create_launch_template(LaunchTemplateName="tmpl", LaunchTemplateData=template)["LaunchTemplate"]
    subnets = [each["SubnetId"] for each in api.describe_subnets()["Subnets"]][:2]

    fleets = [
        api.create_fleet(
            Type="instant",
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": made["LaunchTemplateId"], "Version": "$Latest"},
                    "Overrides": [
                        {"InstanceType": t, "SubnetId": s} for t in ("m7i.large", "c7i.large") for s in subnets
                    ],
                }
            ],
            TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
            TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}],
        )
        for _ in range(2)
    ]
    (got,) = fleets[0]["Instances"]
    assert (got["InstanceType"], got["Lifecycle"]) == ("c7i.large", "spot")
    assert {each["ErrorCode"] for each in fleets[1]["Errors"]} == {"InsufficientInstanceCapacity"}
    instance = described(api, got["InstanceIds"][0])
    assert (instance["InstanceLifecycle"], instance["Tags"]) == ("spot", [{"Key": "a", "Value": "b"}])
    assert len(ec2.instances()) == 1


def test_types_prices_quotas_and_images_are_those_of_the_market() -> None:
    market = Market(prices={"m7i.large": 0.1, "g5.xlarge": None}, spot_prices={"m7i.large": {"us-east-1b": 0.03}})
    market.quotas["L-DB2E81BA"] = 0.0
    with LocalEC2(market=market) as ec2:
        api = client(ec2)
        types = {each["InstanceType"] for each in api.describe_instance_types()["InstanceTypes"]}
        history = api.describe_spot_price_history(InstanceTypes=["m7i.large"])["SpotPriceHistory"]
        products = client(ec2, "pricing").get_products(ServiceCode="AmazonEC2")["PriceList"]
        quota = client(ec2, "service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode="L-DB2E81BA")
        place = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
        image_id = client(ec2, "ssm").get_parameter(Name=place)["Parameter"]["Value"]
        (image,) = api.describe_images(ImageIds=[image_id])["Images"]
        unknown = code_of(run, api=api, InstanceType="m7i.lage")
    assert types == {"m7i.large", "g5.xlarge"}
    assert [(each["AvailabilityZone"], each["SpotPrice"]) for each in history] == [("us-east-1b", "0.030000")]
    assert len(products) == 1
    assert quota["Quota"]["Value"] == 0.0
    assert image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 65
    assert unknown == ("InvalidInstanceType", 400)


def test_what_is_left_is_named_and_a_group_in_use_cannot_go(ec2: LocalEC2) -> None:
    api = client(ec2)
    group = api.create_security_group(GroupName="g", Description="g")["GroupId"]
    instance_id = run(api, SecurityGroupIds=[group])
    api.create_launch_template(LaunchTemplateName="tmpl", LaunchTemplateData={"ImageId": IMAGE})
    left = ec2.left()
    assert {kind: len(names) for kind, names in left.items()} == {
        "instances": 1, "groups": 1, "templates": 1, "volumes": 1
    }  # fmt: skip
    assert code_of(api.delete_security_group, GroupId=group) == ("DependencyViolation", 400)
    api.terminate_instances(InstanceIds=[instance_id])
    assert eventually(lambda: described(api, instance_id)["State"]["Name"] == "terminated")
    api.delete_security_group(GroupId=group)
    api.delete_launch_template(LaunchTemplateName="tmpl")
    assert ec2.left() == {}


def said(url: str, path: str, **headers: str) -> str:
    request = urllib.request.Request(f"{url}/latest/{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_an_instance_is_a_machine_with_the_keys_of_its_user_data_until_it_is_taken_back(tmp_path: Path) -> None:
    require_sshd()
    (host_private, host_public), (user_private, user_public) = key_pair(), key_pair()
    key_path = tmp_path / "key"
    key_path.write_text(user_private)
    key_path.chmod(0o600)
    with LocalEC2(tmp_path / "machines", machines=True) as ec2:
        api = client(ec2)
        spot = {"MarketType": "spot"}
        instance_id = run(api, UserData=cloud_config(host_private, user_public, 60), InstanceMarketOptions=spot)
        address = eventually(lambda: described(api, instance_id).get("PublicIpAddress"))
        eventually(lambda: (host := ec2.host(instance_id)) and host.pid)
        assert ec2.failures() == []
        target = SSHTarget(
            host=address, port=ec2.ssh_port, user=ec2.user, key_path=str(key_path), host_keys=(host_public,)
        )
        url, pid = asyncio.run(started_there(target))

        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            said(url, ACTION)
        refused.value.close()
        request = urllib.request.Request(f"{url}/latest/api/token", method="PUT", headers={TOKEN_TTL: "60"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            headers = {TOKEN: answer.read().decode()}
        assert said(url, "meta-data/instance-id", **headers) == instance_id
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            said(url, ACTION, **headers)
        missing.value.close()
        ec2.hint(instance_id)
        ec2.preempt(instance_id, in_s=0.5)
        assert '"action": "terminate"' in said(url, ACTION, **headers)
        assert "noticeTime" in said(url, "meta-data/events/recommendations/rebalance", **headers)
        eventually(lambda: described(api, instance_id)["State"]["Name"] == "terminated")
        assert described(api, instance_id)["StateReason"]["Code"] == "Server.SpotInstanceTermination"
        assert not psutil.pid_exists(pid)


async def started_there(target: SSHTarget) -> tuple[str, int]:
    """The metadata service as the machine knows it, and a process that outlives its session."""
    transport = SshTransport(target)
    try:
        command = "setsid sleep 60 >/dev/null 2>&1 </dev/null & echo $! $AWS_EC2_METADATA_SERVICE_ENDPOINT"
        done = await transport.run(["sh", "-c", command], timeout_s=20)
    finally:
        await transport.close()
    pid, url = done.stdout.split()
    return url, int(pid)


@pytest.mark.parametrize(("behaviour", "state"), [("terminate", "terminated"), ("stop", "stopped")])
def test_a_machine_switches_itself_off_when_its_time_is_up(tmp_path: Path, behaviour: str, state: str) -> None:
    require_sshd()
    with LocalEC2(tmp_path, machines=True) as ec2:
        api = client(ec2)
        data = cloud_config(*key_pair(), 30)
        instance_id = run(api, UserData=data, InstanceInitiatedShutdownBehavior=behaviour)

        def off() -> bool:
            ec2.elapse(30)
            return described(api, instance_id)["State"]["Name"] == state

        described(api, instance_id)
        ec2.elapse(29)
        assert described(api, instance_id)["State"]["Name"] in ("pending", "running")
        eventually(off)
        reason = described(api, instance_id)["StateReason"]["Code"]
    assert reason == ("Client.InstanceInitiatedShutdown" if behaviour == "terminate" else "")


def test_pools_of_this_process_can_use_machines_while_they_are_open(tmp_path: Path) -> None:
    require_sshd()
    names = ("user", "port", "home", "address_url", "power_off")
    before = [getattr(AWS, name) for name in names], dict(os.environ), machine_size.CORES_SHARE

    with LocalEC2(tmp_path, machines=True) as ec2:
        assert {name: getattr(AWS, name) for name in names} == ec2.settings
        assert os.environ.items() >= ec2.environment.items()
        assert machine_size.CORES_SHARE == 0.0

    assert ([getattr(AWS, name) for name in names], dict(os.environ), machine_size.CORES_SHARE) == before


def test_machines_without_an_ssh_server_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ec2, "find_openssh", lambda _program: None)

    with pytest.raises(ConfigurationError, match="apt-get install openssh-server"), LocalEC2(tmp_path, machines=True):
        pass


def test_a_machine_that_does_not_boot_is_reported_as_terminated_with_the_reason(tmp_path: Path) -> None:
    require_sshd()
    with LocalEC2(tmp_path, machines=True) as ec2:
        api = client(ec2)
        instance_id = run(api, UserData=cloud_config("no private key", key_pair()[1], 60))
        eventually(lambda: described(api, instance_id)["State"]["Name"] == "terminated")
        reason = described(api, instance_id)["StateReason"]

        assert reason["Code"] == "Server.InternalError"
        assert reason["Message"].startswith("Server.InternalError: ")
        assert ec2.failures()
