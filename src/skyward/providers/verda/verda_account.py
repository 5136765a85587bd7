"""Account at Verda: errors, credentials, machines, and the scripts, keys and volumes of machines."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from skyward.errors import ConfigurationError, RateLimitError, SkywardError, UnreachableError
from skyward.providers._common.oauth_client import BearerTokens, ClientCredentials, read_credentials
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable
from skyward.providers._common.rented_machines import MachineRecord, label, labels_of
from skyward.providers._common.rest_client import ApiAnswer, RestClient
from skyward.providers.base import REFUSALS, InstanceState, Offer
from skyward.providers.verda.machine_records import create_body, parse_images, parse_record

__all__ = ["API_URL", "CATALOGUE", "TABLE", "VerdaAccount", "find_credentials"]

API_URL: Final = "https://api.verda.com/v1"
CATALOGUE: Final = ("/instance-types", {"currency": "usd"})
"""Path and query of the machine types."""
_CONSOLE: Final = "https://console.verda.com"
_KEYS: Final = (
    f"Make credentials for the cloud API in the console ({_CONSOLE}, under Keys), and put them in VERDA_CLIENT_ID and "
    "VERDA_CLIENT_SECRET, or in ~/.verda/credentials"
)

TABLE: Final = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.IN_USE, words="discontinue a provisioning"),
        RefusalRow(kind=RefusalKind.MISSING, words="invalid instance id|discontinue a discontinued|does not exist"),
        RefusalRow(kind=RefusalKind.QUOTA, status=402, advice=f"Top up the balance in the console: {_CONSOLE}"),
        RefusalRow(kind=RefusalKind.QUOTA, status=403, advice=f"The project's limits forbid it: {_CONSOLE}"),
        RefusalRow(kind=RefusalKind.CAPACITY, words="capacity|not available", status=400),
        # No other 5xx is a refusal: the machine may have been made.
        RefusalRow(kind=RefusalKind.CAPACITY, words="no capacity", status=503),
        RefusalRow(kind=RefusalKind.CAPACITY, words="instance.?type|location", status=400),
    ),
    advice={RefusalKind.AUTH: _KEYS},
)
"""Verda's errors; the code alone seldom decides, since most are ``invalid_request``."""


def find_credentials() -> ClientCredentials:
    """Return the credentials in the environment, else those in the file of Verda's command line.

    Raises:
        AuthenticationError: there are none.
    """
    folder = Path(os.environ.get("VERDA_HOME") or Path.home() / ".verda")
    return read_credentials("Verda", ("verda_client_id", "verda_client_secret"), folder / "credentials", advice=_KEYS)


def _judge(answer: ApiAnswer) -> Refusal:
    row = answer.row()
    text = str(row.get("message") or (answer.body if isinstance(answer.body, str) else "") or "no message")
    return TABLE.judge(str(row.get("code") or f"HTTP {answer.status}"), text, status=answer.status)


def _explain(found: Refusal, call: str) -> SkywardError:
    return TABLE.explain(found, f"Verda: {call}")


