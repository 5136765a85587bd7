"""Instances of an emulated region: moto's records, each with a real host of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from werkzeug import Response

from skyward.errors import ConfigurationError
from skyward.testing.aws.ec2_market import IMAGES, Market
from skyward.testing.bill import Bill, Tariff
from skyward.testing.hosts import SshHost, share_cache
from skyward.testing.loopback import serving

METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable of AWS's libraries with the URL of another metadata service."""

_TIMER = re.compile(r"^(?:sh -c )?life=(\d+)$.*--on-active=.*\bshutdown\b", re.DOTALL | re.MULTILINE)
POWER_OFF_PATH: Final = "/power-off"
_SHUTDOWN = re.compile(r"\bshutdown\b.*\s\+(\d+)")
_TOKEN_TTL = "HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS"  # noqa: S105 - a header's name
_TOKEN = "HTTP_X_AWS_EC2_METADATA_TOKEN"  # noqa: S105 - a header's name
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserData:
    """The directives of cloud-config that the emulation reads.

    Attributes:
        host_key: private host key of the machine; empty for a generated one.
        authorized_keys: public keys that may log in.
        shutdown_min: minutes until the machine shuts itself down; None means never.
        commands: its commands, in order. None is run.
    """

    host_key: str = ""
    authorized_keys: tuple[str, ...] = ()
    shutdown_min: float | None = None
    commands: tuple[str, ...] = ()


def read_user_data(text: str) -> UserData:
    """Parse an instance's user data.

    Raises:
        ConfigurationError: it is no cloud-config.
    """
    import yaml

    if not text.strip():
        return UserData()
    content = yaml.safe_load(text)
    if not text.startswith("#cloud-config\n") or not isinstance(content, Mapping):
        raise ConfigurationError(f"user data is no cloud-config: {text[:80]!r}")
    config = cast("Mapping[str, Any]", content)
    commands = tuple(_command(each) for name in ("bootcmd", "runcmd") for each in config.get(name, ()))
    minutes = [each for command in commands if (each := _shutdown_min(command)) is not None]
    return UserData(
        host_key=config.get("ssh_keys", {}).get("ed25519_private", ""),
        authorized_keys=tuple(config.get("ssh_authorized_keys", ())),
        shutdown_min=minutes[0] if minutes else None,
        commands=commands,
    )


def _shutdown_min(command: str) -> float | None:
    """Return the minutes after which the command shuts the machine down, by a systemd timer or ``shutdown`` itself."""
    if timer := _TIMER.search(command):
        return int(timer[1]) / 60
    return float(found[1]) if (found := _SHUTDOWN.search(command)) else None


def _command(entry: str | Sequence[str]) -> str:
    return entry if isinstance(entry, str) else " ".join(entry)


class Metadata:
    """Metadata service, version 2: every answer requires a token. A WSGI application.

    It also serves the substitute for ``shutdown -h now`` of its machine.

    Attributes:
        facts: constant answers, by path below ``/latest/``.
        notice: announcement of a preemption; None for none.
        hint: rebalance recommendation; None for none.
    """

    def __init__(self, facts: Mapping[str, str], power_off: Callable[[], None]) -> None:
        self.facts = dict(facts)
        self._power_off = power_off
        self.notice: str | None = None
        self.hint: str | None = None
        self._token = os.urandom(12).hex()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        status, text = self._answer(environ)
        return Response(text, status)(environ, start_response)

    def interrupt(self, in_s: float) -> None:
        """Announce preemption in ``in_s`` seconds."""
        self.notice = json.dumps({"action": "terminate", "time": _time(in_s)})

    def recommend(self) -> None:
        """Announce that preemption has become more likely."""
        self.hint = json.dumps({"noticeTime": _time(0)})

    def _answer(self, environ: Mapping[str, Any]) -> tuple[int, str]:
        path = environ["PATH_INFO"]
        if path == POWER_OFF_PATH:
            self._power_off()
            return 200, ""
        if path == "/latest/api/token":
            granted = environ["REQUEST_METHOD"] == "PUT" and environ.get(_TOKEN_TTL, "").isdigit()
            return (200, self._token) if granted else (400, "")
        if environ.get(_TOKEN) != self._token:
            return 401, ""
        news = {
            "meta-data/spot/instance-action": self.notice,
            "meta-data/events/recommendations/rebalance": self.hint,
        }
        found = (self.facts | news).get(path.removeprefix("/latest/"))
        return (404, "") if found is None else (200, found)


