"""EC2 on this machine: its API, which plans faults and launches fleets, and the test's control of it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import pwd
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, cast

from werkzeug import Response

from skyward.errors import ConfigurationError, PoolStateError
from skyward.fleet import machine_size
from skyward.providers._common.cached_answers import forget
from skyward.providers.aws.provider import AWS
from skyward.testing.aws.ec2_market import (
    AwsCall,
    Market,
    error,
    nested,
    read_call,
    without_instances,
    xml_answer,
)
from skyward.testing.aws.region import (
    METADATA_VARIABLE,
    POWER_OFF_PATH,
    TAKEN_BACK,
    EmulatedMachine,
    Looks,
    Region,
    UserData,
)
from skyward.testing.bill import Bill
from skyward.testing.hosts import SshHost, find_openssh, share_cache
from skyward.testing.loopback import Faults, drop_connection, reserve_network, serving

if TYPE_CHECKING:
    import pytest  # for its users' annotation only: this module works without it

_OVERRIDE_MEMBERS = {"InstanceType": "instanceType", "SubnetId": "subnetId", "AvailabilityZone": "availabilityZone"}


def create_fleet(call: AwsCall, region: Region, client: Any) -> Response:
    """Answer a call that creates a fleet of one machine, which it launches by ``RunInstances``.

    Args:
        call: the call.
        region: its region.
        client: client of moto's EC2 there that bypasses faults.
    """
    asked = nested(call.parameters)
    if asked.get("Type") != "instant":
        return error(call, "InvalidParameterValue", "only fleets of the type instant are implemented", 400)
    if asked.get("DryRun") == "true":
        return error(call, "DryRunOperation", "it would have succeeded", 412)
    target, config = asked["TargetCapacitySpecification"], asked["LaunchTemplateConfigs"]["1"]
    if target["TotalTargetCapacity"] != "1":
        return error(call, "InvalidParameterValue", "only fleets of one machine are implemented", 400)
    template = _template(config["LaunchTemplateSpecification"], client)
    template["TagSpecifications"] += [
        {"ResourceType": each["ResourceType"], "Tags": [*each["Tag"].values()]}
        for each in asked.get("TagSpecification", {}).values()
        if each["ResourceType"] != "fleet"
    ]
    spot = target.get("DefaultTargetCapacityType", "on-demand") == "spot"
    strategy = asked.get("SpotOptions" if spot else "OnDemandOptions", {}).get("AllocationStrategy", "")
    overrides = [*config.get("Overrides", {"1": {}}).values()]
    answer: dict[str, Any] = {"fleetId": f"fleet-{uuid.uuid4().hex[:17]}", "errorSet": [], "fleetInstanceSet": []}
    for override, zone in _rank_overrides(overrides, region, template, strategy, spot=spot):
        item = _buy(override, zone, region, template, client, spot=spot)
        if "instanceIds" in item:
            return xml_answer(call.action, {**answer, "errorSet": [], "fleetInstanceSet": [item]})
        answer["errorSet"].append(item)
    return xml_answer(call.action, answer)


def _template(wanted: Mapping[str, str], client: Any) -> dict[str, Any]:
    """Return the launch template's data as parameters of ``RunInstances``."""
    named = {name: wanted[name] for name in ("LaunchTemplateId", "LaunchTemplateName") if name in wanted}
    version = wanted.get("Version", "$Default")
    found = client.describe_launch_template_versions(**named, Versions=[version])
    data = dict(found["LaunchTemplateVersions"][0]["LaunchTemplateData"])
    if "UserData" in data:  # encoded in a template; a client of RunInstances encodes it itself
        data["UserData"] = base64.b64decode(data["UserData"]).decode()
    tags = data.get("TagSpecifications", [])
    return data | {"TagSpecifications": [each for each in tags if each["ResourceType"] != "launch-template"]}


