"""EC2's record of a machine as Skyward's (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from skyward.providers.aws.tags import HOST_KEY_TAG, KEY_TAG, POOL_TAG, read_tags
from skyward.providers.base import Instance, InstanceState, Offer
from skyward.request.instance import InstanceSpec
from skyward.request.metadata import PreemptionWatch
from skyward.transport.access import SSHAccess

__all__ = ["MINIMUM_BILLED_S", "SPOT_WATCH", "Record", "gone", "parse_record"]

MINIMUM_BILLED_S: Final = 60.0
"""Machines are billed by the second, but for a minute at least."""

SPOT_WATCH: Final = PreemptionWatch(
    endpoint="http://169.254.169.254",
    endpoint_env="AWS_EC2_METADATA_SERVICE_ENDPOINT",
    token_path="/latest/api/token",  # noqa: S106 - a path
    token_request_headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
    token_header="X-aws-ec2-metadata-token",  # noqa: S106 - a header's name
    notice_path="/latest/meta-data/spot/instance-action",
    notice_time_field="time",
    hint_path="/latest/meta-data/events/recommendations/rebalance",
    interval_s=5.0,
)
"""Where a spot machine is told that it will be taken back, two minutes before."""

_STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.FAILED,
    "terminated": InstanceState.GONE,
}
_DOOMED: Final = ("shutting-down", "terminated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What EC2 says of a machine.

    Attributes:
        id: ``"i-…"``.
        key: its ledger key; empty if it is not tagged.
        pool_id: likewise.
        host_key: the public key that it proves itself by; empty if it is not tagged.
        state: EC2's word.
        reason: why it is in that state, if EC2 says so.
        type: its machine type.
        cpu: its cores.
        zone: where it is.
        region: likewise.
        spot: whether it is on spot.
        public_address: None if it has none, or none yet.
        private_address: likewise.
    """

    id: str
    key: str
    pool_id: str
    host_key: str
    state: str
    reason: str
    type: str
    cpu: int
    zone: str
    region: str
    spot: bool
    public_address: str | None
    private_address: str | None

    @property
    def ending(self) -> bool:
        """Whether nobody needs to end it any more."""
        return self.state in _DOOMED

    def instance(self, offer: Offer | None, access: Callable[[Record], SSHAccess | None]) -> Instance:
        """Skyward's record; ``offer`` is what it was launched as, where that is known better."""
        spec = InstanceSpec(name=self.type, cpu=self.cpu, memory_gib=0.0)
        known = offer or Offer(
            spec=spec, region=self.region, zone=self.zone, spot=self.spot, minimum_billed_s=MINIMUM_BILLED_S
        )
        return Instance(
            id=self.id,
            key=self.key,
            state=_STATES.get(self.state, InstanceState.PENDING),
            offer=known,
            access=access(self) if self.state == "running" else None,
            watch=SPOT_WATCH if self.spot else None,
            reason=self.reason,
        )


def parse_record(row: Mapping[str, Any], region: str) -> Record:
    """One of ``DescribeInstances``' or ``RunInstances``' instances."""
    tags = read_tags(row)
    zone = str(row.get("Placement", {}).get("AvailabilityZone", ""))
    reason: Mapping[str, Any] = row.get("StateReason") or {}
    options: Mapping[str, Any] = row.get("CpuOptions") or {}
    return Record(
        id=str(row["InstanceId"]),
        key=tags.get(KEY_TAG, ""),
        pool_id=tags.get(POOL_TAG, ""),
        host_key=tags.get(HOST_KEY_TAG, ""),
        state=str(row.get("State", {}).get("Name", "pending")),
        reason=": ".join(str(reason[part]) for part in ("Code", "Message") if reason.get(part)),
        type=str(row.get("InstanceType", "")),
        cpu=int(options.get("CoreCount", 0)) * int(options.get("ThreadsPerCore", 1)),
        zone=zone,
        region=region,
        spot=row.get("InstanceLifecycle") == "spot",
        public_address=row.get("PublicIpAddress") or None,
        private_address=row.get("PrivateIpAddress") or None,
    )


def gone(instance_id: str) -> Instance:
    """A machine that EC2 does not know, or not any more."""
    nothing = Offer(spec=InstanceSpec(name="", cpu=0, memory_gib=0.0))
    return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=nothing)