def _time(in_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True, kw_only=True, eq=False)
class EmulatedMachine:
    """One machine, from boot to its end. Verbs block and are thread-safe.

    Attributes:
        id: the instance's id, and the name of its folder.
        root: folder of all machines.
        address: its address.
        port: port of its sshd.
        user_data: its user data.
        facts: constant answers of its metadata service, see :class:`Metadata`.
        env: additional environment of sessions.
        cache: folder of environments, shared by all machines.
        switched_off: called when the machine has shut itself down.
    """

    id: str
    root: Path
    address: str
    port: int
    user_data: UserData
    facts: Mapping[str, str]
    env: Mapping[str, str]
    cache: Path
    switched_off: Callable[[], None]
    metadata: Metadata = field(init=False)
    host: SshHost | None = None
    _running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _timer: threading.Timer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def __post_init__(self) -> None:
        self.metadata = Metadata(self.facts, self._switch_off)

    def boot(self) -> None:
        """Boot it, the timer of its user data first. Does nothing once it has ended."""
        with self._lock:
            if self._ended:
                return
            if self.user_data.shutdown_min is not None:
                self._timer = threading.Timer(60.0 * self.user_data.shutdown_min, self.switched_off)
                self._timer.daemon = True
                self._timer.start()
            url = self._running.enter_context(serving(self.metadata, f"metadata-{self.address}", self.address))
            self.host = self._running.enter_context(self._new_host(url))

    def elapse(self, minutes: int) -> None:
        """Shut it down if its timer is armed, and no longer than ``minutes``."""
        with self._lock:
            due = self._timer is not None and (self.user_data.shutdown_min or 0) <= minutes
        if due:
            self.switched_off()

    def _switch_off(self) -> None:
        """Shut it down from within, in a thread, so that the request is still answered."""
        threading.Thread(target=self.switched_off, name=f"power-off-{self.address}", daemon=True).start()

    def end(self) -> None:
        """End it with every process on it. Idempotent."""
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()
                if self._timer is not threading.current_thread():
                    self._timer.join(_JOIN_S)
            self._running.close()

    def _new_host(self, metadata_url: str) -> SshHost:
        """Return the host, which has only the keys of its user data."""
        folder = self.root / self.id
        folder.mkdir(parents=True, mode=0o700)
        if self.user_data.host_key:
            (folder / "host_key").touch(mode=0o600)
            (folder / "host_key").write_text(self.user_data.host_key, encoding="utf-8")
        env = dict(self.env) | {METADATA_VARIABLE: metadata_url}
        host = SshHost(folder, address=self.address, client_key=folder / "nobodys_key", env=env)
        host.port = self.port
        keys = "".join(f"{key}\n" for key in self.user_data.authorized_keys)
        host.authorized_keys.write_text(keys, encoding="utf-8")
        share_cache(host.home, self.cache)
        return host


ENDED_BY_USER: Final = "Client.UserInitiatedShutdown"
ENDED_BY_ITSELF: Final = "Client.InstanceInitiatedShutdown"
TAKEN_BACK: Final = "Server.SpotInstanceTermination"
BROKEN: Final = "Server.InternalError"
_LEAST_BILLED_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Delays of an instance's state changes, in number of times that it is described.

    Attributes:
        unseen: looks at which a new instance is not found.
        pending: looks at which it is pending before it runs.
        ending: looks at which it is shutting down before it is terminated.
    """

    unseen: int = 0
    pending: int = 1
    ending: int = 1


@dataclass(slots=True, eq=False)
class _Tracked:
    """Instance of moto's, with its machine and its delays."""

    instance: Any
    address: str
    public: bool
    unseen: int
    pending: int
    ending: int
    machine: EmulatedMachine | None = None
    booting: Future[None] | None = None
    reason: str = ""
    over: Future[None] | None = None