def _buy(
    override: Mapping[str, str], zone: str, region: Region, template: Mapping[str, Any], client: Any, *, spot: bool
) -> Mapping[str, Any]:
    """Launch a machine, and return it as an item of the fleet's answer; or the refusal."""
    kind = override.get("InstanceType") or template["InstanceType"]
    members = {_OVERRIDE_MEMBERS[name]: value for name, value in override.items() if name in _OVERRIDE_MEMBERS}
    market = "spot" if spot else "on-demand"
    item = {"lifecycle": market, "launchTemplateAndOverrides": {"overrides": members}}
    if code := region.market.refusal(kind, zone, spot=spot, running=region.running()):
        text = f"We have no sufficient {kind} capacity in {zone}."
        return {**item, "errorCode": code, "errorMessage": text}
    run: dict[str, Any] = dict(template) | {
        name: value for name, value in override.items() if name in ("InstanceType", "SubnetId", "ImageId")
    }
    if "SubnetId" in override and run.get("NetworkInterfaces"):
        first, *others = run["NetworkInterfaces"]
        run["NetworkInterfaces"] = [dict(first) | {"SubnetId": run.pop("SubnetId")}, *others]
    if spot:
        run["InstanceMarketOptions"] = {"MarketType": "spot"}
    if not run["TagSpecifications"]:
        del run["TagSpecifications"]
    (instance,) = client.run_instances(MinCount=1, MaxCount=1, **run)["Instances"]
    return {**item, "instanceIds": [instance["InstanceId"]], "availabilityZone": zone, "instanceType": kind}


def _rank_overrides(
    overrides: Sequence[Mapping[str, str]], region: Region, template: Mapping[str, Any], strategy: str, *, spot: bool
) -> list[tuple[Mapping[str, str], str]]:
    """Return overrides with their zones, by priority where that is the strategy, then by price; unknown ones last."""
    offered = set(region.offered())
    found: list[tuple[tuple[float, float], Mapping[str, str], str]] = []
    for override in overrides:
        kind = override.get("InstanceType") or template["InstanceType"]
        zone = override.get("AvailabilityZone") or region.zone_of(override.get("SubnetId"))
        price = region.market.spot_price(kind, zone) if spot else region.market.prices.get(kind)
        priority = float(override.get("Priority", 0)) if "prioritized" in strategy else 0.0
        if (kind, zone) in offered:
            found.append(((priority, float("inf") if price is None else price), override, zone))
    return [(override, zone) for _, override, zone in sorted(found, key=lambda each: each[0])]


_CAPACITY_CODES: Final = (b"<Code>InsufficientInstanceCapacity<", b"<Code>InsufficientCapacity<")
_OK, _BAD_REQUEST, _SERVER_ERROR = 200, 400, 500
_CATALOGUE: Final = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings")


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsFault:
    """Failure of a call.

    Attributes:
        code: AWS's error code; the call has no effect then. Empty for a dropped connection.
        status: HTTP status of the error.
        message: text of the error; empty for a default.
        dropped: the connection ends without an answer, before or after the call takes effect.
    """

    code: str = ""
    status: int = 400
    message: str = ""
    dropped: Literal["", "before", "after"] = ""

    def __post_init__(self) -> None:
        if bool(self.code) == bool(self.dropped):
            raise ConfigurationError("a fault has either a code or a dropped connection")


