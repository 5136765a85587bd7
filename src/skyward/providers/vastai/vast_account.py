"""Account at VastAI: errors, key, searches, instances."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.errors import AuthenticationError, QuotaError, RateLimitError, SkywardError, UnreachableError
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall, is_kind
from skyward.providers._common.rented_machines import MachineRecord
from skyward.providers._common.rest_client import ApiAnswer, RestClient
from skyward.providers.base import REFUSALS
from skyward.providers.vastai.instance_records import parse_record

__all__ = ["API_URL", "TABLE", "VastAccount", "find_key", "instance_path"]

API_URL: Final = "https://console.vast.ai"
_LIST: Final = "/api/v1/instances/"
_PAGE: Final = 25
_DAY_S: Final = 86400
_KEYS: Final = (
    "Make a key in the console (https://cloud.vast.ai/manage-keys/) with the scopes misc, user_read, instance_read and "
    "instance_write, and put it in VAST_API_KEY or ~/.config/vastai/vast_api_key"
)
_TOP_UP: Final = "Add credit: https://cloud.vast.ai/billing/"

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(
            kind=RefusalKind.QUOTA,
            codes="search_quota_exceeded",
            advice="VastAI limits searches by the day, and no retry helps: the quota resets at 00:00 UTC, in {reset}",
        ),
        RefusalRow(kind=RefusalKind.AUTH, words="invalid user key"),
        RefusalRow(kind=RefusalKind.CAPACITY, codes="invalid_price", advice="Others bid more now: raise bid_factor"),
        RefusalRow(kind=RefusalKind.CAPACITY, codes="no_such_ask"),
        RefusalRow(kind=RefusalKind.CAPACITY, words="no_such_ask|no longer available|is not available|not your own"),
        RefusalRow(kind=RefusalKind.QUOTA, codes="missing_billing insufficient_credit", advice=_TOP_UP),
        RefusalRow(kind=RefusalKind.QUOTA, words="credit|billing", status=400, advice=_TOP_UP),
        RefusalRow(kind=RefusalKind.QUOTA, status=402, advice=_TOP_UP),
        RefusalRow(kind=RefusalKind.MISSING, codes="no_such_instance"),
        RefusalRow(kind=RefusalKind.CAPACITY, status=200),  # success: false
    ),
    advice={RefusalKind.AUTH: _KEYS},
)
"""VastAI's errors. Any part of them may be missing, and those of throttled calls are often plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _VastRefusal(Refusal):
    """Refusal of a creating call that may have made a contract all the same."""

    contract: str = ""


def find_key(given: str | None) -> str:
    """Return the key that was given, else the environment's, else that of the vendor's command line.

    Raises:
        AuthenticationError: there is none.
    """
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    if key := (given or os.environ.get("VAST_API_KEY", "")).strip():
        return key
    for path in (folder / "vastai/vast_api_key", Path.home() / ".vast_api_key"):
        if path.is_file() and (key := path.read_text(encoding="utf-8").strip()):
            return key
    raise AuthenticationError(f"no key for VastAI in VAST_API_KEY, nor in {folder}/vastai/vast_api_key. {_KEYS}")


def instance_path(instance: str) -> str:
    """Return the path of an instance's calls."""
    return f"/api/v0/instances/{instance}/"


