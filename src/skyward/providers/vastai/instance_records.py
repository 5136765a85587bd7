"""VastAI's records of instances, and the body of the creating call (pure)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from skyward.providers._common.boot.container_boot import ContainerBoot
from skyward.providers._common.rented_machines import MachineRecord, labels_of
from skyward.providers.base import InstanceState, Offer
from skyward.providers.vastai.ask_market import MALFORMED, Ask, region_of, spec_of
from skyward.providers.vastai.ask_terms import AskTerms
from skyward.request.instance import InstanceSpec

__all__ = ["PORT", "STATES", "create_body", "parse_record"]

PORT: Final = 10022
"""Port of Skyward's sshd in a container."""

STATES: Final[Mapping[str | None, InstanceState]] = {
    **dict.fromkeys((None, "created", "loading", "rebooting"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(("stopped", "exited", "frozen", "offline", "unknown"), InstanceState.FAILED),
}
"""State of an instance, by its ``actual_status``; any other word is an instance that is not ready."""

_NEVER_RUNS: Final = re.compile(
    r"OCI runtime create failed|failed to create|pull access denied|manifest unknown|manifest for .* not found|"
    r"unauthorized|no space left|no basic auth|toomanyrequests",
    re.IGNORECASE,
)
"""Messages of instances that do not come up, although their status goes on as if they did."""


def create_body(ask: Ask, terms: AskTerms, name: str, boot: ContainerBoot, *, spot: bool) -> Mapping[str, Any]:
    """Return the body of the call that rents an ask, by a bid or on demand.

    Args:
        ask: the ask.
        terms: terms of the rental.
        name: the instance's label.
        boot: orders of the container.
        spot: True for a bid.
    """
    return {
        "client_id": "me",
        "image": terms.image_for(gpu=ask.spec.accelerator_count > 0),
        "disk": terms.disk_gb,
        "label": name,
        "runtype": "args",  # any other one starts the vendor's sshd, whose keys the vendor rewrites
        "args": list(boot.arguments),
        "env": {f"-p {PORT}:{PORT}": "1", **boot.variable},
        "target_state": "running",
        "cancel_unavail": True,  # without it an ask that is gone becomes a stopped contract, whose disk bills
        **({"price": ask.bid} if spot else {}),
        **({"image_login": terms.image_login} if terms.image_login else {}),
    }


def parse_record(row: Mapping[str, Any]) -> MachineRecord | None:
    """Parse one instance of a list; None for one of somebody else."""
    if not (labels := labels_of(row.get("label"))):
        return None
    status, message = cast("str | None", row.get("actual_status")), str(row.get("status_msg") or "").strip()
    stopped = {row.get(name) for name in ("cur_state", "next_state", "intended_status")} == {"stopped"}
    state = InstanceState.FAILED if stopped else STATES.get(status, InstanceState.PENDING)
    if state is InstanceState.PENDING and _NEVER_RUNS.search(message):
        state = InstanceState.FAILED
    outbid = stopped and row.get("is_bid") is True  # "exited" alone: its main process ended, which is no host's doing
    reason = "outbid: the host runs somebody else's bid" if outbid else f"{status}: {message[:200]}".rstrip(": ")
    port = _public_port(row)
    return MachineRecord(
        id=str(row["id"]),
        key=labels[1],
        pool_id=labels[0],
        state=state,
        offer=_offer(row),
        public_address=str(row.get("public_ipaddr") or "").strip() if port else "",
        public_port=port,
        host=str(row.get("machine_id") or ""),
        reason=reason if state is InstanceState.FAILED else "",
        preempted=outbid,
    )


def _public_port(row: Mapping[str, Any]) -> int:
    """Return the port of the host that is mapped to sshd; 0 while there is none."""
    ports = row.get("ports")
    found = cast("Mapping[str, Any]", ports).get(f"{PORT}/tcp") if isinstance(ports, dict) else None
    return next((int(each["HostPort"]) for each in found or () if str(each.get("HostPort")).isdecimal()), 0)


def _offer(row: Mapping[str, Any]) -> Offer:
    spec, price = InstanceSpec(name="", cpu=0, memory_gib=0.0), None
    with contextlib.suppress(*MALFORMED):
        spec, price = spec_of(row), float(row["dph_total"])
    return Offer(spec=spec, region=region_of(row), spot=row.get("is_bid") is True, price_per_hour=price, island=True)