@dataclass(kw_only=True, eq=False)
class ApiServer:
    """WSGI application of the API. Calls take effect one at a time.

    Attributes:
        faults: plan of failing calls.
        market: answers calls about prices, quotas and parameters.
        client: returns a client of moto's EC2 in the region of that name that bypasses faults.
        region: returns the region of that name.
        client_address: public address of every client, as answered at ``/checkip``.
        calls: every call, in order, including failed ones.
        lock: held while a call takes effect.
        moto: moto's application; None while closed.
    """

    _catalogues: ClassVar[dict[str, Response]] = {}

    faults: Faults[AwsFault]
    market: Market
    client: Callable[[str], Any]
    region: Callable[[str], Region]
    client_address: str
    calls: list[AwsCall] = field(default_factory=list[AwsCall])
    lock: threading.RLock = field(default_factory=threading.RLock)
    moto: Any = None
    _tokens: dict[tuple[str, str], tuple[Mapping[str, Any], Response]] = field(default_factory=dict[Any, Any])

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        if environ["PATH_INFO"] == "/checkip":
            return Response(f"{self.client_address}\n")(environ, start_response)
        call = read_call(environ)
        with self.lock:
            self.calls.append(call)
            fault = self.faults.met(call.action)
            if fault is not None and fault.dropped == "before":
                drop_connection(environ)
            if fault is not None and fault.code:
                answer = error(call, fault.code, fault.message or "planned fault", fault.status)
            else:
                answer = self._once(call, environ)
        if fault is not None and fault.dropped == "after":
            drop_connection(environ)
        return answer(environ, start_response)

    def _once(self, call: AwsCall, environ: dict[str, Any]) -> Response:
        """Answer a call; calls with the same client token take effect once."""
        token = call.parameters.get("ClientToken") if call.service == "ec2" else None
        if not token:
            return self._answer(call, environ)
        known = self._tokens.get((call.action, token))
        if known is None:
            answer = self._answer(call, environ)
            if answer.status_code == _OK:
                self._tokens[call.action, token] = (call.parameters, answer)
            return answer
        parameters, answer = known
        if parameters != call.parameters:
            text = f"client token {token} was used with other parameters"
            return error(call, "IdempotentParameterMismatch", text, _BAD_REQUEST)
        return answer

    def _answer(self, call: AwsCall, environ: dict[str, Any]) -> Response:
        if not call.region or call.service not in {"ec2", "pricing", "servicequotas", "ssm"}:
            return self._ask_moto(environ)
        region = self.region(call.region)
        if call.action in _CATALOGUE:
            return self._ask_catalogue(call, environ)
        hidden: Sequence[str] = ()
        if call.action in {"DescribeInstances", "DescribeInstanceStatus"}:
            asked = call.listed("InstanceId")
            hidden = region.look(asked)
            if missing := set(hidden) & set(asked):
                text = f"The instance IDs '{', '.join(sorted(missing))}' do not exist"
                return error(call, "InvalidInstanceID.NotFound", text, _BAD_REQUEST)
        answer = self.market.answer(call, region.offered() if "Spot" in call.action else ())
        if call.action == "CreateFleet":
            answer = create_fleet(call, region, self.client(call.region))
        return answer or without_instances(self._ask_moto(environ), hidden)

    def _ask_catalogue(self, call: AwsCall, environ: dict[str, Any]) -> Response:
        """Return the answer about machine types, the same in every account: it takes moto 20 to 60 ms."""
        asked = repr((call.action, call.region, sorted(call.parameters.items()), sorted(self.market.prices)))
        if asked not in self._catalogues:
            self._catalogues[asked] = self._ask_moto(environ)
        return self._catalogues[asked]

    def _ask_moto(self, environ: dict[str, Any]) -> Response:
        answer = Response.from_app(self.moto, environ, buffered=True)
        if answer.status_code == _BAD_REQUEST and any(each in answer.data for each in _CAPACITY_CODES):
            answer.status_code = _SERVER_ERROR  # EC2 answers these with 500, moto with 400
        return answer


_SSH_PORT: Final = 22022
_THREADS: Final = 8
_SIZES: Final = {"CORES_SHARE": 0.0, "MEMORY_SHARE": 0.0}
"""Least shares of what was bought: machines here are as large as this one."""
_POWER_OFF: Final = (
    f"import os, urllib.request; urllib.request.urlopen(os.environ[{METADATA_VARIABLE!r}] + {POWER_OFF_PATH!r}, b'')"
)
"""Substitute for ``shutdown -h now`` on machines, which would power this machine off."""


