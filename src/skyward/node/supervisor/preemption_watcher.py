"""Asking a metadata service whether the machine will be taken back. One small request at a time, in a thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    body: bytes


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
        try:
            notice = await self._ask(self._watch.notice_path)
            hint = None
            if notice is None and self._watch.hint_path and not self._likely:
                hint = await self._ask(self._watch.hint_path)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._note(f"{type(error).__name__}: {error}")
            return
        self._trouble = ""
        if notice is not None:
            self._taken_at = self._time_in(notice)
            self._say()
        elif hint is not None:
            self._likely = True
            self._say()

    async def _ask(self, path: str) -> dict[str, Any] | None:
        """Return the service's answer there; None if there is none.

        Raises ``ValueError`` for an answer that such a service does not give.
        """
        answer = await asyncio.to_thread(self._service.get, path)
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise ValueError(f"the metadata service answers {path} with status {answer.status}")
        said = json.loads(answer.body)
        if isinstance(said, dict):
            return cast("dict[str, Any]", said)
        raise ValueError(f"the metadata service answers {path} with {answer.body[:80]!r}")

    def _time_in(self, notice: Mapping[str, Any]) -> float:
        """Return the Unix time at which the machine is taken."""
        said = notice.get(self._watch.notice_time_field)
        try:
            when = datetime.fromisoformat(said)  # type: ignore[arg-type]  # what is no text is refused as well
        except (TypeError, ValueError):
            log.warning("a notice does not say when the machine is taken: %.200r", notice)
            return self._now() + _UNKNOWN_S
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def _say(self) -> None:
        for message in self.news():
            log.info("%s", message)
            self._tell(message)

    def _note(self, trouble: str) -> None:
        """Once, however often it is met in a row."""
        if trouble != self._trouble:
            log.warning("the metadata service does not say whether the machine is taken back: %s", trouble)
        self._trouble = trouble


@dataclass(slots=True)
class _Service:
    """The metadata service, and its session token. Its methods block."""

    watch: PreemptionWatch
    endpoint: str
    token: str = field(default="", repr=False)

    def get(self, path: str) -> _Answer:
        """Ask with the token there is, or with a new one if there is none, or it is not good any more."""
        if not self.watch.token_path:
            return self._request("GET", path, {})
        if self.token:
            answer = self._request("GET", path, {self.watch.token_header: self.token})
            if answer.status not in _TOO_OLD:
                return answer
        self.token = self._new_token()
        return self._request("GET", path, {self.watch.token_header: self.token})

    def _new_token(self) -> str:
        answer = self._request("PUT", self.watch.token_path, self.watch.token_request_headers)
        token = answer.body.decode("ascii").strip()
        if answer.status != http.client.OK or not token:
            raise ValueError(f"the metadata service gives no token: status {answer.status}")
        return token

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> _Answer:
        where = urlsplit(self.endpoint)
        if where.hostname is None:
            raise ValueError(f"{self.endpoint!r} is no address of a metadata service")
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, where.path.rstrip("/") + path, headers=dict(headers))
            response = connection.getresponse()
            return _Answer(status=response.status, body=response.read(_LONGEST_BODY))
        finally:
            connection.close()
