"""EC2 on this machine: moto's API with faults, scarce capacity and prices, and a real host for every instance."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from skyward.errors import ConfigurationError, PoolStateError
from skyward.providers.aws.account import forget
from skyward.providers.aws.provider import AWS
from skyward.testing.aws.api_messages import AwsCall
from skyward.testing.aws.api_server import ApiServer, AwsFault, Faults
from skyward.testing.aws.ec2_market import Market
from skyward.testing.aws.emulated_machine import METADATA_VARIABLE, POWER_OFF_PATH, EmulatedMachine, UserData, serve
from skyward.testing.aws.instant_fleets import Fleets
from skyward.testing.aws.region import TAKEN_BACK, Looks, Region
from skyward.testing.hosts import SshHost, share_cache

if TYPE_CHECKING:
    import pytest  # for its users' annotation only: this module works without it

__all__ = ["LocalEC2", "use_ec2"]

_SSH_PORT: Final = 22022
_NETWORKS: Final = 250
_THREADS: Final = 8
_POWER_OFF: Final = (
    f"import os, urllib.request; urllib.request.urlopen(os.environ[{METADATA_VARIABLE!r}] + {POWER_OFF_PATH!r}, b'')"
)
"""What stands in for ``shutdown -h now`` on machines: as they share this one's, it must not be that."""


