"""Account at VastAI: errors, key, searches, instances."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from skyward.errors import AuthenticationError, SkywardError, UnreachableError
from skyward.providers._common.boot.container_boot import ContainerBoot
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall
from skyward.providers._common.rented_machines import MachineRecord
from skyward.providers._common.rest_client import ApiAnswer, RestClient
from skyward.providers.base import REFUSALS, InstanceState
from skyward.providers.vastai.ask_market import Ask, AskMarket
from skyward.providers.vastai.ask_terms import AskTerms
from skyward.providers.vastai.instance_records import create_body, parse_record

__all__ = ["API_URL", "TABLE", "TOP_UP", "VastAccount", "find_key", "instance_path"]

API_URL: Final = "https://console.vast.ai"
_LIST: Final = "/api/v1/instances/"
_PAGE: Final = 25
_SUCCESS, _NOT_FOUND = 200, 404
_CONTRACT: Final = re.compile(r"\(it made contract (\d+)\)")
_DAY_S: Final = 86400
_KEYS: Final = (
    "Make a key in the console (https://cloud.vast.ai/manage-keys/) with the scopes misc, user_read, instance_read and "
    "instance_write, and put it in VAST_API_KEY or ~/.config/vastai/vast_api_key"
)
TOP_UP: Final = "Add credit: https://cloud.vast.ai/billing/"
_RESET: Final = "Searches are limited by the day, and no retry helps: the quota resets at 00:00 UTC, in {reset}"

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.QUOTA, codes="search_quota_exceeded", advice=_RESET),
        RefusalRow(kind=RefusalKind.AUTH, words="invalid user key"),
        RefusalRow(kind=RefusalKind.CAPACITY, codes="invalid_price no_such_ask"),
        RefusalRow(kind=RefusalKind.CAPACITY, words="no_such_ask|no longer available|is not available|not your own"),
        RefusalRow(kind=RefusalKind.QUOTA, codes="missing_billing insufficient_credit"),
        RefusalRow(kind=RefusalKind.QUOTA, words="credit|billing", status=400),
        RefusalRow(kind=RefusalKind.CAPACITY, status=_SUCCESS),  # with "success": false
    ),
    advice={RefusalKind.AUTH: _KEYS, RefusalKind.QUOTA: TOP_UP},
)
"""VastAI's errors. Any part of them may be missing, and those of throttled calls are often plain text."""


def find_key(given: str | None) -> str:
    """Return the key that was given, else the environment's, else that of the vendor's command line.

    Raises:
        AuthenticationError: there is none.
    """
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = (each for each in (folder / "vastai/vast_api_key", Path.home() / ".vast_api_key") if each.is_file())
    found = (given, os.environ.get("VAST_API_KEY"), *(each.read_text(encoding="utf-8") for each in files))
    if key := next((each.strip() for each in found if each and each.strip()), ""):
        return key
    raise AuthenticationError(f"no key for VastAI in VAST_API_KEY, nor in {folder}/vastai/vast_api_key. {_KEYS}")


def instance_path(instance: str) -> str:
    """Return the path of an instance's calls."""
    return f"/api/v0/instances/{instance}/"


