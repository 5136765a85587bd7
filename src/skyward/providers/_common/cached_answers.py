"""Answers of calls with a quota: on disk for all processes of the user, and in memory for all tasks of this one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import platformdirs

_VENDORS_OWN: Final = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFile:
    """File on disk that caches answers of one endpoint in one place. A damaged or unwritable file counts as empty.

    Attributes:
        vendor: the provider's name.
        name: subject of the answers, such as ``"types"``.
        place: region or location; empty for answers that hold everywhere.
        endpoint_url: the endpoint; None is the vendor's own.
        longest_s: lifetime of an answer.
    """

    vendor: str
    name: str
    place: str
    endpoint_url: str | None
    longest_s: float

    @property
    def path(self) -> Path:
        """Path of the file."""
        return _folder(self.vendor, self.endpoint_url) / f"{self.name}-{self.place}.json"

    def read(self) -> dict[str, Any]:
        """Return the answers that have not expired, by name."""
        now = time.time()
        return {name: entry["value"] for name, entry in self._entries().items() if self._counts(entry, now)}

    def ages_s(self) -> dict[str, float]:
        """Return the age of each answer that has not expired, by name."""
        now = time.time()
        return {name: now - float(entry["at"]) for name, entry in self._entries().items() if self._counts(entry, now)}

    def add(self, values: dict[str, Any]) -> None:
        """Add ``values`` and drop expired answers; other processes see the file before or after, nothing between."""
        now = time.time()
        entries = {name: entry for name, entry in self._entries().items() if self._counts(entry, now)}
        entries |= {name: {"at": now, "value": value} for name, value in values.items()}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=self.path.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(entries, file)
                os.replace(draft, self.path)
            except BaseException:
                os.unlink(draft)
                raise

    async def completed(
        self, names: Iterable[str], fetch: Callable[[Sequence[str]], Awaitable[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """Return the answers of these names, by name; ``fetch`` returns those not cached, and they are cached then."""
        wanted = list(names)
        kept = await asyncio.to_thread(self.read)
        if missing := [name for name in wanted if name not in kept]:
            new = dict(await fetch(missing))
            if new:
                await asyncio.to_thread(self.add, new)
            kept |= new
        return {name: kept[name] for name in wanted if name in kept}

    def _counts(self, entry: Any, now: float) -> bool:
        try:
            return "value" in entry and 0 <= now - float(entry["at"]) < self.longest_s
        except (KeyError, TypeError, ValueError):
            return False

    def _entries(self) -> dict[str, Any]:
        try:
            found: object = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def forget(vendor: str, endpoint_url: str | None) -> None:
    """Delete all cached answers of an endpoint; None is the vendor's own."""
    shutil.rmtree(_folder(vendor, endpoint_url), ignore_errors=True)


def _folder(vendor: str, endpoint_url: str | None) -> Path:
    endpoint = hashlib.blake2b(endpoint_url.encode(), digest_size=6).hexdigest() if endpoint_url else _VENDORS_OWN
    return platformdirs.user_cache_path("skyward") / vendor / endpoint


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedAnswer(Generic[T]):
    """Answer of a call.

    Attributes:
        value: the answer.
        at: the time at which it came.
    """

    value: T
    at: float


class SharedAnswers(Generic[T]):
    """Answers of calls, by name. At most one call of a name is under way, of all tasks and event loops of the process.

    Args:
        longest_s: longest age of an answer.
        now: the time in seconds.
    """

    def __init__(self, longest_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._now = now
        self._lock = threading.Lock()
        self._kept: dict[str, SharedAnswer[T]] = {}
        self._coming: dict[str, Future[SharedAnswer[T] | None]] = {}

    async def of(self, name: str, call: Callable[[], Awaitable[T]]) -> SharedAnswer[T]:
        """Return the answer that is kept under a name, else that of the call under way, else that of ``call``.

        An error of the call is raised by everybody who waits for it. If its task is cancelled, the next one calls.
        """
        while True:
            with self._lock:
                kept = self._kept.get(name)
                if kept is not None and self._now() - kept.at <= self._longest_s:
                    return kept
                coming = self._coming.get(name)
                if coming is None:
                    own = self._coming[name] = Future[SharedAnswer[T] | None]()
                    own.set_running_or_notify_cancel()  # so that no cancelled waiter cancels it for the others
                    break
            if (answer := await asyncio.wrap_future(coming)) is not None:
                return answer
        return await self._call(name, call, own)

    async def _call(
        self, name: str, call: Callable[[], Awaitable[T]], coming: Future[SharedAnswer[T] | None]
    ) -> SharedAnswer[T]:
        try:
            answer = SharedAnswer(await call(), self._now())
        except BaseException as error:
            with self._lock:
                del self._coming[name]
            if isinstance(error, Exception):
                coming.set_exception(error)
            else:
                coming.set_result(None)
            raise
        with self._lock:
            del self._coming[name]
            self._kept[name] = answer
        coming.set_result(answer)
        return answer
