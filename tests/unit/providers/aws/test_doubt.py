"""What is not known for certain: whether a machine was made, whether it is gone, whether credentials still hold."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient

from skyward.base.waiting import CALL_LIMIT_S, SYSTEM_CLOCK
from skyward.errors import AuthenticationError, ConfigurationError, TerminationError, UnreachableError
from skyward.fleet.machines import Machines
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import Owner
from skyward.ledger.sweep import Sweep
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE
from skyward.providers.aws.api import Api, Credentials, is_lost
from skyward.providers.aws.provider import AWS
from skyward.providers.base import LaunchOrder
from skyward.request.request import parse_request
from skyward.testing.aws import AwsFault, LocalEC2, Looks, use_ec2

ORDER = LaunchOrder(pool_id="pool", keys=("k0", "k1", "k2"), timeout_s=3600.0)


async def launch(provider: AWS, order: LaunchOrder = ORDER) -> Sequence[str]:
    offers = await provider.offers(parse_request(machine="m7i.large", spot="never"))
    return [each.id for each in await provider.launch(offers, order)]


def test_a_lost_answer_beside_a_refusal_leaves_no_machine(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    call, made = Api.call, list[str]()

    async def faulty(self: Api, service: str, operation: str, **parameters: Any) -> Any:
        if operation == "RunInstances":
            made.append(operation)
            if len(made) == 2:
                raise ConfigurationError("InvalidParameterCombination")
            if len(made) == 3:
                await call(self, service, operation, **parameters)
                raise UnreachableError("the answer never came")
        return await call(self, service, operation, **parameters)

    monkeypatch.setattr(Api, "call", faulty)
    with pytest.raises(ConfigurationError, match="InvalidParameterCombination"):
        asyncio.run(launch(AWS(endpoint_url=ec2.endpoint_url)))

    assert len(ec2.instances()) == 2
    assert ec2.left() == {}


def test_a_fleets_word_on_a_role_that_does_not_exist_is_plain(ec2: LocalEC2, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Api.call

    async def refusing(self: Api, service: str, operation: str, **parameters: Any) -> Any:
        if operation == "CreateFleet":
            row = {"ErrorCode": "InvalidParameterValue", "ErrorMessage": "Invalid IAM Instance Profile name: nope"}
            return {"Errors": [row], "Instances": []}
        return await call(self, service, operation, **parameters)

    async def scenario() -> None:
        provider = AWS(endpoint_url=ec2.endpoint_url, instance_profile="nope")
        await provider.launch(await provider.offers(parse_request(cpu=2, memory="4GB", spot="never")), ORDER)

    monkeypatch.setattr(Api, "call", refusing)
    monkeypatch.setattr("skyward.providers.aws.api._VISIBLE_S", 0.0)
    monkeypatch.setattr("skyward.providers.aws.api._LOOK_S", 30.0)  # for the one answer, on a slow machine
    with pytest.raises(ConfigurationError, match="instance_profile='nope' does not exist"):
        asyncio.run(scenario())
    assert ec2.left() == {}


def test_a_machine_that_is_not_listed_yet_is_ended_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
    with LocalEC2(looks=Looks(unseen=3, pending=0, ending=1), block=71) as slow:
        use_ec2(slow, monkeypatch, {"listing_s": 0.0})

        async def scenario() -> None:
            order = LaunchOrder(pool_id="p", keys=("k",), timeout_s=60)
            ids = await launch(AWS(endpoint_url=slow.endpoint_url), order)
            await AWS(endpoint_url=slow.endpoint_url).terminate(ids)

        asyncio.run(scenario())
        assert slow.actions.count("TerminateInstances") == 1
        assert slow.left() == {}


def test_an_unlisted_machine_that_may_not_be_ended_is_named(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="TerminateInstances", times=100)

    with pytest.raises(TerminationError, match="i-00000000000000000"):
        asyncio.run(AWS(endpoint_url=ec2.endpoint_url).terminate(["i-00000000000000000"]))


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return file


def write(file: Path, key: str) -> None:
    file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\n")


def test_a_limit_on_the_answers_to_some_calls_is_none_on_others(
    ec2: LocalEC2, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(credentials, "KEY")
    api = Api(credentials=Credentials(region="us-east-1", endpoint_url=ec2.endpoint_url), patience_s=1)
    limits: list[float] = []
    clients: Any = BaseClient
    call = clients._make_api_call

    def noted(self: Any, operation: str, parameters: Any) -> Any:
        limits.append(self.meta.config.read_timeout)
        return call(self, operation, parameters)

    monkeypatch.setattr(BaseClient, "_make_api_call", noted)

    async def ask(limit_s: float) -> None:
        CALL_LIMIT_S.set(limit_s)
        await api.call("ec2", "DescribeVpcs")

    async def scenario() -> None:
        for limit_s in (10.0, math.inf, 10.0):
            await asyncio.create_task(ask(limit_s))

    asyncio.run(scenario())
    assert limits == [10.0, 30.0, 10.0]


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidClientTokenId", "AuthFailure", "RequestExpired"])
def test_renewed_credentials_are_read(ec2: LocalEC2, credentials: Path, code: str) -> None:
    write(credentials, "OLD")
    api = Api(credentials=Credentials(region="us-east-1", endpoint_url=ec2.endpoint_url), patience_s=1)

    async def scenario() -> None:
        await api.call("ec2", "DescribeVpcs")
        write(credentials, "NEW")
        ec2.fail(AwsFault(code=code, status=403), action="DescribeVpcs")
        await api.call("ec2", "DescribeVpcs")
        ec2.fail(AwsFault(code=code, status=403), action="DescribeVpcs")
        with pytest.raises(AuthenticationError, match=code):
            await api.call("ec2", "DescribeVpcs")

    asyncio.run(scenario())
    assert ec2.actions.count("DescribeVpcs") == 4


def test_newer_credentials_are_no_answer_to_a_lack_of_permission(ec2: LocalEC2, credentials: Path) -> None:
    write(credentials, "OLD")
    api = Api(credentials=Credentials(region="us-east-1", endpoint_url=ec2.endpoint_url), patience_s=1)

    async def scenario() -> None:
        await api.call("ec2", "DescribeVpcs")
        write(credentials, "NEW")
        ec2.fail(AwsFault(code="UnauthorizedOperation", status=403), action="DescribeVpcs")
        with pytest.raises(AuthenticationError, match="UnauthorizedOperation"):
            await api.call("ec2", "DescribeVpcs")

    asyncio.run(scenario())
    assert ec2.actions.count("DescribeVpcs") == 2


def test_another_clients_group_is_never_taken(ec2: LocalEC2) -> None:
    """However old it is: its pool may have lost its machines, and be launching others into it at this moment."""
    tags = {"skyward:pool": "other", "Name": "skyward-other", "skyward:created": str(int(time.time()) - 7200)}
    ec2.client("ec2").create_security_group(
        GroupName="skyward-other",
        Description="Skyward pool other",
        TagSpecifications=[
            {"ResourceType": "security-group", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
        ],
    )

    asyncio.run(AWS(endpoint_url=ec2.endpoint_url).terminate(["i-00000000000000000"]))  # nobody knows whose it was

    assert ec2.left() == {"groups": ["skyward-other"]}


def test_the_group_of_a_pool_whose_machines_are_long_gone_is_swept(ec2: LocalEC2, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    settings = {"endpoint_url": ec2.endpoint_url}
    (instance_id,) = asyncio.run(launch(AWS(**settings), LaunchOrder(pool_id="pool", keys=("k",), timeout_s=60)))
    dead = replace(Owner.this_process(), pid=1 << 22, started="never")
    ledger.reserve({"k": 0}, Purchase(pool_id="pool", provider="aws", settings=settings), owner=dead)
    ec2.client("ec2").terminate_instances(InstanceIds=[instance_id])

    report = asyncio.run(Sweep(ledger).run())

    assert [entry.key for entry in report.forgotten] == ["k"]
    assert ec2.left() == {}


FORBIDDEN = AwsFault(code="UnauthorizedOperation", status=403)
THROTTLED = AwsFault(code="RequestLimitExceeded", status=503)
ONE = LaunchOrder(pool_id="pool", keys=("pool-0-k",), timeout_s=60)


@pytest.fixture
def slow_ec2(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[LocalEC2]:
    """Lists a new machine only at so many looks."""
    monkeypatch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")
    with LocalEC2(looks=Looks(unseen=request.param, pending=0, ending=0), block=71) as slow:
        use_ec2(slow, monkeypatch, {"listing_s": 0.0, "patience_s": 2.0})
        yield slow


@pytest.mark.parametrize("slow_ec2", [10_000], indirect=True)
@pytest.mark.parametrize("again", [FORBIDDEN, THROTTLED], ids=["forbidden", "throttled"])
def test_a_machine_of_a_lost_answer_that_is_not_listed_is_an_error_that_names_its_key(
    slow_ec2: LocalEC2, again: AwsFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.aws.provider._BY_PRODUCTS_S", 0.5)
    slow_ec2.fail(AwsFault(dropped="after"), action="RunInstances")
    slow_ec2.fail(again, action="RunInstances", nth=2, times=100)
    ledger = Ledger(tmp_path / "ledger.db")
    provider = AWS(endpoint_url=slow_ec2.endpoint_url)
    asked = parse_request(machine="m7i.large", spot="never")
    pool = Machines(provider, asked, pool_id="pool", publish=lambda event: None, ledger=ledger, clock=SYSTEM_CLOCK)

    with pytest.raises(TerminationError, match=r"us-east-1.* ledger key pool-0-.*skyward sweep") as raised:
        asyncio.run(pool.launch([0]))

    (entry,) = ledger.open_entries()
    assert raised.value.keys == (entry.key,)
    assert entry.instance_id is None
    assert len(slow_ec2.left()["instances"]) == 1


@pytest.mark.parametrize("slow_ec2", [8], indirect=True)
def test_a_machine_of_a_lost_answer_is_ended_while_its_group_is_waited_for(slow_ec2: LocalEC2) -> None:
    slow_ec2.fail(AwsFault(dropped="after"), action="RunInstances")
    slow_ec2.fail(FORBIDDEN, action="RunInstances", nth=2)

    with pytest.raises(AuthenticationError, match=r"RunInstances.*UnauthorizedOperation"):
        asyncio.run(launch(AWS(endpoint_url=slow_ec2.endpoint_url), ONE))

    assert slow_ec2.launched() == 1
    assert slow_ec2.left() == {}


@pytest.mark.parametrize("answers", [0, 1], ids=["never reached", "gone after the call has arrived"])
def test_a_call_is_lost_if_it_has_arrived_once_although_aws_cannot_be_reached_any_more(
    ec2: LocalEC2, answers: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def take() -> None:
            for _ in range(answers):
                taken, _ = server.accept()
                taken.recv(1 << 16)
                server.close()
                taken.close()
            server.close()

        taking = threading.Thread(target=take)
        taking.start()
        if not answers:
            taking.join()
        api = Api(credentials=Credentials(region="us-east-1", endpoint_url=f"http://{host}:{port}"), patience_s=1)
        with pytest.raises(UnreachableError) as raised:
            asyncio.run(api.call("ec2", "RunInstances", MinCount=1, MaxCount=1))
        taking.join()
        api.close()

    assert is_lost(raised.value) is bool(answers)


def test_no_machine_is_feared_where_the_group_that_it_would_be_in_is_gone(ec2: LocalEC2) -> None:
    ec2.fail(AwsFault(dropped="before"), action="RunInstances")
    ec2.fail(FORBIDDEN, action="RunInstances", nth=2)

    with pytest.raises(AuthenticationError, match="RunInstances"):
        asyncio.run(launch(AWS(endpoint_url=ec2.endpoint_url), ONE))

    assert ec2.launched() == 0
    assert ec2.left() == {}