class LocalEC2:
    """AWS, as far as Skyward needs it, on loopback addresses: a context manager; one at a time in a process.

    The API is moto's, over HTTP, for every service that moto has. What moto lacks is added: capacity, prices, quotas,
    images, client tokens that are honoured, states that take their time, faults. With ``machines=True`` each instance
    is an :class:`~skyward.testing.hosts.SshHost` at an address of its own, which is its private and its public one:
    it shows the host key and lets in the user key of its user data, honours a ``shutdown -h +N`` there, and is told of
    preemption by a metadata service of its own, whose place is in ``AWS_EC2_METADATA_SERVICE_ENDPOINT``. It runs no
    command of its user data. Security groups are kept, not enforced.

    Args:
        folder: the machines' own; needed with ``machines``.
        machines: whether instances are machines, or entries only.
        market: types, prices, capacity, quotas; may be changed at any time.
        looks: how slowly states follow.
        cache: where all machines keep environments; None means in ``folder``.
        env: what their sessions find in the environment.
        minute_s: how long a minute of their shutdown timers lasts.
        block: addresses are ``127.<block>.x.y``.

    Attributes:
        market: as given.
        user: who can log in on machines.
        ssh_port: where machines listen.

    Raises:
        ConfigurationError: there are machines without a folder; no free addresses are left.
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
        minute_s: float = 60.0,
        block: int = 72,
    ) -> None:
        if machines and folder is None:
            raise ConfigurationError("machines need a folder")
        self.market = market or Market()
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.ssh_port = _SSH_PORT
        self._folder = folder
        self._machines = machines
        self._looks = looks or Looks()
        self._cache = cache
        self._env = dict(env or {})
        self._minute_s = minute_s
        self._block = block
        self._faults = Faults()
        self._regions: dict[str, Region] = {}
        self._clients: dict[tuple[str, str], Any] = {}
        fleets = Fleets(lambda region: self.client("ec2", region))
        self._api = ApiServer(self._faults, self.market, fleets, self._region, client_address="127.0.0.1")
        self._timers: list[threading.Timer] = []
        self._stack = contextlib.ExitStack()
        self._network = ""
        self._hosts = itertools.count(2)
        self._front = self._back = ""

    def __enter__(self) -> Self:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        if self._api.moto is not None:
            raise PoolStateError("this LocalEC2 is already open")
        _forget_everything()
        if self._folder is not None and self._machines:
            share_cache(self._folder / "home", self._cache or self._folder / "cache")
        self._api.moto = DomainDispatcherApplication(create_backend_app)
        with contextlib.ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="local-ec2"))
            self._network = stack.enter_context(_network(self._block, self.ssh_port))
            self._front = stack.enter_context(_serving(self._api, "local-ec2-api"))
            self._back = stack.enter_context(_serving(self._api.moto, "local-ec2-moto"))
            stack.callback(self._end_everything)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._api.moto = None

    # What a client needs

    @property
    def endpoint_url(self) -> str:
        """Where the API answers, faults included."""
        return self._front

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that make AWS's libraries find credentials here, and nowhere else."""
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
        """What is different here for a client, by the names of the class variables of ``sky.AWS``."""
        home = (self._folder or Path("/nonexistent")) / "home"
        address_url = f"{self.endpoint_url}/checkip"
        power_off = ("python", "-c", _POWER_OFF)
        here = {"user": self.user, "port": self.ssh_port, "home": str(home)}
        return here | {"address_url": address_url, "power_off": power_off}

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """A client of boto3's that goes past faults, and is not counted among the calls."""
        if (service, region) not in self._clients:
            self._clients[service, region] = _session().client(service, region_name=region, endpoint_url=self._back)
        return self._clients[service, region]

    # What a test does to it

    def fail(self, fault: AwsFault, *, action: str = "", nth: int = 1, times: int = 1) -> None:
        """Have calls fail: the ``nth`` from now on, of one action or of all, and ``times - 1`` after it."""
        self._faults.add(fault, action=action, nth=nth, times=times)

    def heal(self) -> None:
        """Have no call fail any more."""
        self._faults.clear()

    def preempt(self, instance_id: str, *, in_s: float, region: str = "us-east-1") -> None:
        """Take a spot instance back in ``in_s`` seconds; its metadata service says so now.

        Raises:
            ConfigurationError: it is on demand.
        """
        place = self._region(region)
        (found,) = place.backend.get_multi_instances_by_id([instance_id])
        if found.lifecycle != "spot":
            raise ConfigurationError(f"{instance_id} is on demand: it is not taken back")
        if (machine := place.machine(instance_id)) is not None:
            machine.metadata.interrupt(in_s)
        timer = threading.Timer(in_s, self._end, (place, instance_id))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def hint(self, instance_id: str, region: str = "us-east-1") -> None:
        """Have its metadata service say that preemption has become more likely."""
        if (machine := self._region(region).machine(instance_id)) is not None:
            machine.metadata.recommend()

    # What a test may ask

    @property
    def calls(self) -> Sequence[AwsCall]:
        """Every call of the API so far, in order, those that failed too."""
        return tuple(self._api.calls)

    @property
    def actions(self) -> Sequence[str]:
        """The actions of the calls so far, in order."""
        return [call.action for call in self.calls]

    def host(self, instance_id: str, region: str = "us-east-1") -> SshHost | None:
        """The host that an instance is; None if there is none, or it has not booted yet."""
        machine = self._region(region).machine(instance_id)
        return None if machine is None else machine.host

    def user_data(self, instance_id: str, region: str = "us-east-1") -> UserData:
        """What an instance was told at its first boot; raises KeyError if it is no machine."""
        machine = self._region(region).machine(instance_id)
        if machine is None:
            raise KeyError(instance_id)
        return machine.user_data

    def instances(self, region: str = "us-east-1") -> Sequence[Mapping[str, Any]]:
        """Every instance there ever was, as EC2 describes it."""
        reservations = self.client("ec2", region).describe_instances()["Reservations"]
        return [each for reservation in reservations for each in reservation["Instances"]]

    def launched(self, region: str = "us-east-1") -> int:
        """How many instances there ever were."""
        return self._region(region).launched

    def left(self, region: str = "us-east-1") -> Mapping[str, Sequence[str]]:
        """What somebody has made and not removed, by kind; empty when all is gone. Waits for what is ending."""
        with self._api.lock:
            self._region(region).settle()
        ec2 = self.client("ec2", region)
        groups = ec2.describe_security_groups()["SecurityGroups"]
        found = {
            "instances": [each["InstanceId"] for each in self.instances(region) if _is_alive(each)],
            "groups": [each["GroupName"] for each in groups if each["GroupName"] != "default"],
            "key pairs": [each["KeyName"] for each in ec2.describe_key_pairs()["KeyPairs"]],
            "templates": [t["LaunchTemplateName"] for t in ec2.describe_launch_templates()["LaunchTemplates"]],
            "volumes": [each["VolumeId"] for each in ec2.describe_volumes()["Volumes"]],
        }
        return {kind: names for kind, names in found.items() if names}

    def failures(self) -> Sequence[str]:
        """Why machines did not boot."""
        return [failure for region in self._regions.values() for failure in region.failures()]

    # How it works

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            self._regions[name] = Region(
                name,
                market=self.market,
                looks=self._looks,
                next_address=lambda: f"{self._network}.{next(self._hosts)}",
                make_machine=self._machine if self._machines else None,
                threads=self._threads,
            )
        return self._regions[name]

    def _machine(
        self, instance_id: str, address: str, user_data: UserData, facts: Mapping[str, str], off: Callable[[], None]
    ) -> EmulatedMachine:
        assert self._folder is not None
        return EmulatedMachine(
            folder=self._folder / instance_id,
            address=address,
            port=self.ssh_port,
            user_data=user_data,
            facts=facts,
            env=self._env,
            cache=self._cache or self._folder / "cache",
            minute_s=self._minute_s,
            switched_off=off,
        )

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
    """Have this process's ``sky.AWS`` find its credentials there, and have these class variables.

    What an earlier one has answered at the same address is forgotten.
    """
    for name, value in ec2.environment.items():
        patch.setenv(name, value)
    for name, value in settings.items():
        patch.setattr(AWS, name, value)
    forget(ec2.endpoint_url)


@cache
def _session() -> Any:
    """One for the process: what it has read of the services' descriptions costs half a second."""
    import boto3

    return boto3.Session(aws_access_key_id="test", aws_secret_access_key="test")  # noqa: S106 - moto takes any


def _forget_everything() -> None:
    """What others have left in moto, which has one memory for all of a process."""
    from moto.backends import get_backend

    for service in ("ec2", "iam", "s3", "ssm", "sts"):
        if f"moto.{service}.models" in sys.modules:
            get_backend(cast("Any", service)).reset()


def _is_alive(instance: Mapping[str, Any]) -> bool:
    return instance["State"]["Name"] != "terminated"


@contextlib.contextmanager
def _serving(application: Any, name: str) -> Generator[str]:
    server, thread = serve(application, "127.0.0.1", name)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def _network(block: int, port: int) -> Generator[str]:
    """Addresses that no other test run uses: whoever holds the first one's port has them all."""
    for number in range(_NETWORKS):
        with socket.socket() as held:
            try:
                held.bind((f"127.{block}.{number}.1", port))
            except OSError:
                continue
            yield f"127.{block}.{number}"
            return
    raise ConfigurationError(f"all of 127.{block}.0.0/16 is taken")