class Region:
    """Region that replaces some verbs of moto's backend. Not thread-safe: callers hold a lock around every call.

    Args:
        name: such as ``"us-east-1"``.
        market: types, prices and capacity.
        looks: delays of state changes.
        bill: bills instances from their launch until their end begins.
        next_address: returns a new address for an instance.
        make_machine: creates machines; None for instances without machines.
        threads: threads in which machines boot and end.
    """

    def __init__(
        self,
        name: str,
        *,
        market: Market,
        looks: Looks,
        bill: Bill,
        next_address: Callable[[], str],
        make_machine: Callable[..., EmulatedMachine] | None,
        threads: ThreadPoolExecutor,
    ) -> None:
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.ec2.models import ec2_backends

        self.name = name
        self.market = market
        self.looks = looks
        self.bill = bill
        self.backend: Any = ec2_backends[DEFAULT_ACCOUNT_ID][name]
        self._original: Any = type(self.backend)
        self._next_address = next_address
        self._make_machine = make_machine
        self._threads = threads
        self._tracked: dict[str, _Tracked] = {}
        for verb in (
            self.run_instances,
            self.terminate_instances,
            self.delete_security_group,
            self.describe_instance_types,
            self.describe_instance_type_offerings,
        ):
            setattr(self.backend, verb.__name__, verb)
        _publish_images(self.backend)

    def machine(self, instance_id: str) -> EmulatedMachine | None:
        """Return an instance's machine; None if it has none."""
        return self._tracked[instance_id].machine if instance_id in self._tracked else None

    def machines(self) -> Sequence[EmulatedMachine]:
        """Return the machines of all instances that have one."""
        return [each.machine for each in self._tracked.values() if each.machine is not None]

    @property
    def launched(self) -> int:
        """Number of instances ever launched."""
        return len(self._tracked)

    def offered(self) -> Sequence[tuple[str, str]]:
        """Return every available type, with each zone that has it."""
        found = self.describe_instance_type_offerings("availability-zone")
        return [(each["InstanceType"], each["Location"]) for each in found]

    def running(self) -> Sequence[tuple[str, str, bool]]:
        """Return type, zone and market (True is spot) of every instance that counts towards capacity."""
        alive = [each.instance for each in self._tracked.values() if not each.reason]
        return [(each.instance_type, each.placement.zone, each.lifecycle == "spot") for each in alive]

    def zone_of(self, subnet_id: str | None) -> str:
        """Return the zone of a subnet; without one the region's first zone."""
        return self.backend.get_subnet(subnet_id).availability_zone if subnet_id else f"{self.name}a"

    # Verbs that moto's handlers call

    def describe_instance_types(self, instance_types: Sequence[str] = (), filters: Any = None) -> list[Any]:
        """Return the types that the market has."""
        for name in instance_types:
            self._check_type(name)
        found = self._original.describe_instance_types(self.backend, instance_types, filters)
        return [each for each in found if each["InstanceType"] in self.market.prices]

    def describe_instance_type_offerings(self, location_type: str | None = None, filters: Any = None) -> list[Any]:
        """Return the offerings of types that the market has."""
        found = self._original.describe_instance_type_offerings(self.backend, location_type, filters)
        return [each for each in found if each["InstanceType"] in self.market.prices]

    def run_instances(self, image_id: str, count: int, *args: Any, **kwargs: Any) -> Any:
        """Launch all requested machines or none, within the market's limits."""
        from moto.ec2.exceptions import EC2ClientError

        subnets = [kwargs.get("subnet_id"), *(nic.get("SubnetId") for nic in kwargs.get("nics", ()))]
        zone = kwargs.get("placement") or self.zone_of(next((each for each in subnets if each), None))
        spot = bool(kwargs.get("instance_market_options"))
        self._check_type(kwargs["instance_type"])
        code = self.market.refusal(kwargs["instance_type"], zone, spot=spot, running=self.running())
        if code:
            kind = "spot" if spot else "on-demand"
            raise EC2ClientError(code, f"We have no sufficient {kind} {kwargs['instance_type']} capacity in {zone}.")
        reservation = self._original.run_instances(self.backend, image_id, count, *args, **kwargs)
        for instance in reservation.instances:
            self._adopt(instance)
        return reservation

    def terminate_instances(self, instance_ids: list[str]) -> list[tuple[Any, Any]]:
        """Begin to terminate instances; one unknown id fails the whole call."""
        from moto.ec2.models.instances import InstanceState

        found = self.backend.get_multi_instances_by_id(instance_ids)
        before = [(each, InstanceState(each._state.name, each._state.code)) for each in found]  # noqa: SLF001
        for instance in found:
            self.end(instance.id, ENDED_BY_USER)
        return before

    def delete_security_group(self, name: str | None = None, group_id: str | None = None) -> None:
        """Delete a security group, unless an instance is in it."""
        from moto.ec2.exceptions import DependencyViolationError

        if any(group_id in _groups(each.instance) for each in self._tracked.values() if not self._is_over(each)):
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
        self._original.delete_security_group(self.backend, name, group_id)

    # Life of instances

    def end(self, instance_id: str, reason: str) -> None:
        """Begin an instance's shutdown for ``reason``; does nothing if it has begun."""
        tracked = self._tracked[instance_id]
        if tracked.reason:
            return
        tracked.reason = reason
        self.bill.end(instance_id)
        _set_state(tracked.instance, "shutting-down", 32)
        if tracked.machine is not None:
            tracked.over = self._threads.submit(tracked.machine.end)

    def look(self, instance_ids: Sequence[str]) -> Sequence[str]:
        """Count a look at these instances, all if empty, which advances their states; return the hidden ones."""
        ids = instance_ids or tuple(self._tracked)
        known = [self._tracked[each] for each in ids if each in self._tracked]
        hidden = [each.instance.id for each in known if each.unseen > 0]
        for tracked in known:
            self._go_on(tracked)
        return hidden

    def settle(self) -> None:
        """Complete every termination that has begun."""
        for tracked in self._tracked.values():
            if tracked.reason:
                tracked.ending = 0
                if tracked.over is not None:
                    tracked.over.result()
                self._go_on(tracked)

    def close(self) -> None:
        """End every machine and wait for that."""
        for instance_id in self._tracked:
            self.end(instance_id, ENDED_BY_USER)
        self.settle()

    def failures(self) -> Iterator[str]:
        """Yield the errors of machines that did not boot."""
        for tracked in self._tracked.values():
            if error := _boot_error(tracked):
                yield f"{tracked.instance.id}: {error}"

    def _check_type(self, name: str) -> None:
        from moto.ec2.exceptions import InvalidInstanceTypeError

        if name not in self.market.prices:
            raise InvalidInstanceTypeError(name, error_type="InvalidInstanceType")

    def _adopt(self, instance: Any) -> None:
        address = self._next_address()
        nic = instance.nics[0]
        nic.private_ip_address, nic.public_ip = address, None
        nic.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": address}]
        looks = self.looks
        tracked = _Tracked(instance, address, nic.public_ip_auto_assign, looks.unseen, looks.pending, looks.ending)
        self._tracked[instance.id] = tracked
        self.bill.begin(instance.id, Tariff(usd_per_hour=self._price(instance), minimum_s=_LEAST_BILLED_S))
        _set_state(instance, "pending", 0)
        if self._make_machine is not None:
            tracked.machine = self._make_machine(
                id=instance.id,
                address=address,
                user_data=read_user_data((instance.user_data or b"").decode()),
                facts=self._facts(instance, address),
                switched_off=partial(self._switched_off, tracked),
            )
            tracked.booting = self._threads.submit(tracked.machine.boot)

    def _price(self, instance: Any) -> float:
        kind, zone = instance.instance_type, instance.placement.zone
        known = self.market.spot_price(kind, zone) if instance.lifecycle == "spot" else self.market.prices[kind]
        return known or 0.0

    def _facts(self, instance: Any, address: str) -> Mapping[str, str]:
        return {
            "meta-data/instance-id": instance.id,
            "meta-data/instance-type": instance.instance_type,
            "meta-data/local-ipv4": address,
            "meta-data/placement/availability-zone": instance.placement.zone,
            "meta-data/placement/region": self.name,
        }

    def _switched_off(self, tracked: _Tracked) -> None:
        """Stop or terminate an instance after its own shutdown, as ``InstanceInitiatedShutdownBehavior`` states."""
        if tracked.instance.instance_initiated_shutdown_behavior == "terminate":
            self.end(tracked.instance.id, ENDED_BY_ITSELF)
        elif tracked.machine is not None:
            tracked.over = self._threads.submit(tracked.machine.end)
            _set_state(tracked.instance, "stopped", 80)
            self.bill.end(tracked.instance.id)

    def _go_on(self, tracked: _Tracked) -> None:
        if tracked.unseen > 0:
            tracked.unseen -= 1
        if error := _boot_error(tracked):  # else a client would wait for the machine until its patience ends
            self.end(tracked.instance.id, f"{BROKEN}: {error}")
        if tracked.reason and not self._is_over(tracked):
            if tracked.ending > 0:
                tracked.ending -= 1
            elif tracked.over is None or tracked.over.done():
                _terminated(tracked.instance, tracked.reason)
        elif tracked.instance.state == "pending":
            if tracked.pending > 0:
                tracked.pending -= 1
            else:
                _set_state(tracked.instance, "running", 16)
                tracked.instance.nics[0].public_ip = tracked.address if tracked.public else None

    def _is_over(self, tracked: _Tracked) -> bool:
        return tracked.instance.state == "terminated"