class VastAccount:
    """Instances of one account; they bear labels, and there is nothing else to remove.

    Args:
        url: URL of the API; None for the vendor's.
        key: the account's key; None for that of the environment.
        terms: terms of the rentals.
        patience_s: time for which throttled and interrupted calls are repeated.
        pace: least seconds between two calls of a route.

    Attributes:
        url: as given, without a slash at its end.
        rest: the API.
        market: the asks that meet the terms.
    """

    def __init__(
        self, url: str | None, key: str | None, terms: AskTerms, *, patience_s: float, pace: Mapping[str, float]
    ) -> None:
        async def authorize(*, stale: bool) -> Mapping[str, str]:  # noqa: ARG001 - there is one key
            return {"Authorization": f"Bearer {find_key(key)}"}

        self.url, self._terms, self._asks = (url or API_URL).removesuffix("/"), terms, dict[str, int]()
        self.market = AskMarket(self.search, terms)
        api: Mapping[str, Any] = {"vendor": "VastAI", "base_url": self.url, "pace": pace, "patience_s": patience_s}
        self.rest = RestClient(authorize=authorize, judge=_judge, explain=_explain, **api)

    async def credit(self) -> float:
        """Return the USD that are left."""
        row: Mapping[str, Any] = await self.rest.read("/api/v0/users/current/")
        return float(row.get("credit") or row.get("balance") or 0.0)

    async def search(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the asks of a search, of which an account has few a minute, and a limited number a day."""
        answer: Mapping[str, Any] = await self.rest.change("POST", "/api/v0/bundles/", body)
        return answer.get("offers") or ()

    async def rent(self, ask: Ask, name: str, boot: ContainerBoot, *, spot: bool) -> str:
        """Rent an ask and return the id of the instance. Throttled calls, which have no effect, are repeated.

        A contract that was made with a refusal is destroyed. Raises one of :data:`~skyward.providers.base.REFUSALS`
        if there is no instance.
        """
        path, body = f"/api/v0/asks/{ask.id}/", create_body(ask, self._terms, name, boot, spot=spot)
        try:
            answer = _accepted(await self.rest.create(path, body, method="PUT"), f"PUT {path}")
        except REFUSALS as error:
            if contract := _CONTRACT.search(str(error.__cause__)):
                await self._destroy(contract[1])
            raise
        if not (made := answer.get("new_contract")):
            raise UnreachableError(f"VastAI answered a creating call with success, but no id: {str(answer)[:80]}")
        self._asks[str(made)] = ask.id
        return str(made)

    async def find(self, key: str) -> MachineRecord | None:
        """Return the instance with that ledger key; None if none is listed.

        A contract that was made with a refusal has the key, too, and is listed for some seconds: it is older.
        """
        found = [each for each in await self.listed() if each.key == key]
        return max(found, key=lambda each: (each.state is not InstanceState.FAILED, int(each.id)), default=None)

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:  # noqa: ARG002 - ids do
        """Return the instances with these ids that exist."""
        return await self._rows({"id": {"in": [int(each) for each in instance_ids if each.isdecimal()]}})

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:  # noqa: ARG002 - labels cannot be searched
        """Return every instance of Skyward's in the account."""
        return await self._rows({})

    async def request_end(self, machine: str) -> None:
        """Destroy an instance with its disk. It is never stopped: the disk of a stopped one bills."""
        if not machine.isdecimal():
            raise TABLE.refused("no_such_instance", f"{machine!r} is no number", "VastAI", status=_NOT_FOUND)
        _accepted(await self.rest.change("DELETE", instance_path(machine), {}), f"DELETE {instance_path(machine)}")
        self.market.release(self._asks.pop(machine, 0))

    async def remove(self, pool_id: str) -> None:
        """Do nothing: a pool has instances, and nothing else."""

    async def _rows(self, filters: Mapping[str, Any]) -> Sequence[MachineRecord]:
        def following(page: Mapping[str, Any]) -> Mapping[str, str] | None:
            return {"after_token": str(page["next_token"])} if page.get("next_token") else None

        query = {"limit": str(_PAGE), "select_filters": json.dumps(filters)}
        rows = await self.rest.pages(_LIST, "instances", query, following=following)
        return [each for row in rows if (each := parse_record(row)) is not None]

    async def _destroy(self, contract: str) -> None:
        """Destroy a contract that came with a refusal.

        Raises:
            UnreachableError: it may be left.
        """
        try:
            await self.rest.change("DELETE", instance_path(contract), {}, done=(RefusalKind.MISSING,))
        except SkywardError as error:
            raise UnreachableError(f"VastAI refused to rent, yet made contract {contract}: {error}") from error


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    plain = answer.body if isinstance(answer.body, str) else ""
    words = str(row.get("msg") or row.get("detail") or plain or "no message")
    if contract := row.get("new_contract"):
        words += f" (it made contract {contract})"
    return TABLE.judge(str(row.get("error") or f"HTTP {answer.status}"), words, status=answer.status)


def _accepted(answer: Any, call: str) -> Mapping[str, Any]:
    """Return an answer with a status of success; raises if it is a refusal all the same."""
    row = cast("Mapping[str, Any]", answer if isinstance(answer, dict) else {})
    if row.get("success") is False:
        found = _judge(ApiAnswer(status=_SUCCESS, body=row))
        raise _explain(found, call) from RefusedCall(found)
    return row


def _explain(found: Refusal, call: str) -> SkywardError:
    left_s = _DAY_S - time.time() % _DAY_S
    return TABLE.explain(found, f"VastAI: {call}", reset=f"{left_s // 3600:.0f} h {left_s % 3600 // 60:.0f} min")
