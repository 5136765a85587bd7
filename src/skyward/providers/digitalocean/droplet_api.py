"""DigitalOcean's API: the token, its refusals, the paths that are in use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import platformdirs

from skyward.errors import AuthenticationError, SkywardError
from skyward.providers._common.findings import failed
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable
from skyward.providers._common.rest_client import ApiAnswer, RestClient
from skyward.providers.digitalocean.droplet_sizes import DropletSize, parse_sizes
from skyward.providers.registry import Finding

__all__ = ["API_URL", "REFUSED", "check_account", "find_token", "open_api", "read_sizes"]

API_URL: Final = "https://api.digitalocean.com"
_VARIABLES: Final = ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN")
_TOKENS_URL: Final = "https://cloud.digitalocean.com/account/api/tokens"

_SCOPES: Final[Mapping[str, str]] = {"keys": "ssh_key", "regions": "regions", "sizes": "sizes"}
"""Names of scopes that are not the singular of the path's last word."""
_VERBS: Final[Mapping[str, str]] = {"GET": "read", "POST": "create", "PUT": "update", "DELETE": "delete"}
_READ: Final = ("/v2/droplets", "/v2/firewalls", "/v2/account/keys")
REFUSED: Final = RefusalTable(
    rows=(
        RefusalRow(
            kind=RefusalKind.AUTH,
            status=403,
            advice=f"The token lacks the scope {{scope}}, or its account is locked: {_TOKENS_URL}",
        ),
        RefusalRow(kind=RefusalKind.QUOTA, status=422, words=r"droplet limit|limit exceeded|exceed your"),
        RefusalRow(
            kind=RefusalKind.QUOTA,
            status=422,
            words=r"invalid size",
            advice="Sizes with GPUs need an approval for the account: https://cloud.digitalocean.com/gpus",
        ),
        RefusalRow(kind=RefusalKind.MISSING, status=422, words=r"invalid key identifiers"),
        RefusalRow(kind=RefusalKind.IN_USE, status=422, words=r"pending event|is locked|currently being|in progress"),
        RefusalRow(kind=RefusalKind.EXISTS, words=r"already (?:in use|exists|been taken)|duplicate"),
        RefusalRow(kind=RefusalKind.CAPACITY, status=422, words=r"unavailable|not available|capacity|sold out"),
    ),
    advice={
        RefusalKind.AUTH: f"Set {_VARIABLES[0]} to a token of {_TOKENS_URL}, or `doctl auth init`",
        RefusalKind.QUOTA: "Request a higher limit, or settle the bill: https://cloud.digitalocean.com/account/team",
        RefusalKind.CAPACITY: "Another size or region may have some: see `skyward offers --provider digitalocean`",
        RefusalKind.TRANSIENT: "Check this machine's network, then https://status.digitalocean.com",
    },
)
"""Refusals. The API's codes repeat the HTTP status, so the words of a message have to do."""


def open_api(region: str, token: str | None, endpoint_url: str | None, *, patience_s: float) -> RestClient:
    """Return a client of the API; the token is looked up at each call, so that a newer one counts."""

    async def authorize(*, stale: bool) -> Mapping[str, str]:  # noqa: ARG001 - a stale token is read once more
        return {"Authorization": f"Bearer {token or find_token()}"}

    def explain(found: Refusal, call: str) -> SkywardError:
        return REFUSED.explain(found, f"digitalocean {region}: {call}", scope=_scope(call))

    return RestClient(
        vendor="digitalocean",
        base_url=endpoint_url or API_URL,
        authorize=authorize,
        judge=_judge,
        explain=explain,
        reset_header="ratelimit-reset",
        patience_s=patience_s,
    )


async def read_sizes(rest: RestClient) -> Sequence[DropletSize]:
    """Return the sizes that can be ordered, at their present prices."""
    return parse_sizes(await rest.pages("/v2/sizes", "sizes", {"per_page": "200"}))


def find_token() -> str:
    """Return the token of the environment, else that of doctl's present context.

    Raises:
        AuthenticationError: there is none; names the places.
    """
    for name in _VARIABLES:
        if found := os.environ.get(name, "").strip():
            return found
    path = platformdirs.user_config_path("doctl") / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    context = _setting(text, "context")
    name = "access-token" if context in ("", "default") else rf"[ \t]+{re.escape(context)}"
    if found := _setting(text, name):
        return found
    raise AuthenticationError(
        f"digitalocean: no token: set {_VARIABLES[0]} (or {_VARIABLES[1]}) to one of {_TOKENS_URL}, log in with "
        f"`doctl auth init` ({path}), or pass DigitalOcean(token=...)"
    )


def _setting(text: str, name: str) -> str:
    found = re.search(rf"^{name}:[ \t]*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
    return found[1] if found else ""


def _judge(answer: ApiAnswer) -> Refusal:
    row: Mapping[str, Any] = answer.row()
    code, message = str(row.get("id") or answer.status), str(row.get("message") or answer.body or "no reason given")
    return REFUSED.judge(code, message, status=answer.status)


def _scope(call: str) -> str:
    """Return the token's scope that a call such as ``"GET /v2/sizes"`` requires."""
    method, _, path = call.partition(" ")
    word = path.removeprefix("/v2/").removeprefix("account/").partition("/")[0]
    return f"{_SCOPES.get(word, word.removesuffix('s'))}:{_VERBS.get(method, 'read')}"


async def check_account(rest: RestClient, region: str) -> Sequence[Finding]:
    """See :meth:`skyward.providers.registry.Checkable.check`. Scopes for changes cannot be tested without a change."""
    try:
        account: Mapping[str, Any] = (await rest.read("/v2/account"))["account"]
        findings = [Finding(what="digitalocean token", state="ok", found=str(account["email"])), _state(account)]
        for path in _READ:
            await rest.read(path, {"per_page": "1"})
            findings.append(Finding(what=f"digitalocean may {_scope(f'GET {path}')}", state="ok", found="yes"))
        return [*findings, _region(await read_sizes(rest), region)]
    except SkywardError as error:
        return [failed("digitalocean token", error)]


def _state(account: Mapping[str, Any]) -> Finding:
    what, status, limit = "digitalocean account", str(account["status"]), account.get("droplet_limit")
    if status == "active":
        return Finding(what=what, state="ok", found=f"active, {limit} droplets at a time")
    state = "fail" if status == "locked" else "warn"
    found = f"{status} {account['status_message']}".strip()
    return Finding(what=what, state=state, found=found, fix="see https://cloud.digitalocean.com, or open a ticket")


def _region(sizes: Sequence[DropletSize], region: str) -> Finding:
    what, known = "digitalocean region", sorted({each for size in sizes for each in size.regions})
    if region not in known:
        return Finding(what=what, state="fail", found=f"no region {region}", fix=f"one of {', '.join(known)}")
    where = sorted({each for size in sizes if size.type.spec.accelerator for each in size.regions})
    gpus = "with GPUs" if region in where else f"without GPUs; {', '.join(where)} have some"
    return Finding(what=what, state="ok", found=f"{region}, {gpus}")
