"""Bearer tokens by client credentials (RFC 6749, 4.4), renewed before they expire."""

from __future__ import annotations

import asyncio
import configparser
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock
from skyward.errors import AuthenticationError, SkywardError
from skyward.providers._common.refusals import Refusal, RefusalKind
from skyward.providers._common.rest_client import ApiAnswer, RestClient

__all__ = ["BearerTokens", "ClientCredentials", "read_credentials"]

_MARGIN_S: Final = 300.0
"""Least time that a bearer must still be valid for a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    """Credentials of a client.

    Attributes:
        client_id: the id.
        client_secret: the secret.
    """

    client_id: str
    client_secret: str = field(repr=False)


def read_credentials(vendor: str, names: Sequence[str], path: Path, *, advice: str) -> ClientCredentials:
    """Return the credentials in the environment, else those in a file of sections such as ``[default]``.

    Args:
        vendor: the provider's name, for messages.
        names: names of id and secret in the file; in capitals in the environment.
        path: the file. Its section ``default`` counts, else its first one.
        advice: next step where there are none.

    Raises:
        AuthenticationError: there are none.
    """
    if all(found := [os.environ.get(name.upper(), "") for name in names]):
        return ClientCredentials(client_id=found[0], client_secret=found[1])
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read(path, encoding="utf-8")
        section = file["default" if "default" in file or not file.sections() else file.sections()[0]]
        return ClientCredentials(client_id=section[names[0]], client_secret=section[names[1]])
    except (KeyError, OSError, ValueError, configparser.Error) as error:
        cause = None if isinstance(error, KeyError) else error
        places = f"{' and '.join(name.upper() for name in names)} of the environment, nor in {path}"
        raise AuthenticationError(f"no credentials for {vendor} in {places}. {advice}") from cause


class BearerTokens:
    """Source of bearers of one API, as :class:`~skyward.providers._common.rest_client.Authorize`.

    Refused credentials are reported without the vendor's text, which may repeat them.

    Args:
        vendor: the provider's name, for messages.
        base_url: the API's URL.
        path: path of the token endpoint.
        credentials: returns the credentials, or raises :class:`~skyward.errors.AuthenticationError`; runs in a thread.
        judge: see :class:`~skyward.providers._common.rest_client.RestClient`.
        explain: see there.
        patience_s: see there.
        clock: the time.
    """

    def __init__(
        self,
        *,
        vendor: str,
        base_url: str,
        path: str,
        credentials: Callable[[], ClientCredentials],
        judge: Callable[[ApiAnswer], Refusal],
        explain: Callable[[Refusal, str], SkywardError],
        patience_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._path = path
        self._credentials = credentials
        self._clock = clock
        self._token = ""
        self._expires_at = 0.0
        self._rest = RestClient(
            vendor=vendor,
            base_url=base_url,
            authorize=_no_headers,
            judge=lambda answer: _of_credentials(judge(answer)),
            explain=explain,
            patience_s=patience_s,
            clock=clock,
        )

    async def __call__(self, *, stale: bool) -> Mapping[str, str]:
        """Return the header with a bearer that is still valid for some minutes; a new one if that was refused."""
        left_s = self._expires_at - self._clock.elapsed()
        token = await self.new() if stale or left_s < _MARGIN_S else self._token
        return {"Authorization": f"Bearer {token}"}

    async def new(self) -> str:
        """Return a new bearer, valid for its whole lifetime.

        Raises:
            AuthenticationError: there are no credentials, or they are refused.
        """
        found = await asyncio.to_thread(self._credentials)
        began = self._clock.elapsed()
        answer = await self._rest.change(
            "POST",
            self._path,
            {
                "grant_type": "client_credentials",
                "client_id": found.client_id,
                "client_secret": found.client_secret,
            },
        )
        self._token = str(answer["access_token"])
        self._expires_at = began + float(answer.get("expires_in") or 0.0)
        return self._token

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()


def _of_credentials(found: Refusal) -> Refusal:
    """Return a refusal without the vendor's text. Any that is definite concerns the credentials, also status 403."""
    if found.kind in (RefusalKind.RATE, RefusalKind.TRANSIENT):
        return replace(found, message="no bearer was issued")
    return replace(found, kind=RefusalKind.AUTH, message="the credentials are not accepted", advice="")


async def _no_headers(*, stale: bool) -> Mapping[str, str]:  # noqa: ARG001 - the seam's form
    return {}
