"""Account at RunPod: its key, its refusals, and its pods."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from skyward.errors import AuthenticationError, CapacityError, SkywardError, UnreachableError
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall
from skyward.providers._common.rented_machines import MachineRecord, labels_of
from skyward.providers._common.rest_client import ApiAnswer, RestClient
from skyward.providers.base import InstanceState, Offer
from skyward.providers.runpod.pod_catalogue import pod_name
from skyward.request.instance import InstanceSpec

__all__ = ["API_URL", "STATES", "TABLE", "PodAccount", "find_key"]

API_URL: Final = "https://api.runpod.io"
_KEYS_URL: Final = "https://console.runpod.io/user/settings"
_BILLING_URL: Final = "https://console.runpod.io/user/billing"

STATES: Final[Mapping[str, InstanceState]] = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.FAILED,  # stopped, by an empty balance for example; its disk is billed
    "ERROR": InstanceState.FAILED,
    "TERMINATED": InstanceState.GONE,
}
"""State of a pod, by RunPod's word for it; any other word is a pod that is not ready."""

_REASONS: Final[Mapping[str, str]] = {
    "EXITED": "RunPod stopped the pod",
    "ERROR": "its container does not start: the image may not exist, be private, or have no shell",
    "TERMINATED": "the pod was terminated",
}

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.QUOTA, status=402),
        RefusalRow(kind=RefusalKind.QUOTA, status=400, words=r"balance|insufficient funds|spend(?:ing)? limit"),
        RefusalRow(kind=RefusalKind.CAPACITY, status=400, words=r"instances? (?:\w+ )?available|capacity|out of stock"),
        RefusalRow(kind=RefusalKind.AUTH, status=403, advice=f"The key lacks a right: {_KEYS_URL}"),
    ),
    advice={
        RefusalKind.AUTH: f"Put a key of {_KEYS_URL} in RUNPOD_API_KEY, or run `runpodctl config`",
        RefusalKind.QUOTA: f"Top up the balance, or raise the spending limit: {_BILLING_URL}",
        RefusalKind.CAPACITY: "Another GPU, cloud or data center may have some: see `skyward offers`",
    },
)
"""RunPod's errors. They have no codes: the status and words have to do."""


def find_key() -> str:
    """Return the API key of the environment, else that of RunPod's own tools.

    Raises:
        AuthenticationError: there is none, or the file cannot be read; names the places.
    """
    if found := os.environ.get("RUNPOD_API_KEY", "").strip():
        return found
    path = Path.home() / ".runpod" / "config.toml"
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        settings = dict[str, Any]()
    except (OSError, ValueError) as error:
        raise AuthenticationError(
            f"RunPod: {path} cannot be read ({error}): correct it, run `runpodctl config` again, or put a key in "
            "RUNPOD_API_KEY"
        ) from error
    default = settings.get("default")  # of its Python library; its command line writes at the top
    tables = [settings, *([cast("dict[str, Any]", default)] if isinstance(default, dict) else [])]
    for table in tables:
        for name, value in table.items():
            if name.lower().replace("_", "") == "apikey" and isinstance(value, str) and value.strip():
                return value.strip()
    raise AuthenticationError(
        f"RunPod: no API key: put one of {_KEYS_URL} in RUNPOD_API_KEY, run `runpodctl config` ({path}), or pass "
        "RunPod(api_key=...)"
    )


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    parts = [str(row.get("detail") or ""), *(str(each) for each in row.get("errors") or ())]
    text = "; ".join(filter(None, parts)) or (answer.body if isinstance(answer.body, str) else "") or "no message"
    return TABLE.judge(f"{answer.status} {row.get('title') or ''}".strip(), text, status=answer.status)


def _explain(found: Refusal, call: str) -> SkywardError:
    return TABLE.explain(found, f"RunPod: {call}")


class PodAccount:
    """Pods of one account. Each bears its pool and its ledger key in its name; those of clusters are left alone.

    Args:
        url: URL of the API.
        api_key: the key; None is looked up at each call, so that a newer one counts.
        patience_s: time for which throttled and interrupted calls are repeated.

    Attributes:
        rest: the API.
    """

    def __init__(self, url: str, api_key: str | None, *, patience_s: float) -> None:
        async def authorize(*, stale: bool) -> Mapping[str, str]:  # noqa: ARG001 - a stale key is read once more
            return {"Authorization": f"Bearer {api_key or find_key()}"}

        self.rest = RestClient(
            vendor="RunPod",
            base_url=url,
            authorize=authorize,
            judge=_judge,
            explain=_explain,
            patience_s=patience_s,
        )

    async def find(self, key: str) -> MachineRecord | None:
        """Return the pod with that ledger key; None if none is listed."""
        return next((each for each in await self.listed() if each.key == key), None)

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return every pod of Skyward's in the account: one call lists them all."""
        del instance_ids, pool_id
        rows = (await self.rest.read("/v2/pods")).get("pods") or ()
        return [each for row in rows if (each := _parse_pod(row)) is not None]

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return every pod of Skyward's in the account that is not gone."""
        return [each for each in await self.records((), pool_id) if each.state is not InstanceState.GONE]

    async def create(self, body: Mapping[str, Any]) -> MachineRecord:
        """Create a pod, by one call. Raises one of :data:`~skyward.providers.base.REFUSALS` if none was made."""
        try:
            made = _parse_pod(await self.rest.create("/v2/pods", body))
        except AuthenticationError as error:
            if isinstance(error.__cause__, RefusedCall) and error.__cause__.refusal.code.startswith("403"):
                raise CapacityError(f"{error}; or the account may not use this GPU") from error.__cause__
            raise
        if made is None:
            raise UnreachableError("RunPod answered a creating call with success, and without a pod")
        return made

    async def request_end(self, machine: str) -> None:
        """Request the termination of a pod; raises the refusal."""
        await self.rest.change("DELETE", f"/v2/pods/{machine}")

    async def remove(self, pool_id: str) -> None:
        """Do nothing: a pool has nothing but pods."""


def _parse_pod(row: Any) -> MachineRecord | None:
    """Parse one pod of an answer; None for a pod of somebody else, or of a cluster."""
    pod: Mapping[str, Any] = cast("Mapping[str, Any]", row) if isinstance(row, dict) else {}
    if not (labels := labels_of(pod.get("name"))) or not pod.get("id") or pod.get("cluster"):
        return None
    status = str(pod.get("status", ""))
    state = STATES.get(status, InstanceState.PENDING)
    gpu: Mapping[str, Any] = pod.get("gpu") or {}
    cpu: Mapping[str, Any] = pod.get("cpu") or {}
    count = int(gpu.get("count") or cpu.get("vcpuCount") or 1)
    spec = InstanceSpec(name=pod_name(str(gpu.get("id") or cpu.get("id") or ""), count), cpu=0, memory_gib=0.0)
    billed = state in (InstanceState.PENDING, InstanceState.RUNNING)
    ways: Mapping[str, Any] = pod.get("ssh") or {}
    direct: Mapping[str, Any] = ways.get("direct") or {}
    return MachineRecord(
        id=str(pod["id"]),
        key=labels[1],
        pool_id=labels[0],
        state=state,
        offer=Offer(
            spec=spec,
            region=str(pod.get("dataCenterId") or ""),
            price_per_hour=(float(pod.get("cost") or 0.0) or None) if billed else None,
            island=True,
        ),
        public_address=str(direct.get("host") or "") if direct.get("port") else "",
        public_port=int(direct.get("port") or 0),
        reason=_REASONS.get(status, ""),
    )