def _boot_error(tracked: _Tracked) -> BaseException | None:
    booting = tracked.booting
    return booting.exception() if booting is not None and booting.done() else None


def _terminated(instance: Any, reason: str) -> None:
    instance.terminate()
    for nic in instance.nics.values():
        instance.ec2_backend.enis.pop(nic.id, None)
    instance.state_reason.code = reason.partition(":")[0]
    instance.state_reason.message = f"{reason}: the instance was terminated"


def _set_state(instance: Any, name: str, code: int) -> None:
    state = instance.instance_state
    state.name, state.code = name, code


def _groups(instance: Any) -> set[str]:
    on_nics = (group.id for nic in instance.nics.values() for group in nic.group_set)
    return {group.id for group in instance.security_groups} | set(on_nics)


def _publish_images(backend: Any) -> None:
    from moto.ec2.models.amis import Ami

    class SizedAmi(Ami):
        size_gib = 0

        @property
        def block_device_mappings(self) -> list[dict[str, Any]]:
            """Return the block devices with the image's own size; moto's is the same for all."""
            (root,) = super().block_device_mappings
            return [root | {"Ebs": root["Ebs"] | {"VolumeSize": self.size_gib, "VolumeType": "gp3"}}]

    for image in IMAGES:
        ami: Any = SizedAmi(
            backend,
            image.id,
            name=image.name,
            owner_id=image.owner,
            public=True,
            virtualization_type="hvm",
            architecture=image.architecture,
            hypervisor="xen",
            root_device_type="ebs",
            root_device_name="/dev/sda1",
        )
        ami.size_gib = image.volume_gib
        backend.amis[image.id] = ami
