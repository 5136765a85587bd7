"""Asking a metadata service whether the machine will be taken back. One small request at a time, in a thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import urlsplit

from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.wire.control import Preempting, PreemptionLikely
from skyward.wire.node_config import PreemptionWatch

log = logging.getLogger("skyward.node.supervisor.preemption_watcher")

_TIMEOUT_S = 2.0
_LONGEST_BODY = 1 << 16
_UNKNOWN_S = 120.0
"""Seconds assumed to be left when a notice has no time."""
_TOO_OLD = (401, 403)
"""Statuses with which a service refuses a token that is too old."""


class PreemptionWatcher:
    """Poller of a metadata service that reports each of its notices once. Not thread-safe.

    A service that does not answer, or whose answer makes no sense, is polled again.

    Args:
        watch: where to look, and how often.
        tell: called with each report; must not block.
        environ: the machine's environment, in which the service's address may be overridden.
        clock: the time between two looks.
        now: the Unix time, in seconds.
    """

    def __init__(
        self,
        watch: PreemptionWatch,
        *,
        tell: Callable[[Preempting | PreemptionLikely], None],
        environ: Mapping[str, str] = os.environ,
        clock: Clock = SYSTEM_CLOCK,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._watch = watch
        self._tell = tell
        self._clock = clock
        self._now = now
        self._service = _Service(watch, environ.get(watch.endpoint_env) or watch.endpoint)
        self._taken_at: float | None = None
        self._likely = False
        self._trouble = ""

    def news(self) -> list[Preempting | PreemptionLikely]:
        """Return the reports so far, for a client that connects later."""
        if self._taken_at is not None:
            return [Preempting(seconds_left=max(0.0, self._taken_at - self._now()))]
        return [PreemptionLikely()] if self._likely else []

    async def run(self) -> None:
        """Look until cancelled; once the notice is there, there is nothing more to learn."""
        while True:
            if self._taken_at is None:
                await self._look()
            await self._clock.sleep(self._watch.interval_s)

    async def _look(self) -> None:
        hint_path = "" if self._likely else self._watch.hint_path
        try:
            notice = await self._ask(self._watch.notice_path)
            hint = await self._ask(hint_path) if notice is None and hint_path else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._note(f"{type(error).__name__}: {error}")
            return
        self._trouble = ""
        if notice is None and hint is None:
            return
        self._likely = True
        if notice is not None:
            self._taken_at = self._time_in(notice)
        for message in self.news():
            log.info("%s", message)
            self._tell(message)

    async def _ask(self, path: str) -> dict[str, Any] | None:
        """Return the service's answer there; None if there is none.

        Raises ``ValueError`` for an answer that such a service does not give.
        """
        status, body = await asyncio.to_thread(self._service.get, path)
        if status == http.client.NOT_FOUND:
            return None
        if status != http.client.OK:
            raise ValueError(f"the metadata service answers {path} with status {status}")
        answer = json.loads(body)
        if isinstance(answer, dict):
            return cast("dict[str, Any]", answer)
        raise ValueError(f"the metadata service answers {path} with {body[:80]!r}")

    def _time_in(self, notice: Mapping[str, Any]) -> float:
        """Return the Unix time at which the machine is taken."""
        said = notice.get(self._watch.notice_time_field)
        try:
            when = datetime.fromisoformat(said)  # type: ignore[arg-type]  # what is no text is refused as well
        except (TypeError, ValueError):
            log.warning("a notice does not say when the machine is taken: %.200r", notice)
            return self._now() + _UNKNOWN_S
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def _note(self, trouble: str) -> None:
        """Once, however often it is met in a row."""
        if trouble != self._trouble:
            log.warning("the metadata service does not say whether the machine is taken back: %s", trouble)
        self._trouble = trouble


class _Service:
    """The metadata service, and its session token. Its methods block."""

    def __init__(self, watch: PreemptionWatch, endpoint: str) -> None:
        self._watch = watch
        self._endpoint = endpoint
        self._token = ""

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body; ask with the present token, or with a new one if it has none, or a stale one."""
        watch = self._watch
        if not watch.token_path:
            return self._request("GET", path, {})
        if self._token:
            status, body = self._request("GET", path, {watch.token_header: self._token})
            if status not in _TOO_OLD:
                return status, body
        status, body = self._request("PUT", watch.token_path, watch.token_request_headers)
        self._token = body.decode("ascii").strip() if status == http.client.OK else ""
        if not self._token:
            raise ValueError(f"the metadata service gives no token: status {status}")
        return self._request("GET", path, {watch.token_header: self._token})

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        address = urlsplit(self._endpoint)
        if address.hostname is None:
            raise ValueError(f"{self._endpoint!r} is no address of a metadata service")
        with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=_TIMEOUT_S)) as connection:
            connection.request(method, address.path.rstrip("/") + path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_LONGEST_BODY)
