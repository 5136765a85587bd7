"""Answers kept on disk for a while: types and prices change seldom, and take long to ask for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import platformdirs

__all__ = ["Kept", "forget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One file of answers of one endpoint in one region. A damaged or unwritable file is as good as none.

    Attributes:
        name: what is kept.
        region: whose.
        endpoint_url: of whom; None is AWS.
        longest_s: how long an answer counts.
    """

    name: str
    region: str
    endpoint_url: str | None
    longest_s: float

    @property
    def path(self) -> Path:
        """The file."""
        return _folder(self.endpoint_url) / f"{self.name}-{self.region}.json"

    def read(self) -> dict[str, Any]:
        """What still counts, by name."""
        now = time.time()
        return {name: entry["value"] for name, entry in self._entries().items() if self._counts(entry, now)}

    def add(self, values: dict[str, Any]) -> None:
        """Keep ``values`` beside what still counts; other processes see all of it or nothing."""
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


def forget(endpoint_url: str | None) -> None:
    """Keep nothing of what this endpoint has answered; None is AWS. For who knows that it has changed."""
    shutil.rmtree(_folder(endpoint_url), ignore_errors=True)


def _folder(endpoint_url: str | None) -> Path:
    whose = hashlib.blake2b(endpoint_url.encode(), digest_size=6).hexdigest() if endpoint_url else "aws"
    return platformdirs.user_cache_path("skyward") / "aws" / whose