class VastAccount:
    """Instances of one account; they bear labels, and there is nothing else to remove.

    Args:
        url: URL of the API.
        key: the account's key; None for that of the environment.
        patience_s: time for which throttled and interrupted calls are repeated.
        pace: least seconds between two calls of a route.

    Attributes:
        rest: the API.
    """

    def __init__(self, url: str, key: str | None, *, patience_s: float, pace: Mapping[str, float]) -> None:
        async def authorize(*, stale: bool) -> Mapping[str, str]:
            del stale
            return {"Authorization": f"Bearer {find_key(key)}"}

        self._patience_s = patience_s
        self.rest = RestClient(
            vendor="VastAI",
            base_url=url,
            authorize=authorize,
            judge=_judge,
            explain=_explain,
            pace=pace,
            patience_s=patience_s,
        )

    async def credit(self) -> float:
        """Return the USD that are left."""
        row: Mapping[str, Any] = await self.rest.read("/api/v0/users/current/")
        return float(row.get("credit") or row.get("balance") or 0.0)

    async def check_credit(self) -> None:
        """Raise :class:`~skyward.errors.QuotaError` if nothing can be rented for want of credit."""
        if (credit := await self.credit()) <= 0:
            raise QuotaError(f"VastAI: the account's credit is ${credit:.2f}, and nothing is rented. {_TOP_UP}")

    async def search(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the asks of a search, of which an account has few a minute, and a limited number a day."""
        answer: Mapping[str, Any] = await self.rest.change("POST", "/api/v0/bundles/", body)
        return answer.get("offers") or ()

    async def rent(self, ask: int, body: Mapping[str, Any]) -> str:
        """Rent an ask and return the id of the instance. Throttled calls, which have no effect, are repeated.

        A contract that was made with a refusal is destroyed. Raises one of :data:`~skyward.providers.base.REFUSALS`
        if there is no instance.
        """
        path = f"/api/v0/asks/{ask}/"
        patiently = AsyncRetrying(
            retry=retry_if_exception_type(RateLimitError),
            stop=stop_after_delay(self._patience_s),
            sleep=SYSTEM_CLOCK.sleep,
            reraise=True,
        )
        try:
            answer = _accepted(await patiently(self.rest.create, path, body, method="PUT"), f"PUT {path}", asked=200)
        except REFUSALS as error:
            cause = error.__cause__
            refusal = cause.refusal if isinstance(cause, RefusedCall) else None
            if isinstance(refusal, _VastRefusal) and refusal.contract:
                await self._destroy(refusal.contract)
            raise
        if not (made := _contract_in(answer)):
            raise UnreachableError(
                f"VastAI answered a creating call with success, and without an id: {str(answer)[:80]}"
            )
        return made

    async def find(self, key: str) -> MachineRecord | None:
        """Return the instance with that ledger key; None if none is listed."""
        return next((each for each in await self.listed() if each.key == key), None)

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return the instances with these ids that exist."""
        del pool_id
        return await self._rows({"id": {"in": [int(each) for each in instance_ids if each.isdecimal()]}})

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return every instance of Skyward's in the account."""
        del pool_id
        return await self._rows({})

    async def request_end(self, machine: str) -> None:
        """Destroy an instance with its disk. It is never stopped: the disk of a stopped one bills."""
        path = instance_path(machine)
        _accepted(await self.rest.change("DELETE", path, {}), f"DELETE {path}", asked=404)

    async def remove(self, pool_id: str) -> None:
        """Do nothing: a pool has instances, and nothing else."""

    async def close(self) -> None:
        """Close the connections."""
        await self.rest.close()

    async def _rows(self, filters: Mapping[str, Any]) -> Sequence[MachineRecord]:
        found: list[Mapping[str, Any]] = []
        query = {"limit": str(_PAGE), "select_filters": json.dumps(filters)}
        while True:
            page: Mapping[str, Any] = await self.rest.read(_LIST, query)
            found += page.get("instances") or ()
            token = page.get("next_token")
            if not token or token == query.get("after_token"):
                return [each for row in found if (each := parse_record(row)) is not None]
            query["after_token"] = str(token)

    async def _destroy(self, contract: str) -> None:
        """Destroy a contract that came with a refusal.

        Raises:
            UnreachableError: it may be left.
        """
        try:
            await self.request_end(contract)
        except SkywardError as error:
            if not is_kind(error, RefusalKind.MISSING):
                raise UnreachableError(f"VastAI refused to rent, yet made contract {contract}: {error}") from error


def _accepted(answer: Any, call: str, *, asked: int) -> Mapping[str, Any]:
    """Return an answer of success; raise the refusal of one that says ``success: false``."""
    row: Mapping[str, Any] = ApiAnswer(status=asked, body=answer).row()
    if row.get("success") is not False:
        return row
    found = _judge(ApiAnswer(status=asked, body=row))
    raise _explain(found, call) from RefusedCall(found)


def _contract_in(row: Mapping[str, Any]) -> str:
    return str(row.get("new_contract") or "")


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    plain = answer.body if isinstance(answer.body, str) else ""
    words = str(row.get("msg") or row.get("detail") or plain or "no message")
    found = TABLE.judge(str(row.get("error") or f"HTTP {answer.status}"), words, status=answer.status)
    return _VastRefusal(
        kind=found.kind, code=found.code, message=found.message, advice=found.advice, contract=_contract_in(row)
    )


def _explain(found: Refusal, call: str) -> SkywardError:
    left_s = _DAY_S - time.time() % _DAY_S
    return TABLE.explain(found, f"VastAI: {call}", reset=f"{left_s // 3600:.0f} h {left_s % 3600 // 60:.0f} min")