class VerdaAccount:
    """Machines of one account. Everything that is made for one bears its label, and is removed by it.

    Args:
        url: URL of the API.
        patience_s: time for which throttled and interrupted calls are repeated.

    Attributes:
        rest: the API.
        tokens: its bearers.
    """

    def __init__(self, url: str, *, patience_s: float) -> None:
        api: Mapping[str, Any] = {"vendor": "Verda", "base_url": url, "judge": _judge, "patience_s": patience_s}
        self.tokens = BearerTokens(path="/oauth2/token", credentials=find_credentials, explain=_explain, **api)
        self.rest = RestClient(authorize=self.tokens, explain=_explain, **api)
        self._images: Mapping[str, str] = {}
        self._key_id = ""
        self._seen: dict[str, Mapping[str, Any]] = {}

    async def find(self, key: str) -> MachineRecord | None:
        """Return the machine with that ledger key; None if none is listed."""
        return next((each for each in await self.listed() if each.key == key), None)

    async def records(self, instance_ids: Sequence[str], pool_id: str) -> Sequence[MachineRecord]:
        """Return every machine of Skyward's in the account: one call lists them all."""
        del instance_ids, pool_id
        found = await self._rows("/instances")
        self._seen = {str(row["id"]): row for row in found}
        return [each for row in found if (each := parse_record(row)) is not None]

    async def listed(self, pool_id: str = "") -> Sequence[MachineRecord]:
        """Return every machine of Skyward's in the account that is not gone."""
        return [each for each in await self.records((), pool_id) if each.state is not InstanceState.GONE]

    async def prepare(self, public_key: str) -> None:
        """Add the user's key to those of the account, unless it is there, and look up the images of machine types."""
        self._images = parse_images(await self.rest.read(*CATALOGUE))
        wanted = public_key.split()[:2]
        kept = [row for row in await self._rows("/sshkeys") if str(row.get("key", "")).split()[:2] == wanted]
        body = {"name": f"skyward-{wanted[1][-12:]}", "key": public_key}
        self._key_id = str(kept[0]["id"]) if kept else await self._make("/sshkeys", body)

    async def create(self, offer: Offer, pool_id: str, key: str, script: str) -> str:
        """Make a machine's startup script, then the machine, with its volume and tags; return the machine's id.

        The call for the machine is sent once. Raises one of :data:`~skyward.providers.base.REFUSALS` if none was made.
        """
        if (image := self._images.get(offer.spec.name)) is None:
            raise ConfigurationError(f"Verda has no machine type {offer.spec.name!r} with an image of Ubuntu")
        try:
            script_id = await self._make("/scripts", {"name": label(pool_id, key), "script": script})
        except UnreachableError as error:
            raise RateLimitError(f"Verda takes no startup script now, so that no machine was made: {error}") from error
        body = create_body(offer, pool_id, key, image=image, key_id=self._key_id, script_id=script_id)
        try:
            return _id_in(await self.rest.create("/instances", body))
        except REFUSALS:
            with contextlib.suppress(SkywardError):  # one that is left is removed by its name, with its pool
                await self._delete("/scripts", script_id)
            raise

    async def request_end(self, machine: str) -> None:
        """Request a machine's deletion, with its volumes, for good; then delete its script.

        Raises the refusal, which may be an item of an answer of success.
        """
        row = self._seen.get(machine, {})
        order: dict[str, Any] = {"id": [machine], "action": "delete", "delete_permanently": True}
        # An empty list would keep every volume; without one, the machine's own volume is deleted.
        if volumes := [each for each in {row.get("os_volume_id"), *(row.get("volume_ids") or ())} if each]:
            order["volume_ids"] = volumes
        items = await self.rest.change("PUT", "/instances", order)
        for item in cast("Sequence[Mapping[str, Any]]", items if isinstance(items, list) else ()):
            if item.get("status") == "error":
                raise TABLE.refused("item", str(item.get("error")), "Verda: PUT /instances", status=400)
        if script := row.get("startup_script_id"):
            await self._delete("/scripts", str(script))

    async def remove(self, pool_id: str) -> None:
        """Remove the startup scripts and volumes of a pool. Idempotent."""
        for path in ("/scripts", "/volumes"):
            for row in await self._rows(path):
                if labels_of(row.get("name"))[:1] == (pool_id,):
                    await self._delete(path, str(row["id"]))

    async def close(self) -> None:
        """Close the connections."""
        await self.rest.close()
        await self.tokens.close()

    async def _make(self, path: str, body: Mapping[str, Any]) -> str:
        """Make a script or key, and return its id; where the answer is lost, look for its name, and make it again."""
        try:
            return _id_in(await self.rest.create(path, body))
        except UnreachableError:
            rows = [row for row in await self._rows(path) if row.get("name") == body["name"]]
            return str(rows[-1]["id"]) if rows else _id_in(await self.rest.create(path, body))

    async def _delete(self, path: str, made: str) -> None:
        for_good = ({"is_permanent": True}, {"is_permanent": "true"}) if path == "/volumes" else (None, None)
        await self.rest.change("DELETE", f"{path}/{made}", *for_good, done=(RefusalKind.MISSING,))

    async def _rows(self, path: str) -> Sequence[Mapping[str, Any]]:
        return cast("Sequence[Mapping[str, Any]]", await self.rest.read(path) or ())


def _id_in(answer: object) -> str:
    """Return the id in the answer to a creating call: text, or an object. The answer counts as lost if it has none."""
    found: object = cast("Mapping[str, Any]", answer).get("id") if isinstance(answer, dict) else answer
    if not isinstance(found, str) or not re.fullmatch(r"[\w-]*\d[\w-]*", found):
        raise UnreachableError(f"Verda answered a creating call with success, and without an id: {str(found)[:60]!r}")
    return found