class LocalEC2:
    """The parts of AWS that Skyward needs, on loopback addresses. A context manager; one at a time in a process.

    The API is moto's, over HTTP, for every service that moto has. Added are capacity, prices, quotas, images, client
    tokens, states that take their time, and faults. With ``machines=True`` each instance is an
    :class:`~skyward.testing.hosts.SshHost` at an address of its own, which is its private and its public one. It has
    the host key and the user key of its user data, and honours a ``shutdown -h +N`` there. Its own metadata service
    announces preemption; the endpoint is in ``AWS_EC2_METADATA_SERVICE_ENDPOINT``. Other commands of user data are not
    run. Security groups are recorded, not enforced. Methods take EC2's ``instance_id`` and a ``region``.

    With ``machines=True`` pools of this process can use it, without more: ``sky.AWS(endpoint_url=ec2.endpoint_url)``.
    While it is open, the process has :attr:`environment`, ``sky.AWS`` the class variables in :attr:`settings`, and
    machines count as large as bought. Another process needs those, too; else it dials machines at port 22. Records only
    are for a provider's own verbs: nothing answers at their addresses, and no pool opens.

    Args:
        folder: folder of the machines; needed with ``machines``.
        machines: True for a real host per instance; False for records only.
        market: types, prices, capacity, quotas; may be changed at any time.
        looks: delays of state changes, in looks.
        cache: folder of environments, shared by all machines; None means a folder in ``folder``.
        env: additional environment of sessions on machines.
        block: addresses are ``127.<block>.x.y``.

    Attributes:
        market: as given.
        bill: cost of the instances of all regions; disks, addresses and traffic are not billed.
        user: user name that can log in on machines.
        ssh_port: port of the machines' sshd.

    Raises:
        ConfigurationError: ``machines`` without a folder, or without OpenSSH's server; no free addresses are left.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        machines: bool = False,
        market: Market | None = None,
        looks: Looks | None = None,
        cache: Path | None = None,
        env: Mapping[str, str] | None = None,
        block: int = 72,
    ) -> None:
        if machines and folder is None:
            raise ConfigurationError("machines need a folder")
        self.market = market or Market()
        self.bill = Bill(time.monotonic)
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.ssh_port = _SSH_PORT
        self._folder = folder
        self._machines = machines
        self._looks = looks or Looks()
        self._cache = cache
        self._env = dict(env or {})
        self._block = block
        self._faults = Faults[AwsFault]()
        self._regions: dict[str, Region] = {}
        self._clients: dict[tuple[str, str], Any] = {}
        self._api = ApiServer(
            faults=self._faults,
            market=self.market,
            client=partial(self.client, "ec2"),
            region=self._region,
            client_address="127.0.0.1",
        )
        self._timers: list[threading.Timer] = []
        self._stack = contextlib.ExitStack()
        self._network = ""
        self._hosts = itertools.count(2)
        self._front = self._back = ""

    def __enter__(self) -> Self:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        if self._api.moto is not None:
            raise PoolStateError("this LocalEC2 is already open")
        if self._machines and find_openssh("sshd") is None:
            raise ConfigurationError("machines=True needs OpenSSH's server: apt-get install openssh-server")
        with _no_default_images():
            _forget_everything()
        if self._folder is not None and self._machines:
            share_cache(self._folder / "home", self._cache or self._folder / "cache")
        self._api.moto = DomainDispatcherApplication(create_backend_app)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_no_default_images())
            self._threads = stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="local-ec2"))
            self._network = stack.enter_context(reserve_network(self._block, self.ssh_port))
            self._front = stack.enter_context(serving(self._api, "local-ec2-api"))
            self._back = stack.enter_context(serving(self._api.moto, "local-ec2-moto"))
            stack.callback(self._end_everything)
            if self._machines:
                stack.enter_context(_in_use(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._api.moto = None

    # Settings of a client

    @property
    def endpoint_url(self) -> str:
        """URL of the API, faults included."""
        return self._front

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables by which AWS's libraries find credentials for this API, and no others."""
        nowhere = str((self._folder or Path("/nonexistent")) / "no-aws-config")
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values for class variables of ``sky.AWS``, by name."""
        home = (self._folder or Path("/nonexistent")) / "home"
        address_url = f"{self.endpoint_url}/checkip"
        power_off = ("python", "-c", _POWER_OFF)
        here = {"user": self.user, "port": self.ssh_port, "home": str(home)}
        return here | {"address_url": address_url, "power_off": power_off}

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """Return a client of boto3's for a ``service`` that bypasses faults and is not recorded in :attr:`calls`."""
        if (service, region) not in self._clients:
            self._clients[service, region] = _session().client(service, region_name=region, endpoint_url=self._back)
        return self._clients[service, region]

    # Controls of a test

    def fail(self, fault: AwsFault, *, action: str = "", nth: int = 1, times: int = 1) -> None:
        """Let calls fail with ``fault``: the ``nth`` call, of one action or of all, and ``times - 1`` after it."""
        self._faults.add(fault, action=action, nth=nth, times=times)

    def heal(self) -> None:
        """Remove all planned faults."""
        self._faults.clear()

    def preempt(self, instance_id: str, *, in_s: float, region: str = "us-east-1") -> None:
        """Preempt a spot instance in ``in_s`` seconds; its metadata service announces that now.

        Raises:
            ConfigurationError: it is on demand.
        """
        place = self._region(region)
        (found,) = place.backend.get_multi_instances_by_id([instance_id])
        if found.lifecycle != "spot":
            raise ConfigurationError(f"{instance_id} is on demand, and only spot instances can be preempted")
        if (machine := place.machine(instance_id)) is not None:
            machine.metadata.interrupt(in_s)
        timer = threading.Timer(in_s, self._end, (place, instance_id))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def elapse(self, minutes: int) -> None:
        """Let the shutdown timers of machines that have booted go off, where they are armed for at most ``minutes``."""
        for region in self._regions.values():
            for machine in region.machines():
                machine.elapse(minutes)

    def hint(self, instance_id: str, region: str = "us-east-1") -> None:
        """Announce in an instance's metadata service that preemption has become more likely."""
        if (machine := self._region(region).machine(instance_id)) is not None:
            machine.metadata.recommend()

    # State for assertions

    @property
    def calls(self) -> Sequence[AwsCall]:
        """Every call of the API so far, in order, including failed ones."""
        return tuple(self._api.calls)

    @property
    def actions(self) -> Sequence[str]:
        """Actions of the calls so far, in order."""
        return [call.action for call in self.calls]

    def host(self, instance_id: str, region: str = "us-east-1") -> SshHost | None:
        """Return an instance's host; None if it has none, or has not booted yet."""
        machine = self._region(region).machine(instance_id)
        return None if machine is None else machine.host

    def user_data(self, instance_id: str, region: str = "us-east-1") -> UserData:
        """Return an instance's user data; raises KeyError if it has no machine."""
        machine = self._region(region).machine(instance_id)
        if machine is None:
            raise KeyError(instance_id)
        return machine.user_data

    def instances(self, region: str = "us-east-1") -> Sequence[Mapping[str, Any]]:
        """Return every instance ever launched, as ``DescribeInstances`` does."""
        reservations = self.client("ec2", region).describe_instances()["Reservations"]
        return [each for reservation in reservations for each in reservation["Instances"]]

    def launched(self, region: str = "us-east-1") -> int:
        """Return the number of instances ever launched."""
        return self._region(region).launched

    def left(self, region: str = "us-east-1") -> Mapping[str, Sequence[str]]:
        """Return the names of resources not removed, by kind; empty for none. Waits for machines that are ending."""
        with self._api.lock:
            self._region(region).settle()
        ec2 = self.client("ec2", region)
        groups, instances = ec2.describe_security_groups()["SecurityGroups"], self.instances(region)
        found = {
            "instances": [each["InstanceId"] for each in instances if each["State"]["Name"] != "terminated"],
            "groups": [each["GroupName"] for each in groups if each["GroupName"] != "default"],
            "key pairs": [each["KeyName"] for each in ec2.describe_key_pairs()["KeyPairs"]],
            "templates": [t["LaunchTemplateName"] for t in ec2.describe_launch_templates()["LaunchTemplates"]],
            "volumes": [each["VolumeId"] for each in ec2.describe_volumes()["Volumes"]],
        }
        return {kind: names for kind, names in found.items() if names}

    def failures(self) -> Sequence[str]:
        """Return the errors of machines that did not boot."""
        return [failure for region in self._regions.values() for failure in region.failures()]

    # Implementation

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            self._regions[name] = Region(
                name,
                market=self.market,
                looks=self._looks,
                bill=self.bill,
                next_address=lambda: f"{self._network}.{next(self._hosts)}",
                make_machine=self._new_machine() if self._machines else None,
                threads=self._threads,
            )
        return self._regions[name]

    def _new_machine(self) -> Callable[..., EmulatedMachine]:
        assert self._folder is not None
        cache = self._cache or self._folder / "cache"
        return partial(EmulatedMachine, root=self._folder, port=self.ssh_port, env=self._env, cache=cache)

    def _end(self, region: Region, instance_id: str) -> None:
        with self._api.lock:
            region.end(instance_id, TAKEN_BACK)

    def _end_everything(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for client in self._clients.values():
            client.close()
        with self._api.lock:
            for region in self._regions.values():
                region.close()


def use_ec2(ec2: LocalEC2, patch: pytest.MonkeyPatch, settings: Mapping[str, Any]) -> None:
    """Set this process's credentials for ``ec2``, and the class variables of ``sky.AWS`` to ``settings``.

    pytest's ``patch`` takes both back when the test ends.
    Cached answers of an earlier instance at the same address are deleted. Its machines are as large as this one, and
    never smaller than bought.
    """
    # What an open LocalEC2 has set already, it takes back itself.
    for name, value in ec2.environment.items():
        if os.environ.get(name) != value:
            patch.setenv(name, value)
    for target, values in ((AWS, settings), (machine_size, _SIZES)):
        for name, value in values.items():
            if getattr(target, name) != value:
                patch.setattr(target, name, value)
    forget("aws", ec2.endpoint_url)


@contextlib.contextmanager
def _in_use(ec2: LocalEC2) -> Generator[None]:
    """Make pools of this process find and accept the machines of ``ec2``."""
    with _variables(ec2.environment), contextlib.ExitStack() as before:
        for target, values in ((AWS, ec2.settings), (machine_size, _SIZES)):
            for name, value in values.items():
                before.callback(setattr, target, name, getattr(target, name))
                setattr(target, name, value)
        forget("aws", ec2.endpoint_url)
        yield


def _no_default_images() -> contextlib.AbstractContextManager[None]:
    """Keep moto from making its 1,301 images for each region: 0.3 s of processor time; no pool looks for them."""
    name = "MOTO_EC2_LOAD_DEFAULT_AMIS"
    return _variables({name: os.environ.get(name) or "false"})


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables, and take them back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _session() -> Any:
    """Return the process's session: loading the services' descriptions costs half a second."""
    import boto3

    return boto3.Session(aws_access_key_id="test", aws_secret_access_key="test")  # noqa: S106 - moto takes any


def _forget_everything() -> None:
    """Reset moto, whose state is shared by the whole process."""
    from moto.backends import get_backend

    for service in ("ec2", "iam", "s3", "ssm", "sts"):
        if f"moto.{service}.models" in sys.modules:
            get_backend(cast("Any", service)).reset()
