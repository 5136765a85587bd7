"""Answers of an API, cached on disk for all processes of the user."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import platformdirs

__all__ = ["AnswerFile", "forget"]

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
